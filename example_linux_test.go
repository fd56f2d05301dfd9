package ipvs_test

import (
	"errors"
	"fmt"
	"log"
	"net"
	"os"
	"syscall"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"
)

// Examples without an "Output:" comment are compiled, not run: they need root
// and a kernel with IPVS.

// A service with three real servers. Both calls accept that the kernel has them
// already.
func Example() {
	handle, err := ipvs.New("") // the current network namespace
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	web := &ipvs.Service{
		Address: net.ParseIP("192.0.2.10"), Protocol: unix.IPPROTO_TCP, Port: 80,
		SchedName: ipvs.WeightedRoundRobin, Netmask: 0xFFFFFFFF,
	}
	if err := handle.NewService(web); err != nil && !errors.Is(err, syscall.EEXIST) {
		log.Fatal(err)
	}
	for _, address := range []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"} {
		server := &ipvs.Destination{Address: net.ParseIP(address), Port: 8080, Weight: 1}
		if err := handle.NewDestination(web, server); err != nil && !errors.Is(err, syscall.EEXIST) {
			log.Fatal(err)
		}
	}
}

// A kernel without IPVS is an error of New.
func ExampleNew() {
	handle, err := ipvs.New("")
	if errors.Is(err, ipvs.ErrNotSupported) {
		log.Fatal("load the ip_vs module first: ", err)
	} else if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()
}

// Services and destinations of another network namespace, with their counters.
func ExampleHandle_GetServices() {
	handle, err := ipvs.New("/run/netns/blue")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	services, err := handle.GetServices()
	if err != nil {
		log.Fatal(err)
	}
	for _, service := range services {
		destinations, err := handle.GetDestinations(service)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(service.Address, service.Port, service.Stats64.Connections)
		for _, d := range destinations {
			fmt.Println("  ->", d.Address, d.Port, d.Weight, d.ActiveConnections)
		}
	}
}

// Read, change, write back: only the weight changes.
func ExampleHandle_UpdateDestination() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	web := &ipvs.Service{Address: net.ParseIP("192.0.2.10"), Protocol: unix.IPPROTO_TCP, Port: 80}
	destinations, err := handle.GetDestinations(web)
	if err != nil {
		log.Fatal(err)
	}
	for _, d := range destinations {
		d.Weight = 0 // no new connections; everything else stays as it is
		if err := handle.UpdateDestination(web, d); err != nil {
			log.Fatal(err)
		}
	}
}

// GetService distinguishes an absent service from a failed call.
func ExampleHandle_GetService() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	web := &ipvs.Service{Address: net.ParseIP("192.0.2.10"), Protocol: unix.IPPROTO_TCP, Port: 80}
	switch _, err := handle.GetService(web); {
	case err == nil:
		fmt.Println("present")
	case errors.Is(err, syscall.ESRCH):
		fmt.Println("absent")
	case errors.Is(err, os.ErrDeadlineExceeded):
		fmt.Println("the kernel did not answer in time")
	default:
		fmt.Println("failed:", err)
	}
}
