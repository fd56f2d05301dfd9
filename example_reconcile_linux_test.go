package ipvs_test

import (
	"fmt"
	"log"
	"net"
	"time"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"
)

// A proxier's loop: repeatedly bring the table to the desired state.
func ExampleReconciler() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	wanted := func() []ipvs.TableEntry { // from the cluster's API
		return []ipvs.TableEntry{{
			Service: &ipvs.Service{Address: net.ParseIP("10.96.0.10"), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: ipvs.RoundRobin},
			Destinations: []*ipvs.Destination{
				{Address: net.ParseIP("10.244.0.2"), Port: 8080, Weight: 1},
				{Address: net.ParseIP("10.244.0.3"), Port: 8080, Weight: 1},
			},
		}}
	}

	clusterIPs := net.IPNet{IP: net.IPv4(10, 96, 0, 0), Mask: net.CIDRMask(12, 32)}
	reconciler := &ipvs.Reconciler{
		Handle: handle,
		Drain:  10 * time.Minute, // for connections to finish
		Owned:  func(s *ipvs.Service) bool { return clusterIPs.Contains(s.Address) },
	}
	for {
		changes, err := reconciler.Reconcile(wanted())
		if err != nil {
			log.Print(err) // the next round tries again
		}
		pause := 30 * time.Second
		if changes.RequeueAfter > 0 { // destinations are draining
			pause = min(pause, changes.RequeueAfter)
		}
		time.Sleep(pause)
	}
}

// The dry run: what would be deleted if nothing was wanted?
func ExampleReconciler_Plan() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()
	reconciler := &ipvs.Reconciler{Handle: handle}

	plan, err := reconciler.Plan(nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(plan) // one change per line in ipvsadm's notation: -D -t 192.0.2.10:80
}

// The life of a destination: it is added, drains when it is no longer wanted, and is
// deleted when its last connection has ended.
func ExampleReconciler_drain() {
	kernel := ipvs.NewFake() // in a program: a Handle from ipvs.New("")
	reconciler := &ipvs.Reconciler{Handle: kernel.Handle(), Drain: 10 * time.Minute}

	web := &ipvs.Service{Address: net.ParseIP("192.0.2.10"), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: ipvs.RoundRobin}
	stays := &ipvs.Destination{Address: net.ParseIP("10.0.0.1"), Port: 8080, Weight: 1}
	goes := &ipvs.Destination{Address: net.ParseIP("10.0.0.2"), Port: 8080, Weight: 1}
	reconcile := func(wanted ...*ipvs.Destination) {
		want := []ipvs.TableEntry{{Service: web, Destinations: wanted}}
		plan, err := reconciler.Plan(want)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(plan)
		changes, err := reconciler.Reconcile(want)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("draining:", changes.Draining)
	}

	reconcile(stays, goes)
	kernel.SetConnections(web, goes, 3, 0, 0) // active, inactive, persistent
	reconcile(stays)
	kernel.SetConnections(web, goes, 0, 0, 0)
	reconcile(stays)
	// Output:
	// -A -t 192.0.2.10:80 -s rr
	// -a -t 192.0.2.10:80 -r 10.0.0.1:8080 -m -w 1
	// -a -t 192.0.2.10:80 -r 10.0.0.2:8080 -m -w 1
	// draining: 0
	// -e -t 192.0.2.10:80 -r 10.0.0.2:8080 -m -w 0
	// draining: 1
	// -d -t 192.0.2.10:80 -r 10.0.0.2:8080
	// draining: 0
}
