package main

import (
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/moby/ipvs"
)

const (
	servicePersistent = 0x1 // service flag: a client stays with its real server
	serviceHashed     = 0x2 // service flag that the kernel adds to every service
	persistenceTime   = 300 // seconds
	firewallMark      = 1
)

// Netmasks of persistence that use the whole client address.
const (
	netmask4 = 0xFFFFFFFF
	netmask6 = 128
)

// The ports of the virtual address that get the firewall mark.
var markedPorts = []uint16{realPortTCP, realPortTCPAlt}

// virtualService has the settings of one virtual service, and its use by clients.
type virtualService struct {
	ipvs.Service
	realPort uint16                // of its real servers; 0: the port that the client named (firewall mark)
	weights  [len(realServers)]int // now, in the kernel

	network string           // "tcp" or "udp"
	clients []netip.Addr     // requests come from these in turn
	targets []netip.AddrPort // requests go to these in turn

	homes map[netip.Addr]int // with persistence: the real server that each client met first
}

func newService(network string, address netip.Addr, port uint16, scheduler string, weights [len(realServers)]int,
	realPort uint16) *virtualService {
	v := &virtualService{
		Service: ipvs.Service{
			AddressFamily: syscall.AF_INET,
			Protocol:      syscall.IPPROTO_TCP,
			Address:       address.AsSlice(),
			Port:          port,
			SchedName:     scheduler,
			Netmask:       netmask4,
		},
		realPort: realPort,
		weights:  weights,
		network:  network,
		clients:  clientAddresses4[:1],
		targets:  []netip.AddrPort{netip.AddrPortFrom(address, port)},
	}
	if network == "udp" {
		v.Protocol = syscall.IPPROTO_UDP
	}
	if address.Is6() {
		v.AddressFamily, v.Netmask = syscall.AF_INET6, netmask6
		v.clients = []netip.Addr{clientAddress6}
	}
	return v
}

// weightedService gives the first real server three connections for two and one of the others.
func weightedService(address netip.Addr) *virtualService {
	return newService("tcp", address, 80, ipvs.WeightedRoundRobin, [...]int{3, 2, 1}, realPortTCP)
}

// udpService takes datagrams; each client port is a connection to IPVS.
func udpService(address netip.Addr) *virtualService {
	return newService("udp", address, 53, ipvs.RoundRobin, [...]int{1, 1, 1}, realPortUDP)
}

// persistentService keeps each of several clients with the real server that the scheduler found for it first.
func persistentService() *virtualService {
	v := newService("tcp", virtualAddress4, 443, ipvs.SourceHashing, [...]int{1, 1, 1}, realPortTCPAlt)
	v.Flags = servicePersistent
	v.Timeout = persistenceTime
	v.clients = clientAddresses4
	v.homes = map[netip.Addr]int{}
	return v
}

// firewallMarkService handles all packets that carry a mark, here those to two ports: one service for both.
func firewallMarkService() *virtualService {
	v := newService("tcp", virtualAddress4, 0, ipvs.RoundRobin, [...]int{1, 1, 1}, 0)
	v.FWMark = firewallMark
	v.Protocol, v.Address = 0, nil
	v.targets = nil
	for _, port := range markedPorts {
		v.targets = append(v.targets, netip.AddrPortFrom(virtualAddress4, port))
	}
	return v
}

// setMark makes the director mark packets to the marked ports.
func setMark(director *namespace) error {
	for _, port := range markedPorts {
		_, err := director.run("iptables", "-t", "mangle", "-A", "PREROUTING", "-d", virtualAddress4.String(),
			"-p", "tcp", "--dport", fmt.Sprint(port), "-j", "MARK", "--set-mark", fmt.Sprint(firewallMark))
		if err != nil {
			return err
		}
	}
	return nil
}

// destination is the real server with the given index, as a destination of the virtual service.
func (v *virtualService) destination(real int) *ipvs.Destination {
	address := realServers[real].address4
	if v.AddressFamily == syscall.AF_INET6 {
		address = realServers[real].address6
	}
	return &ipvs.Destination{
		AddressFamily:   v.AddressFamily,
		Address:         address.AsSlice(),
		Port:            v.realPort,
		Weight:          v.weights[real],
		ConnectionFlags: ipvs.ConnectionFlagMasq,
	}
}

// create puts the virtual service and its real servers into the kernel's table.
func (v *virtualService) create(handle *ipvs.Handle) error {
	if err := handle.NewService(&v.Service); err != nil {
		return fmt.Errorf("create %s: %w", serviceName(&v.Service), err)
	}
	for i, real := range realServers {
		if err := handle.NewDestination(&v.Service, v.destination(i)); err != nil {
			return fmt.Errorf("add %s to %s: %w", real.name, serviceName(&v.Service), err)
		}
	}
	return nil
}

// destinations reads the virtual service's real servers from the kernel, in the order of realServers.
func (v *virtualService) destinations(handle *ipvs.Handle) ([len(realServers)]*ipvs.Destination, error) {
	var ordered [len(realServers)]*ipvs.Destination
	read, err := handle.GetDestinations(&v.Service)
	if err != nil {
		return ordered, fmt.Errorf("read the destinations of %s: %w", serviceName(&v.Service), err)
	}
	for i := range realServers {
		want := destinationName(v.destination(i))
		for _, d := range read {
			if destinationName(d) == want {
				ordered[i] = d
			}
		}
		if ordered[i] == nil || len(read) != len(ordered) {
			return ordered, fmt.Errorf("destinations of %s: %d read, want %d with %s among them",
				serviceName(&v.Service), len(read), len(ordered), want)
		}
	}
	return ordered, nil
}

// connections reads the kernel's counts of connections so far, in total and for each real server.
func (v *virtualService) connections(handle *ipvs.Handle) (total int, counted [len(realServers)]int, err error) {
	service, err := handle.GetService(&v.Service)
	if err != nil {
		return 0, counted, fmt.Errorf("read %s: %w", serviceName(&v.Service), err)
	}
	destinations, err := v.destinations(handle)
	if err != nil {
		return 0, counted, err
	}
	for i, d := range destinations {
		counted[i] = int(d.Stats.Connections)
	}
	return int(service.Stats.Connections), counted, nil
}

// setWeight changes one real server's weight the way callers do: read, change, write back.
func (v *virtualService) setWeight(handle *ipvs.Handle, real, weight int) error {
	destinations, err := v.destinations(handle)
	if err != nil {
		return err
	}
	destinations[real].Weight = weight
	if err := handle.UpdateDestination(&v.Service, destinations[real]); err != nil {
		return fmt.Errorf("set the weight of %s of %s: %w", realServers[real].name, serviceName(&v.Service), err)
	}
	v.weights[real] = weight
	return nil
}

// serviceName identifies a virtual service in ipvsadm's notation.
func serviceName(s *ipvs.Service) string {
	if s.FWMark != 0 {
		return fmt.Sprintf("FWM %d", s.FWMark)
	}
	protocol := map[uint16]string{syscall.IPPROTO_TCP: "TCP", syscall.IPPROTO_UDP: "UDP"}[s.Protocol]
	return protocol + " " + hostPort(s.Address, s.Port)
}

// destinationName identifies a real server in ipvsadm's notation.
func destinationName(d *ipvs.Destination) string { return hostPort(d.Address, d.Port) }

func hostPort(address net.IP, port uint16) string {
	return net.JoinHostPort(address.String(), fmt.Sprint(port))
}
