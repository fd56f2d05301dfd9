package ipvs

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// One invalid entry of each kind among a hundred valid ones does not affect the others.
func TestReconcileBadEntries(t *testing.T) {
	for _, owned := range []bool{false, true} {
		for _, drain := range []bool{false, true} {
			for _, exists := range []bool{false, true} {
				t.Run(fmt.Sprintf("owned %v, drain %v, exists %v", owned, drain, exists), func(t *testing.T) {
					testBadEntries(t, owned, drain, exists)
				})
			}
		}
	}
}

// badEntries returns one wanted entry of each invalid kind, each with its own key, the
// texts of the errors, and the kernel's entries in their place.
func badEntries() (want []TableEntry, errs []string, there []TableEntry) {
	number := 200
	add := func(text string, change func(s *Service, dests *[]*Destination)) *TableEntry {
		s, dests := ipv4Service(number), []*Destination{ipv4Destination(1), ipv4Destination(2)}
		there = append(there, TableEntry{ipv4Service(number), []*Destination{ipv4Destination(1), ipv4Destination(2)}})
		number++
		change(s, &dests)
		want = append(want, TableEntry{s, dests})
		errs = append(errs, text)
		return &want[len(want)-1]
	}
	add("ipvs: the service is nil", func(*Service, *[]*Destination) {}).Service = nil
	there = there[:0] // nothing is in the place of nil
	add("ipvs: the service has no address", func(s *Service, _ *[]*Destination) { s.Address = nil })
	there = there[:0]
	add("Service -t 10.0.0.202:80: ipvs: the service's address 10.0.0.202 is not of its address family 10",
		func(s *Service, _ *[]*Destination) { s.Address, s.AddressFamily = s.Address.To4(), unix.AF_INET6 })
	add("NewService -t [::ffff:10.0.0.203]:80: ipvs: the service's address 10.0.0.203 is not of its address family 10",
		func(s *Service, _ *[]*Destination) { s.AddressFamily = unix.AF_INET6 })
	add(`Service -t 10.0.0.204:80: ipvs: scheduler "sixteen-letters!" has 16 bytes`,
		func(s *Service, _ *[]*Destination) { s.SchedName = "sixteen-letters!" })
	add(`Service -t 10.0.0.205:80: ipvs: persistence engine "sixteen-letters!" has 16 bytes`,
		func(s *Service, _ *[]*Destination) { s.PEName = "sixteen-letters!" })
	add("Destination -t 10.0.0.206:80 -r 10.1.0.2:8080: ipvs: weight -1 is not in",
		func(_ *Service, dests *[]*Destination) { (*dests)[1].Weight = -1 })
	add("NewDestination -t 10.0.0.207:80: ipvs: the destination is nil",
		func(_ *Service, dests *[]*Destination) { *dests = append(*dests, nil) })
	add("NewDestination -t 10.0.0.208:80 -r <nil>:8080: ipvs: the destination has no address",
		func(_ *Service, dests *[]*Destination) { *dests = append(*dests, &Destination{Port: 8080}) })
	add("NewDestination -t 10.0.0.209:80 -r [::ffff:10.1.0.2]:8080: ipvs: the destination's address 10.1.0.2 is not of its address family 10",
		func(_ *Service, dests *[]*Destination) { (*dests)[1].AddressFamily = unix.AF_INET6 })
	add("Destination -t 10.0.0.210:80 -r 10.1.0.1:8080: ipvs: wanted twice; the first one counts", // ready and not ready
		func(_ *Service, dests *[]*Destination) {
			notReady := *ipv4Destination(1)
			notReady.Weight = 0
			*dests = append(*dests, &notReady)
		})
	add("Service -t 10.0.0.211:80: ipvs: wanted twice; the first one counts", func(*Service, *[]*Destination) {})
	twice := ipv4Service(211)
	twice.SchedName = SourceHashing
	want = append(want, TableEntry{twice, nil})
	return want, errs, there
}

// checkErrors checks that a BatchError has exactly the errors whose ends are given.
func checkErrors(t *testing.T, err error, want []string) {
	t.Helper()
	var failed *BatchError
	if !errors.As(err, &failed) {
		t.Fatalf("the error is %v", err)
	}
	last, missing := -1, slices.Clone(want)
	for _, op := range failed.Errors {
		if op.Index <= last {
			t.Errorf("%v: after change %d", op, last)
		}
		last = op.Index
		at := slices.IndexFunc(missing, func(text string) bool { return strings.Contains(op.Error(), text) })
		if at < 0 {
			t.Errorf("not expected: %v", op)
			continue
		}
		missing = slices.Delete(missing, at, at+1)
	}
	for _, text := range missing {
		t.Errorf("not in the error: %s", text)
	}
	for _, text := range want {
		if len(want) <= 16 && !strings.Contains(err.Error(), text) {
			t.Errorf("not in the text of the error: %s", text)
		}
	}
}

func testBadEntries(t *testing.T, owned, drain, exists bool) {
	i, m := newMemory(t)
	r := &Reconciler{Handle: i}
	if drain {
		r.Drain = 1 << 40
	}
	bad, errs, there := badEntries()
	good := wantedTable(100, 3)
	expect := slices.Clone(good)
	if owned {
		foreign := ipv4Service(150)
		foreign.SchedName = "wrr"
		r.Owned = func(s *Service) bool { return s.SchedName != "wrr" && s.Port == 80 }
		there = append(there, TableEntry{foreign, []*Destination{ipv4Destination(9)}})
		bad = append(bad, TableEntry{ipv4Service(150), []*Destination{ipv4Destination(1)}})
		errs = append(errs, "NewService -t 10.0.0.150:80: ipvs: wanted, but not owned: it is another owner's")
		notMine := ipv4Service(151)
		notMine.Port = 81
		bad = append(bad, TableEntry{notMine, []*Destination{ipv4Destination(1)}})
		errs = append(errs, "NewService -t 10.0.0.151:81: ipvs: wanted, but not owned")
		expect = append(expect, there[len(there)-1])
	}
	if exists {
		m.put(there...)
		expect = append(expect, there...)
		if owned {
			expect = append(expect[:100], expect[101:]...)
		}
	} else {
		if owned {
			m.put(there[len(there)-1])
		}
		for n := 206; n <= 211; n++ { // the service and the good ones of its destinations
			e := TableEntry{ipv4Service(n), []*Destination{ipv4Destination(1), ipv4Destination(2)}}
			if n == 206 || n == 209 {
				e.Destinations = e.Destinations[:1]
			}
			expect = append(expect, e)
		}
	}
	// Valid and invalid ones mixed.
	var want []TableEntry
	for n, e := range good {
		want = append(want, e)
		if n < len(bad) {
			want = append(want, bad[n])
		}
	}
	for range 2 {
		changes, err := r.Reconcile(want)
		checkErrors(t, err, errs)
		if changes.Draining != 0 {
			t.Errorf("%+v", changes)
		}
		if b := mustGet(Diff(m.table(), expect))(t); b.Len() != 0 {
			t.Errorf("the table lacks:\n%s", b)
		}
		for _, e := range there {
			for _, change := range m.changes {
				if exists && strings.HasPrefix(change[3:], serviceName(e.Service)) {
					t.Errorf("touched: %s", change)
				}
			}
		}
		if t.Failed() {
			break
		}
		m.changes = nil
	}
	if len(m.changes) > 0 {
		t.Errorf("the second time it changes %q", m.changes)
	}
	plan := mustGet(r.Plan(want))(t)
	if plan.Len() != len(errs) {
		t.Errorf("the plan has %d changes:\n%s", plan.Len(), plan)
	}
	for n, c := range plan.All() {
		if c.Err == nil {
			t.Errorf("change %d can be sent: %v", n, c)
		}
	}
}

// A failure that only follows from another one is not in the error: a destination of a
// service that the kernel rejected.
func TestReconcileConsequences(t *testing.T) {
	for _, owned := range []func(*Service) bool{nil, func(*Service) bool { return true }} {
		i, m := newMemory(t)
		m.fake.table.schedulers = []string{"rr"}
		want := wantedTable(3, 2)
		want[1].Service.SchedName = "nosuch"
		want[2].Destinations[1].Weight = -1
		r := &Reconciler{Handle: i, Owned: owned}
		changes, err := r.Reconcile(want)
		checkErrors(t, err, []string{
			`change 3, NewService -t 10.0.0.1:80: no such file or directory (the kernel has no scheduler "nosuch"`,
			"change 8, NewDestination -t 10.0.0.2:80 -r 10.1.0.1:8080: ipvs: weight -1",
		})
		if changes != (Changes{ServicesAdded: 2, DestinationsAdded: 3}) {
			t.Errorf("%+v", changes)
		}
		if !strings.HasPrefix(err.Error(), "ipvs: 2 of 9 changes failed; change 3, ") {
			t.Errorf("%v", err)
		}
	}
}

// Changes that were not sent because an earlier send failed are in the error, each once
// and with its number in the plan.
func TestReconcileNotSent(t *testing.T) {
	for _, owned := range []func(*Service) bool{nil, func(*Service) bool { return true }} {
		i, m := newMemory(t)
		gone, old := ipv4Service(9), ipv4Service(1)
		m.put(TableEntry{gone, nil}, TableEntry{old, []*Destination{ipv4Destination(3)}})
		m.lose = func(r []byte) bool { return cmdOf(r) == cmdNewService }
		if owned == nil { // destinations travel with their services
			m.lose = func(r []byte) bool { return cmdOf(r) == cmdNewDest }
		}
		want := wantedTable(2, 2)
		want[1].Destinations[1].Weight = -1
		r := &Reconciler{Handle: i, Owned: owned}
		plan := mustGet(r.Plan(want))(t)
		_, err := r.Reconcile(want)
		var failed *BatchError
		if !errors.As(err, &failed) || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("%v", err)
		}
		if len(failed.Errors) != plan.Len() || plan.Len() != 7 {
			t.Fatalf("%d of %d changes are in the error:\n%v", len(failed.Errors), plan.Len(), err)
		}
		for n, c := range plan.All() {
			op := failed.Errors[n]
			if op.Index != n || op.Op != c.Op {
				t.Errorf("error %d is %v, want that of %v", n, op, c)
			}
			sent := c.Op == "NewService" || owned == nil && c.Op == "NewDestination"
			if c.Err != nil {
				sent = false
			} else if errors.Is(op, ErrOutcomeUnknown) != sent || !errors.Is(op, os.ErrDeadlineExceeded) {
				t.Errorf("sent %v: %v", sent, op)
			}
		}
	}
}

// Errors of reading the table are marked as such.
func TestReconcileReadingFails(t *testing.T) {
	for _, cmd := range []uint8{cmdGetService, cmdGetDest} {
		_, m := newMemory(t)
		m.put(TableEntry{ipv4Service(1), nil})
		i, _ := newFake(t, func(r []byte) []fakeReply {
			if cmdOf(r) == cmd {
				return one(errorReply(r, syscall.EPERM))
			}
			return m.respond(r)
		})
		for _, r := range []*Reconciler{{Handle: i}, {Handle: i, Owned: func(*Service) bool { return true }}} {
			_, err := r.Reconcile(nil)
			_, planErr := r.Plan(nil)
			for _, err := range []error{err, planErr} {
				if !errors.Is(err, syscall.EPERM) || err.Error() != "ipvs: reading the table: operation not permitted" {
					t.Errorf("%v", err)
				}
			}
		}
		i.Close()
		if _, err := (&Reconciler{Handle: i}).Reconcile(nil); !errors.Is(err, ErrClosed) || !errors.Is(err, net.ErrClosed) {
			t.Errorf("closed: %v", err)
		}
	}
}

// After a race the table is read again, with invalid entries or without, a bounded
// number of times, but not if the kernel is silent.
func TestReconcileRacesWithBadEntries(t *testing.T) {
	i, m := newMemory(t)
	races := 3
	m.before = func(cmd uint8, s *Service, d *Destination) syscall.Errno {
		if cmd == cmdNewService && races > 0 {
			races--
			m.apply(cmd, s, nil) // another was faster
		}
		return 0
	}
	want := append([]TableEntry{{nil, nil}}, wantedTable(5, 1)...)
	r := &Reconciler{Handle: i}
	changes, err := r.Reconcile(want)
	checkErrors(t, err, []string{"change 0, NewService: ipvs: the service is nil"})
	if changes != (Changes{ServicesAdded: 2, DestinationsAdded: 5}) {
		t.Errorf("%+v", changes)
	}
	tries := 0
	m.before = func(cmd uint8, s *Service, d *Destination) syscall.Errno {
		tries++
		return syscall.EEXIST
	}
	if _, err := r.Reconcile(wantedTable(6, 1)); !errors.Is(err, syscall.EEXIST) || tries != 2*maxRounds {
		t.Errorf("%d tries, %v", tries, err)
	}
	tries = 0
	m.lose = func(r []byte) bool { return native.Uint16(r[6:])&unix.NLM_F_ACK != 0 }
	if _, err := r.Reconcile(wantedTable(6, 1)); !errors.Is(err, os.ErrDeadlineExceeded) || tries != 2 {
		t.Errorf("a silent kernel is asked %d times: %v", tries, err)
	}
}
