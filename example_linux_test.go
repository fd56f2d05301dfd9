package ipvs_test

import (
	"errors"
	"fmt"
	"log"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"
)

// Examples without an "Output:" comment are compiled, not run: they need root
// and a kernel with IPVS.

func Example() {
	handle, err := ipvs.New("") // the current network namespace
	if errors.Is(err, ipvs.ErrNotSupported) {
		log.Fatal("this kernel has no IPVS: ", err)
	} else if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	web := &ipvs.Service{
		Address:   net.ParseIP("192.0.2.10"),
		Protocol:  unix.IPPROTO_TCP,
		Port:      80,
		SchedName: ipvs.WeightedRoundRobin,
		Netmask:   0xFFFFFFFF,
	}
	if err := handle.NewService(web); err != nil && !errors.Is(err, syscall.EEXIST) {
		log.Fatal(err)
	}
	for n, address := range []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"} {
		real := &ipvs.Destination{
			Address:         net.ParseIP(address),
			Port:            8080,
			Weight:          3 - n,
			ConnectionFlags: ipvs.ConnectionFlagMasq,
		}
		if err := handle.NewDestination(web, real); err != nil && !errors.Is(err, syscall.EEXIST) {
			log.Fatal(err)
		}
	}
}

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
		d.Weight = 0 // no new connections; all else stays as it is
		if err := handle.UpdateDestination(web, d); err != nil {
			log.Fatal(err)
		}
	}
}

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
		fmt.Println("could not ask:", err)
	}
}

func ExampleHandle_SetConfig() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	// The timeouts left out stay as they are.
	if err := handle.SetConfig(&ipvs.Config{TimeoutTCP: 15 * time.Minute}); err != nil {
		log.Fatal(err)
	}
}

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

// A proxier's loop: bring the table to what is wanted, again and again.
func ExampleReconciler() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	wanted := func() []ipvs.TableEntry { // from the cluster's API
		return []ipvs.TableEntry{{
			Service: &ipvs.Service{Address: net.ParseIP("10.96.0.10"), Protocol: unix.IPPROTO_UDP, Port: 53, SchedName: ipvs.RoundRobin},
			Destinations: []*ipvs.Destination{
				{Address: net.ParseIP("10.244.0.2"), Port: 53, Weight: 1},
				{Address: net.ParseIP("10.244.0.3"), Port: 53, Weight: 1},
			},
		}}
	}

	clusterIPs := net.IPNet{IP: net.IPv4(10, 96, 0, 0), Mask: net.CIDRMask(12, 32)}
	reconciler := &ipvs.Reconciler{
		Handle: handle,
		Owned:  func(s *ipvs.Service) bool { return clusterIPs.Contains(s.Address) }, // others are never touched
		Drain:  10 * time.Minute,                                                     // connections may end
	}
	for {
		changes, err := reconciler.Reconcile(wanted())
		if err != nil {
			log.Print(err) // what could be done is done; the next turn tries the rest again
		}
		if changes.Total() > 0 {
			log.Printf("%+v", changes)
		}
		pause := 30 * time.Second
		if changes.RequeueAfter > 0 {
			pause = changes.RequeueAfter // something drains
		}
		time.Sleep(pause)
	}
}

func ExampleReconciler_Plan() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()
	reconciler := &ipvs.Reconciler{Handle: handle}

	plan, err := reconciler.Plan(nil) // what would make the table empty?
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(plan) // one change a line, as ipvsadm's options: -D -t 192.0.2.10:80
}

func ExampleDiff() {
	web := &ipvs.Service{Address: net.ParseIP("192.0.2.10"), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: ipvs.RoundRobin, Netmask: 0xFFFFFFFF}
	old := &ipvs.Destination{Address: net.ParseIP("10.0.0.1"), Port: 8080, Weight: 1}
	new := &ipvs.Destination{Address: net.ParseIP("10.0.0.2"), Port: 8080, Weight: 1}
	changes, err := ipvs.Diff(
		[]ipvs.TableEntry{{Service: web, Destinations: []*ipvs.Destination{old}}},
		[]ipvs.TableEntry{{Service: web, Destinations: []*ipvs.Destination{new}}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(changes)
	// Output:
	// -a -t 192.0.2.10:80 -r 10.0.0.2:8080 -m -w 1
	// -d -t 192.0.2.10:80 -r 10.0.0.1:8080
}

func ExampleHandle_NewDaemon() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	// Send the connections of this director to its backups.
	err = handle.NewDaemon(&ipvs.Daemon{State: ipvs.DaemonMaster, MulticastInterface: "eth0", SyncID: 7})
	if err != nil && !errors.Is(err, syscall.EEXIST) {
		log.Fatal(err)
	}
	daemons, err := handle.GetDaemons()
	if err != nil {
		log.Fatal(err)
	}
	for _, d := range daemons {
		fmt.Println(d.State, d.MulticastInterface, d.MulticastGroup, d.MulticastPort)
	}
}

func ExampleHandle_GetInfo() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	info, err := handle.GetInfo()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("IPVS", info.Version, "with", info.ConnectionTableSize, "buckets")
	if err := handle.Zero(); err != nil { // all counters; ZeroService for one service
		log.Fatal(err)
	}
}

func ExampleService_Rule() {
	mask, err := ipvs.IPv4Netmask(24)
	if err != nil {
		log.Fatal(err)
	}
	web := ipvs.Service{
		Address: net.ParseIP("192.0.2.10"), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: ipvs.SourceHashing,
		Flags: ipvs.ServiceFlagPersistent | ipvs.ServiceFlagSHPort, Timeout: 300, Netmask: mask,
	}
	fmt.Println(web.Rule()) // as ipvsadm -Sn writes it
	// Output: -t 192.0.2.10:80 -s sh -p 300 -M 255.255.255.0 -b sh-port
}

func ExampleDestination_Rule() {
	far := ipvs.Destination{
		Address: net.ParseIP("2001:db8::7"), Port: 80, Weight: 1, // of another family than its service, too
		ConnectionFlags: ipvs.ConnectionFlagTunnel, TunnelType: ipvs.TunnelGUE, TunnelPort: 6080, TunnelFlags: ipvs.TunnelFlagChecksum,
	}
	fmt.Println(far.Rule())
	// Output: -r [2001:db8::7]:80 -i -w 1 --tun-type gue --tun-port 6080 --tun-csum
}
