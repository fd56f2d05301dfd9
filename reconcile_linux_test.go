package ipvs

import (
	"errors"
	"net"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Each kind of change is counted, even if new services are sent first.
func TestReconcileCountsChanges(t *testing.T) {
	// New: 1 service with 6 destinations. Changed: 2 services and, of the service that
	// stays, 4 destinations. Deleted: its other 5, and 3 services.
	have, want := wantedTable(6, 0), wantedTable(3, 0)
	for n := range 2 {
		have[n].Service = serviceWith(n, "sh")
	}
	for n := range 9 {
		have[2].Destinations = append(have[2].Destinations, ipv4Destination(n))
	}
	for n := range 4 {
		d := ipv4Destination(n)
		d.Weight = 7
		want[2].Destinations = append(want[2].Destinations, d)
	}
	added := TableEntry{Service: ipv4Service(20)}
	for n := range 6 {
		added.Destinations = append(added.Destinations, ipv4Destination(n))
	}
	want = append(want, added)
	expected := Changes{ServicesAdded: 1, ServicesUpdated: 2, ServicesDeleted: 3,
		DestinationsAdded: 6, DestinationsUpdated: 4, DestinationsDeleted: 5}
	for name, owned := range map[string]func(*Service) bool{"all": nil, "owned": func(*Service) bool { return true }} {
		t.Run(name, func(t *testing.T) {
			i, k := newFake(t, listingTable(have))
			got, err := (&Reconciler{Handle: i, Owned: owned}).Reconcile(want)
			if err != nil || got != expected {
				t.Errorf("got  %+v, %v\nwant %+v", got, err, expected)
			}
			sent := 0
			for _, r := range k.requests {
				if cmd := cmdOf(r); cmd != cmdGetService && cmd != cmdGetDest {
					sent++
				}
			}
			if got.Total() != sent || sent != 21 {
				t.Errorf("%d changes in all, %d sent, want 21", got.Total(), sent)
			}
		})
	}
}

// wantedTable has services with a number of destinations each.
func wantedTable(services, destinations int) (table []TableEntry) {
	for n := range services {
		e := TableEntry{Service: ipv4Service(n)}
		for m := range destinations {
			e.Destinations = append(e.Destinations, ipv4Destination(m))
		}
		table = append(table, e)
	}
	return table
}

func serviceWith(n int, scheduler string) *Service {
	s := *ipv4Service(n)
	s.SchedName = scheduler
	return &s
}

// checkTable checks that the kernel's table is exactly the wanted one.
func checkTable(t *testing.T, i *Handle, want []TableEntry) {
	t.Helper()
	var b *Batch
	// While their table grows, Linux 7 and later list it incompletely.
	eventually(func() bool {
		b = mustGet(Diff(mustGet(i.GetTable())(t), want))(t)
		return b.Len() == 0
	})
	if b.Len() != 0 {
		t.Errorf("the table is not as wanted, it lacks:\n%s", b)
	}
}

// listing makes a fake kernel's answers: one service, with the destinations that
// dests returns; the rest is acknowledged, or answered by other.
func listing(s *Service, dests func() []*Destination, other func(r []byte) []fakeReply) func(r []byte) []fakeReply {
	return func(r []byte) []fakeReply {
		var answer []byte
		switch cmdOf(r) {
		case cmdGetService:
			attrs, _ := fillService(nil, s, true)
			answer = dataReply(r, unix.NLM_F_MULTI, cmdNewService, attrs)
		case cmdGetDest:
			for _, d := range dests() {
				attrs, _ := fillDestination(nil, d, true)
				attrs = appendUint32(attrs, destAttrActiveConnections, uint32(d.ActiveConnections))
				closeNest(attrs, 0)
				answer = append(answer, dataReply(r, unix.NLM_F_MULTI, cmdNewDest, attrs)...)
			}
		default:
			if replies := other(r); replies != nil {
				return replies
			}
			return acknowledge(r)
		}
		return one(append(answer, doneReply(r, 0)...))
	}
}

// listingTable makes a fake kernel's answers: the services and destinations of a table;
// everything else is acknowledged on request.
func listingTable(table []TableEntry) func(r []byte) []fakeReply {
	return func(r []byte) []fakeReply {
		var answer []byte
		switch cmdOf(r) {
		case cmdGetService:
			for _, e := range table {
				attrs, _ := fillService(nil, e.Service, true)
				answer = append(answer, dataReply(r, unix.NLM_F_MULTI, cmdNewService, attrs)...)
			}
		case cmdGetDest:
			s, _ := decode(r)
			for _, e := range table {
				if !e.Service.Address.Equal(s.Address) {
					continue
				}
				for _, d := range e.Destinations {
					attrs, _ := fillDestination(nil, d, true)
					answer = append(answer, dataReply(r, unix.NLM_F_MULTI, cmdNewDest, attrs)...)
				}
			}
		default:
			if native.Uint16(r[6:])&unix.NLM_F_ACK == 0 {
				return nil
			}
			return acknowledge(r)
		}
		return one(append(answer, doneReply(r, 0)...))
	}
}

// reconcilerOn returns a reconciler that owns all services, on a fake kernel with a
// table, which rejects requests with the errors of refuse.
func reconcilerOn(t *testing.T, have []TableEntry, refuse func(cmd uint8, s *Service, d *Destination) syscall.Errno) (*Reconciler, *fakeKernel) {
	answer := listingTable(have)
	i, k := newFake(t, func(r []byte) []fakeReply {
		if cmd := cmdOf(r); cmd != cmdGetService && cmd != cmdGetDest {
			if s, d := decode(r); refuse(cmd, s, d) != 0 {
				return one(errorReply(r, refuse(cmd, s, d)))
			}
		}
		return answer(r)
	})
	return &Reconciler{Handle: i, Owned: func(*Service) bool { return true }}, k
}

// New services are sent first if others own some. A change that fails, of these or of
// the rest, is reported with its number in the plan, and not counted.
func TestReconcileOwnedReportsFailures(t *testing.T) {
	want := wantedTable(3, 2) // each service is followed by its destinations
	for _, c := range []struct {
		name    string
		refuse  func(cmd uint8, s *Service, d *Destination) syscall.Errno
		failed  []int
		changes Changes
	}{
		{"nothing", func(uint8, *Service, *Destination) syscall.Errno { return 0 }, nil,
			Changes{ServicesAdded: 3, DestinationsAdded: 6}},
		{"a service", func(cmd uint8, s *Service, _ *Destination) syscall.Errno {
			if cmd == cmdNewService && s.Address[3] == 1 {
				return syscall.ENOMEM
			}
			return 0
		}, []int{3}, Changes{ServicesAdded: 2, DestinationsAdded: 4}},
		{"destinations", func(cmd uint8, s *Service, d *Destination) syscall.Errno {
			if cmd == cmdNewDest && s.Address[3] == 1 {
				return syscall.ENOMEM
			}
			return 0
		}, []int{4, 5}, Changes{ServicesAdded: 3, DestinationsAdded: 4}},
		{"both", func(cmd uint8, s *Service, d *Destination) syscall.Errno {
			if cmd == cmdNewService && s.Address[3] == 1 || cmd == cmdNewDest && s.Address[3] == 2 && d.Address[3] == 1 {
				return syscall.ENOMEM
			}
			return 0
		}, []int{3, 8}, Changes{ServicesAdded: 2, DestinationsAdded: 3}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, _ := reconcilerOn(t, nil, c.refuse)
			got, err := r.Reconcile(want)
			if got != c.changes {
				t.Errorf("got  %+v\nwant %+v", got, c.changes)
			}
			var failed *BatchError
			if errors.As(err, &failed) != (c.failed != nil) || c.failed == nil && err != nil {
				t.Fatalf("got %v", err)
			}
			var numbers []int
			if failed != nil {
				for _, op := range failed.Errors {
					numbers = append(numbers, op.Index)
				}
			}
			if !slices.Equal(numbers, c.failed) {
				t.Errorf("failed %v, want %v: %v", numbers, c.failed, err)
			}
		})
	}
}

// If somebody else was faster, the table is read again.
func TestReconcileReadsAgain(t *testing.T) {
	want := wantedTable(2, 0)
	var table []TableEntry
	i, k := newFake(t, nil)
	k.respond = func(r []byte) []fakeReply {
		if cmdOf(r) == cmdNewService && len(table) == 0 {
			table = want
			return one(errorReply(r, syscall.EEXIST))
		}
		return listingTable(table)(r)
	}
	got, err := (&Reconciler{Handle: i}).Reconcile(want)
	if err != nil || got != (Changes{ServicesAdded: 1}) {
		t.Errorf("%+v, %v", got, err)
	}
}

// Wanted services have to be owned, and Owned gets them as the kernel will return them.
func TestReconcileOwnedOnly(t *testing.T) {
	want := []TableEntry{{&Service{Address: net.IPv4(10, 0, 0, 1), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin}, nil}}
	nothing := func(uint8, *Service, *Destination) syscall.Errno { return 0 }
	r, k := reconcilerOn(t, nil, nothing)
	var seen []Service
	r.Owned = func(s *Service) bool { seen = append(seen, *s); return false }
	got, err := r.Reconcile(want)
	if err == nil || !strings.HasSuffix(err.Error(), "NewService -t 10.0.0.1:80: ipvs: wanted, but not owned") || got != (Changes{}) {
		t.Errorf("%+v, %v", got, err)
	}
	returned := Service{AddressFamily: unix.AF_INET, Address: net.IP{10, 0, 0, 1}, Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin, Flags: ServiceFlagHashed}
	if len(seen) != 1 || !reflect.DeepEqual(seen[0], returned) {
		t.Errorf("saw  %+v\nwant %+v", seen, returned)
	}
	if len(k.requests) != 1 {
		t.Errorf("%d requests", len(k.requests))
	}
	// Owned is not called for a service that cannot be sent.
	r.Owned = func(s *Service) bool { return s.Port > 0 }
	for _, bad := range []*Service{nil, {Protocol: unix.IPPROTO_TCP, Port: 80}} {
		if _, err := r.Reconcile([]TableEntry{{bad, nil}}); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
}

// If the confirmation of the new services is lost, the rest is not sent.
func TestReconcileOwnedLost(t *testing.T) {
	sent := map[uint8]int{}
	silence := []fakeReply{}
	i, _ := newFake(t, listing(ipv4Service(2), func() []*Destination { return nil }, func(r []byte) []fakeReply {
		sent[cmdOf(r)]++
		return silence
	}))
	r := &Reconciler{Handle: i, Owned: func(*Service) bool { return true }}
	dests := []*Destination{ipv4Destination(1)}
	got, err := r.Reconcile([]TableEntry{{ipv4Service(1), dests}, {ipv4Service(2), dests}})
	if !errors.Is(err, ErrOutcomeUnknown) || got != (Changes{}) {
		t.Errorf("%+v, %v", got, err)
	}
	if sent[cmdNewService] != 1 || sent[cmdNewDest] != 0 {
		t.Errorf("sent %v", sent)
	}
}

// Plan and Reconcile need a working handle, and do not disturb each other.
func TestPlan(t *testing.T) {
	if b, err := new(Reconciler).Plan(nil); err == nil || b != nil {
		t.Errorf("without a handle: %v, %v", b, err)
	}
	if got, err := new(Reconciler).Reconcile(nil); err == nil || got != (Changes{}) {
		t.Errorf("without a handle: %+v, %v", got, err)
	}
	r, k := reconcilerOn(t, wantedTable(1, 1), func(uint8, *Service, *Destination) syscall.Errno { return 0 })
	b, err := r.Plan(wantedTable(1, 2))
	if err != nil || b.String() != "-a -t 10.0.0.0:80 -r 10.1.0.1:8080 -m -w 1\n" || len(k.requests) != 2 {
		t.Errorf("%v, %d requests, %v", b, len(k.requests), err)
	}
	r.mu.Lock()
	done := make(chan error)
	go func() { _, err := r.Plan(nil); done <- err }()
	select {
	case <-done:
		t.Error("Plan did not wait for Reconcile")
	case <-time.After(50 * time.Millisecond):
		r.mu.Unlock()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	// Even with the shortest time to drain, weight 0 comes first.
	r.Drain = 1
	if b, err := r.Plan(wantedTable(1, 0)); err != nil || b.String() != "-e -t 10.0.0.0:80 -r 10.1.0.0:8080 -m -w 0\n" {
		t.Errorf("%v, %v", b, err)
	}
	r.Drain = 0
	if b, err := r.Plan(wantedTable(1, 0)); err != nil || b.String() != "-d -t 10.0.0.0:80 -r 10.1.0.0:8080\n" {
		t.Errorf("%v, %v", b, err)
	}
	r.Handle.Close()
	if b, err := r.Plan(nil); !errors.Is(err, ErrClosed) || b != nil {
		t.Errorf("closed: %v, %v", b, err)
	}
}

// memoryKernel is a Fake for the Reconciler's tests, which see each change, can reject
// it, and can lose replies.
type memoryKernel struct {
	t    *testing.T
	fake *Fake
	own  *Handle // of the kernel itself

	// before is called before each change; an errno rejects the change.
	before func(cmd uint8, s *Service, d *Destination) syscall.Errno
	// lose reports whether the reply to a request gets lost.
	lose func(request []byte) bool

	changes []string // made or refused, as ipvsadm's options
	listed  int      // lists of destinations
}

// newMemory returns a handle whose kernel has an empty table.
func newMemory(t *testing.T) (*Handle, *memoryKernel) {
	m := &memoryKernel{t: t, fake: NewFake()}
	m.fake.table.salt = uint8(ipv4Service(0).Protocol) ^ uint8(ipv4Service(0).Port) // ipv4Services come in order
	m.own = m.fake.Handle()
	return m.open(), m
}

// open returns one more handle of the same kernel.
func (m *memoryKernel) open() *Handle {
	i, _ := newFake(m.t, m.respond)
	i.socket.another = func() *socket { return i.socket } // a second one would be a real one
	return i
}

// destination returns a destination of the table, or nil if it does not exist.
func (m *memoryKernel) destination(s *Service, d *Destination) *Destination {
	key, err := sentDestinationKey(d)
	must(m.t, err)
	for _, d := range mustGet(m.own.GetDestinations(s))(m.t) {
		if keyOfDestination(d) == key {
			return d
		}
	}
	return nil
}

// put replaces the kernel's table by the given one, in its order, with its connections.
func (m *memoryKernel) put(table ...TableEntry) {
	before := m.fake.table
	m.fake.table = newFakeTable()
	m.fake.table.fakeVariant = before.fakeVariant
	for _, e := range table {
		must(m.t, m.own.NewService(e.Service))
		for _, d := range slices.Backward(e.Destinations) {
			must(m.t, m.own.NewDestination(e.Service, d))
			m.connect(e.Service, d, d.ActiveConnections, d.InactiveConnections)
		}
	}
}

// connect sets the connections of a destination.
func (m *memoryKernel) connect(s *Service, d *Destination, active, inactive int) {
	must(m.t, m.fake.SetConnections(s, d, active, inactive, 0))
}

// table returns a copy of the table.
func (m *memoryKernel) table() []TableEntry { return mustGet(m.own.GetTable())(m.t) }

// apply makes a change without the handle.
func (m *memoryKernel) apply(cmd uint8, s *Service, d *Destination) syscall.Errno {
	switch err := m.own.call(cmd, unix.NLM_F_ACK, change(cmd, s, d), nil).(type) {
	case nil:
		return 0
	case syscall.Errno:
		return err
	default:
		m.t.Error(err)
		return 0
	}
}

func (m *memoryKernel) respond(r []byte) []fakeReply {
	switch cmd := cmdOf(r); {
	case isFamilyRequest(r):
	case cmd == cmdGetDest:
		m.listed++
	case cmd >= cmdNewService && cmd <= cmdDelDest && cmd != cmdGetService:
		s, d := decode(r)
		if cmd == cmdNewService || cmd == cmdSetService || cmd == cmdDelService {
			d = nil
		}
		m.changes = append(m.changes, notation(opName(cmd), s, d))
		if m.before != nil {
			if errno := m.before(cmd, s, d); errno != 0 {
				return m.unlessLost(r, one(errorReply(r, errno)))
			}
		}
	}
	return m.unlessLost(r, fakeReplies(m.fake, r))
}

func (m *memoryKernel) unlessLost(r []byte, replies []fakeReply) []fakeReply {
	if m.lose != nil && m.lose(r) {
		return nil
	}
	return replies
}

// fakeReplies returns what a Fake replies to a request.
func fakeReplies(f *Fake, request []byte) (replies []fakeReply) {
	s := &fakeSocket{fake: f, portID: fakePortID}
	s.sendmsg(noFD, request)
	for {
		b := make([]byte, smallBuffer)
		n, _, err := s.recvmsg(noFD, b)
		if err == unix.EAGAIN {
			return replies
		}
		replies = append(replies, fakeReply{data: b[:n]})
	}
}
