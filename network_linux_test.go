package ipvs

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// A network for the tests with real traffic, made with iproute2 in namespaces
// that last as long as the test. The addresses are those for documentation.
const (
	client4   = "192.0.2.2"
	client6   = "2001:db8:c::2"
	virtual4  = "203.0.113.1" // the director's own, on lo
	virtual6  = "2001:db8:f::1"
	director4 = "198.51.100.1" // towards the real server
	real4     = "198.51.100.2"
	real6     = "2001:db8:b::2"
)

// trafficTimeout is long for operations that should take no time, since an emulated
// machine on a busy host is slow.
const trafficTimeout = 20 * time.Second

// network is a client, a director and a real server, joined in this order by
// veth pairs. The link to a neighbour is named after it.
type network struct {
	client, director, real netns.NsHandle
	ipvs                   *Handle // in the director
}

// newNamespace makes a network namespace that lasts as long as the test.
func newNamespace(t *testing.T) netns.NsHandle {
	t.Helper()
	type result struct {
		ns  netns.NsHandle
		err error
	}
	results := make(chan result)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		ns, err := netns.New()
		if err == nil {
			// In a namespace without an address the kernel accepts no IPv4 destination.
			err = netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "lo"}})
		}
		results <- result{ns, err}
	}()
	r := <-results
	if r.err != nil {
		t.Fatal(r.err)
	}
	t.Cleanup(func() {
		flush(r.ns)
		r.ns.Close()
	})
	return r.ns
}

// flush deletes the services of a namespace. Before Linux 7, lists in other namespaces
// can miss services while the kernel deletes those of a namespace that is gone.
func flush(ns netns.NsHandle) {
	if _, err := os.Stat("/proc/net/ip_vs"); err != nil {
		return // there are none, and NewAt would load IPVS
	}
	if i, err := NewAt(ns); err == nil {
		i.Flush()
		i.Close()
	}
}

// within calls f on a thread in the namespace.
func within(t *testing.T, ns netns.NsHandle, f func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := netns.Set(ns)
		if err == nil {
			f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// holdHooks keeps a netfilter hook of each kind registered in the virtual machine.
// Without them, the kernel patches its own code whenever the first IPVS service of all
// namespaces is added or the last one is deleted. If another processor is running that
// code, as with real traffic, QEMU's emulation can execute the incomplete patch, which
// ends the machine ("Oops: int3").
var holdHooks = sync.OnceFunc(func() {
	if inVM {
		for _, program := range []string{"iptables", "ip6tables"} {
			exec.Command(program, "-t", "mangle", "-S").Run() // makes the table, which has the hooks
		}
	}
})

func newNetwork(t *testing.T) *network {
	t.Helper()
	needKernel(t)
	holdHooks()
	n := &network{client: newNamespace(t), director: newNamespace(t), real: newNamespace(t)}
	for _, ns := range []netns.NsHandle{n.client, n.director, n.real} {
		quickIPv6(t, ns)
	}
	iproute(t, n.director,
		linkTo("client", n.client, "director"),
		linkTo("real", n.real, "director"),
		"addr add 192.0.2.1/24 dev client",
		"addr add 2001:db8:c::1/64 dev client nodad",
		"addr add "+director4+"/24 dev real",
		"addr add 2001:db8:b::1/64 dev real nodad",
		// IPVS handles packets that are for the machine itself.
		"addr add "+virtual4+"/32 dev lo",
		"addr add "+virtual6+"/128 dev lo nodad",
		"link set client up",
		"link set real up")
	iproute(t, n.client,
		"addr add "+client4+"/24 dev director",
		"addr add "+client6+"/64 dev director nodad",
		"link set director up",
		"route add default via 192.0.2.1",
		"route add default via 2001:db8:c::1")
	// Replies to masqueraded packets must come back through the director.
	iproute(t, n.real,
		"addr add "+real4+"/24 dev director",
		"addr add "+real6+"/64 dev director nodad",
		"link set director up",
		"route add default via "+director4,
		"route add default via 2001:db8:b::1")
	sysctl(t, n.director, "net/ipv4/ip_forward", "1")
	sysctl(t, n.director, "net/ipv6/conf/all/forwarding", "1")
	n.ipvs = openIn(t, n.director)
	return n
}

// linkTo makes a veth pair: name here, and peer in another namespace.
func linkTo(name string, ns netns.NsHandle, peer string) string {
	return fmt.Sprintf("link add %s type veth peer name %s netns /proc/%d/fd/%d", name, peer, os.Getpid(), ns)
}

// quickIPv6 makes the addresses of links that are added later usable at once.
func quickIPv6(t *testing.T, ns netns.NsHandle) {
	t.Helper()
	sysctl(t, ns, "net/ipv6/conf/all/accept_dad", "0")
	sysctl(t, ns, "net/ipv6/conf/default/accept_dad", "0")
}

// iproute runs commands of iproute2 in the namespace.
func iproute(t *testing.T, ns netns.NsHandle, commands ...string) {
	t.Helper()
	var out []byte
	var err error
	within(t, ns, func() {
		c := exec.Command("ip", "-batch", "-")
		c.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
		out, err = c.CombinedOutput()
	})
	if errors.Is(err, exec.ErrNotFound) && !inVM {
		t.Skip("SKIP: needs iproute2's ip to make links")
	}
	if err != nil {
		t.Fatalf("ip: %v: %s\n%s", err, out, strings.Join(commands, "\n"))
	}
}

func sysctl(t *testing.T, ns netns.NsHandle, name, value string) {
	t.Helper()
	var err error
	within(t, ns, func() { err = os.WriteFile("/proc/sys/"+name, []byte(value), 0) })
	must(t, err)
}

// dial connects from inside the namespace. The connection has a deadline.
func dial(t *testing.T, ns netns.NsHandle, protocol, from, to string) net.Conn {
	t.Helper()
	d := net.Dialer{Timeout: trafficTimeout, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	if protocol == "udp" {
		d.LocalAddr = &net.UDPAddr{IP: net.ParseIP(from)}
	}
	var c net.Conn
	var err error
	within(t, ns, func() { c, err = d.Dial(protocol, to) })
	must(t, err)
	t.Cleanup(func() { c.Close() })
	must(t, c.SetDeadline(time.Now().Add(trafficTimeout)))
	return c
}

// serveUDP answers, until the test ends, each datagram that begins with '?'.
func serveUDP(t *testing.T, ns netns.NsHandle, address, answer string) {
	t.Helper()
	answerUDP(t, ns, address, func(request []byte) []byte {
		if !bytes.HasPrefix(request, []byte("?")) {
			return nil
		}
		return []byte(answer)
	})
}

// answerUDP sends back what answer returns for each datagram, unless that is nil,
// until the test ends or the server is closed.
func answerUDP(t *testing.T, ns netns.NsHandle, address string, answer func(request []byte) []byte) (server net.PacketConn) {
	t.Helper()
	var err error
	within(t, ns, func() { server, err = net.ListenPacket("udp", address) })
	must(t, err)
	t.Cleanup(func() { server.Close() })
	go func() {
		request := make([]byte, 2048)
		for {
			n, from, err := server.ReadFrom(request)
			if err != nil {
				return
			}
			if reply := answer(request[:n]); reply != nil {
				server.WriteTo(reply, from) // one that is lost shows at the client
			}
		}
	}()
	return server
}

// serveTCP sends, until the test ends, an answer for each line that comes in.
func serveTCP(t *testing.T, ns netns.NsHandle, address, answer string) {
	t.Helper()
	acceptTCP(t, ns, address, func(c net.Conn) {
		c.SetDeadline(time.Now().Add(trafficTimeout))
		for lines := bufio.NewScanner(c); lines.Scan(); {
			io.WriteString(c, answer+"\n")
		}
	})
}

// acceptTCP accepts connections until the test ends. Each is closed when serve
// returns.
func acceptTCP(t *testing.T, ns netns.NsHandle, address string, serve func(net.Conn)) {
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
			go func() {
				defer c.Close()
				serve(c)
			}()
		}
	}()
}

// ask sends a request and wants the answer.
func ask(t *testing.T, c net.Conn, request, answer string) {
	t.Helper()
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatalf("to %v: %v", c.RemoteAddr(), err)
	}
	got := make([]byte, 2048)
	n, err := io.ReadAtLeast(c, got, len(answer))
	if err != nil || string(got[:n]) != answer {
		t.Fatalf("%v answers %q, %v, want %q", c.RemoteAddr(), got[:n], err, answer)
	}
}

// eventually waits a bounded time until the condition holds, and reports whether it
// did. A condition that was true need not stay true: Linux 7 and later list a growing
// table sometimes completely, sometimes not.
func eventually(condition func() bool) bool {
	for deadline := time.Now().Add(trafficTimeout); time.Now().Before(deadline); {
		if condition() {
			return true
		}
		time.Sleep(100 * time.Millisecond)
	}
	return false
}

// ipvsadmNumbers returns the n numbers that end each line of ipvsadm's table that
// begins with one of the addresses, in the order of these.
func ipvsadmNumbers(t *testing.T, ns netns.NsHandle, addresses []string, n int, args ...string) (numbers [][]uint64) {
	t.Helper()
	out := ipvsadm(t, ns, append([]string{"-Ln"}, args...)...)
	for _, address := range addresses {
		before := len(numbers)
		for _, line := range strings.Split(out, "\n") {
			f := strings.Fields(line)
			if len(f) < 2+n || f[1] != address {
				continue
			}
			var row []uint64
			for _, text := range f[len(f)-n:] {
				v, err := strconv.ParseUint(text, 10, 64)
				if err != nil {
					t.Fatalf("%v in %q", err, line)
				}
				row = append(row, v)
			}
			numbers = append(numbers, row)
		}
		if len(numbers) != before+1 {
			t.Fatalf("not one line of %s with %d numbers in\n%s", address, n, out)
		}
	}
	return numbers
}

// connectionLine is the start of an IPVS connection in /proc/net/ip_vs_conn: client,
// virtual and real address, then the state.
func connectionLine(protocol, client, virtual, real, state string) string {
	line := protocol
	for _, text := range []string{client, virtual, real} {
		host, port, _ := net.SplitHostPort(text)
		number, _ := strconv.Atoi(port)
		address := net.ParseIP(host)
		if ip := address.To4(); ip != nil {
			line += fmt.Sprintf(" %08X", binary.BigEndian.Uint32(ip))
		} else {
			separator := " "
			for n := 0; n < len(address); n += 2 {
				line += fmt.Sprintf("%s%04x", separator, binary.BigEndian.Uint16(address[n:]))
				separator = ":"
			}
		}
		line += fmt.Sprintf(" %04X", number)
	}
	return line + " " + state
}

// connections returns the lines of /proc/net/ip_vs_conn with single blanks.
func connections(t *testing.T, ns netns.NsHandle) (lines []string) {
	t.Helper()
	var data []byte
	var err error
	within(t, ns, func() { data, err = os.ReadFile("/proc/thread-self/net/ip_vs_conn") })
	must(t, err)
	for _, line := range strings.Split(string(data), "\n") {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	return lines
}

// tapIPv4 opens a socket that sees the IPv4 packets that come in on a link, each
// from its IP header on.
func tapIPv4(t *testing.T, ns netns.NsHandle, link string) (fd int) {
	t.Helper()
	var err error
	within(t, ns, func() {
		var i *net.Interface
		if i, err = net.InterfaceByName(link); err != nil {
			return
		}
		protocol := binary.NativeEndian.Uint16([]byte{unix.ETH_P_IP >> 8, unix.ETH_P_IP & 0xff})
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(protocol)); err == nil {
			err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: i.Index})
		}
	})
	must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}
