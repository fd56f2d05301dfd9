package ipvs

import (
	"encoding/binary"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Tests with real traffic, and of the parts of the protocol beyond services and
// destinations.

// counters are those that only increase: connections, packets in and out, bytes in and
// out; the order is ipvsadm's.
type counters [5]uint64

func countersOf(s Stats64) counters {
	return counters{s.Connections, s.PacketsIn, s.PacketsOut, s.BytesIn, s.BytesOut}
}

// ratesOf are the others, in ipvsadm's order.
func ratesOf(s Stats64) counters { return counters{s.CPS, s.PPSIn, s.PPSOut, s.BPSIn, s.BPSOut} }

func widened(s SvcStats) Stats64 {
	return Stats64{
		Connections: uint64(s.Connections), PacketsIn: uint64(s.PacketsIn), PacketsOut: uint64(s.PacketsOut),
		BytesIn: s.BytesIn, BytesOut: s.BytesOut, CPS: uint64(s.CPS), BPSOut: uint64(s.BPSOut),
		PPSIn: uint64(s.PPSIn), PPSOut: uint64(s.PPSOut), BPSIn: uint64(s.BPSIn),
	}
}

// statsOf reads the counters of a service and of its one destination, and
// compares the 32-bit with the 64-bit ones.
func statsOf(t *testing.T, i *Handle, s *Service) (service, dest Stats64) {
	t.Helper()
	gotService := mustGet(i.GetService(s))(t)
	gotDests := mustGet(i.GetDestinations(s))(t)
	if len(gotDests) != 1 {
		t.Fatalf("%d destinations, want 1", len(gotDests))
	}
	gotDest := gotDests[0]
	if got := widened(gotService.Stats); got != gotService.Stats64 {
		t.Errorf("service: in 32 bits %+v, in 64 bits %+v", got, gotService.Stats64)
	}
	if got := widened(SvcStats(gotDest.Stats)); got != gotDest.Stats64 {
		t.Errorf("destination: in 32 bits %+v, in 64 bits %+v", got, gotDest.Stats64)
	}
	return gotService.Stats64, gotDest.Stats64
}

// sameAsIpvsadm compares counters or rates of a service and its destination with
// ipvsadm's; it reads the library's before and after, until they stand still.
func sameAsIpvsadm(t *testing.T, n *network, s *Service, d *Destination, of func(Stats64) counters, option string) (service, dest counters) {
	t.Helper()
	addresses := []string{hostPort(s.Address.String(), s.Port), hostPort(d.Address.String(), d.Port)}
	read := func() [2]counters {
		service, dest := statsOf(t, n.ipvs, s)
		return [2]counters{of(service), of(dest)}
	}
	var got, adm [2]counters
	still := false
	eventually(func() bool {
		got = read()
		rows := ipvsadmNumbers(t, n.director, addresses, len(counters{}), option, "--exact")
		adm = [2]counters{counters(rows[0]), counters(rows[1])}
		still = got == read()
		return still
	})
	if !still {
		t.Errorf("%s of %v do not stand still", option, addresses)
	}
	if got != adm {
		t.Errorf("%s of %v: %v, ipvsadm has %v", option, addresses, got, adm)
	}
	return got[0], got[1]
}

// wantCounters compares the counters of a service and its destination with those
// wanted and with ipvsadm's.
func wantCounters(t *testing.T, n *network, s *Service, d *Destination, want counters) {
	t.Helper()
	// The kernel adds up its processors' counters every two seconds.
	eventually(func() bool {
		service, dest := statsOf(t, n.ipvs, s)
		return countersOf(service) == want && countersOf(dest) == want
	})
	if service, dest := sameAsIpvsadm(t, n, s, d, countersOf, "--stats"); service != want || dest != want {
		t.Errorf("counters of %v and its destination: %v, %v, want %v", s.Address, service, dest, want)
	}
}

// Counters are exactly those of the traffic, in 32 and 64 bits, of services and
// destinations, and those that ipvsadm prints; they can be set to zero.
func TestKernelCounters(t *testing.T) {
	n := newNetwork(t)
	const answer = "an answer that is longer than any request, so that no two counters of the test can be the same by chance"
	type target struct {
		s        *Service
		d        *Destination
		client   string
		overhead uint64 // of a UDP datagram: IP and UDP header
		want     counters
	}
	newTarget := func(protocol uint16, client, virtual, real string, port uint16, overhead uint64) *target {
		x := &target{client: client, overhead: overhead,
			s: &Service{Address: net.ParseIP(virtual), Protocol: protocol, Port: port, SchedName: RoundRobin, Netmask: 0xFFFFFFFF},
			d: &Destination{Address: net.ParseIP(real), Port: 1000 + port, Weight: 1}}
		if strings.Contains(virtual, ":") {
			x.s.Netmask = 128
		}
		must(t, n.ipvs.NewService(x.s))
		must(t, n.ipvs.NewDestination(x.s, x.d))
		serve := serveUDP
		if protocol == unix.IPPROTO_TCP {
			serve = serveTCP
		}
		serve(t, n.real, hostPort(real, x.d.Port), answer)
		return x
	}
	to := func(x *target) string { return hostPort(x.s.Address.String(), x.s.Port) }

	udp := []*target{
		newTarget(unix.IPPROTO_UDP, client4, virtual4, real4, 53, 20+8),
		newTarget(unix.IPPROTO_UDP, client6, virtual6, real6, 54, 40+8),
	}
	const sockets, answered, unanswered = 4, 3, 2
	for _, x := range udp {
		request := "?" + strings.Repeat("x", 60)
		const silent = "no answer"
		for range sockets {
			c := dial(t, n.client, "udp", x.client, to(x))
			for range unanswered {
				if _, err := c.Write([]byte(silent)); err != nil {
					t.Fatal(err)
				}
			}
			for range answered {
				ask(t, c, request, answer)
			}
		}
		x.want = counters{sockets, sockets * (answered + unanswered), sockets * answered,
			sockets * (answered*(x.overhead+uint64(len(request))) + unanswered*(x.overhead+uint64(len(silent)))),
			sockets * answered * (x.overhead + uint64(len(answer)))}
	}
	tcp := newTarget(unix.IPPROTO_TCP, client4, virtual4, real4, 80, 0)
	for range sockets {
		c := dial(t, n.client, "tcp", tcp.client, to(tcp))
		for range answered {
			ask(t, c, "question\n", answer+"\n")
		}
		must(t, c.Close())
	}

	for _, x := range udp {
		wantCounters(t, n, x.s, x.d, x.want)
	}
	// The number of packets is up to TCP, but not the number of connections.
	eventually(func() bool { s, _ := statsOf(t, n.ipvs, tcp.s); return s.Connections == sockets })
	got, dest := sameAsIpvsadm(t, n, tcp.s, tcp.d, countersOf, "--stats")
	if got != dest {
		t.Errorf("TCP: service %v, destination %v", got, dest)
	}
	const headers = 20 + 20
	least := counters{sockets, sockets * (answered + 3), sockets * (answered + 2),
		uint64(sockets*answered*len("question\n")) + headers*got[1], uint64(sockets*answered*len(answer+"\n")) + headers*got[2]}
	for k := range got {
		if got[k] < least[k] || k == 0 && got[k] != least[k] {
			t.Errorf("TCP: %v, want %d connections, and of the rest at least %v", got, sockets, least)
		}
	}

	// One service and its destination are set to zero, and no other.
	must(t, n.ipvs.ZeroService(&Service{Address: udp[0].s.Address, Protocol: udp[0].s.Protocol, Port: udp[0].s.Port}))
	wantCounters(t, n, udp[0].s, udp[0].d, counters{})
	wantCounters(t, n, udp[1].s, udp[1].d, udp[1].want)
	must(t, n.ipvs.Zero())
	for _, x := range append(udp, tcp) {
		wantCounters(t, n, x.s, x.d, counters{})
	}

	// It continues to count from there, and the rates are the current ones.
	x := udp[1]
	var sent uint64
	eventually(func() bool {
		for range 20 {
			c := dial(t, n.client, "udp", x.client, to(x))
			if _, err := c.Write([]byte("!")); err != nil {
				t.Fatal(err)
			}
			ask(t, c, "?", answer)
			sent++
		}
		service, dest := statsOf(t, n.ipvs, x.s)
		return service.CPS > 0 && dest.CPS > 0
	})
	wantCounters(t, n, x.s, x.d, counters{sent, 2 * sent, sent, sent * 2 * (x.overhead + 1), sent * (x.overhead + uint64(len(answer)))})
	service, dest := sameAsIpvsadm(t, n, x.s, x.d, ratesOf, "--rate")
	for _, r := range []counters{service, dest} {
		// Otherwise the comparison proves nothing.
		if r[0] == 0 || r[1] <= r[2] || r[2] == 0 || r[3] == 0 || r[4] <= r[3] {
			t.Errorf("rates %v, want all above zero, more packets in than out and fewer bytes", r)
		}
	}
	must(t, n.ipvs.Zero())
	if service, dest := statsOf(t, n.ipvs, x.s); service != (Stats64{}) || dest != (Stats64{}) {
		t.Errorf("after Zero: %+v, %+v, want no counters and no rates", service, dest)
	}
	if err := n.ipvs.ZeroService(&Service{Address: net.ParseIP("192.0.2.99"), Protocol: 6, Port: 1}); err != error(syscall.ESRCH) {
		t.Errorf("ZeroService of none: %v, want ESRCH", err)
	}
}

// hostPort is for a port in a field of the library's.
func hostPort(host string, port uint16) string { return net.JoinHostPort(host, fmt.Sprint(port)) }

// Tunnels carry traffic, and wrap packets in what TunnelType, TunnelPort and
// TunnelFlags say.
func TestKernelTunnel(t *testing.T) {
	n := newNetwork(t)
	// Some of them may be built in, or loaded automatically.
	exec.Command("modprobe", "-a", "ipip", "ip_gre", "fou").Run()
	// Replies come from the virtual address. They go straight to the client: the
	// director would not accept packets from one of its own addresses.
	iproute(t, n.client, linkTo("direct", n.real, "direct"), "addr add 10.8.0.1/24 dev direct", "link set direct up")
	iproute(t, n.real,
		"addr add 10.8.0.2/24 dev direct", "link set direct up",
		"route add 192.0.2.0/24 via 10.8.0.1",
		"addr add "+virtual4+"/32 dev lo")
	for _, ns := range []netns.NsHandle{n.client, n.real} {
		sysctl(t, ns, "net/ipv4/conf/all/rp_filter", "0")
		sysctl(t, ns, "net/ipv4/conf/default/rp_filter", "0")
	}
	sysctl(t, n.client, "net/ipv4/conf/direct/rp_filter", "0")

	const port, guePort = 53, 6080
	const request, answer = "? who is there", "the real server"
	serveUDP(t, n.real, hostPort(virtual4, port), answer)
	s := &Service{Address: net.ParseIP(virtual4), Protocol: unix.IPPROTO_UDP, Port: port, SchedName: RoundRobin, Netmask: 0xFFFFFFFF}
	d := &Destination{Address: net.ParseIP(real4), Port: port, Weight: 1, ConnectionFlags: ConnectionFlagTunnel}
	must(t, n.ipvs.NewService(s))
	must(t, n.ipvs.NewDestination(s, d))
	tap := tapIPv4(t, n.real, "director")

	gue := func(checksum bool, words byte) func(header []byte) bool {
		return func(h []byte) bool { // UDP header, then GUE's: version, control bit and words of options; protocol
			return binary.BigEndian.Uint16(h[2:]) == guePort && (binary.BigEndian.Uint16(h[6:]) != 0) == checksum &&
				h[8] == words && h[9] == unix.IPPROTO_IPIP
		}
	}
	gre := func(flags uint16) func(header []byte) bool {
		return func(h []byte) bool {
			return binary.BigEndian.Uint16(h) == flags && binary.BigEndian.Uint16(h[2:]) == unix.ETH_P_IP
		}
	}
	const remote = " local " + real4 + " remote " + director4
	const ipip = "link add tunnel type ipip" + remote
	tests := []struct {
		name     string
		link     string // of the real server
		kind     uint8
		flags    uint16
		protocol byte // of the outer IP header
		wrapped  func(header []byte) bool
	}{
		{"IPIP", ipip, TunnelIPIP, 0, unix.IPPROTO_IPIP, func(h []byte) bool { return h[0] == 0x45 }},
		{"GUE", ipip, TunnelGUE, TunnelFlagNoChecksum, unix.IPPROTO_UDP, gue(false, 0)},
		{"GUE, checksum", ipip, TunnelGUE, TunnelFlagChecksum, unix.IPPROTO_UDP, gue(true, 0)},
		{"GUE, remote checksum", ipip, TunnelGUE, TunnelFlagRemoteChecksum, unix.IPPROTO_UDP, gue(true, 2)},
		{"GRE", "link add tunnel type gre" + remote, TunnelGRE, TunnelFlagNoChecksum, unix.IPPROTO_GRE, gre(0)},
		{"GRE, checksum", "link add tunnel type gre icsum" + remote, TunnelGRE, TunnelFlagChecksum, unix.IPPROTO_GRE, gre(0x8000)},
	}
	iproute(t, n.real, fmt.Sprintf("fou add port %d gue", guePort))
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			iproute(t, n.real, test.link, "link set tunnel up")
			defer iproute(t, n.real, "link del tunnel")
			d.TunnelType, d.TunnelFlags, d.TunnelPort = test.kind, test.flags, 0
			if test.kind == TunnelGUE {
				d.TunnelPort = guePort
			}
			must(t, n.ipvs.UpdateDestination(s, d))
			c := dial(t, n.client, "udp", client4, hostPort(virtual4, port))
			ask(t, c, request, answer)

			packet := tunnelled(t, tap)
			if packet[9] != test.protocol || !test.wrapped(packet[20:]) {
				t.Errorf("outer protocol %d, then % x", packet[9], packet[20:])
			}
			if !strings.HasSuffix(string(packet), request) {
				t.Errorf("%q does not end with the request", packet)
			}
		})
	}
	// IPVS counts the inner packets, and does not see the replies.
	wantCounters(t, n, s, d, counters{uint64(len(tests)), uint64(len(tests)), 0, uint64(len(tests) * (28 + len(request))), 0})
}

// tunnelled returns the next packet from the director that a tap saw. ICMP is the
// director's answer to what the tunnel's other end sends by itself.
func tunnelled(t *testing.T, tap int) []byte {
	t.Helper()
	packet := make([]byte, 2048)
	for deadline := time.Now().Add(trafficTimeout); time.Now().Before(deadline); {
		n, _, err := unix.Recvfrom(tap, packet, 0)
		if err == unix.EAGAIN || err == unix.EINTR {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		must(t, err)
		if n > 32 && packet[0] == 0x45 && packet[9] != unix.IPPROTO_ICMP && net.IP(packet[12:16]).String() == director4 && net.IP(packet[16:20]).String() == real4 {
			return packet[:n]
		}
	}
	t.Fatal("no packet from the director")
	return nil
}

// A persistent service has an entry for each client.
func TestKernelPersistentConnections(t *testing.T) {
	n := newNetwork(t)
	const second4 = "192.0.2.3"
	iproute(t, n.client, "addr add "+second4+"/24 dev director")
	s := &Service{Address: net.ParseIP(virtual4), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin,
		Flags: ServiceFlagPersistent, Timeout: 300, Netmask: 0xFFFFFFFF}
	must(t, n.ipvs.NewService(s))
	must(t, n.ipvs.NewDestination(s, &Destination{Address: net.ParseIP(real4), Port: 8080, Weight: 3}))
	serveTCP(t, n.real, net.JoinHostPort(real4, "8080"), "answer")
	to := net.JoinHostPort(virtual4, "80")
	for _, from := range []string{client4, client4, client4, second4, second4} {
		ask(t, dial(t, n.client, "tcp", from, to), "question\n", "answer\n")
	}
	// They are open until the end of the test.
	dests := mustGet(n.ipvs.GetDestinations(s))(t)
	if len(dests) != 1 {
		t.Fatalf("%d destinations, want 1", len(dests))
	}
	d := dests[0]
	got := []uint64{uint64(d.Weight), uint64(d.PersistentConnections), uint64(d.ActiveConnections), uint64(d.InactiveConnections)}
	if want := []uint64{3, 2, 5, 0}; !slices.Equal(got, want) {
		t.Errorf("weight, persistent, active and inactive connections: %v, want %v", got, want)
	}
	if adm := ipvsadmNumbers(t, n.director, []string{net.JoinHostPort(real4, "8080")}, 4, "--persistent-conn")[0]; !slices.Equal(got, adm) {
		t.Errorf("weight, persistent, active and inactive connections: %v, ipvsadm prints %v", got, adm)
	}
}
