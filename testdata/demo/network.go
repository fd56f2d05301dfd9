package main

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The addresses are the ones reserved for documentation. Every network has an IPv4 and an IPv6 side.
var (
	clientAddresses4 = []netip.Addr{
		netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("192.0.2.12"), netip.MustParseAddr("192.0.2.13"),
		netip.MustParseAddr("192.0.2.14"), netip.MustParseAddr("192.0.2.15"), netip.MustParseAddr("192.0.2.16"),
	}
	clientAddress6  = netip.MustParseAddr("2001:db8:c::11")
	clientGateway4  = netip.MustParseAddr("192.0.2.1")
	clientGateway6  = netip.MustParseAddr("2001:db8:c::1")
	virtualAddress4 = netip.MustParseAddr("203.0.113.1")
	virtualAddress6 = netip.MustParseAddr("2001:db8:f::1")
	realGateway4    = netip.MustParseAddr("198.51.100.1")
	realGateway6    = netip.MustParseAddr("2001:db8:b::1")
)

// realServer is a machine behind the director.
type realServer struct {
	name     string
	address4 netip.Addr
	address6 netip.Addr
}

var realServers = [3]realServer{
	{"real1", netip.MustParseAddr("198.51.100.11"), netip.MustParseAddr("2001:db8:b::11")},
	{"real2", netip.MustParseAddr("198.51.100.12"), netip.MustParseAddr("2001:db8:b::12")},
	{"real3", netip.MustParseAddr("198.51.100.13"), netip.MustParseAddr("2001:db8:b::13")},
}

// namespace is a network namespace that only this process's open file keeps alive. It has no name in the file
// system, so the kernel removes it, with every link, address and IPVS table in it, however the process ends.
type namespace struct {
	file *os.File
}

// The main goroutine stays on the main thread: a thread that enter leaves in another namespace ends with its
// goroutine, and the main thread is the only one that cannot end.
func init() { runtime.LockOSThread() }

func newNamespace() (*namespace, error) {
	ns := &namespace{}
	err := onOwnThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("new network namespace (are you root?): %w", err)
		}
		ns.file, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	return ns, err
}

// path names the namespace for whoever opens it by path, as ipvs.New does.
func (ns *namespace) path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.file.Fd()) }

// enter runs f inside the namespace. Sockets that f opens, and programs that it starts, stay there.
func (ns *namespace) enter(f func() error) error {
	return onOwnThread(func() error {
		if err := unix.Setns(int(ns.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return f()
	})
}

// run runs a program inside the namespace and returns its output.
func (ns *namespace) run(name string, args ...string) (string, error) {
	var out []byte
	err := ns.enter(func() (err error) {
		cmd := exec.Command(name, args...)
		if out, err = cmd.CombinedOutput(); err != nil {
			err = fmt.Errorf("%s: %w: %s", cmd, err, out)
		}
		return err
	})
	return string(out), err
}

// onOwnThread runs f on a thread that no other goroutine ever uses: it is locked and never unlocked, so it ends
// with its goroutine. Network namespaces belong to threads.
func onOwnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		done <- f()
	}()
	return <-done
}

// testNetwork is the client, the director and the real servers, each in its own namespace.
type testNetwork struct {
	client   *namespace
	director *namespace
	reals    [len(realServers)]*namespace
}

// buildNetwork joins the client to the director by a veth pair, and the real servers to a bridge in the director.
// The real servers' default route leads through the director: masquerading needs to see the replies.
func buildNetwork() (*testNetwork, error) {
	n := &testNetwork{}
	all := []**namespace{&n.client, &n.director, &n.reals[0], &n.reals[1], &n.reals[2]}
	for _, ns := range all {
		var err error
		if *ns, err = newNamespace(); err != nil {
			return nil, err
		}
	}
	if err := n.director.enter(n.setUpDirector); err != nil {
		return nil, fmt.Errorf("director: %w", err)
	}
	clientAddresses := append([]netip.Addr{clientAddress6}, clientAddresses4...)
	err := n.client.enter(func() error { return setUpHost(clientAddresses, clientGateway4, clientGateway6) })
	if err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	for i, real := range realServers {
		addresses := []netip.Addr{real.address4, real.address6}
		err := n.reals[i].enter(func() error { return setUpHost(addresses, realGateway4, realGateway6) })
		if err != nil {
			return nil, fmt.Errorf("%s: %w", real.name, err)
		}
	}
	return n, nil
}

func (n *testNetwork) setUpDirector() error {
	if err := netlink.LinkAdd(vethInto(n.client, "client", 0)); err != nil {
		return fmt.Errorf("veth pair to the client: %w", err)
	}
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "reals"}}
	if err := netlink.LinkAdd(bridge); err != nil {
		return fmt.Errorf("bridge: %w", err)
	}
	for i, ns := range n.reals {
		name := realServers[i].name
		if err := netlink.LinkAdd(vethInto(ns, name, bridge.Index)); err != nil {
			return fmt.Errorf("veth pair to %s: %w", name, err)
		}
		if err := configureLink(name); err != nil {
			return err
		}
	}
	if err := configureLink("client", clientGateway4, clientGateway6); err != nil {
		return err
	}
	if err := configureLink("reals", realGateway4, realGateway6); err != nil {
		return err
	}
	// The virtual addresses are the director's own: IPVS handles packets that are for this machine.
	if err := configureLink("lo", virtualAddress4, virtualAddress6); err != nil {
		return err
	}
	for _, setting := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/"+setting, []byte("1"), 0); err != nil {
			return err
		}
	}
	return nil
}

// setUpHost configures the client or a real server: its addresses, and everything else through the gateways.
func setUpHost(addresses []netip.Addr, gateways ...netip.Addr) error {
	if err := configureLink("lo"); err != nil {
		return err
	}
	if err := configureLink("eth0", addresses...); err != nil {
		return err
	}
	for _, gateway := range gateways {
		if err := netlink.RouteAdd(&netlink.Route{Gw: gateway.AsSlice()}); err != nil {
			return fmt.Errorf("default route via %s: %w", gateway, err)
		}
	}
	return nil
}

// vethInto describes a veth pair: one end here, named name, and one in the namespace ns, named eth0.
func vethInto(ns *namespace, name string, bridge int) *netlink.Veth {
	return &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: name, MasterIndex: bridge},
		PeerName:      "eth0",
		PeerNamespace: netlink.NsFd(ns.file.Fd()),
	}
}

// configureLink brings a link up and gives it addresses: on lo single ones, elsewhere with their network.
func configureLink(name string, addresses ...netip.Addr) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("link %s up: %w", name, err)
	}
	for _, address := range addresses {
		ones := 24
		switch {
		case name == "lo":
			ones = address.BitLen()
		case address.Is6():
			ones = 64
		}
		a := &netlink.Addr{
			IPNet: &net.IPNet{IP: address.AsSlice(), Mask: net.CIDRMask(ones, address.BitLen())},
			Flags: unix.IFA_F_NODAD, // usable at once, since nobody else has this address
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return fmt.Errorf("address %s on %s: %w", address, name, err)
		}
	}
	return nil
}
