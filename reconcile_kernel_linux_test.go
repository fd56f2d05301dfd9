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

	"golang.org/x/sys/unix"
)

func TestKernelReconcile(t *testing.T) {
	i, ns := newKernelHandle(t)
	r := &Reconciler{Handle: i}
	want := wantedTable(200, 4)
	if plan := mustGet(r.Plan(want))(t); plan.Len() != 1000 {
		t.Errorf("the plan has %d changes", plan.Len())
	}
	if out := ipvsadm(t, ns, "-Sn"); out != "" {
		t.Fatal("Plan changed the table")
	}
	if got := mustGet(r.Reconcile(want))(t); got != (Changes{ServicesAdded: 200, DestinationsAdded: 800}) {
		t.Errorf("from nothing: %+v", got)
	}
	checkTable(t, i, want)
	if got := mustGet(r.Reconcile(want))(t); got != (Changes{}) {
		t.Errorf("again: %+v", got)
	}
	want[7].Service.SchedName = SourceHashing
	want[8].Destinations[0].Weight = 9
	want[9].Destinations = append(want[9].Destinations[1:], ipv4Destination(99))
	want = want[:199]
	if got := mustGet(r.Reconcile(want))(t); got != (Changes{ServicesUpdated: 1, ServicesDeleted: 1, DestinationsAdded: 1, DestinationsUpdated: 1, DestinationsDeleted: 1}) {
		t.Errorf("changed: %+v", got)
	}
	checkTable(t, i, want)
	if n := strings.Count(ipvsadm(t, ns, "-Sn"), "-A "); n != 199 {
		t.Errorf("ipvsadm shows %d services", n)
	}
	if got := mustGet(r.Reconcile(nil))(t); got != (Changes{ServicesDeleted: 199}) {
		t.Errorf("to nothing: %+v", got)
	}
}

func TestKernelReconcileOwned(t *testing.T) {
	i, ns := newKernelHandle(t)
	foreign := &Service{Address: net.IPv4(192, 0, 2, 1), Protocol: 6, Port: 1, SchedName: RoundRobin, Netmask: 0xFFFFFFFF}
	must(t, i.NewService(foreign))
	must(t, i.NewDestination(foreign, ipv4Destination(1)))
	before := ipvsadm(t, ns, "-Sn")
	r := &Reconciler{Handle: i, Owned: func(s *Service) bool { return s.Address[0] == 10 || s.Address.To4()[0] == 10 }}
	must(t, second(r.Reconcile(wantedTable(3, 2))))
	must(t, second(r.Reconcile(nil)))
	if after := ipvsadm(t, ns, "-Sn"); after != before {
		t.Errorf("before:\n%safter:\n%s", before, after)
	}
	// Others have a service with the same identity, which is not owned because of its
	// scheduler.
	r2 := &Reconciler{Handle: i, Owned: func(s *Service) bool { return s.SchedName == SourceHashing && s.AddressFamily == unix.AF_INET }}
	mine := *foreign
	mine.SchedName = SourceHashing
	if _, err := r2.Reconcile([]TableEntry{{&mine, []*Destination{ipv4Destination(2)}}}); err == nil || !strings.Contains(err.Error(), "not owned") {
		t.Errorf("others have it: %v", err)
	}
	if after := ipvsadm(t, ns, "-Sn"); after != before {
		t.Errorf("before:\n%safter:\n%s", before, after)
	}
	if _, err := r.Reconcile([]TableEntry{{foreign, nil}}); err == nil || !strings.Contains(err.Error(), "not owned") {
		t.Errorf("wanted but not owned: %v", err)
	}
}

// If a change keeps failing, Reconcile returns its error, and makes the others.
func TestKernelReconcileFails(t *testing.T) {
	i, _ := newKernelHandle(t)
	want := wantedTable(3, 1)
	want[1].Service.SchedName = "nosuch"
	r := &Reconciler{Handle: i}
	got, err := r.Reconcile(want)
	if !errors.Is(err, syscall.ENOENT) || !strings.Contains(err.Error(), `no scheduler "nosuch"`) {
		t.Errorf("error %v", err)
	}
	if got != (Changes{ServicesAdded: 2, DestinationsAdded: 2}) {
		t.Errorf("%+v", got)
	}
	if _, err := new(Reconciler).Reconcile(nil); err == nil {
		t.Error("a reconciler without handle succeeds")
	}
}

// The states of draining, with the test's own clock. The tests with traffic have real
// connections.
func TestKernelReconcileDrains(t *testing.T) {
	i, ns := newKernelHandle(t)
	clock := time.Unix(1000, 0)
	newReconciler := func() *Reconciler {
		return &Reconciler{Handle: i, Drain: time.Minute, now: func() time.Time { return clock }}
	}
	r := newReconciler()
	table := func() string { return ipvsadm(t, ns, "-Sn") }
	want := wantedTable(1, 2)
	must(t, second(r.Reconcile(want)))
	both := table()

	fewer := wantedTable(1, 1)
	if got := mustGet(r.Reconcile(fewer))(t); got != (Changes{DestinationsUpdated: 1, Draining: 1, RequeueAfter: time.Second}) {
		t.Errorf("begins to drain: %+v", got)
	}
	if quiet := strings.Replace(both, "10.1.0.1:8080 -m -w 1", "10.1.0.1:8080 -m -w 0", 1); table() != quiet {
		t.Errorf("draining:\n%swant:\n%s", table(), quiet)
	}
	// A plan makes no change and starts no drain. A new process has nothing to wait
	// for.
	if plan := mustGet(newReconciler().Plan(fewer))(t).String(); plan != "-d -t 10.0.0.0:80 -r 10.1.0.1:8080\n" {
		t.Errorf("a new process would %s", plan)
	}
	// Wanted again, it gets its weight back.
	if got := mustGet(r.Reconcile(want))(t); got != (Changes{DestinationsUpdated: 1}) || table() != both {
		t.Errorf("wanted again: %+v\n%s", got, table())
	}
	// Without connections it is deleted by a later call.
	must(t, second(r.Reconcile(fewer)))
	if got := mustGet(r.Reconcile(fewer))(t); got != (Changes{DestinationsDeleted: 1}) {
		t.Errorf("drained: %+v", got)
	}
	// One that got its weight back from another process has to lose it again first.
	must(t, i.NewDestination(fewer[0].Service, ipv4Destination(1)))
	must(t, second(r.Reconcile(fewer)))
	must(t, i.UpdateDestination(fewer[0].Service, ipv4Destination(1)))
	if got := mustGet(r.Reconcile(fewer))(t); got != (Changes{DestinationsUpdated: 1, Draining: 1, RequeueAfter: time.Second}) {
		t.Errorf("given its weight back by another: %+v", got)
	}
	if got := mustGet(r.Reconcile(fewer))(t); got != (Changes{DestinationsDeleted: 1}) {
		t.Errorf("drained in the end: %+v", got)
	}
	// A service that is not wanted stays until its destinations are deleted.
	if got := mustGet(r.Reconcile(nil))(t); got != (Changes{DestinationsUpdated: 1, Draining: 1, RequeueAfter: time.Second}) {
		t.Errorf("service begins to drain: %+v", got)
	}
	// A new process finds it without connections.
	r = newReconciler()
	if got := mustGet(r.Reconcile(nil))(t); got != (Changes{ServicesDeleted: 1}) || table() != "" {
		t.Errorf("service drained: %+v\n%s", got, table())
	}
	// A service without destinations has nothing to drain.
	must(t, i.NewService(ipv4Service(1)))
	if got := mustGet(r.Reconcile(nil))(t); got != (Changes{ServicesDeleted: 1}) {
		t.Errorf("empty service: %+v", got)
	}
}

// Another process changes the table while it is reconciled: the owned services
// converge, the others are not touched, and a wanted service that does not change keeps
// its destinations at every moment.
func TestKernelReconcileRaces(t *testing.T) {
	i, ns := newKernelHandle(t)
	want := wantedTable(30, 3)
	stable := &Service{Address: net.IPv4(10, 0, 9, 9), Protocol: 6, Port: 80, SchedName: RoundRobin, Netmask: 0xFFFFFFFF}
	want = append(want, TableEntry{stable, []*Destination{ipv4Destination(1), ipv4Destination(2)}})
	foreign := func(n int) *Service {
		s := ipv4Service(n)
		s.Address = net.IPv4(192, 0, 2, byte(n))
		return s
	}
	r := &Reconciler{Handle: i, Owned: func(s *Service) bool { return s.Address.To4()[0] == 10 }}
	must(t, second(r.Reconcile(want)))

	stop := make(chan struct{})
	var wg sync.WaitGroup
	loop := func(f func(n int) error) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				if err := f(n); err != nil {
					t.Errorf("turn %d: %v", n, err)
					return
				}
			}
		}()
	}
	tolerate := func(err error, errnos ...syscall.Errno) error {
		if errno, ok := err.(syscall.Errno); ok && slices.Contains(errnos, errno) {
			return nil
		}
		return err
	}
	other, watcher := openIn(t, ns), openIn(t, ns)
	loop(func(n int) error { // damages the owned services, and makes its own
		s := ipv4Service(n % 30)
		return errors.Join(
			tolerate(other.DelService(s), syscall.ESRCH),
			tolerate(other.NewService(ipv4Service((n+7)%30)), syscall.EEXIST),
			tolerate(other.NewDestination(s, ipv4Destination(50)), syscall.ESRCH, syscall.EEXIST),
			tolerate(other.NewService(foreign(n%200)), syscall.EEXIST),
			tolerate(other.NewDestination(foreign(n%200), ipv4Destination(1)), syscall.EEXIST))
	})
	loop(func(int) error {
		dests, err := watcher.GetDestinations(stable)
		if err == nil && len(dests) != 2 {
			err = fmt.Errorf("the stable service has %d destinations", len(dests))
		}
		return err
	})
	rounds, races := 0, 0
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); rounds++ {
		if _, err := r.Reconcile(want); err != nil {
			var failed *BatchError
			if !errors.As(err, &failed) || !anyRace(failed.Errors) {
				t.Errorf("round %d: %v", rounds, err)
			}
			races++
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("%d rounds, %d of them lost the race", rounds, races)
	must(t, second(r.Reconcile(want)))
	owned, foreigners := []TableEntry{}, 0
	for _, e := range mustGet(i.GetTable())(t) {
		if r.Owned(e.Service) {
			owned = append(owned, e)
		} else if foreigners++; len(e.Destinations) != 1 {
			t.Errorf("a foreign service has %d destinations", len(e.Destinations))
		}
	}
	if b := mustGet(Diff(owned, want))(t); b.Len() != 0 {
		t.Errorf("not converged:\n%s", b)
	}
	if foreigners == 0 {
		t.Error("no foreign services: the test shows nothing")
	}
}

// A destination that begins to drain is deleted by a later call, even if this one reads
// again.
func TestKernelDrainOneCall(t *testing.T) {
	i, ns := newKernelHandle(t)
	other := openIn(t, ns)
	must(t, i.NewService(ipv4Service(1)))
	must(t, i.NewDestination(ipv4Service(1), ipv4Destination(1)))
	r := &Reconciler{Handle: i, Drain: time.Hour}
	var once sync.Once
	r.now = func() time.Time { // between reading and writing
		once.Do(func() { must(t, other.NewService(ipv4Service(2))) })
		return time.Now()
	}
	want := []TableEntry{{ipv4Service(1), nil}, {ipv4Service(2), nil}}
	if got := mustGet(r.Reconcile(want))(t); got != (Changes{DestinationsUpdated: 1, Draining: 1, RequeueAfter: time.Second}) {
		t.Errorf("first: %+v", got)
	}
	if got := mustGet(r.Reconcile(want))(t); got != (Changes{DestinationsDeleted: 1}) {
		t.Errorf("then: %+v", got)
	}
}

// A service that others make after the table was read gets no destination of the wanted
// one in its place.
func TestKernelReconcileForeignAppears(t *testing.T) {
	i, ns := newKernelHandle(t)
	other := openIn(t, ns)
	mine := *ipv4Service(1)
	mine.SchedName = SourceHashing
	var once sync.Once
	r := &Reconciler{Handle: i, Owned: func(s *Service) bool {
		once.Do(func() { must(t, other.NewService(ipv4Service(1))) })
		return s.SchedName == SourceHashing
	}}
	dests := []*Destination{ipv4Destination(1), ipv4Destination(2)}
	want := []TableEntry{{&mine, dests}, {serviceWith(2, SourceHashing), dests}}
	got, err := r.Reconcile(want)
	if text := "ipvs: 1 of 1 changes failed; change 0, NewService -t 10.0.0.1:80: ipvs: wanted, but not owned: it is another owner's"; err == nil || err.Error() != text {
		t.Errorf("%v, want %s", err, text)
	}
	if got != (Changes{ServicesAdded: 1, DestinationsAdded: 2}) {
		t.Errorf("%+v", got)
	}
	table := "-A -t 10.0.0.1:80 -s rr\n-A -t 10.0.0.2:80 -s sh\n-a -t 10.0.0.2:80 -r 10.1.0.2:8080 -m -w 1\n-a -t 10.0.0.2:80 -r 10.1.0.1:8080 -m -w 1\n"
	is := strings.Split(ipvsadm(t, ns, "-Sn"), "\n")
	want2 := strings.Split(table, "\n")
	slices.Sort(is)
	slices.Sort(want2)
	if !slices.Equal(is, want2) {
		t.Errorf("the table is\n%s", strings.Join(is, "\n"))
	}
}

// Owned is called for wanted services as the kernel returns them.
func TestKernelOwnedAsReturned(t *testing.T) {
	i, _ := newKernelHandle(t)
	for _, s := range []*Service{
		{FWMark: 7, AddressFamily: unix.AF_INET, SchedName: "rr", Address: net.ParseIP("10.96.0.1"), Protocol: 6, Port: 80},
		{Address: net.ParseIP("2001:db8::1"), Protocol: 6, Port: 80, SchedName: "rr"},
		{Address: net.ParseIP("10.96.0.1"), Protocol: 17, Port: 80, SchedName: "sh", Flags: ServiceFlagPersistent, Timeout: 60, Netmask: 0xFFFFFF},
	} {
		asked := asReturned(s, mustGet(sentServiceKey(s))(t))
		must(t, i.NewService(s))
		if got := mustGet(i.GetService(s))(t); !reflect.DeepEqual(got, asked) {
			t.Errorf("asked with %+v, the kernel has %+v", asked, got)
		}
	}
}
