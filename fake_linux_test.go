package ipvs

import (
	"errors"
	"math"
	"net"
	"os"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// All handles share one table; closing one does not affect the others.
func TestFakeHandles(t *testing.T) {
	f, i := newFakeTest(t)
	other := f.Handle()
	i.Close()
	i.Close()
	if err := i.NewService(ipv4Service(1)); err != ErrClosed {
		t.Errorf("on the closed handle: %v, want %v", err, ErrClosed)
	}
	if err := other.NewService(&someService); err != syscall.EEXIST {
		t.Errorf("on the other handle: %v, want %v", err, syscall.EEXIST)
	}
	if table := mustGet(f.Handle().GetTable())(t); len(table) != 1 || len(table[0].Destinations) != 1 {
		t.Errorf("on a new handle: %+v, want a service with a destination", table)
	}
	if table := mustGet(NewFake().Handle().GetTable())(t); len(table) != 0 {
		t.Errorf("another Fake: %+v, want nothing", table)
	}
}

// newFakeTest returns a Fake with a service and a destination, and one of its handles.
func newFakeTest(t testing.TB) (*Fake, *Handle) {
	t.Helper()
	f := NewFake()
	i := f.Handle()
	must(t, i.NewService(&someService))
	must(t, i.NewDestination(&someService, &someDestination))
	return f, i
}

// fakeCalls makes a call of each method that Fail knows; changed reports whether the
// call had its effect.
var fakeCalls = map[string]struct {
	call    func(*Handle) error
	changed func(*testing.T, *Handle) bool
}{
	"NewService": {func(i *Handle) error { return i.NewService(ipv4Service(99)) },
		func(t *testing.T, i *Handle) bool { return i.IsServicePresent(ipv4Service(99)) }},
	"UpdateService": {func(i *Handle) error {
		s := someService
		s.SchedName = WeightedRoundRobin
		return i.UpdateService(&s)
	}, func(t *testing.T, i *Handle) bool {
		return mustGet(i.GetService(&someService))(t).SchedName == WeightedRoundRobin
	}},
	"DelService": {func(i *Handle) error { return i.DelService(&someService) },
		func(t *testing.T, i *Handle) bool { return !i.IsServicePresent(&someService) }},
	"GetService":  {call: func(i *Handle) error { return second(i.GetService(&someService)) }},
	"GetServices": {call: func(i *Handle) error { return second(i.GetServices()) }},
	"NewDestination": {func(i *Handle) error { return i.NewDestination(&someService, ipv4Destination(1)) },
		func(t *testing.T, i *Handle) bool { return len(mustGet(i.GetDestinations(&someService))(t)) == 2 }},
	"UpdateDestination": {func(i *Handle) error {
		d := someDestination
		d.Weight = 7
		return i.UpdateDestination(&someService, &d)
	}, func(t *testing.T, i *Handle) bool {
		return mustGet(i.GetDestinations(&someService))(t)[0].Weight == 7
	}},
	"DelDestination": {func(i *Handle) error { return i.DelDestination(&someService, &someDestination) },
		func(t *testing.T, i *Handle) bool { return len(mustGet(i.GetDestinations(&someService))(t)) == 0 }},
	"GetDestinations": {call: func(i *Handle) error { return second(i.GetDestinations(&someService)) }},
	"NewDaemon": {func(i *Handle) error {
		return i.NewDaemon(&Daemon{State: DaemonMaster, MulticastInterface: "eth0"})
	}, func(t *testing.T, i *Handle) bool { return len(mustGet(i.GetDaemons())(t)) == 2 }},
	"DelDaemon": {func(i *Handle) error { return i.DelDaemon(DaemonBackup) },
		func(t *testing.T, i *Handle) bool { return len(mustGet(i.GetDaemons())(t)) == 0 }},
	"GetDaemons": {call: func(i *Handle) error { return second(i.GetDaemons()) }},
	"GetConfig":  {call: func(i *Handle) error { return second(i.GetConfig()) }},
	"SetConfig": {func(i *Handle) error { return i.SetConfig(&Config{TimeoutUDP: 7 * time.Second}) },
		func(t *testing.T, i *Handle) bool { return mustGet(i.GetConfig())(t).TimeoutUDP == 7*time.Second }},
	"GetInfo": {call: func(i *Handle) error { return second(i.GetInfo()) }},
	"Zero": {func(i *Handle) error { return i.Zero() },
		func(t *testing.T, i *Handle) bool {
			return mustGet(i.GetService(&someService))(t).Stats64.Connections == 0
		}},
	"ZeroService": {func(i *Handle) error { return i.ZeroService(&someService) },
		func(t *testing.T, i *Handle) bool {
			return mustGet(i.GetService(&someService))(t).Stats64.Connections == 0
		}},
	"Flush": {func(i *Handle) error { return i.Flush() },
		func(t *testing.T, i *Handle) bool { return len(mustGet(i.GetServices())(t)) == 0 }},
}

func TestFakeFail(t *testing.T) {
	if len(fakeCalls) != len(fakeMethods) {
		t.Errorf("%d calls, want one for each of %d methods", len(fakeCalls), len(fakeMethods))
	}
	for _, method := range fakeMethods {
		t.Run(method, func(t *testing.T) {
			c := fakeCalls[method]
			for _, fault := range []struct {
				err, want error
				changes   bool
			}{
				{syscall.ENOMEM, syscall.ENOMEM, false},
				{syscall.ENOENT, syscall.ENOENT, false}, // the family is asked for again
				{syscall.EINTR, syscall.EINTR, false},   // a reply all the same
				{os.ErrDeadlineExceeded, os.ErrDeadlineExceeded, true},
			} {
				f, i := newFakeTest(t)
				must(t, f.SetStats(&someService, nil, Stats64{Connections: 1}))
				must(t, i.NewDaemon(&Daemon{State: DaemonBackup, MulticastInterface: "eth0"}))
				other := f.Handle()
				must(t, i.SetTimeout(time.Hour)) // it is not waited for
				f.Fail(method, nil)
				f.Fail(method, fault.err)
				if method == "GetService" {
					must(t, second(i.GetService(&someService)))
				} else {
					f.Fail(method, nil)
					f.faults[method] = f.faults[method][1:]
				}
				if err := c.call(i); !errors.Is(err, fault.want) {
					t.Errorf("%v: error %v", fault.err, err)
				} else if _, refused := fault.err.(syscall.Errno); refused && err != fault.err {
					t.Errorf("%v: error %v (%T), want the bare number", fault.err, err, err)
				}
				f.faults[method] = nil
				if c.changed != nil && c.changed(t, other) != fault.changes {
					t.Errorf("%v: changed %v, want %v", fault.err, !fault.changes, fault.changes)
				}
				must(t, second(i.GetTable())) // the handle stays usable
			}
		})
	}
}

func TestFakeFailPanics(t *testing.T) {
	for op, err := range map[string]error{"Do": syscall.EIO, "newService": syscall.EIO, "NewService": errors.New("what"), "Flush": syscall.Errno(4096), "Zero": syscall.Errno(0)} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("Fail(%q, %v) does not panic", op, err)
				}
			}()
			NewFake().Fail(op, err)
		}()
	}
}

// A change of a batch fails alone; if its reply is lost, so are those to later changes.
func TestFakeFailBatch(t *testing.T) {
	for _, fault := range []error{syscall.ENOMEM, os.ErrDeadlineExceeded} {
		f, i := newFakeTest(t)
		must(t, i.SetTimeout(time.Hour))
		var b Batch
		for n := range 5 {
			b.NewDestination(&someService, ipv4Destination(n))
		}
		f.Fail("NewDestination", nil)
		f.Fail("NewDestination", nil)
		f.Fail("NewDestination", fault)
		var failed *BatchError
		if err := i.Do(&b); !errors.As(err, &failed) {
			t.Fatalf("error %v, want a %T", err, failed)
		}
		destinations := mustGet(f.Handle().GetDestinations(&someService))(t)
		if fault == error(syscall.ENOMEM) {
			if len(failed.Errors) != 1 || failed.Errors[0].Index != 2 || failed.Errors[0].Err != fault || len(destinations) != 5 {
				t.Errorf("%v, %d destinations; want change 2 to fail, and 5", failed, len(destinations))
			}
			continue
		}
		if !errors.Is(failed, ErrOutcomeUnknown) || !errors.Is(failed, os.ErrDeadlineExceeded) || len(destinations) != 6 {
			t.Errorf("%v, %d destinations; want an unknown outcome, and 6", failed, len(destinations))
		}
		if err := i.Do(&b); !errors.As(err, &failed) || len(failed.Errors) != 5 || failed.Errors[4].Err != syscall.EEXIST {
			t.Errorf("again: %v, want 5 times %v", err, syscall.EEXIST)
		}
	}
}

func TestFakeConnections(t *testing.T) {
	f, i := newFakeTest(t)
	connections := func() [3]int {
		d := mustGet(i.GetDestinations(&someService))(t)[0]
		return [3]int{d.ActiveConnections, d.InactiveConnections, d.PersistentConnections}
	}
	must(t, f.SetConnections(&someService, &someDestination, 1, 2, 3))
	if got := connections(); got != [3]int{1, 2, 3} {
		t.Errorf("%v, want 1, 2, 3", got)
	}
	must(t, i.UpdateDestination(&someService, &someDestination))
	must(t, i.Zero())
	if got := connections(); got != [3]int{1, 2, 3} {
		t.Errorf("%v after an update and Zero, want 1, 2, 3", got)
	}
	// A deleted destination keeps its connections, even if its service is deleted.
	must(t, i.DelDestination(&someService, &someDestination))
	must(t, i.NewDestination(&someService, &someDestination))
	if got := connections(); got != [3]int{1, 2, 3} {
		t.Errorf("%v after it was deleted and added, want 1, 2, 3", got)
	}
	must(t, f.SetConnections(&someService, &someDestination, 0, 0, 0))
	must(t, i.DelService(&someService))
	must(t, i.NewService(&someService))
	must(t, i.NewDestination(&someService, &someDestination))
	if got := connections(); got != [3]int{} {
		t.Errorf("%v after all ended, want none", got)
	}

	for _, c := range []struct {
		s    *Service
		d    *Destination
		n    int
		want error
	}{
		{ipv4Service(9), &someDestination, 0, syscall.ESRCH},
		{&someService, ipv4Destination(9), 0, syscall.ENOENT},
		{&someService, &someDestination, -1, syscall.ERANGE},
		{nil, &someDestination, 0, errNilService},
		{&someService, nil, 0, errNilDestination},
	} {
		if err := f.SetConnections(c.s, c.d, c.n, 0, 0); !errors.Is(err, c.want) {
			t.Errorf("SetConnections of %v, %v, %d: %v, want %v", c.s, c.d, c.n, err, c.want)
		}
	}
}

// Numbers of connections have 31 bits.
func TestFakeConnectionsRange(t *testing.T) {
	f := NewFake()
	i := f.Handle()
	defer i.Close()
	s, d := ipv4Service(1), ipv4Destination(1)
	must(t, i.NewService(s))
	must(t, i.NewDestination(s, d))
	must(t, f.SetConnections(s, d, math.MaxInt32, 0, math.MaxInt32))
	more := math.MaxInt32
	more++ // negative where an int has 32 bits
	for _, n := range [][3]int{{more, 0, 0}, {0, more, 0}, {0, 0, more}, {-1, 0, 0}} {
		if err := f.SetConnections(s, d, n[0], n[1], n[2]); !errors.Is(err, syscall.ERANGE) {
			t.Errorf("%v: %v", n, err)
		}
	}
	got := mustGet(i.GetDestinations(s))(t)
	if len(got) != 1 || got[0].ActiveConnections != math.MaxInt32 || got[0].InactiveConnections != 0 || got[0].PersistentConnections != math.MaxInt32 {
		t.Errorf("got %+v", got)
	}
}

func TestFakeStats(t *testing.T) {
	f, i := newFakeTest(t)
	const big = 1<<32 + 1
	stats := Stats64{Connections: big, PacketsIn: big + 1, PacketsOut: big + 2, BytesIn: big + 3, BytesOut: big + 4,
		CPS: big + 5, BPSOut: big + 6, PPSIn: big + 7, PPSOut: big + 8, BPSIn: big + 9}
	narrow := SvcStats{Connections: 1, PacketsIn: 2, PacketsOut: 3, BytesIn: big + 3, BytesOut: big + 4,
		CPS: 6, BPSOut: 7, PPSIn: 8, PPSOut: 9, BPSIn: 10}
	check := func(when string, service, destination Stats64, serviceNarrow, destinationNarrow SvcStats) {
		t.Helper()
		s := mustGet(i.GetService(&someService))(t)
		d := mustGet(i.GetDestinations(&someService))(t)[0]
		if s.Stats64 != service || s.Stats != serviceNarrow || d.Stats64 != destination || d.Stats != DstStats(destinationNarrow) {
			t.Errorf("%s:\n%+v\n%+v", when, *s, *d)
		}
	}
	must(t, f.SetStats(&someService, nil, stats))
	check("of the service", stats, Stats64{}, narrow, SvcStats{})
	must(t, f.SetStats(&someService, &someDestination, stats))
	must(t, f.SetStats(&someService, nil, Stats64{}))
	check("of the destination", Stats64{}, stats, SvcStats{}, narrow)

	must(t, i.DelDestination(&someService, &someDestination))
	must(t, i.NewDestination(&someService, &someDestination))
	check("deleted and added", Stats64{}, stats, SvcStats{}, narrow)
	must(t, i.DelService(&someService))
	must(t, i.NewService(&someService))
	must(t, i.NewDestination(&someService, &someDestination))
	check("of a new service", Stats64{}, Stats64{}, SvcStats{}, SvcStats{})
	must(t, f.SetStats(&someService, &someDestination, stats))
	must(t, i.ZeroService(&someService))
	check("zero", Stats64{}, Stats64{}, SvcStats{}, SvcStats{})

	if err := f.SetStats(ipv4Service(9), nil, stats); err != syscall.ESRCH {
		t.Errorf("no such service: %v", err)
	}
	if err := f.SetStats(&someService, ipv4Destination(9), stats); err != syscall.ENOENT {
		t.Errorf("no such destination: %v", err)
	}
	if err := f.SetStats(nil, nil, stats); err != errNilService {
		t.Errorf("nil service: %v", err)
	}
}

// A daemon has the settings that it was started with.
func TestFakeDaemonSettings(t *testing.T) {
	i := NewFake().Handle()
	defer i.Close()
	want := []*Daemon{
		{State: DaemonMaster, MulticastInterface: "lo", SyncID: 7, SyncMaxLen: 1400, MulticastGroup: net.ParseIP("ff02::51"), MulticastPort: 9000, MulticastTTL: 3},
		{State: DaemonBackup, MulticastInterface: "lo", SyncID: 8, SyncMaxLen: 1400, MulticastGroup: net.IP{224, 0, 0, 82}, MulticastPort: 9001, MulticastTTL: 4},
	}
	for _, d := range want {
		must(t, i.NewDaemon(d))
	}
	if got := mustGet(i.GetDaemons())(t); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v, %+v\nwant %+v, %+v", got[0], got[1], want[0], want[1])
	}
}

// While a service has a destination of another family no daemon starts.
func TestFakeDaemonAndMixedFamilies(t *testing.T) {
	i := NewFake().Handle()
	defer i.Close()
	s := ipv4Service(1)
	d := &Destination{Address: net.ParseIP("2001:db8::1"), Port: 80, Weight: 1, ConnectionFlags: ConnectionFlagTunnel}
	daemon := &Daemon{State: DaemonMaster, MulticastInterface: "lo"}
	must(t, i.NewService(s))
	for range 2 {
		must(t, i.NewDestination(s, d))
		if err := i.NewDaemon(daemon); err != syscall.EINVAL {
			t.Errorf("with such a destination: %v", err)
		}
		must(t, i.DelDestination(s, d))
		must(t, i.NewDaemon(daemon))
		if err := i.NewDestination(s, d); err != syscall.EINVAL {
			t.Errorf("with a daemon: %v", err)
		}
		must(t, i.DelDaemon(DaemonMaster))
	}
}

// A socket has one list at a time, and replies that a call left in the queue do not
// disturb the next one.
func TestFakeDumpBusy(t *testing.T) {
	f, i := newFakeTest(t)
	msg := newGenlRequest(nil, fakeFamilyID, cmdGetService, genlVersion, unix.NLM_F_DUMP)
	setLength(msg)
	must(t, i.socket.send(msg, 0))
	if err := second(i.GetServices()); err != syscall.EBUSY {
		t.Errorf("with a list under way: %v, want %v", err, syscall.EBUSY)
	}
	i.socket.lateReplies = true
	if services := mustGet(i.GetServices())(t); len(services) != 1 {
		t.Errorf("%d services, want 1", len(services))
	}
	for n := range 3 * longList { // with the second socket, too
		must(t, i.NewService(ipv4Service(1000+n)))
	}
	for range 2 {
		if services := mustGet(i.GetServices())(t); len(services) != 3*longList+1 {
			t.Errorf("%d services, want %d", len(services), 3*longList+1)
		}
	}
	if i.bulk.Load() == nil {
		t.Error("there is no second socket for long lists")
	}
	other := f.Handle()
	i.Close()
	if services := mustGet(other.GetServices())(t); len(services) != 3*longList+1 {
		t.Errorf("%d services on another handle, want %d", len(services), 3*longList+1)
	}
}

// Many goroutines and handles: every result is right, and no descriptor or goroutine is
// left.
func TestFakeConcurrent(t *testing.T) {
	time.Sleep(time.Millisecond) // the first timer opens descriptors of the runtime's own
	fds, goroutines := descriptors(t), runtime.NumGoroutine()
	f := NewFake()
	shared := f.Handle()
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			i := shared
			if g%2 == 0 {
				i = f.Handle()
				defer i.Close()
			}
			s, d := ipv4Service(g), ipv4Destination(g)
			for n := range 50 {
				if err := firstError(i.NewService(s), i.NewDestination(s, d), f.SetConnections(s, d, n, 0, 0)); err != nil {
					t.Error(err)
				}
				if ds, err := i.GetDestinations(s); err != nil || len(ds) != 1 || ds[0].ActiveConnections != n {
					t.Errorf("%v, error %v; want one with %d connections", ds, err, n)
				}
				err := firstError(second(i.GetTable()), f.SetConnections(s, d, 0, 0, 0), i.DelDestination(s, d), i.DelService(s))
				if err != nil {
					t.Error(err)
				}
			}
		}()
	}
	wg.Wait()
	if table := mustGet(shared.GetTable())(t); len(table) != 0 {
		t.Errorf("%d services are left", len(table))
	}
	if left := opened(t, fds); len(left) > 0 {
		t.Errorf("descriptors left open: %v", left)
	}
	if n := settled(goroutines); n > goroutines {
		t.Errorf("%d goroutines at the start, %d at the end", goroutines, n)
	}
}

// Calls that need a network namespace fail on a Fake.
func TestFakeWithoutNamespace(t *testing.T) {
	_, i := newFakeTest(t)
	_, sysctlErr := i.GetSysctl("expire_nodest_conn")
	_, totalsErr := i.GetTotals()
	errs := []error{sysctlErr, i.SetSysctl("expire_nodest_conn", 1), totalsErr}
	for _, err := range i.Connections() {
		errs = append(errs, err)
	}
	for n, err := range errs {
		if !errors.Is(err, errors.ErrUnsupported) || len(errs) != 4 {
			t.Errorf("call %d of %d: error %v, want one that matches %v", n, len(errs), err, errors.ErrUnsupported)
		}
	}
}

// The network namespace that a Fake assumes.
func TestFakeAddresses(t *testing.T) {
	_, i := newFakeTest(t)
	s6 := Service{Address: net.ParseIP("2001:db8::1"), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin}
	must(t, i.NewService(&s6))
	for address, want := range map[string]error{
		"10.0.0.7": nil, "127.0.0.1": nil, "169.254.0.1": nil, "240.0.0.1": nil, "255.255.255.254": nil,
		"0.0.0.0": syscall.EINVAL, "224.0.0.1": syscall.EINVAL, "239.255.255.255": syscall.EINVAL,
		"255.255.255.255": syscall.EINVAL, "127.255.255.255": syscall.EINVAL,
		"2001:db8::7": nil, "::1": nil, "fec0::1": nil, "fc00::1": nil,
		"::": syscall.EINVAL, "ff0e::1": syscall.EINVAL, "fe80::1": syscall.EINVAL,
	} {
		d := &Destination{Address: net.ParseIP(address), Port: 1, Weight: 1}
		s := &someService
		if d.Address.To4() == nil {
			s = &s6
		}
		if err := i.NewDestination(s, d); err != want {
			t.Errorf("%s: %v, want %v", address, err, want)
		}
	}
}

// The Fake's methods for Fail are those of Handle, and there are no others that
// send one request.
func TestFakeMethods(t *testing.T) {
	handle := reflect.TypeFor[*Handle]()
	for _, method := range fakeMethods {
		if _, ok := handle.MethodByName(method); !ok {
			t.Errorf("a Handle has no method %s", method)
		}
	}
	for cmd := cmdNewService; cmd <= cmdFlush; cmd++ {
		for _, dump := range []bool{false, true} {
			if method := fakeMethod(cmd, dump, false); fakeHasCommand(cmd, dump) && !slices.Contains(fakeMethods, method) {
				t.Errorf("command %d is sent by %q, which Fail does not know", cmd, method)
			}
		}
	}
	if fakeHasCommand(math.MaxUint8, false) {
		t.Error("there is a command 255")
	}
}
