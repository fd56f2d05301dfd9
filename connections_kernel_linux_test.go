package ipvs

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// listConnections reads the whole table.
func listConnections(t *testing.T, i *Handle) (all []Connection) {
	t.Helper()
	for c, err := range i.Connections() {
		must(t, err)
		all = append(all, *c)
	}
	return all
}

// asIpvsadm writes a connection, but for its time, with the fields of a line of
// ipvsadm -Lnc.
func asIpvsadm(c Connection) string {
	protocols := map[uint16]string{unix.IPPROTO_IP: "IP", unix.IPPROTO_TCP: "TCP", unix.IPPROTO_UDP: "UDP", unix.IPPROTO_SCTP: "SCTP"}
	return strings.TrimSpace(fmt.Sprintf("%s %s %v %v %v %s %s", protocols[c.Protocol], c.State, c.Client, c.Virtual, c.Destination, c.PEName, c.PEData))
}

// ipvsadmConnections returns the lines of ipvsadm -Lnc without the time, and the
// time for each.
func ipvsadmConnections(t *testing.T, ns netns.NsHandle) (lines map[string]time.Duration) {
	t.Helper()
	lines = map[string]time.Duration{}
	for _, line := range strings.Split(strings.TrimSpace(ipvsadm(t, ns, "-Lnc", "--persistent-conn")), "\n")[2:] {
		f := strings.Fields(line)
		var minutes, seconds int
		if _, err := fmt.Sscanf(f[1], "%d:%d", &minutes, &seconds); err != nil {
			t.Fatalf("%v in %q", err, line)
		}
		lines[strings.Join(slices.Delete(f, 1, 2), " ")] = time.Duration(60*minutes+seconds) * time.Second
	}
	return lines
}

// wantAsIpvsadm compares the connections with what ipvsadm lists in every field.
// Their times run down meanwhile: ipvsadm's is between two of the library's.
func wantAsIpvsadm(t *testing.T, i *Handle, ns netns.NsHandle, refresh func()) {
	t.Helper()
	times := func() map[string]time.Duration {
		lines := map[string]time.Duration{}
		for _, c := range listConnections(t, i) {
			lines[asIpvsadm(c)] = c.Expires
		}
		return lines
	}
	var before, want, after map[string]time.Duration
	if !eventually(func() bool {
		refresh()
		before, want, after = times(), ipvsadmConnections(t, ns), times()
		same := len(before) == len(want) && len(after) == len(want)
		for line, expires := range want {
			first, ok1 := before[line]
			last, ok2 := after[line]
			same = same && ok1 && ok2 && last <= expires && expires <= first
		}
		return same
	}) {
		t.Errorf("got\n%v\nthen\n%v\nipvsadm has\n%v", before, after, want)
	}
}

// holdTCP accepts connections, until the test ends, and reads what comes.
func holdTCP(t *testing.T, ns netns.NsHandle, address string) {
	t.Helper()
	var server net.Listener
	var err error
	within(t, ns, func() { server, err = net.Listen("tcp", address) })
	must(t, err)
	t.Cleanup(func() { server.Close() })
	go func() {
		for {
			c, err := server.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
			go io.Copy(io.Discard, c)
		}
	}()
}

// sendSCTP sends the packet that opens an SCTP association.
func sendSCTP(t *testing.T, ns netns.NsHandle, from, to string, fromPort, toPort uint16) {
	t.Helper()
	p := binary.BigEndian.AppendUint16(nil, fromPort)
	p = binary.BigEndian.AppendUint16(p, toPort)
	p = append(p, 0, 0, 0, 0, 0, 0, 0, 0) // no tag yet; the checksum
	p = append(p, 1, 0, 0, 20)            // INIT
	p = append(p, 0, 0, 0, 1, 0, 1, 0, 0) // tag, window
	p = append(p, 0, 1, 0, 1, 0, 0, 0, 1) // streams out and in, sequence number
	sum := crc32.Checksum(p, crc32.MakeTable(crc32.Castagnoli))
	binary.LittleEndian.PutUint32(p[8:], sum)
	within(t, ns, func() {
		c, err := net.DialIP("ip:sctp", &net.IPAddr{IP: net.ParseIP(from)}, &net.IPAddr{IP: net.ParseIP(to)})
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		if _, err := c.Write(p); err != nil {
			t.Error(err)
		}
	})
}

// Connections of all kinds are those that the traffic made, and what ipvsadm lists.
func TestKernelConnections(t *testing.T) {
	n := newNetwork(t)
	if got := listConnections(t, n.ipvs); len(got) != 0 {
		t.Fatalf("a new namespace has connections: %v", got)
	}
	exec.Command("modprobe", "ip_vs_pe_sip").Run() // else the kernel does
	backupNS := newNamespace(t)
	quickIPv6(t, backupNS)
	iproute(t, n.director, linkTo("sync", backupNS, "sync"), "addr add 10.9.0.1/24 dev sync", "link set sync up")
	iproute(t, backupNS, "addr add 10.9.0.2/24 dev sync", "link set sync up")
	backup := openIn(t, backupNS)
	stopDaemons(t, n.ipvs)
	stopDaemons(t, backup)
	daemon := Daemon{State: DaemonMaster, MulticastInterface: "sync", SyncID: 9, MulticastGroup: net.IPv4(239, 1, 2, 4)}
	startDaemon(t, n.ipvs, daemon)
	daemon.State = DaemonBackup
	startDaemon(t, backup, daemon)

	addrPort := func(host string, port uint16) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr(host), port)
	}
	var want []Connection // without how long they stay
	add := func(protocol uint16, client, virtual, dest netip.AddrPort, state, engine, data string) {
		want = append(want, Connection{protocol, client, virtual, dest, state, 0, engine, data})
	}
	type path struct{ client, virtual, real string }
	paths := []path{{client4, virtual4, real4}, {client6, virtual6, real6}}
	service := func(p path, protocol, port uint16, change func(*Service, *Destination)) {
		s := &Service{Address: net.ParseIP(p.virtual), Protocol: protocol, Port: port, SchedName: RoundRobin, Netmask: 0xFFFFFFFF}
		if strings.Contains(p.virtual, ":") {
			s.Netmask = 128
		}
		d := &Destination{Address: net.ParseIP(p.real), Port: port, Weight: 1}
		if change != nil {
			change(s, d)
		}
		must(t, n.ipvs.NewService(s))
		must(t, n.ipvs.NewDestination(s, d))
	}
	send := func(p path, port uint16, text string) (client netip.AddrPort) {
		c := dial(t, n.client, "udp", p.client, hostPort(p.virtual, port))
		if _, err := c.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		return c.LocalAddr().(*net.UDPAddr).AddrPort()
	}
	persistent := func(prefix4, prefix6 int) func(s *Service, d *Destination) {
		return func(s *Service, d *Destination) {
			s.Flags, s.Timeout = ServiceFlagPersistent, 1000
			s.Netmask = uint32(prefix6)
			if s.AddressFamily == unix.AF_INET || s.Address.To4() != nil {
				s.Netmask = ipv4Mask(prefix4)
			}
		}
	}
	const callID = "a84b4c76e66710@"
	for _, p := range paths {
		// UDP by each method.
		for port, method := range map[uint16]uint32{53: ConnectionFlagMasq, 54: ConnectionFlagTunnel, 55: ConnectionFlagDirectRoute} {
			service(p, unix.IPPROTO_UDP, port, func(s *Service, d *Destination) { d.ConnectionFlags = method })
			add(unix.IPPROTO_UDP, send(p, port, "hello"), addrPort(p.virtual, port), addrPort(p.real, port), "UDP", "", "")
		}

		// A SIP call is known by its Call-ID.
		service(p, unix.IPPROTO_UDP, 5060, func(s *Service, d *Destination) { persistent(32, 128)(s, d); s.PEName = "sip" })
		from := send(p, 5060, "INVITE sip:bob@example.com SIP/2.0\r\nVia: SIP/2.0/UDP client\r\nCall-ID: "+callID+p.client+"\r\n\r\n")
		add(unix.IPPROTO_UDP, from, addrPort(p.virtual, 5060), addrPort(p.real, 5060), "UDP", "", "")
		add(unix.IPPROTO_UDP, netip.AddrPortFrom(from.Addr(), 0), addrPort(p.virtual, 5060), addrPort(p.real, 5060), "NONE", "sip", callID+p.client)

		// The persistence of a firewall mark.
		tables := "iptables"
		if strings.Contains(p.client, ":") {
			tables = "ip6tables"
		}
		within(t, n.director, func() {
			if out, err := exec.Command(tables, "-t", "mangle", "-A", "PREROUTING", "-p", "udp", "--dport", "77", "-j", "MARK", "--set-mark", "258").CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
		service(p, 0, 0, func(s *Service, d *Destination) {
			s.FWMark, s.AddressFamily, s.Address = 258, uint16(familyOfText(p.virtual)), nil
			persistent(32, 128)(s, d)
		})
		add(unix.IPPROTO_UDP, send(p, 77, "marked"), addrPort(p.virtual, 77), addrPort(p.real, 77), "UDP", "", "")
		mark := "0.0.1.2"
		if strings.Contains(p.client, ":") {
			mark = "0:102::"
		}
		add(unix.IPPROTO_IP, addrPort(p.client, 0), addrPort(mark, 0), addrPort(p.real, 0), "NONE", "", "")
	}
	var open []net.Conn
	for _, p := range paths {
		// TCP, established, persistent with a netmask.
		service(p, unix.IPPROTO_TCP, 80, persistent(24, 64))
		holdTCP(t, n.real, hostPort(p.real, 80))
		c := dial(t, n.client, "tcp", p.client, hostPort(p.virtual, 80))
		open = append(open, c)
		add(unix.IPPROTO_TCP, c.LocalAddr().(*net.TCPAddr).AddrPort(), addrPort(p.virtual, 80), addrPort(p.real, 80), "ESTABLISHED", "", "")
		bits := 24
		if strings.Contains(p.client, ":") {
			bits = 64
		}
		network := netip.PrefixFrom(netip.MustParseAddr(p.client), bits).Masked().Addr()
		add(unix.IPPROTO_TCP, netip.AddrPortFrom(network, 0), addrPort(p.virtual, 80), addrPort(p.real, 80), "ASSURED", "", "")

		service(p, unix.IPPROTO_SCTP, 3868, nil)
		add(unix.IPPROTO_SCTP, addrPort(p.client, 4000), addrPort(p.virtual, 3868), addrPort(p.real, 3868), "INIT1", "", "")
	}
	// A first SCTP packet counts for three seconds only.
	refresh := func() {
		for _, p := range paths {
			sendSCTP(t, n.client, p.client, p.virtual, 4000, 3868)
		}
		for _, c := range open { // the third packet of a connection is the first to be synchronised
			if _, err := c.Write([]byte("hello\n")); err != nil {
				t.Error(err)
			}
		}
	}
	var have []string
	wanted := make([]string, 0, len(want))
	for _, c := range want {
		wanted = append(wanted, asIpvsadm(c))
	}
	slices.Sort(wanted)
	if !eventually(func() bool {
		refresh()
		have = nil
		for _, c := range listConnections(t, n.ipvs) {
			have = append(have, asIpvsadm(c))
			if c.Expires <= 0 || c.Expires > 1000*time.Second {
				t.Errorf("%s expires after %v", asIpvsadm(c), c.Expires)
			}
		}
		slices.Sort(have)
		return slices.Equal(have, wanted)
	}) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(have, "\n"), strings.Join(wanted, "\n"))
	}
	wantAsIpvsadm(t, n.ipvs, n.director, refresh)

	// The backup has the connections, and what persistence knows.
	synced := []string{
		asIpvsadm(Connection{unix.IPPROTO_TCP, open[0].LocalAddr().(*net.TCPAddr).AddrPort(), addrPort(virtual4, 80), addrPort(real4, 80), "ESTABLISHED", 0, "", ""}),
		asIpvsadm(Connection{unix.IPPROTO_UDP, addrPort(client6, 0), addrPort(virtual6, 5060), addrPort(real6, 5060), "NONE", 0, "sip", callID + client6}),
	}
	if !eventually(func() bool {
		refresh()
		have = nil
		for _, c := range listConnections(t, backup) {
			have = append(have, asIpvsadm(c))
		}
		return slices.Contains(have, synced[0]) && slices.Contains(have, synced[1])
	}) {
		t.Errorf("the backup has\n%s\nwant also\n%s", strings.Join(have, "\n"), strings.Join(synced, "\n"))
	}
	wantAsIpvsadm(t, backup, backupNS, func() {})
}

func familyOfText(address string) int {
	if strings.Contains(address, ":") {
		return unix.AF_INET6
	}
	return unix.AF_INET
}
