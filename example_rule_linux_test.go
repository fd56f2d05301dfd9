package ipvs_test

import (
	"fmt"
	"log"
	"net"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"
)

// Persistence by network, with a scheduler flag.
func ExampleService_Rule() {
	mask, err := ipvs.IPv4Netmask(24)
	if err != nil {
		log.Fatal(err)
	}
	web := ipvs.Service{
		Address: net.ParseIP("192.0.2.10"), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: ipvs.SourceHashing,
		Flags: ipvs.ServiceFlagPersistent | ipvs.ServiceFlagSHPort, Timeout: 300, Netmask: mask,
	}
	fmt.Println(web.Rule())
	// Output: -t 192.0.2.10:80 -s sh -p 300 -M 255.255.255.0 -b sh-port
}

// A tunnel, to a destination that may be of another address family than its service.
func ExampleDestination_Rule() {
	far := ipvs.Destination{
		Address: net.ParseIP("2001:db8::7"), Port: 80, Weight: 1, ConnectionFlags: ipvs.ConnectionFlagTunnel,
		TunnelType: ipvs.TunnelGUE, TunnelPort: 6080, TunnelFlags: ipvs.TunnelFlagChecksum,
	}
	fmt.Println(far.Rule())
	// Output: -r [2001:db8::7]:80 -i -w 1 --tun-type gue --tun-port 6080 --tun-csum
}

func ExampleIPv4Netmask() {
	mask, err := ipvs.IPv4Netmask(24)
	if err != nil {
		log.Fatal(err)
	}
	web := ipvs.Service{FWMark: 1, AddressFamily: unix.AF_INET, SchedName: ipvs.RoundRobin,
		Flags: ipvs.ServiceFlagPersistent, Timeout: 300, Netmask: mask}
	fmt.Println(web.Rule())
	// Output: -f 1 -s rr -p 300 -M 255.255.255.0
}
