package ipvs_test

import (
	"fmt"
	"log"
	"net"

	"golang.org/x/sys/unix"

	"github.com/moby/ipvs"
)

// share returns how many of the destinations of a table a plan takes away, and how
// many there are. Those of a deleted service go with it, and those that get weight 0
// get no more clients.
func share(table []ipvs.TableEntry, plan *ipvs.Batch) (gone, all int) {
	name := func(s *ipvs.Service) string {
		return fmt.Sprint(s.FWMark, s.AddressFamily, s.Protocol, s.Address, s.Port)
	}
	destinations := map[string]int{}
	for _, entry := range table {
		destinations[name(entry.Service)] = len(entry.Destinations)
		all += len(entry.Destinations)
	}
	for _, change := range plan.All() {
		switch {
		case change.Err != nil: // it is not made
		case change.Op == "DelService":
			gone += destinations[name(change.Service)]
		case change.Op == "DelDestination", change.Op == "UpdateDestination" && change.Destination.Weight == 0:
			gone++
			destinations[name(change.Service)]-- // in case its service goes too
		}
	}
	return gone, all
}

// A proxier refuses a plan that takes away more than half of all destinations: what is
// wanted is then more likely a mistake than a wish.
func ExampleBatch_All() {
	tcp := func(address string) *ipvs.Service {
		return &ipvs.Service{AddressFamily: unix.AF_INET, Address: net.ParseIP(address).To4(), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: ipvs.RoundRobin}
	}
	to := func(addresses ...string) (destinations []*ipvs.Destination) {
		for _, address := range addresses {
			destinations = append(destinations, &ipvs.Destination{Address: net.ParseIP(address), Port: 8080, Weight: 1})
		}
		return destinations
	}
	have := []ipvs.TableEntry{ // from Handle.GetTable
		{Service: tcp("192.0.2.10"), Destinations: to("10.0.0.1", "10.0.0.2", "10.0.0.3")},
		{Service: tcp("192.0.2.11"), Destinations: to("10.0.0.4", "10.0.0.5")},
	}
	want := []ipvs.TableEntry{{Service: tcp("192.0.2.10"), Destinations: to("10.0.0.1", "10.0.0.2")}}

	plan, err := ipvs.Diff(have, want) // or Reconciler.Plan
	if err != nil {
		log.Fatal(err)
	}
	gone, all := share(have, plan)
	if gone*2 > all {
		fmt.Printf("refused: %d of %d destinations would go\n%v", gone, all, plan)
	}
	// Output:
	// refused: 3 of 5 destinations would go
	// -d -t 192.0.2.10:80 -r 10.0.0.3:8080
	// -D -t 192.0.2.11:80
}
