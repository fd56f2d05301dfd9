package ipvs

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Which destinations drain, and which are deleted at once.
func TestDrainWhat(t *testing.T) {
	const protocolSCTP = unix.IPPROTO_SCTP
	service := func(change func(*Service)) *Service {
		s := ipv4Service(1)
		change(s)
		return s
	}
	minute := func(*Service, *Destination) time.Duration { return time.Minute }
	never := func(*Service, *Destination) time.Duration { return -time.Minute }
	mark := &Service{FWMark: 7, AddressFamily: unix.AF_INET, SchedName: RoundRobin, Netmask: 0xFFFFFFFF}
	udp := service(func(s *Service) { s.Protocol = unix.IPPROTO_UDP })
	anyPort := service(func(s *Service) { s.Port, s.Flags, s.Timeout = 0, ServiceFlagPersistent, 60 })
	for _, test := range []struct {
		name     string
		there    *Service
		want     *Service // with destination 2, while 1 goes; nil: the service goes
		also     *Service // wanted too
		drainFor func(*Service, *Destination) time.Duration
		drains   bool
	}{
		{"TCP", ipv4Service(1), ipv4Service(1), nil, nil, true},
		{"TCP service", ipv4Service(1), nil, nil, nil, true},
		{"mark", mark, mark, nil, nil, true},
		{"mark service", mark, nil, nil, nil, true},
		{"UDP", udp, udp, nil, nil, false},
		{"UDP service", udp, nil, nil, nil, false},
		{"SCTP", service(func(s *Service) { s.Protocol = protocolSCTP }), nil, nil, nil, false},
		{"UDP, DrainFor", udp, udp, nil, minute, true},
		{"UDP service, DrainFor", udp, nil, nil, minute, true},
		{"TCP, DrainFor", ipv4Service(1), ipv4Service(1), nil, never, false},
		{"mark, DrainFor", mark, nil, ipv4Service(1), never, false},
		{"dh", serviceWith(1, "dh"), serviceWith(1, "dh"), nil, nil, false},
		{"dh, DrainFor", serviceWith(1, "dh"), serviceWith(1, "dh"), nil, minute, false},
		{"dh service", serviceWith(1, "dh"), nil, nil, nil, false},
		{"dh becomes rr", serviceWith(1, "dh"), ipv4Service(1), nil, nil, true},
		{"rr becomes dh", ipv4Service(1), serviceWith(1, "dh"), nil, nil, false},
		{"port 0 takes over", ipv4Service(1), nil, anyPort, nil, false},
		{"port 0 takes over, DrainFor", ipv4Service(1), nil, anyPort, minute, false},
		{"port 0 beside it", ipv4Service(1), ipv4Service(1), anyPort, nil, true},
		{"port 0 itself", anyPort, anyPort, nil, nil, true},
		{"port 0 goes for a port", anyPort, nil, ipv4Service(1), nil, true},
		{"port 0 of another protocol", ipv4Service(1), nil, service(func(s *Service) { s.Port, s.Protocol = 0, unix.IPPROTO_UDP }), nil, true},
		{"port 0 of another address", ipv4Service(1), nil, service(func(s *Service) { s.Port, s.Address = 0, ipv4Service(2).Address }), nil, true},
		{"port 0 that cannot be", ipv4Service(1), nil, service(func(s *Service) { s.Port, s.SchedName = 0, "sixteen-letters!" }), nil, true},
		{"another port", ipv4Service(1), nil, service(func(s *Service) { s.Port = 81 }), nil, true},
	} {
		w := newDrainWorld(t, time.Hour)
		w.r.DrainFor = test.drainFor
		w.m.put(TableEntry{test.there, []*Destination{busy(1)}})
		var want []TableEntry
		if test.want != nil {
			want = append(want, TableEntry{test.want, []*Destination{ipv4Destination(2)}})
		}
		if test.also != nil {
			want = append(want, TableEntry{test.also, []*Destination{ipv4Destination(3)}})
		}
		for range 2 {
			got, _ := w.r.Reconcile(want)
			d := w.m.destination(test.there, ipv4Destination(1))
			if drains := d != nil && d.Weight == 0 && got.Draining == 1; drains != test.drains || !drains && d != nil {
				t.Errorf("%s: destination %v, %+v", test.name, d, got)
			}
		}
	}
}

// drainWorld is a Reconciler on a kernel in memory, with a clock of the test's.
type drainWorld struct {
	t     *testing.T
	m     *memoryKernel
	r     *Reconciler
	clock time.Time
}

func newDrainWorld(t *testing.T, drain time.Duration) *drainWorld {
	i, m := newMemory(t)
	w := &drainWorld{t: t, m: m, clock: time.Unix(1000, 0)}
	w.r = &Reconciler{Handle: i, Drain: drain, now: func() time.Time { return w.clock }}
	return w
}

// reconcile checks the changes that it makes, as ipvsadm's options.
func (w *drainWorld) reconcile(want []TableEntry, changes ...string) Changes {
	w.t.Helper()
	w.m.changes = nil
	got, err := w.r.Reconcile(want)
	must(w.t, err)
	if !slices.Equal(w.m.changes, changes) {
		w.t.Errorf("changes\n%s\nwant\n%s", strings.Join(w.m.changes, "\n"), strings.Join(changes, "\n"))
	}
	return got
}

// busy returns destination n with connections.
func busy(n int) *Destination {
	d := ipv4Destination(n)
	d.ActiveConnections, d.InactiveConnections = 3, 4
	return d
}

const (
	drain0 = "-e -t 10.0.0.1:80 -r 10.1.0.1:8080 -m -w 0"
	drain1 = "-e -t 10.0.0.1:80 -r 10.1.0.1:8080 -m -w 1"
	drainD = "-d -t 10.0.0.1:80 -r 10.1.0.1:8080"
)

// A drain of ten minutes is looked at about thirty times, the last time at its end,
// when the destination is deleted.
func TestDrainRequeueAfter(t *testing.T) {
	for _, limit := range []time.Duration{10 * time.Minute, 90 * time.Second, 1500 * time.Millisecond, time.Millisecond} {
		w := newDrainWorld(t, limit)
		w.m.put(TableEntry{ipv4Service(1), []*Destination{busy(1), ipv4Destination(2)}})
		want := []TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(2)}}}
		began := w.clock
		got := w.reconcile(want, drain0)
		looks, last := 0, time.Duration(0)
		for ; got.Draining > 0 && !t.Failed(); looks++ {
			left := limit - w.clock.Sub(began)
			if got.RequeueAfter <= 0 || got.RequeueAfter > left || got.RequeueAfter < min(last, left) {
				t.Errorf("look %d of %v: again in %v, before in %v, left %v", looks, limit, got.RequeueAfter, last, left)
			}
			last = got.RequeueAfter
			w.clock = w.clock.Add(last)
			if w.clock.Sub(began) < limit {
				got = w.reconcile(want)
			} else {
				got = w.reconcile(want, drainD)
			}
		}
		if got != (Changes{DestinationsDeleted: 1}) || w.clock.Sub(began) != limit {
			t.Errorf("the last of %d looks, after %v: %+v", looks, w.clock.Sub(began), got)
		}
		if limit == 10*time.Minute && (looks < 25 || looks > 35) {
			t.Errorf("%d looks", looks)
		}
	}
	// The next look is due when the first of the drains needs one.
	w := newDrainWorld(t, 10*time.Minute)
	w.m.put(TableEntry{ipv4Service(1), []*Destination{busy(1), busy(2)}})
	w.reconcile([]TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(2)}}}, drain0)
	w.clock = w.clock.Add(5 * time.Minute)
	if got := w.reconcile([]TableEntry{{ipv4Service(1), nil}}, "-e -t 10.0.0.1:80 -r 10.1.0.2:8080 -m -w 0"); got.RequeueAfter != time.Second || got.Draining != 2 {
		t.Errorf("%+v", got)
	}
	w.clock = w.clock.Add(50 * time.Second)
	if got := w.reconcile([]TableEntry{{ipv4Service(1), nil}}); got.RequeueAfter != 10*time.Second || got.Draining != 2 {
		t.Errorf("%+v", got)
	}
}

// With sh and mh a destination of weight 0 keeps its share of the clients, unless the
// service has the fallback flag. The service has the flag from before the first drain
// begins until after the last one has ended.
func TestDrainFallbackFlag(t *testing.T) {
	for _, scheduler := range []string{SourceHashing, MaglevHashing} {
		w := newDrainWorld(t, time.Minute)
		s := serviceWith(1, scheduler)
		s.Flags = ServiceFlagSHPort
		bare := fmt.Sprintf("-E -t 10.0.0.1:80 -s %s -b %[1]s-port", scheduler)
		flagged := fmt.Sprintf("-E -t 10.0.0.1:80 -s %s -b %[1]s-fallback,%[1]s-port", scheduler)
		w.m.put(TableEntry{s, []*Destination{busy(1), busy(2), busy(3)}})
		want := []TableEntry{{s, []*Destination{ipv4Destination(3)}}}
		w.reconcile(want, flagged, drain0, strings.Replace(drain0, "10.1.0.1:", "10.1.0.2:", 1))
		w.reconcile(want)
		w.m.connect(s, ipv4Destination(1), 0, 0)
		w.reconcile(want, drainD)
		w.clock = w.clock.Add(time.Minute)
		w.reconcile(want, strings.Replace(drainD, "10.1.0.1:", "10.1.0.2:", 1), bare)
		w.reconcile(want)

		// A service that is wanted with the flag keeps it, and an unwanted one needs
		// none.
		s.Flags |= ServiceFlagSHFallback
		w.reconcile([]TableEntry{{s, []*Destination{ipv4Destination(3)}}}, flagged)
		w.reconcile([]TableEntry{{s, nil}}, strings.Replace(drain0, "10.1.0.1:", "10.1.0.3:", 1))
		w.clock = w.clock.Add(time.Minute)
		w.reconcile([]TableEntry{{s, nil}}, strings.Replace(drainD, "10.1.0.1:", "10.1.0.3:", 1))
		w.m.put(TableEntry{serviceWith(1, scheduler), []*Destination{busy(1)}})
		w.reconcile(nil, drain0)

		// If the destination is wanted again, the service loses the flag, unless
		// another one drains.
		w.m.put(TableEntry{serviceWith(1, scheduler), []*Destination{busy(1), busy(2)}})
		one := []TableEntry{{serviceWith(1, scheduler), []*Destination{ipv4Destination(2)}}}
		both := []TableEntry{{serviceWith(1, scheduler), []*Destination{ipv4Destination(1), ipv4Destination(2)}}}
		w.reconcile(one, fmt.Sprintf("-E -t 10.0.0.1:80 -s %s -b %[1]s-fallback", scheduler), drain0)
		w.reconcile(both, fmt.Sprintf("-E -t 10.0.0.1:80 -s %s", scheduler), drain1)
	}
	// A new scheduler, flags and persistence are taken at once, with what draining adds.
	w := newDrainWorld(t, time.Minute)
	w.m.put(TableEntry{ipv4Service(1), []*Destination{busy(1), busy(2)}})
	w.reconcile([]TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(2)}}}, drain0)
	s := serviceWith(1, SourceHashing)
	s.Flags, s.Timeout = ServiceFlagPersistent, 60
	w.reconcile([]TableEntry{{s, []*Destination{ipv4Destination(2)}}}, "-E "+func() string {
		f := *s
		f.Flags |= ServiceFlagSHFallback
		return f.Rule()
	}())
	w.reconcile([]TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(2)}}}, "-E -t 10.0.0.1:80 -s rr")
	w.clock = w.clock.Add(time.Minute)
	w.reconcile([]TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(2)}}}, drainD)
}

// The time to drain begins when weight 0 takes effect.
func TestDrainWithoutWeightZero(t *testing.T) {
	busy := *ipv4Destination(1)
	busy.Weight, busy.ActiveConnections = 5, 9
	refuses, deleted := true, false
	i, _ := newFake(t, listing(ipv4Service(1), func() []*Destination { return []*Destination{&busy} }, func(r []byte) []fakeReply {
		switch cmdOf(r) {
		case cmdSetDest:
			if refuses {
				return one(errorReply(r, syscall.ENOMEM))
			}
			busy.Weight = 0
		case cmdDelDest:
			deleted = true
		}
		return nil
	}))
	clock := time.Unix(1000, 0)
	r := &Reconciler{Handle: i, Drain: time.Minute, now: func() time.Time { return clock }}
	want := []TableEntry{{ipv4Service(1), nil}}
	for turn, step := range []struct {
		refuses, deletes bool
		after            time.Duration
	}{{true, false, 0}, {false, false, time.Hour}, {false, false, time.Minute - 1}, {false, true, 1}} {
		clock, refuses = clock.Add(step.after), step.refuses
		if _, err := r.Reconcile(want); (err != nil) != step.refuses {
			t.Errorf("turn %d: %v", turn, err)
		}
		if deleted != step.deletes {
			t.Errorf("turn %d: deleted: %v", turn, deleted)
		}
	}
}

// DrainFor gets the kernel's service and destination, and may return another time at
// each call.
func TestDrainForSees(t *testing.T) {
	w := newDrainWorld(t, 0)
	s := serviceWith(1, "wrr")
	heavy := busy(1)
	heavy.Weight = 5
	w.m.put(TableEntry{s, []*Destination{heavy, ipv4Destination(2)}})
	var seen []string
	limit := time.Minute
	w.r.DrainFor = func(s *Service, d *Destination) time.Duration {
		seen = append(seen, fmt.Sprintf("%s %s %d %d", s.Rule(), d.Rule(), d.ActiveConnections, d.InactiveConnections))
		s.SchedName, d.Weight = "changed", 77 // copies
		return limit
	}
	other := *s
	other.SchedName = RoundRobin
	want := []TableEntry{{&other, []*Destination{ipv4Destination(2)}}}
	w.reconcile(want, "-E -t 10.0.0.1:80 -s rr", drain0)
	w.reconcile(want)
	limit = time.Hour
	w.clock = w.clock.Add(59 * time.Minute)
	w.reconcile(want)
	limit = time.Minute
	w.reconcile(want, drainD)
	for n, text := range []string{"-t 10.0.0.1:80 -s wrr -r 10.1.0.1:8080 -m -w 5 3 4", "-t 10.0.0.1:80 -s rr -r 10.1.0.1:8080 -m -w 0 3 4"} {
		if len(seen) != 4 || seen[n] != text {
			t.Errorf("DrainFor saw %q", seen)
		}
	}
}

// The clock of a drain begins when weight 0 is confirmed, and anew if a weight came
// back; a lost reply or a closed handle confirms nothing.
func TestDrainClock(t *testing.T) {
	want := []TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(2)}}}
	fresh := func() *drainWorld {
		w := newDrainWorld(t, time.Minute)
		heavy := busy(1)
		heavy.Weight = 9
		w.m.put(TableEntry{ipv4Service(1), []*Destination{heavy, ipv4Destination(2)}})
		return w
	}
	ends := func(name string, w *drainWorld) {
		t.Helper()
		w.clock = w.clock.Add(time.Minute - 1)
		if got := w.reconcile(want); got.Draining != 1 || got.RequeueAfter != 1 {
			t.Errorf("%s: before its end: %+v", name, got)
		}
		w.clock = w.clock.Add(1)
		w.reconcile(want, drainD)
	}

	// The change is refused, with another one or alone.
	w := fresh()
	w.m.before = func(cmd uint8, s *Service, d *Destination) syscall.Errno {
		if cmd == cmdSetDest {
			return syscall.ENOMEM
		}
		return 0
	}
	for range 3 {
		if got, err := w.r.Reconcile(want); err == nil || got.Draining != 1 || got.DestinationsUpdated != 0 {
			t.Errorf("refused: %+v, %v", got, err)
		}
		w.clock = w.clock.Add(time.Hour)
	}
	if w.m.destination(ipv4Service(1), busy(1)) == nil {
		t.Fatal("deleted with a weight")
	}
	w.m.before = nil
	w.reconcile(want, drain0)
	ends("refused before", w)

	// Another change's confirmation is lost: weight 0 is not sent.
	w = fresh()
	w.m.lose = func(r []byte) bool { return cmdOf(r) == cmdNewDest }
	more := []TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(2), ipv4Destination(3)}}}
	if _, err := w.r.Reconcile(more); err == nil {
		t.Error("a lost confirmation is no error")
	}
	if d := w.m.destination(ipv4Service(1), busy(1)); d.Weight != 9 {
		t.Fatalf("%+v", d)
	}
	w.m.lose = nil
	w.clock = w.clock.Add(time.Hour)
	w.reconcile(want, "-e -t 10.0.0.1:80 -r 10.1.0.3:8080 -m -w 0", drain0) // the newest comes first
	w.reconcile(want, "-d -t 10.0.0.1:80 -r 10.1.0.3:8080")
	ends("not sent before", w)

	// Its own confirmation is lost: it is confirmed when it is read.
	w = fresh()
	w.m.lose = func(r []byte) bool { return cmdOf(r) == cmdSetDest }
	if _, err := w.r.Reconcile(want); err == nil {
		t.Error("a lost confirmation is no error")
	}
	w.m.lose = nil
	w.clock = w.clock.Add(time.Hour)
	w.reconcile(want)
	ends("confirmed by reading", w)

	// The handle is closed before it is sent.
	w = fresh()
	w.r.Owned = func(*Service) bool { w.r.Handle.Close(); return true }
	if _, err := w.r.Reconcile(want); err == nil {
		t.Error("a closed handle is no error")
	}
	w.r.Owned, w.r.Handle = nil, w.m.open()
	w.clock = w.clock.Add(time.Hour)
	w.reconcile(want, drain0)
	ends("closed before", w)

	// A weight that came back.
	w = fresh()
	w.reconcile(want, drain0)
	w.clock = w.clock.Add(59 * time.Second)
	heavy := busy(1)
	heavy.Weight = 9
	w.m.apply(cmdSetDest, ipv4Service(1), heavy)
	w.clock = w.clock.Add(time.Second) // its time would be up
	if got := w.reconcile(want, drain0); got.Draining != 1 || got.RequeueAfter != time.Second {
		t.Errorf("a weight came back: %+v", got)
	}
	ends("weight came back", w)

	// A destination that could not be deleted at the end of its time has no time left.
	w = fresh()
	w.reconcile(want, drain0)
	w.clock = w.clock.Add(time.Minute)
	w.m.before = func(uint8, *Service, *Destination) syscall.Errno { return syscall.ENOMEM }
	if _, err := w.r.Reconcile(want); err == nil {
		t.Error("deleting fails, and that is no error")
	}
	w.m.before = nil
	w.reconcile(want, drainD)
	// The same if it was to be deleted with its service.
	w = fresh()
	w.reconcile(nil, "-e -t 10.0.0.1:80 -r 10.1.0.1:8080 -m -w 0", "-e -t 10.0.0.1:80 -r 10.1.0.2:8080 -m -w 0")
	w.clock = w.clock.Add(time.Minute)
	w.m.before = func(uint8, *Service, *Destination) syscall.Errno { return syscall.ENOMEM }
	if _, err := w.r.Reconcile(nil); err == nil {
		t.Error("deleting fails, and that is no error")
	}
	w.m.before = nil
	w.reconcile(nil, "-D -t 10.0.0.1:80")
	if len(w.r.drains) != 0 {
		t.Errorf("still known: %v", w.r.drains)
	}
}

// A new process finds destinations of weight 0: those without connections are deleted
// at once, the others have their whole time.
func TestDrainNewProcess(t *testing.T) {
	quiet := func(d *Destination) *Destination { d.Weight = 0; return d }
	w := newDrainWorld(t, time.Minute)
	w.m.put(TableEntry{ipv4Service(1), []*Destination{quiet(busy(1)), quiet(ipv4Destination(2)), ipv4Destination(3)}},
		TableEntry{ipv4Service(2), []*Destination{quiet(ipv4Destination(1))}})
	want := []TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(3)}}}
	if got := w.reconcile(want, "-d -t 10.0.0.1:80 -r 10.1.0.2:8080", "-D -t 10.0.0.2:80"); got != (Changes{DestinationsDeleted: 1, ServicesDeleted: 1, Draining: 1, RequeueAfter: time.Second}) {
		t.Errorf("%+v", got)
	}
	for range 3 { // a new Reconciler for each run
		w.clock = w.clock.Add(59 * time.Second)
		w.r = &Reconciler{Handle: w.r.Handle, Drain: time.Minute, now: w.r.now}
		w.reconcile(want)
	}
	w.clock = w.clock.Add(time.Minute)
	w.reconcile(want, drainD)
}

// An invalid entry keeps the existing one with its key, including drains and their
// time.
func TestDrainUnderBadEntry(t *testing.T) {
	w := newDrainWorld(t, time.Minute)
	w.m.put(TableEntry{ipv4Service(1), []*Destination{busy(1), busy(2)}})
	good := []TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(2)}}}
	w.reconcile(good, drain0)
	for _, bad := range []*Service{serviceWith(1, "sixteen-letters!"), {Address: ipv4Service(1).Address, AddressFamily: unix.AF_INET6, Protocol: 6, Port: 80}} {
		w.m.changes = nil
		if got, err := w.r.Reconcile([]TableEntry{{bad, nil}}); err == nil || len(w.m.changes) > 0 {
			t.Errorf("%+v, %v, changes %q", got, err, w.m.changes)
		}
	}
	w.clock = w.clock.Add(time.Minute)
	w.m.changes = nil
	if _, err := w.r.Reconcile([]TableEntry{{serviceWith(1, "sixteen-letters!"), nil}}); err == nil || len(w.m.changes) > 0 {
		t.Errorf("%v, changes %q", err, w.m.changes)
	}
	w.reconcile(good, drainD)
}

// Ten thousand destinations drain at the same time, each with its own end.
func TestDrainTenThousand(t *testing.T) {
	const services, each = 100, 100
	w := newDrainWorld(t, time.Minute)
	w.r.Handle.SetTimeout(time.Minute)
	var there []TableEntry
	for n := range services {
		e := TableEntry{Service: ipv4Service(n)}
		for k := range each {
			e.Destinations = append(e.Destinations, busy(k))
		}
		there = append(there, e)
	}
	w.m.put(there...)
	w.r.DrainFor = func(s *Service, d *Destination) time.Duration {
		return time.Duration(d.Address[3]+1) * time.Second
	}
	got := mustGet(w.r.Reconcile(nil))(t)
	if got != (Changes{DestinationsUpdated: services * each, Draining: services * each, RequeueAfter: time.Second}) {
		t.Errorf("begin: %+v", got)
	}
	for second := 1; second <= each; second++ {
		if second%25 != 0 {
			continue
		}
		w.clock = time.Unix(1000, 0).Add(time.Duration(second) * time.Second)
		got := mustGet(w.r.Reconcile(nil))(t)
		left := services * (each - second)
		if got.Draining != left || left > 0 && (got.DestinationsDeleted != 25*services || got.RequeueAfter != time.Second) {
			t.Errorf("after %d s: %+v", second, got)
		}
	}
	if len(w.m.table()) != 0 || len(w.r.drains) != 0 {
		t.Errorf("%d services are left, %d drains are remembered", len(w.m.table()), len(w.r.drains))
	}
}
