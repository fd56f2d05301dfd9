package ipvs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"reflect"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// All fields on which decisions depend are read, and netlink is used only for what
// getsockopt does not report.
func TestQuickRead(t *testing.T) {
	i, k := newOptFake(t, optTestTable())
	checkRead(t, "first", i, k, 4, 7)
	checkRead(t, "what needs netlink is known", i, k, 4, 5)
	k.table[5].Destinations = k.table[5].Destinations[:1]
	checkRead(t, "the tunnel is gone", i, k, 4, 5)
	checkRead(t, "and that is known", i, k, 3, 6)
	slices.Reverse(k.table)
	checkRead(t, "another order", i, k, 3, 6)
}

// optTestTable has a service of each kind. getsockopt reports the first five
// completely.
func optTestTable() []TableEntry {
	busy := Destination{Address: net.IPv4(10, 1, 2, 3), Port: 0x1234, Weight: math.MaxInt32, ConnectionFlags: ConnectionFlagDirectRoute, UpperThreshold: 70000, LowerThreshold: 65537,
		ActiveConnections: 1 << 17, InactiveConnections: 1<<17 + 1, PersistentConnections: 1<<17 + 2}
	tunnel := Destination{Address: net.IPv4(10, 1, 2, 4), Weight: 2, ConnectionFlags: ConnectionFlagTunnel, TunnelType: TunnelGUE, TunnelPort: 6080, TunnelFlags: TunnelFlagChecksum}
	other := Destination{Address: net.ParseIP("2001:db8::2"), Port: 80, Weight: 3, ConnectionFlags: ConnectionFlagTunnel}
	persistent := ipv4Service(3)
	persistent.Protocol, persistent.Flags, persistent.Timeout, persistent.PEName = 17, ServiceFlagPersistent, 300, "sip"
	return []TableEntry{
		{ipv4Service(1), []*Destination{&busy, ipv4Destination(2), ipv4Destination(3)}},
		{ipv4Service(2), []*Destination{ipv4Destination(1)}},
		{persistent, []*Destination{ipv4Destination(1), ipv4Destination(2)}},
		{&Service{FWMark: 7, AddressFamily: unix.AF_INET, SchedName: "sh"}, []*Destination{ipv4Destination(4)}},
		{ipv4Service(4), nil},
		{ipv4Service(5), []*Destination{ipv4Destination(1), &tunnel}},
		{ipv4Service(6), []*Destination{ipv4Destination(1), &other}},
		{&Service{Address: net.ParseIP("2001:db8::1"), Protocol: 6, Port: 80, SchedName: "rr"}, []*Destination{{Address: net.ParseIP("2001:db8::3"), Port: 1}}},
		{&Service{FWMark: 7, AddressFamily: unix.AF_INET6, SchedName: "sh"}, []*Destination{{Address: net.ParseIP("2001:db8::4"), Port: 1}}},
	}
}

// checkRead checks that readTable returns the same as GetTable, and how it read the
// table.
func checkRead(t *testing.T, name string, i *Handle, k *optKernel, netlink, opts int) {
	t.Helper()
	k.netlink, k.opts = 0, 0
	got := readAll(i.readTable(everyService))(t)
	if k.netlink != netlink || k.opts != opts {
		t.Errorf("%s: %d lists over netlink and %d calls of getsockopt, want %d and %d", name, k.netlink, k.opts, netlink, opts)
	}
	k.before = nil
	if want := mustGet(i.GetTable())(t); !reflect.DeepEqual(got, want) {
		t.Errorf("%s: read\n%s\nwant\n%s", name, tableText(got), tableText(want))
	}
}

// readAll is mustGet for readTable.
func readAll(table []TableEntry, _ bool, err error) func(t *testing.T) []TableEntry {
	return mustGet(table, err)
}

func third[T, U any](_ T, _ U, err error) error { return err }

func everyService(*Service) bool { return true }

func tableText(table []TableEntry) (text string) {
	for _, e := range table {
		text += fmt.Sprintf("%+v\n", *e.Service)
		for _, d := range e.Destinations {
			text += fmt.Sprintf("\t%+v\n", *d)
		}
	}
	return text
}

// Changes by others between the calls: the result is that of netlink at that moment, or
// the kernel's table a moment before; never a mixture.
func TestQuickReadChanges(t *testing.T) {
	mark := TableEntry{&Service{FWMark: 9, AddressFamily: unix.AF_INET, SchedName: "rr"}, []*Destination{ipv4Destination(1), ipv4Destination(2)}}
	other := &Destination{Address: net.ParseIP("2001:db8::2"), Port: 80, ConnectionFlags: ConnectionFlagTunnel}
	for _, c := range []struct {
		name          string
		at            int // option before which it happens
		change        func(e *TableEntry)
		netlink, opts int
	}{
		{"nothing", optGetDests, func(*TableEntry) {}, 0, 3},
		{"one more", optGetDests, func(e *TableEntry) { e.Destinations = append(e.Destinations, ipv4Destination(3)) }, 1, 3},
		{"one less", optGetDests, func(e *TableEntry) { e.Destinations = e.Destinations[:1] }, 1, 3},
		{"none left", optGetDests, func(e *TableEntry) { e.Destinations = nil }, 1, 3},
		{"another one", optGetDests, func(e *TableEntry) { e.Destinations[1] = ipv4Destination(5) }, 0, 3},
		{"one of the other family instead", optGetDests, func(e *TableEntry) { e.Destinations[0] = other }, 1, 3},
		{"one of the other family more", optGetServices, func(e *TableEntry) { e.Destinations = append(e.Destinations, other) }, 1, 3},
		{"the service is gone", optGetDests, func(e *TableEntry) { e.Service, e.Destinations = ipv4Service(99), nil }, 1, 3},
		{"another weight", optGetDests, func(e *TableEntry) { e.Destinations[1].Weight = 0 }, 0, 3},
	} {
		i, k := newOptFake(t, []TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(1), ipv4Destination(2)}}, mark})
		changed := false
		k.before = func(option int, _ *refOptRequest) error {
			if option == c.at && !changed {
				changed = true
				c.change(&k.table[0])
			}
			return nil
		}
		got := readAll(i.readTable(everyService))(t)
		if k.netlink != c.netlink || k.opts != c.opts {
			t.Errorf("%s: %d lists over netlink and %d calls, want %d and %d", c.name, k.netlink, k.opts, c.netlink, c.opts)
		}
		want := mustGet(i.GetTable())(t)
		if c.name == "the service is gone" {
			want[0].Service = got[0].Service // it was listed, and has none now
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: read\n%s\nwant\n%s", c.name, tableText(got), tableText(want))
		}
	}
}

// If the call fails, everything is read over netlink, after a single attempt for each
// table.
func TestQuickReadRefused(t *testing.T) {
	table := wantedTable(5, 2)
	for _, errno := range []syscall.Errno{unix.EPERM, unix.ENOPROTOOPT, unix.ENOMEM, unix.EINVAL, unix.ENOSYS, unix.EMSGSIZE, unix.EINTR, unix.EFAULT} {
		for _, option := range []int{optGetServices, optGetDests} {
			i, k := newOptFake(t, table)
			k.before = func(o int, _ *refOptRequest) error {
				if o == option {
					return errno
				}
				return nil
			}
			opts := 1
			if option == optGetDests {
				opts = 2
			}
			checkRead(t, errno.Error(), i, k, 5, opts)
			checkRead(t, errno.Error()+", next time", i, k, 0, 6)
		}
	}
}

// A socket that could not be opened because all descriptors were taken is tried again
// when the next table is read.
func TestQuickReadTriedAgain(t *testing.T) {
	i, _ := newOptFake(t, optTestTable())
	if err := inNamespaceOf(i.socket, func() error { return nil }); err != nil {
		t.Skip("SKIP: needs the namespace of a socket, as emulators of other processors do not have it: ", err)
	}
	r := i.opt.Load()
	r.socket.Swap(nil).close()
	var limit unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: limit.Max}))
	table := r.open(i, 10)
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	if table != nil || r.socket.Load() != nil {
		t.Fatal("a socket without a descriptor for it")
	}
	if r.refused {
		t.Error("not tried again")
	}
}

// A kernel that reports a shorter length than that of the buffer.
func TestQuickReadShortAnswer(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(fd)
	b := make([]byte, 64)
	if err := getsockopt(fd, unix.IP_TTL, b); err != unix.EMSGSIZE {
		t.Errorf("%v, want EMSGSIZE", err)
	}
	if err := getsockopt(fd, unix.IP_TTL, b[:4]); err != nil || native.Uint32(b) != 64 {
		t.Errorf("%v, %v", err, b[:4])
	}
	if err := getsockopt(fd, optGetServices, b[:4]); err == nil {
		t.Error("no error for too short a buffer")
	}
}

// Few services of a large table are read one by one.
func TestQuickReadFewOwned(t *testing.T) {
	i, k := newOptFake(t, wantedTable(99, 1))
	owned := func(n int) func(*Service) bool {
		return func(*Service) bool { n--; return n >= 0 }
	}
	for n, opts := range map[int]int{0: 0, 1: 0, 2: 3, 99: 100} {
		k.opts = 0
		if got := readAll(i.readTable(owned(n)))(t); len(got) != n || k.opts != opts {
			t.Errorf("%d owned: %d read, %d calls, want %d", n, len(got), k.opts, opts)
		}
	}
}

// Close ends a reading, and the descriptor is closed after it.
func TestQuickReadClose(t *testing.T) {
	i, k := newOptFake(t, wantedTable(3, 1))
	fd := i.opt.Load().socket.Load().fd
	k.before = func(option int, _ *refOptRequest) error {
		if option == optGetDests {
			i.Close()
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
				t.Error("the descriptor is closed while it is in use")
			}
		}
		return nil
	}
	if table, _, err := i.readTable(everyService); !errors.Is(err, ErrClosed) || table != nil {
		t.Errorf("%v, %v", table, err)
	}
	if k.opts != 2 {
		t.Errorf("%d calls of getsockopt, want 2", k.opts)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != unix.EBADF {
		t.Errorf("after Close the descriptor is open: %v", err)
	}
	if _, _, err := i.readTable(everyService); !errors.Is(err, ErrClosed) {
		t.Errorf("%v", err)
	}
}

// A handle that is closed while the socket for getsockopt is opened leaves none open.
func TestQuickReadClosedMeanwhile(t *testing.T) {
	s := netlinkSocket(t)
	defer s.close()
	i := &Handle{socket: s, kernel: true}
	r := &optReader{getsockopt: func(int, int, []byte) error { return nil }}
	i.closed.Store(true)
	if table := r.open(i, 1); table != nil {
		t.Error("a closed handle reads")
	}
	if opened := r.socket.Load(); opened == nil || !opened.closed.Load() {
		t.Error("the socket stays open")
	}
}

// DrainFor gets destinations as netlink returns them, including counters.
func TestQuickReadDrainFor(t *testing.T) {
	table := []TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(1), ipv4Destination(2)}}, {ipv4Service(2), []*Destination{ipv4Destination(3)}}}
	for _, e := range table {
		for _, d := range e.Destinations {
			d.TunnelPort = d.Port + 1 // as little in getsockopt's answer as counters
		}
	}
	i, k := newOptFake(t, table)
	var asked []uint16
	r := &Reconciler{Handle: i, DrainFor: func(_ *Service, d *Destination) time.Duration {
		asked = append(asked, d.TunnelPort)
		return time.Hour
	}}
	plan := mustGet(r.Plan(wantedTable(2, 0)[1:]))(t)
	if !slices.Equal(asked, []uint16{8081, 8081, 8081}) || k.netlink != 2 || plan.Len() != 3 {
		t.Errorf("asked with %v, %d lists over netlink, plan:\n%s", asked, k.netlink, plan)
	}
	k.before = func(int, *refOptRequest) error { return nil }
	asked, k.netlink = nil, 0
	must(t, second(r.Plan(k.table)))
	if asked != nil || k.netlink != 0 {
		t.Errorf("nothing drains: asked with %v, %d lists over netlink", asked, k.netlink)
	}
	i.kernel = false // all is read over netlink
	k.netlink = 0
	must(t, second(r.Plan(nil)))
	if len(asked) != 3 || k.netlink != 2 {
		t.Errorf("asked with %v, %d lists over netlink", asked, k.netlink)
	}
}

// A handle of a test, or of a 32-bit program, reads over netlink only.
func TestQuickReadNotOfKernel(t *testing.T) {
	i, k := newOptFake(t, wantedTable(3, 1))
	i.kernel = false
	checkRead(t, "not of the kernel", i, k, 3, 0)
}

func TestQuickRead32(t *testing.T) {
	i := &Handle{kernel: true}
	if has := i.optReader() != nil; has != (^uint(0)>>32 != 0) {
		t.Errorf("reads through getsockopt: %v", has)
	}
}

// No buffer of a large table stays.
func TestQuickReadMemory(t *testing.T) {
	i, _ := newOptFake(t, []TableEntry{{ipv4Service(1), wantedTable(1, 5000)[0].Destinations}})
	if got := readAll(i.readTable(everyService))(t); len(got[0].Destinations) != 5000 {
		t.Errorf("%d destinations", len(got[0].Destinations))
	}
	r := i.opt.Load()
	if cap(r.destBuffer) != 0 || cap(r.serviceBuffer) == 0 || cap(r.serviceBuffer) > maxKeptBuffer {
		t.Errorf("buffers of %d and %d bytes are kept", cap(r.destBuffer), cap(r.serviceBuffer))
	}
}

// An entry of the kernel's older interface belongs to a service if it has the same
// identity.
func TestOptServiceIs(t *testing.T) {
	e := make(optService, optServiceSize)
	native.PutUint16(e, unix.IPPROTO_TCP)
	copy(e[4:], []byte{10, 0, 0, 1})
	copy(e[8:], be16(80))
	same := Service{AddressFamily: unix.AF_INET, Address: []byte{10, 0, 0, 1}, Protocol: unix.IPPROTO_TCP, Port: 80}
	if !e.is(&same) || e.isEmpty() {
		t.Error("the service is not recognized")
	}
	for name, change := range map[string]func(s *Service){
		"address":  func(s *Service) { s.Address = []byte{10, 0, 0, 2} },
		"length":   func(s *Service) { s.Address = append([]byte{10, 0, 0, 1}, make([]byte, 12)...) },
		"port":     func(s *Service) { s.Port = 81 },
		"protocol": func(s *Service) { s.Protocol = unix.IPPROTO_UDP },
		"mark":     func(s *Service) { s.FWMark = 1 },
	} {
		other := same
		change(&other)
		if e.is(&other) {
			t.Errorf("another %s is taken for the same", name)
		}
	}
	mark := make(optService, optServiceSize)
	native.PutUint32(mark[12:], 7)
	if !mark.is(&Service{FWMark: 7}) || mark.is(&Service{FWMark: 8}) || mark.is(&same) || mark.isEmpty() {
		t.Error("firewall marks")
	}
}

// Whatever the kernel answers, there is no panic, and the decoded entries are those in
// the reply.
func FuzzQuickRead(f *testing.F) {
	service := func(n int, dests uint32) []byte {
		b := make([]byte, optServiceSize)
		second(binary.Encode(b, binary.NativeEndian, refOptService{Identity: optIdentity(ipv4Service(n)), NumDestination: dests}))
		return b
	}
	dest := make([]byte, optDestSize)
	second(binary.Encode(dest, binary.NativeEndian, refOptDestination{Address: [4]byte{10, 1, 0, 1}, Port: [2]byte{31, 144}, ConnectionFlags: 0x103, Weight: 5}))
	f.Add(append(service(0, 1), service(1, 2)...), append(bytes.Clone(dest), dest...))
	f.Add(service(1, 0), []byte{})
	f.Add(service(2, math.MaxUint32), dest)
	f.Fuzz(func(t *testing.T, services, dests []byte) {
		r := &optReader{getsockopt: func(_, option int, b []byte) error {
			if option == optGetServices {
				copy(b[optServicesHdrLen:], services)
			} else {
				copy(b[optDestsHdrLen:], dests)
			}
			return nil
		}}
		table := &optTable{reader: r}
		if !table.readServices(8) {
			t.Fatal("not read")
		}
		for n := range 4 {
			s := ipv4Service(n)
			s.AddressFamily, s.Address = unix.AF_INET, s.Address.To4()
			got, ok := table.destinations(s)
			var entry refOptService
			found := false
			for at := 0; at < 8*optServiceSize && !found; at += optServiceSize {
				b := append(bytes.Clone(services), make([]byte, 9*optServiceSize)...)[at:]
				second(binary.Decode(b, binary.NativeEndian, &entry))
				id := entry.Identity
				found = id.FWMark == 0 && id.Protocol == 6 && net.IP(id.Address[:]).Equal(s.Address) && id.Port == [2]byte{0, 80}
			}
			if ok && !found {
				t.Fatalf("destinations of a service that is not there: %v", got)
			}
			if !ok {
				continue
			}
			checkOptDestinations(t, dests, got)
		}
	})
}

// checkOptDestinations compares what was decoded with the entries.
func checkOptDestinations(t *testing.T, b []byte, got []*Destination) {
	t.Helper()
	for n, d := range got {
		var e refOptDestination
		padded := append(bytes.Clone(b), make([]byte, (len(got)+2)*optDestSize)...)
		if n == len(got)-1 && len(b) <= n*optDestSize {
			t.Fatalf("%d destinations in %d bytes", len(got), len(b))
		}
		second(binary.Decode(padded[n*optDestSize:], binary.NativeEndian, &e))
		if (n+1)*optDestSize > len(b) && n != len(got)-1 {
			continue // the entry is what was in the buffer before
		}
		want := Destination{Address: net.IP(e.Address[:]), AddressFamily: unix.AF_INET, Port: binary.BigEndian.Uint16(e.Port[:]),
			ConnectionFlags: e.ConnectionFlags & 7, Weight: int(uint32(e.Weight)), UpperThreshold: e.Upper, LowerThreshold: e.Lower,
			ActiveConnections: int(e.Active), InactiveConnections: int(e.Inactive), PersistentConnections: int(e.Persist)}
		if len(b) >= (n+1)*optDestSize && (!reflect.DeepEqual(*d, want) || d.ConnectionFlags == ConnectionFlagTunnel) {
			t.Fatalf("destination %d: %+v, want %+v", n, *d, want)
		}
	}
}
