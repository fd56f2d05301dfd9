package ipvs

import (
	"testing"

	"golang.org/x/sys/unix"
)

// listingTable makes a fake kernel's answers: the services and destinations of a
// table; everything else is acknowledged where that is asked for.
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

// Each kind of change is counted, also where new services go first.
func TestReconcileCountsChanges(t *testing.T) {
	// To come: 1 service with 6 destinations. To change: 2 services and, of the
	// service that stays, 4 destinations. To go: its other 5, and 3 services.
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
