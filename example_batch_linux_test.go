package ipvs_test

import (
	"errors"
	"fmt"
	"log"
	"net"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"
)

// Many changes in one system call. Each failure names its change.
func ExampleHandle_Do() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	web := &ipvs.Service{Address: net.ParseIP("192.0.2.10"), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: ipvs.RoundRobin}
	var batch ipvs.Batch
	batch.NewService(web)
	for _, address := range []string{"10.0.0.1", "10.0.0.2"} {
		batch.NewDestination(web, &ipvs.Destination{Address: net.ParseIP(address), Port: 8080, Weight: 1})
	}
	err = handle.Do(&batch)
	var failed *ipvs.BatchError
	if errors.As(err, &failed) {
		for _, change := range failed.Errors {
			log.Print(change) // which change, to what, and why
		}
	} else if err != nil {
		log.Fatal(err)
	}
}

// The text of an error names the change, the object and the reason.
func ExampleBatchError() {
	handle := ipvs.NewFake().Handle() // in a program: ipvs.New("")

	web := &ipvs.Service{Address: net.ParseIP("192.0.2.10"), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: ipvs.RoundRobin}
	server := &ipvs.Destination{Address: net.ParseIP("10.0.0.1"), Port: 8080, Weight: 1}
	var batch ipvs.Batch
	batch.NewService(web)
	batch.NewDestination(web, server)
	batch.NewDestination(web, server)
	fmt.Println(handle.Do(&batch))
	// Output:
	// ipvs: 1 of 3 changes failed; change 2, NewDestination -t 192.0.2.10:80 -r 10.0.0.1:8080: file exists
}

// The new destination is added before the old one is deleted.
func ExampleDiff() {
	web := &ipvs.Service{Address: net.ParseIP("192.0.2.10"), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: ipvs.RoundRobin, Netmask: 0xFFFFFFFF}
	before := &ipvs.Destination{Address: net.ParseIP("10.0.0.1"), Port: 8080, Weight: 1}
	after := &ipvs.Destination{Address: net.ParseIP("10.0.0.2"), Port: 8080, Weight: 1}
	changes, err := ipvs.Diff(
		[]ipvs.TableEntry{{Service: web, Destinations: []*ipvs.Destination{before}}},
		[]ipvs.TableEntry{{Service: web, Destinations: []*ipvs.Destination{after}}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(changes)
	// Output:
	// -a -t 192.0.2.10:80 -r 10.0.0.2:8080 -m -w 1
	// -d -t 192.0.2.10:80 -r 10.0.0.1:8080
}

// share returns how many of a table's destinations a plan removes, and how many there
// are. It counts those of deleted services, and those that get weight 0 and so no more
// clients.
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

// A proxier refuses a plan that removes more than half of all destinations, which is
// more likely a mistake than intended.
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
