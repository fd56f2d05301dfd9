package ipvs

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

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

// checkTable checks that the kernel's table is exactly the wanted one.
func checkTable(t *testing.T, i *Handle, want []TableEntry) {
	t.Helper()
	var b *Batch
	// While their table grows, kernels from 7 on list it incompletely.
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

// Kernels from 7 on can list a destination twice in one part.
func TestReconcileDestinationListedTwice(t *testing.T) {
	d := ipv4Destination(1)
	i, _ := newFake(t, listing(ipv4Service(1), func() []*Destination { return []*Destination{d, d} }, func([]byte) []fakeReply { return nil }))
	if got := mustGet(i.GetDestinations(ipv4Service(1)))(t); len(got) != 1 {
		t.Errorf("%d destinations", len(got))
	}
	// A caller can have made a table of two lists.
	b := mustGet(Diff([]TableEntry{{ipv4Service(1), []*Destination{d, d}}}, []TableEntry{{ipv4Service(1), nil}}))(t)
	if b.Len() != 1 {
		t.Errorf("the difference is\n%s", b)
	}
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

// Where the new services' confirmation is lost, the rest is not sent.
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

func serviceWith(n int, scheduler string) *Service {
	s := *ipv4Service(n)
	s.SchedName = scheduler
	return &s
}
