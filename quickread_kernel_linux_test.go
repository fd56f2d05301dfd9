package ipvs

import (
	"errors"
	"math"
	"math/rand/v2"
	"net"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// For random tables with every kind of entry, the plan made from a reading through
// getsockopt is the one made from GetTable, before and after Reconcile, and the table
// is then the wanted one. That is also so while others work on their own services.
func TestKernelQuickReadSamePlan(t *testing.T) {
	needOpts(t)
	ns := newNamespace(t)
	i := openIn(t, ns)
	counts := countOpts(i)
	maxThreshold := math.MaxInt32
	if kernelBefore(t, 6, 1) {
		maxThreshold = 1000
	}
	random := rand.New(rand.NewPCG(11, 12))
	owned := func(s *Service) bool { return s.FWMark < 1000 && s.Port < 60000 }
	r := &Reconciler{Handle: i, Owned: owned}
	// reconcile repeats the call if it can miss an IPv6 service.
	mayMiss := kernelAtLeast7(t)
	reconcile := func(want []TableEntry) {
		t.Helper()
		var err error
		reconciled := func() bool {
			if _, err = r.Reconcile(want); err != nil {
				return false
			}
			is := mustGet(i.getTable(owned))(t)
			return reflect.DeepEqual(settingsOf(t, is), settingsOf(t, want))
		}
		if !reconciled() && (!mayMiss || !eventually(reconciled)) {
			t.Fatalf("%v: the table is\n%s\nwant\n%s", err, tableText(mustGet(i.getTable(owned))(t)), tableText(want))
		}
	}
	for round := range times(10, 500) {
		if round == times(6, 250) {
			otherWriter(t, ns)
			mayMiss = true
		}
		have, want := randomTable(random, maxThreshold), randomTable(random, maxThreshold)
		for _, b := range []byte{0, 1} { // some existing entries are wanted unchanged
			for n := range have {
				if n%3 == int(b) && n < len(want) {
					want[n] = have[n]
				}
			}
		}
		want = slices.DeleteFunc(want, func(e TableEntry) bool { return e.Service == nil })
		want = uniqueServices(t, want)
		reconcile(have)
		samePlan(t, i, r, want)
		reconcile(want)
		samePlan(t, i, r, want)
		var plan *Batch
		if !eventually(func() bool { plan = mustGet(r.Plan(want))(t); return plan.Len() == 0 }) {
			t.Fatalf("round %d: after Reconcile the plan is\n%s", round, plan)
		}
	}
	t.Logf("read through getsockopt: %d lists of services, %d of destinations; failed: %d",
		counts.services.Load(), counts.dests.Load(), counts.failed.Load())
	if counts.services.Load() < 50 || counts.dests.Load() < 250 || counts.failed.Load() > 0 {
		t.Error("that is not what is to be read so")
	}
}

// optCounter counts what a handle reads through getsockopt, and lets it fail.
type optCounter struct {
	services, dests, failed atomic.Int32
	fault                   func(option int, b []byte, call func() error) error
}

// countOpts counts the handle's calls of getsockopt.
func countOpts(i *Handle) *optCounter {
	c := new(optCounter)
	i.opt.Store(&optReader{getsockopt: func(fd, option int, b []byte) (err error) {
		call := func() error { return getsockopt(fd, option, b) }
		if c.fault != nil {
			err = c.fault(option, b, call)
		} else {
			err = call()
		}
		switch {
		case err != nil:
			c.failed.Add(1)
		case option == optGetServices:
			c.services.Add(1)
		default:
			c.dests.Add(1)
		}
		return err
	}})
	return c
}

// needOpts skips the test in programs that do not use getsockopt.
func needOpts(t *testing.T) {
	t.Helper()
	needKernel(t)
	if math.MaxUint == math.MaxUint32 {
		t.Skip("SKIP: 32-bit programs do not read through getsockopt")
	}
}

// randomTable makes services and destinations of every kind that the kernel accepts,
// about half of all possible ones.
func randomTable(r *rand.Rand, maxThreshold int) (table []TableEntry) {
	chance := func(n int) bool { return r.IntN(n) == 0 }
	schedulers := []string{RoundRobin, WeightedRoundRobin, LeastConnection, WeightedLeastConnection, SourceHashing,
		DestinationHashing, MaglevHashing, ShortestExpectedDelay, NeverQueue, WeightedFailover, WeightedOverflow}
	for n := range 32 {
		if chance(3) {
			continue
		}
		s := &Service{SchedName: schedulers[r.IntN(len(schedulers))], AddressFamily: unix.AF_INET}
		if n%3 == 0 {
			s.AddressFamily = unix.AF_INET6
		}
		if n%5 == 0 {
			s.FWMark = uint32(1 + n)
		} else {
			s.Protocol = []uint16{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP}[n%4%3]
			s.Address, s.Port = net.IP{10, 96, 0, byte(n)}, uint16(n%7*8001)
			if s.AddressFamily == unix.AF_INET6 {
				s.Address = net.ParseIP("2001:db8::1")
				s.Address[15] = byte(n)
			}
		}
		s.Flags = uint32(r.IntN(16)) << 2
		if s.Port == 0 || chance(3) {
			s.Flags |= ServiceFlagPersistent
			s.Timeout = uint32(r.IntN(4000))
		}
		s.Netmask = uint32(1 + r.IntN(128))
		if s.AddressFamily == unix.AF_INET {
			s.Netmask = ipv4Mask(r.IntN(33))
		}
		if s.Protocol == unix.IPPROTO_UDP && chance(3) {
			s.PEName = "sip" // also without the flag for persistence
		}
		e := TableEntry{Service: s}
		for m := range r.IntN(9) {
			d := &Destination{Address: net.IP{10, 128, byte(n), byte(m)}, Port: uint16(m * 8001), AddressFamily: unix.AF_INET,
				ConnectionFlags: []uint32{ConnectionFlagMasq, ConnectionFlagDirectRoute, ConnectionFlagLocalNode, ConnFwdBypass}[r.IntN(4)]}
			switch {
			case s.AddressFamily == unix.AF_INET6 != chance(12):
				d.AddressFamily, d.Address = unix.AF_INET6, net.ParseIP("2001:db8:1::")
				d.Address[14], d.Address[15] = byte(n), byte(m)
			}
			if d.AddressFamily != s.AddressFamily || chance(8) {
				d.ConnectionFlags = ConnectionFlagTunnel
			}
			if d.ConnectionFlags == ConnectionFlagTunnel && chance(2) || chance(12) { // unused, too
				d.TunnelType, d.TunnelPort, d.TunnelFlags = TunnelGUE, uint16(1+r.IntN(math.MaxUint16)), TunnelFlagChecksum
			}
			d.Weight = []int{0, 1, 2, math.MaxUint16, math.MaxUint16 + 1, math.MaxInt32}[r.IntN(6)]
			if chance(4) {
				d.UpperThreshold = uint32(r.IntN(maxThreshold))
				d.LowerThreshold = uint32(r.IntN(int(d.UpperThreshold) + 1))
			}
			e.Destinations = append(e.Destinations, d)
		}
		table = append(table, e)
	}
	return table
}

// withoutCounters returns the table without the fields that readTable leaves out.
func withoutCounters(table []TableEntry) []TableEntry {
	for _, e := range table {
		e.Service.Stats, e.Service.Stats64 = SvcStats{}, Stats64{}
		for _, d := range e.Destinations {
			d.Stats, d.Stats64 = DstStats{}, Stats64{}
			if d.ConnectionFlags != ConnectionFlagTunnel {
				d.TunnelType, d.TunnelPort, d.TunnelFlags = 0, 0, 0
			}
		}
	}
	return table
}

// settingsOf returns all that can be set in a table, in the order of its keys,
// without the settings of tunnels that are not used.
func settingsOf(t *testing.T, table []TableEntry) any {
	t.Helper()
	all := map[serviceKey]any{}
	for _, e := range table {
		key := mustGet(sentServiceKey(e.Service))(t)
		s := normalised(e.Service)
		s.Address, s.Port, s.Protocol = nil, 0, 0 // they are in the key
		dests := map[destinationKey]Destination{}
		for _, dest := range e.Destinations {
			d := normalisedDest(dest)
			d.Address, d.ActiveConnections, d.InactiveConnections, d.PersistentConnections = nil, 0, 0, 0
			if d.ConnectionFlags != ConnectionFlagTunnel {
				d.TunnelType, d.TunnelPort, d.TunnelFlags = 0, 0, 0
			}
			dests[mustGet(sentDestinationKey(dest))(t)] = d
		}
		all[key] = struct {
			service      Service
			destinations map[destinationKey]Destination
		}{s, dests}
	}
	return all
}

// uniqueServices removes services that are listed twice.
func uniqueServices(t *testing.T, table []TableEntry) []TableEntry {
	seen := map[serviceKey]bool{}
	return slices.DeleteFunc(table, func(e TableEntry) bool {
		key := mustGet(sentServiceKey(e.Service))(t)
		again := seen[key]
		seen[key] = true
		return again
	})
}

// samePlan checks that both readings of the table, and the plans made of them, are the
// same. It repeats the comparison for a while, if necessary: netlink's list can miss
// services.
func samePlan(t *testing.T, i *Handle, r *Reconciler, want []TableEntry) {
	t.Helper()
	var quick, full []TableEntry
	var plan, fullPlan string
	same := func() bool {
		quick = readAll(i.readTable(r.Owned))(t)
		full = mustGet(i.getTable(r.Owned))(t)
		plan = mustGet(r.Plan(want))(t).String()
		fullPlan = mustGet(Diff(full, want))(t).String()
		return reflect.DeepEqual(withoutCounters(quick), withoutCounters(full)) && plan == fullPlan
	}
	if !eventually(same) {
		for n := range quick {
			if n < len(full) && !reflect.DeepEqual(quick[n], full[n]) {
				t.Logf("%+v\n%+v", quick[n].Service, full[n].Service)
				for m := range max(len(quick[n].Destinations), len(full[n].Destinations)) {
					if m < len(quick[n].Destinations) {
						t.Logf("getsockopt %+v", quick[n].Destinations[m])
					}
					if m < len(full[n].Destinations) {
						t.Logf("netlink    %+v", full[n].Destinations[m])
					}
				}
			}
		}
		t.Fatalf("the plan is\n%s\nof GetTable it is\n%s", plan, fullPlan)
	}
}

// otherWriter makes and deletes its own services, marks and destinations until the test
// ends.
func otherWriter(t *testing.T, ns netns.NsHandle) {
	i := openIn(t, ns)
	repeat(t, func(n int) error {
		s := ipv4Service(n % 20)
		s.Port = uint16(60000 + n%3)
		if n%4 == 0 {
			s = &Service{FWMark: uint32(1000 + n%20), AddressFamily: unix.AF_INET, SchedName: RoundRobin}
		}
		err := i.NewService(s)
		if err == syscall.EEXIST {
			return i.DelService(s)
		} else if err != nil {
			return err
		}
		return i.NewDestination(s, ipv4Destination(n%5))
	})
}

// repeat calls the other writer with 0, 1, 2 and so on until the test ends.
func repeat(t *testing.T, write func(n int) error) {
	done := make(chan bool)
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		for n := 0; ; n++ {
			select {
			case <-done:
				return
			default:
			}
			if err := write(n); err != nil {
				t.Errorf("the other writer: %v", err)
				return
			}
		}
	}()
	t.Cleanup(func() { close(done); wg.Wait() })
}

// One destination of the other family, one tunnel: a service that getsockopt does not
// report completely is read over netlink, it alone, and as long as that is so.
func TestKernelQuickReadOnlyWhatAddsUp(t *testing.T) {
	needOpts(t)
	i := openIn(t, newNamespace(t))
	counts := countOpts(i)
	table := wantedTable(4, 3)
	tunnel := *ipv4Destination(9)
	tunnel.ConnectionFlags, tunnel.TunnelType, tunnel.TunnelPort = ConnectionFlagTunnel, TunnelGUE, 7
	other := Destination{Address: net.ParseIP("2001:db8::1"), Port: 1, Weight: 1, ConnectionFlags: ConnectionFlagTunnel}
	table[1].Destinations = append(table[1].Destinations, &tunnel)
	table[2].Destinations = append(table[2].Destinations, &other)
	r := &Reconciler{Handle: i}
	must(t, second(r.Reconcile(table)))
	read := func() int {
		before := counts.dests.Load()
		got := withoutCounters(readAll(i.readTable(everyService))(t))
		if want := withoutCounters(mustGet(i.GetTable())(t)); !reflect.DeepEqual(got, want) {
			t.Errorf("read %+v, want %+v", got, want)
		}
		return int(counts.dests.Load() - before)
	}
	if n := read(); n != 4 { // all are tried
		t.Errorf("%d lists the first time", n)
	}
	if n := read(); n != 2 {
		t.Errorf("%d lists the second time", n)
	}
	must(t, i.DelDestination(table[1].Service, &tunnel))
	must(t, i.DelDestination(table[2].Service, &other))
	if n := read(); n != 2 { // netlink shows that it is over
		t.Errorf("%d lists after the tunnels are gone", n)
	}
	if n := read(); n != 4 {
		t.Errorf("%d lists at the end", n)
	}
}

// Faults of the call: the table read is right, at worst at netlink's cost.
func TestKernelQuickReadFaults(t *testing.T) {
	needOpts(t)
	i := openIn(t, newNamespace(t))
	counts := countOpts(i)
	table := wantedTable(6, 3)
	must(t, second((&Reconciler{Handle: i}).Reconcile(table)))
	if kernelAtLeast7(t) {
		time.Sleep(200 * time.Millisecond) // the kernel's table of services grows
	}
	dests := 0 // calls of one reading
	check := func(name string) {
		t.Helper()
		dests = 0
		before := counts.failed.Load()
		got := withoutCounters(readAll(i.readTable(everyService))(t))
		if want := withoutCounters(mustGet(i.GetTable())(t)); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: read %+v, want %+v", name, got, want)
		}
		if n := counts.failed.Load() - before; n != 1 {
			t.Errorf("%s: %d calls failed, want one", name, n)
		}
	}
	for _, errno := range []syscall.Errno{unix.EPERM, unix.ENOPROTOOPT, unix.ENOMEM, unix.EINVAL, unix.EINTR, unix.EFAULT, unix.EMSGSIZE, unix.ESRCH} {
		for _, faulty := range []int{optGetServices, optGetDests} {
			counts.fault = func(option int, b []byte, call func() error) error {
				if option == optGetDests {
					dests++
				}
				if option == faulty && (option == optGetServices || dests == 3) {
					return errno
				}
				return call()
			}
			check(errno.Error())
			if want := map[int]int{optGetServices: 0, optGetDests: 3}[faulty]; dests != want && errno != unix.ESRCH {
				t.Errorf("%v of option %d: %d lists of destinations, want %d: one refusal is enough", errno, faulty, dests, want)
			}
		}
	}
}

// Changes by others between the calls, on a real kernel.
func TestKernelQuickReadChanges(t *testing.T) {
	needOpts(t)
	ns := newNamespace(t)
	other := openIn(t, ns)
	s := ipv4Service(1)
	inet6 := &Destination{Address: net.ParseIP("2001:db8::1"), Port: 1, ConnectionFlags: ConnectionFlagTunnel}
	for _, c := range []struct {
		name    string
		at      int
		change  func() error
		missing int // destinations that the plan makes
	}{
		{"one more", optGetDests, func() error { return other.NewDestination(s, ipv4Destination(3)) }, 0},
		{"one less", optGetDests, func() error { return other.DelDestination(s, ipv4Destination(1)) }, 1},
		{"one of the other family instead", optGetDests, func() error {
			return firstError(other.DelDestination(s, ipv4Destination(1)), other.NewDestination(s, inet6))
		}, 1},
		{"one of the other family more", optGetServices, func() error { return other.NewDestination(s, inet6) }, 0},
		{"the service is gone", optGetDests, func() error { return other.DelService(s) }, 2},
		{"the service is gone before it is counted", optGetServices, func() error { return other.DelService(s) }, 2},
		{"all services are gone", optGetServices, other.Flush, 2},
		{"more services", optGetServices, func() error {
			var b Batch
			for n := range 2 * spareServices {
				b.NewService(ipv4Service(10 + n))
			}
			return other.Do(&b)
		}, 0},
	} {
		must(t, other.Flush())
		want := []TableEntry{{s, []*Destination{ipv4Destination(1), ipv4Destination(2)}}}
		must(t, second((&Reconciler{Handle: other}).Reconcile(want)))
		i := openIn(t, ns) // one that knows of no service that netlink is needed for
		counts, changed := countOpts(i), false
		counts.fault = func(option int, _ []byte, call func() error) error {
			if option == c.at && !changed {
				changed = true
				must(t, c.change())
			}
			return call()
		}
		plan := mustGet((&Reconciler{Handle: i, Owned: func(o *Service) bool { return o.Address.Equal(s.Address) }}).Plan(want))(t)
		made := 0
		for _, msg := range plan.messages {
			if commandOf(msg) == cmdNewDest {
				made++
			}
		}
		if !changed || made != c.missing {
			t.Errorf("%s: the plan makes %d destinations, want %d:\n%s", c.name, made, c.missing, plan)
		}
		counts.fault = nil
		must(t, second((&Reconciler{Handle: i}).Reconcile(want)))
		checkTable(t, i, want)
	}
}

// In a sandbox that rejects the call, or the socket for it, the plan is the same.
func TestKernelQuickReadSandbox(t *testing.T) {
	needOpts(t)
	low := uint32(16 + 4*lowByte) // of the first argument, in struct seccomp_data
	const errno = 0x00050000      // SECCOMP_RET_ERRNO
	for _, c := range []struct {
		name   string
		filter []unix.SockFilter // after the call's number is loaded; the last two allow and refuse
	}{
		{"getsockopt", []unix.SockFilter{
			{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_GETSOCKOPT, Jt: 1},
			{Code: unix.BPF_RET, K: seccompAllow},
			{Code: unix.BPF_RET, K: errno | uint32(unix.EPERM)}}},
		{"socket", []unix.SockFilter{
			{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_SOCKET, Jf: 2},
			{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: low},
			{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.AF_INET, Jt: 1},
			{Code: unix.BPF_RET, K: seccompAllow},
			{Code: unix.BPF_RET, K: errno | uint32(unix.EAFNOSUPPORT)}}},
	} {
		t.Run(c.name, func(t *testing.T) { // its own goroutine, with which the thread ends
			ns := newNamespace(t)
			clean := openIn(t, ns)
			want := wantedTable(5, 3)
			must(t, second((&Reconciler{Handle: clean}).Reconcile(want)))
			checkTable(t, clean, want)
			runtime.LockOSThread()
			must(t, netns.Set(ns))
			filter := append([]unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}}, c.filter...)
			program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
			if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, seccompSetFilter, 0, uintptr(unsafe.Pointer(&program))); errno != 0 {
				t.Fatal(errno)
			}
			i, err := New("")
			must(t, err)
			defer i.Close()
			counts := countOpts(i)
			r := &Reconciler{Handle: i}
			for range 3 {
				if got := mustGet(r.Reconcile(want))(t); got != (Changes{}) {
					t.Errorf("%+v", got)
				}
			}
			want[0].Destinations[0].Weight = 7
			if got := mustGet(r.Reconcile(want))(t); got != (Changes{DestinationsUpdated: 1}) {
				t.Errorf("%+v", got)
			}
			if n := counts.services.Load() + counts.dests.Load(); n != 0 {
				t.Errorf("%d calls were not refused", n)
			}
			if refused := i.opt.Load().refused; refused != (c.name == "socket") {
				t.Errorf("the socket is refused: %v", refused)
			}
		})
	}
}

// The descriptor is closed with the handle, with Close and without.
func TestKernelQuickReadDescriptor(t *testing.T) {
	needOpts(t)
	ns := newNamespace(t)
	before := descriptors(t)
	open := func() *Handle {
		i, err := NewAt(ns)
		must(t, err)
		must(t, third(i.readTable(everyService)))
		must(t, i.NewService(ipv4Service(1)))
		must(t, third(i.readTable(everyService)))
		must(t, i.Flush())
		return i
	}
	i := open()
	if own := opened(t, before); len(own) != 2 {
		t.Errorf("a handle that reconciles has descriptors %v, want 2", own)
	}
	i.Close()
	if left := opened(t, before); len(left) > 0 {
		t.Errorf("left open after Close: %v", left)
	}
	open() // dropped
	if !collected(t, before) {
		t.Errorf("left open by a dropped handle: %v", opened(t, before))
	}
}

// Many read and one closes: each call ends with the table or with ErrClosed.
func TestKernelQuickReadConcurrent(t *testing.T) {
	needOpts(t)
	ns := newNamespace(t)
	want := wantedTable(20, 3)
	must(t, second((&Reconciler{Handle: openIn(t, ns)}).Reconcile(want)))
	for range times(5, 50) {
		i := openIn(t, ns)
		var wg sync.WaitGroup
		var reads atomic.Int32
		for range 8 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				r := &Reconciler{Handle: i}
				for {
					plan, err := r.Plan(want)
					if errors.Is(err, ErrClosed) {
						return
					}
					if err != nil || plan.Len() != 0 {
						t.Errorf("%v:\n%s", err, plan)
						return
					}
					reads.Add(1)
				}
			}()
		}
		eventually(func() bool { return reads.Load() > 16 })
		i.Close()
		wg.Wait()
	}
}
