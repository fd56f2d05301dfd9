package ipvs

import (
	"errors"
	"fmt"
	"net"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Tests in this file need a kernel with IPVS, and root. `make test` provides both, in a
// virtual machine if necessary. Each test works in its own network namespace.

// Created services and destinations are read back, one by one and as a whole.
func TestKernelCreateAndRead(t *testing.T) {
	i, _ := newKernelHandle(t)
	table := sampleServices()
	program(t, i, table)
	services := mustGet(i.GetServices())(t)
	if len(services) != len(table) {
		t.Errorf("%d services, want %d", len(services), len(table))
	}
	for s, dests := range table {
		got := mustGet(i.GetService(s))(t)
		if want := normalised(s); !reflect.DeepEqual(*got, want) {
			t.Errorf("got  %+v\nwant %+v", *got, want)
		}
		if !slices.ContainsFunc(services, func(o *Service) bool { return reflect.DeepEqual(o, got) }) {
			t.Errorf("GetServices lacks %+v", *got)
		}
		if !i.IsServicePresent(s) {
			t.Errorf("not present: %+v", s)
		}
		gotDests := mustGet(i.GetDestinations(s))(t)
		if len(gotDests) != len(dests) {
			t.Errorf("%d destinations, want %d", len(gotDests), len(dests))
		}
		for _, d := range dests {
			want := normalisedDest(d)
			if !slices.ContainsFunc(gotDests, func(o *Destination) bool { return reflect.DeepEqual(*o, want) }) {
				t.Errorf("no %+v in", want)
				for _, o := range gotDests {
					t.Errorf("   %+v", *o)
				}
			}
		}
	}
}

// sampleServices has one service of each kind, with two destinations of each
// forwarding method that needs nothing else.
func sampleServices() map[*Service][]*Destination {
	v4 := func(port uint16, flags uint32, weight int) *Destination {
		return &Destination{Address: net.IPv4(10, 1, 0, 1), Port: port, Weight: weight, ConnectionFlags: flags}
	}
	v6 := func(port uint16, flags uint32, weight int) *Destination {
		return &Destination{Address: net.ParseIP("2001:db8:1::1"), Port: port, Weight: weight, ConnectionFlags: flags}
	}
	return map[*Service][]*Destination{
		{Address: net.ParseIP("10.0.0.1"), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin, Netmask: 0xFFFFFFFF}: {
			v4(8080, ConnectionFlagMasq, 1), v4(8081, ConnectionFlagMasq, 65537)},
		{Address: net.ParseIP("10.0.0.1"), Protocol: unix.IPPROTO_UDP, Port: 53, SchedName: WeightedRoundRobin, Netmask: 0xFFFFFFFF, Flags: ServiceFlagOnePacket}: {
			v4(53, ConnectionFlagDirectRoute, 3), {Address: net.IPv4(10, 1, 0, 2), Port: 53, ConnectionFlags: ConnectionFlagTunnel, Weight: 0}},
		{Address: net.ParseIP("10.0.0.2"), Protocol: unix.IPPROTO_TCP, Port: 443, SchedName: SourceHashing, Netmask: ipv4Mask(24),
			Flags: ServiceFlagPersistent, Timeout: 360}: {
			{Address: net.IPv4(10, 1, 0, 3), Port: 443, Weight: 2, UpperThreshold: 100, LowerThreshold: 50}},
		{Address: net.ParseIP("10.0.0.3"), Protocol: unix.IPPROTO_UDP, Port: 5060, SchedName: RoundRobin, Netmask: 0xFFFFFFFF,
			Flags: ServiceFlagPersistent, Timeout: 60, PEName: "sip"}: {v4(5060, ConnectionFlagMasq, 1)},
		{Address: net.ParseIP("2001:db8::1"), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: LeastConnection, Netmask: 128}: {
			v6(8080, ConnectionFlagMasq, 1), v6(8081, ConnectionFlagDirectRoute, 2)},
		{Address: net.ParseIP("2001:db8::1"), Protocol: unix.IPPROTO_SCTP, Port: 9, SchedName: WeightedLeastConnection, Netmask: 64,
			Flags: ServiceFlagPersistent, Timeout: 100}: {v6(9, ConnectionFlagMasq, 1)},
		{FWMark: 42, AddressFamily: unix.AF_INET, SchedName: DestinationHashing, Netmask: 0xFFFFFFFF}: {v4(0, ConnectionFlagDirectRoute, 1)},
		{FWMark: 42, AddressFamily: unix.AF_INET6, SchedName: RoundRobin, Netmask: 128}:               {v6(0, ConnectionFlagDirectRoute, 1)},
	}
}

// normalised returns s as the kernel returns it, without counters.
func normalised(s *Service) Service {
	c := *s
	if ip := c.Address.To4(); ip != nil {
		c.Address = ip
	}
	if c.AddressFamily == 0 {
		c.AddressFamily = unix.AF_INET
		if len(c.Address) == 16 {
			c.AddressFamily = unix.AF_INET6
		}
	}
	c.Flags |= ServiceFlagHashed
	c.Stats, c.Stats64 = SvcStats{}, Stats64{}
	return c
}

func normalisedDest(d *Destination) Destination {
	c := *d
	if ip := c.Address.To4(); ip != nil {
		c.Address = ip
	}
	c.AddressFamily = unix.AF_INET
	if len(c.Address) == 16 {
		c.AddressFamily = unix.AF_INET6
	}
	c.Stats, c.Stats64 = DstStats{}, Stats64{}
	return c
}

func program(t *testing.T, i *Handle, table map[*Service][]*Destination) {
	t.Helper()
	for s, dests := range table {
		if err := i.NewService(s); err != nil {
			t.Fatalf("NewService %+v: %v", s, err)
		}
		for _, d := range dests {
			if err := i.NewDestination(s, d); err != nil {
				t.Fatalf("NewDestination %+v %+v: %v", s, d, err)
			}
		}
	}
}

// Reading a table and writing it back leaves it unchanged, as the library and ipvsadm
// read it.
func TestKernelWriteBackUnchanged(t *testing.T) {
	i, ns := newKernelHandle(t)
	program(t, i, sampleServices())
	// Linux 7 and later list the services in another order when their table grows.
	read := func() (all []string) {
		for _, s := range mustGet(i.GetServices())(t) {
			all = append(all, fmt.Sprintf("%+v", *s))
			for _, d := range mustGet(i.GetDestinations(s))(t) {
				all = append(all, fmt.Sprintf("%+v %+v", serviceName(s), *d))
			}
		}
		slices.Sort(all)
		return all
	}
	before, beforeAdm := read(), ipvsadm(t, ns, "-Sn")
	for _, s := range mustGet(i.GetServices())(t) {
		must(t, i.UpdateService(s))
		for _, d := range mustGet(i.GetDestinations(s))(t) {
			must(t, i.UpdateDestination(s, d))
		}
	}
	if after := read(); !slices.Equal(before, after) {
		t.Errorf("before %q\nafter  %q", before, after)
	}
	if after := ipvsadm(t, ns, "-Sn"); after != beforeAdm {
		t.Errorf("before:\n%s\nafter:\n%s", beforeAdm, after)
	}
	if n := strings.Count(beforeAdm, "-A "); n != len(sampleServices()) {
		t.Errorf("ipvsadm shows %d services:\n%s", n, beforeAdm)
	}
}

func TestKernelUpdateAndDelete(t *testing.T) {
	i, ns := newKernelHandle(t)
	s := &Service{Address: net.IPv4(10, 0, 0, 1), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin, Netmask: 0xFFFFFFFF}
	identity := &Service{Address: s.Address, Protocol: s.Protocol, Port: s.Port}
	d := &Destination{Address: net.IPv4(10, 1, 0, 1), Port: 8080, Weight: 1}
	must(t, i.NewService(s))
	must(t, i.NewDestination(identity, d))

	s.SchedName = WeightedLeastConnection
	s.Flags, s.Timeout = ServiceFlagPersistent, 77
	must(t, i.UpdateService(s))
	d.Weight, d.UpperThreshold = 9, 5
	must(t, i.UpdateDestination(identity, d))
	const want = "-A -t 10.0.0.1:80 -s wlc -p 77\n-a -t 10.0.0.1:80 -r 10.1.0.1:8080 -m -w 9\n"
	if got := ipvsadm(t, ns, "-Sn"); got != want {
		t.Errorf("got  %swant %s", got, want)
	}
	if got := strings.Fields(ipvsadm(t, ns, "-Ln", "--thresholds")); !slices.Equal(got[len(got)-4:], []string{"5", "0", "0", "0"}) {
		t.Errorf("ipvsadm shows thresholds and connections %q, want 5 0 0 0", got[len(got)-4:])
	}
	must(t, i.DelDestination(identity, &Destination{Address: d.Address, Port: d.Port}))
	if got := mustGet(i.GetDestinations(identity))(t); len(got) != 0 {
		t.Errorf("%d destinations after the only one was deleted", len(got))
	}
	must(t, i.DelService(identity))
	if i.IsServicePresent(identity) {
		t.Error("the service is still there")
	}
	program(t, i, sampleServices())
	must(t, i.Flush())
	if got := ipvsadm(t, ns, "-Sn"); got != "" {
		t.Errorf("after Flush ipvsadm shows:\n%s", got)
	}
}

// The kernel's errors are bare error numbers.
func TestKernelErrors(t *testing.T) {
	i, _ := newKernelHandle(t)
	s, d := &someService, &someDestination
	absent := &Service{Address: net.IPv4(10, 0, 0, 99), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin}
	must(t, i.NewService(s))
	must(t, i.NewDestination(s, d))
	other := Destination{Address: net.IPv4(10, 1, 9, 9), Port: 1}
	unknown, engine := *absent, *absent
	unknown.SchedName, engine.PEName = "nosuch", "nosuch"
	for name, test := range map[string]struct {
		err  error
		want syscall.Errno
	}{
		"service exists":         {i.NewService(s), syscall.EEXIST},
		"destination exists":     {i.NewDestination(s, d), syscall.EEXIST},
		"no such service: get":   {second(i.GetService(absent)), syscall.ESRCH},
		"no such service: set":   {i.UpdateService(absent), syscall.ESRCH},
		"no such service: del":   {i.DelService(absent), syscall.ESRCH},
		"no such service: dest":  {i.NewDestination(absent, d), syscall.ESRCH},
		"no such destination":    {i.DelDestination(s, &other), syscall.ENOENT},
		"no such dest to update": {i.UpdateDestination(s, &other), syscall.ENOENT},
		"no such scheduler":      {i.NewService(&unknown), syscall.ENOENT},
		"no such engine":         {i.NewService(&engine), syscall.ENOENT},
		"thresholds":             {i.UpdateDestination(s, &Destination{Address: d.Address, Port: d.Port, UpperThreshold: 1, LowerThreshold: 2}), syscall.ERANGE},
		"mixed, not a tunnel":    {i.NewDestination(s, &Destination{Address: net.ParseIP("2001:db8::2"), Port: 1}), syscall.EINVAL},
	} {
		if test.err != error(test.want) {
			t.Errorf("%s: %v, want %v", name, test.err, test.want)
		}
	}
	if got, err := i.GetDestinations(absent); err != nil || len(got) != 0 {
		t.Errorf("destinations of no service: %v, %v", got, err)
	}
}

// Destinations of another family than the service.
func TestKernelRowMixedFamily(t *testing.T) {
	i, ns := newKernelHandle(t)
	must(t, i.NewService(&someService))
	d := &Destination{Address: net.ParseIP("2001:db8::2"), Port: 80, Weight: 1, ConnectionFlags: ConnectionFlagTunnel}
	must(t, i.NewDestination(&someService, d))
	got := mustGet(i.GetDestinations(&someService))(t)
	if len(got) != 1 || !reflect.DeepEqual(*got[0], normalisedDest(d)) {
		t.Errorf("got %+v", got)
	}
	if out := ipvsadm(t, ns, "-Sn"); !strings.Contains(out, "-r [2001:db8::2]:80 -i -w 1") {
		t.Errorf("ipvsadm shows:\n%s", out)
	}
	must(t, i.DelDestination(&someService, got[0]))
}

// IPv6 with netmask 0, and family 0.
func TestKernelRowDefaults(t *testing.T) {
	i, _ := newKernelHandle(t)
	s := &Service{Address: net.ParseIP("2001:db8::1"), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin}
	must(t, i.NewService(s))
	if got := mustGet(i.GetService(s))(t); got.Netmask != 128 || got.AddressFamily != unix.AF_INET6 {
		t.Errorf("got %+v", got)
	}
	must(t, i.NewService(&Service{Address: net.IPv4(10, 0, 0, 1), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin}))
	if got := mustGet(i.GetService(&someService))(t); got.Netmask != 0 {
		t.Errorf("IPv4 netmask %#x, want the 0 that was given", got.Netmask)
	}
}

// A service that was read can be created anew: the kernel's own flag "hashed" in
// it would make a service that no packet finds.
func TestKernelCreateFromRead(t *testing.T) {
	i, _ := newKernelHandle(t)
	must(t, i.NewService(&someService))
	read := mustGet(i.GetService(&someService))(t)
	if read.Flags&ServiceFlagHashed == 0 {
		t.Fatalf("flags %#x", read.Flags)
	}
	must(t, i.DelService(read))
	must(t, i.NewService(read))
	if got := mustGet(i.GetService(&someService))(t); !reflect.DeepEqual(got, read) {
		t.Errorf("got  %+v\nwant %+v", got, read)
	}
}

func TestKernelConfig(t *testing.T) {
	i, ns := newKernelHandle(t)
	must(t, i.SetConfig(&Config{900 * time.Second, 120 * time.Second, 300 * time.Second}))
	must(t, i.SetConfig(&Config{TimeoutTCPFin: 33*time.Second + 999*time.Millisecond}))
	want := Config{900 * time.Second, 33 * time.Second, 300 * time.Second}
	if got := mustGet(i.GetConfig())(t); *got != want {
		t.Errorf("got %+v, want %+v", *got, want)
	}
	if got := ipvsadm(t, ns, "-Ln", "--timeout"); !strings.Contains(got, "900 33 300") {
		t.Errorf("ipvsadm shows %s", got)
	}
	if err := i.SetConfig(&Config{TimeoutUDP: (1<<31 - 1) * time.Second}); err != syscall.EINVAL {
		t.Errorf("2^31-1 seconds: %v, want the kernel's EINVAL", err)
	}
}

// New opens the namespace at a path, or that of the thread.
func TestKernelNamespaces(t *testing.T) {
	i, ns := newKernelHandle(t)
	must(t, i.NewService(&someService))
	byPath := mustGet(New(fmt.Sprintf("/proc/self/fd/%d", ns)))(t)
	defer byPath.Close()
	if !byPath.IsServicePresent(&someService) {
		t.Error("New(path) is in another namespace")
	}
	within(t, ns, func() {
		current, err := New("")
		if err != nil {
			t.Error(err)
			return
		}
		defer current.Close()
		if !current.IsServicePresent(&someService) {
			t.Error(`New("") is not in the thread's namespace`)
		}
	})
	here := mustGet(New(""))(t)
	defer here.Close()
	if here.IsServicePresent(&someService) {
		t.Error("the service is seen from outside its namespace")
	}
}

// Nothing leaks, no thread stays in a foreign namespace, and each handle sees its own
// table.
func TestKernelRowManyHandles(t *testing.T) {
	needKernel(t)
	const namespaces, handles, workers = 100, 1000, 8
	var nss []netns.NsHandle
	for range namespaces {
		nss = append(nss, newNamespace(t))
	}
	before := descriptors(t)
	var wg sync.WaitGroup
	var exclusive [namespaces]sync.Mutex // one handle at a time programs a namespace
	for w := range workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for n := w; n < handles; n += workers {
				ns := n % namespaces
				exclusive[ns].Lock()
				if err := useNamespace(nss[ns], uint16(ns+1)); err != nil {
					t.Errorf("namespace %d: %v", ns, err)
				}
				exclusive[ns].Unlock()
			}
		}()
	}
	wg.Wait()
	if left := opened(t, before); len(left) > 0 {
		t.Errorf("descriptors left open: %v", left)
	}
	if stray := strayThreads(t); len(stray) > 0 {
		t.Errorf("threads in a foreign namespace: %v", stray)
	}
	for n, ns := range nss {
		services := mustGet(openIn(t, ns).GetServices())(t)
		if len(services) != 1 || services[0].Port != uint16(n+1) {
			t.Errorf("namespace %d has %v", n, services)
		}
	}
}

// useNamespace opens a handle, makes the namespace's own service if it is not
// there yet, and checks that there is no other.
func useNamespace(ns netns.NsHandle, port uint16) error {
	i, err := New(fmt.Sprintf("/proc/self/fd/%d", ns))
	if err != nil {
		return err
	}
	defer i.Close()
	s := someService
	s.Port = port
	if err := i.NewService(&s); err != nil && err != syscall.EEXIST {
		return err
	}
	services, err := i.GetServices()
	if err != nil {
		return err
	}
	err = errors.New("got")
	if len(services) != 1 || services[0].Port != port {
		for _, s := range services {
			err = fmt.Errorf("%w %+v", err, *s)
		}
		return fmt.Errorf("want one service with port %d: %w", port, err)
	}
	return nil
}

// One handle, many goroutines, and Close at any moment.
func TestKernelRowConcurrentUse(t *testing.T) {
	needKernel(t)
	ns := newNamespace(t)
	for round := range 5 {
		i, err := NewAt(ns)
		must(t, err)
		must(t, i.Flush())
		var wg sync.WaitGroup
		closing := make(chan struct{})
		for g := range 8 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				s := someService
				s.Port = uint16(1000 + g)
				for n := 0; ; n++ {
					err := firstError(i.NewService(&s), i.NewDestination(&s, &someDestination),
						second(i.GetServices()), second(i.GetDestinations(&s)), i.DelService(&s))
					if err == nil {
						continue
					}
					select {
					case <-closing:
						if !errors.Is(err, ErrClosed) {
							t.Errorf("after Close: %v", err)
						}
					default:
						t.Errorf("round %d, goroutine %d, turn %d: %v", round, g, n, err)
					}
					return
				}
			}()
		}
		time.Sleep(200 * time.Millisecond)
		close(closing)
		i.Close()
		wg.Wait()
	}
}

// A service with an IPv4-mapped IPv6 address, which only other programs create, can be
// read, changed and deleted, and does not disturb Reconcile.
func TestKernelMappedAddress(t *testing.T) {
	i, ns := newKernelHandle(t)
	make := func() {
		ipvsadm(t, ns, "-A", "-t", "[::ffff:10.0.0.1]:80", "-s", "rr")
		ipvsadm(t, ns, "-a", "-t", "[::ffff:10.0.0.1]:80", "-r", "[2001:db8::1]:80", "-m")
	}
	make()
	table := mustGet(i.GetTable())(t)
	if len(table) != 1 || len(table[0].Destinations) != 1 {
		t.Fatalf("table %v", table)
	}
	s := table[0].Service
	if want := "-t [::ffff:10.0.0.1]:80 -s rr"; s.Rule() != want {
		t.Errorf("got %s, want %s", s.Rule(), want)
	}
	s.SchedName = WeightedRoundRobin
	must(t, i.UpdateService(s))
	if got := mustGet(i.GetService(s))(t); !reflect.DeepEqual(got, s) {
		t.Errorf("got %v", got)
	}
	must(t, i.DelService(s))
	make()
	r := &Reconciler{Handle: i}
	if got := mustGet(r.Reconcile([]TableEntry{{Service: ipv4Service(1)}}))(t); got != (Changes{ServicesAdded: 1, ServicesDeleted: 1}) {
		t.Errorf("%+v", got)
	}
	if out := ipvsadm(t, ns, "-Sn"); out != "-A -t 10.0.0.1:80 -s rr\n" {
		t.Errorf("ipvsadm shows %s", out)
	}
}

// Version and table size are those that ipvsadm prints.
func TestKernelInfo(t *testing.T) {
	i, ns := newKernelHandle(t)
	info := mustGet(i.GetInfo())(t)
	got := fmt.Sprintf("IP Virtual Server version %v (size=%d)", info.Version, info.ConnectionTableSize)
	if want, _, _ := strings.Cut(ipvsadm(t, ns, "-Ln"), "\n"); got != want {
		t.Errorf("%s, ipvsadm prints %s", got, want)
	}
	if info.Version.String() != "1.2.1" {
		t.Errorf("version %v, of all kernels since 2008 it is 1.2.1", info.Version)
	}
}
