package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Connections of all kinds are those of the traffic, and those that ipvsadm lists.
func TestKernelConnections(t *testing.T) {
	n := newNetwork(t)
	if got := listConnections(t, n.ipvs); len(got) != 0 {
		t.Fatalf("a new namespace has connections: %v", got)
	}
	exec.Command("modprobe", "ip_vs_pe_sip").Run() // otherwise the kernel loads it
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
		acceptTCP(t, n.real, hostPort(p.real, 80), func(c net.Conn) { io.Copy(io.Discard, c) })
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

	// The backup has the connections and the persistence templates.
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

// listConnections reads the whole table.
func listConnections(t *testing.T, i *Handle) (all []Connection) {
	t.Helper()
	for c, err := range i.Connections() {
		must(t, err)
		all = append(all, *c)
	}
	return all
}

// asIpvsadm writes a connection, except for its time, with the fields of a line of
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

// wantAsIpvsadm compares every field of the connections with the output of ipvsadm.
// Their times decrease meanwhile: ipvsadm's is between two of the library's.
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

func familyOfText(address string) int {
	if strings.Contains(address, ":") {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// flood makes n connections of UDP clients that do not exist.
func flood(t *testing.T, ns netns.NsHandle, n int) {
	t.Helper()
	var err error
	within(t, ns, func() {
		var fd int
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW); err != nil {
			return
		}
		defer unix.Close(fd)
		to := &unix.SockaddrInet4{Addr: [4]byte{203, 0, 113, 1}}
		p := make([]byte, 20+8)
		p[0], p[8], p[9] = 0x45, 64, unix.IPPROTO_UDP
		copy(p[16:], to.Addr[:])
		binary.BigEndian.PutUint16(p[2:], uint16(len(p)))
		binary.BigEndian.PutUint16(p[22:], 53)
		binary.BigEndian.PutUint16(p[24:], 8)
		for k := range n {
			binary.BigEndian.PutUint32(p[12:], 10<<24|uint32(k/50_000+1))
			binary.BigEndian.PutUint16(p[20:], uint16(k%50_000+1024)) // port 20, of FTP's data, is not scheduled
			if err = unix.Sendto(fd, p, 0, to); err != nil {
				return
			}
		}
	})
	must(t, err)
}

// manyConnections is a namespace with n connections.
func manyConnections(t *testing.T, n int) (*Handle, netns.NsHandle) {
	t.Helper()
	i, ns := newKernelHandle(t)
	holdHooks()
	iproute(t, ns, "link add sink type dummy", "addr add "+virtual4+"/32 dev lo", "addr add "+director4+"/24 dev sink", "link set sink up")
	s := &Service{Address: net.ParseIP(virtual4), Protocol: unix.IPPROTO_UDP, Port: 53, SchedName: RoundRobin}
	must(t, i.NewService(s))
	must(t, i.NewDestination(s, &Destination{Address: net.ParseIP(real4), Port: 53, Weight: 1, ConnectionFlags: ConnectionFlagDirectRoute}))
	start := time.Now()
	flood(t, ns, n)
	t.Logf("%d connections made in %v", n, time.Since(start))
	return i, ns
}

// A long table is read in memory that does not depend on its length, and each
// entry comes once if nothing changes. The kernel's time grows with the square of
// the length: IPVS_TEST_CONNECTIONS=200000 takes an emulated machine many minutes.
func TestKernelConnectionsMany(t *testing.T) {
	n := 10_000
	if text := os.Getenv("IPVS_TEST_CONNECTIONS"); text != "" {
		n = mustGet(strconv.Atoi(text))(t)
	}
	i, _ := manyConnections(t, n)
	before := descriptors(t)
	var memory runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&memory)
	heap := memory.HeapAlloc
	seen := make([]bool, n)
	count, start := 0, time.Now()
	for c, err := range i.Connections() {
		must(t, err)
		a := c.Client.Addr().As4()
		k := (int(a[3])-1)*50_000 + int(c.Client.Port()) - 1024
		if c.Protocol != unix.IPPROTO_UDP || k < 0 || k >= n || seen[k] {
			t.Fatalf("entry %d: %+v, unexpected or seen already", count, c)
		}
		seen[k] = true
		if count++; count == n {
			runtime.GC()
			runtime.ReadMemStats(&memory)
		}
	}
	t.Logf("read in %v", time.Since(start))
	if count != n {
		t.Errorf("%d entries, want %d; the first missing is %d", count, n, slices.Index(seen, false))
	}
	if grown := int64(memory.HeapAlloc) - int64(heap) - int64(n); grown > 1<<20 {
		t.Errorf("%d bytes more are in use at the last entry", grown)
	}
	if left := opened(t, before); len(left) > 0 {
		t.Errorf("descriptors left open: %v", left)
	}
}

// A loop may end early, by break or by a panic; Close ends one too. Nothing stays
// open, and no thread is left elsewhere.
func TestKernelConnectionsEarly(t *testing.T) {
	const n = 2000
	i, ns := manyConnections(t, n)
	before := descriptors(t)
	for range i.Connections() {
		break
	}
	func() {
		defer func() { recover() }()
		for range i.Connections() {
			panic("the loop's own")
		}
	}()
	other := openIn(t, ns)
	turns := 0
	var last error
	for c, err := range other.Connections() {
		if turns++; turns == 10 {
			other.Close()
		}
		if last = err; err == nil && c.Destination != netip.AddrPortFrom(netip.MustParseAddr(real4), 53) {
			t.Errorf("%+v", c)
		}
	}
	if turns != 11 || !errors.Is(last, ErrClosed) {
		t.Errorf("closed in turn 10: %d turns, %v", turns, last)
	}
	if left := opened(t, before); len(left) > 0 {
		t.Errorf("descriptors left open: %v", left)
	}
	if stray := strayThreads(t); len(stray) > 0 {
		t.Errorf("threads left in another namespace: %v", stray)
	}
}

// A table that changes meanwhile, and calls of the handle inside the loop, do not
// disturb the reading: every entry that existed throughout is yielded, except for those
// that the kernel skips, and no entry is damaged.
func TestKernelConnectionsChanging(t *testing.T) {
	const n = 1000
	i, ns := manyConnections(t, n)
	done := make(chan struct{})
	go func() {
		defer close(done)
		flood(t, ns, 4*n) // those that there are, and as many again
	}()
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		count := 0
		for c, err := range i.Connections() {
			must(t, err)
			if c.Client.Port() == 0 || c.Destination != netip.AddrPortFrom(netip.MustParseAddr(real4), 53) || c.State != "UDP" {
				t.Fatalf("%+v", c)
			}
			if count++; count%500 == 0 {
				mustGet(i.GetServices())(t)
			}
		}
		if count < n/2 && !kernelAtLeast7(t) || count > 8*n {
			t.Errorf("%d entries of %d and more", count, n)
		}
	}
	if got := len(listConnections(t, i)); got != 4*n {
		t.Errorf("%d entries at the end, want %d", got, 4*n)
	}
}
