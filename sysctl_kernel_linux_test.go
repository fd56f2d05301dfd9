package ipvs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Every setting of the kernel that is one number is read correctly and can be written;
// that of the calling thread's namespace does not change.
func TestKernelSysctl(t *testing.T) {
	i, ns := newKernelHandle(t)
	var names []string
	within(t, ns, func() { names, _ = filepath.Glob(sysctlDir + "*") })
	if len(names) < 20 {
		t.Fatalf("only %d settings", len(names))
	}
	before := descriptors(t)
	numbers := 0
	for _, path := range names {
		name := filepath.Base(path)
		text := readIn(t, ns, path)
		value, err := i.GetSysctl(name)
		if strings.ContainsAny(text, " \t-") && !strings.HasPrefix(text, "-") { // "3 50", "0-1"
			for _, err := range []error{err, i.SetSysctl(name, 7)} {
				if err == nil || !strings.Contains(err.Error(), "net.ipv4.vs."+name) || !strings.Contains(err.Error(), "not one number") {
					t.Errorf("%s, which is %q: %v", name, text, err)
				}
			}
			if after := readIn(t, ns, path); after != text {
				t.Errorf("%s: %q became %q", name, text, after)
			}
			continue
		}
		numbers++
		if err != nil || strconv.Itoa(value) != text {
			t.Errorf("%s is %d, %v, want %s", name, value, err, text)
		}
	}
	if numbers < 20 {
		t.Errorf("only %d settings are numbers", numbers)
	}
	home, err := os.ReadFile(sysctlDir + "expire_nodest_conn")
	must(t, err)
	for _, name := range []string{"expire_nodest_conn", "expire_quiescent_template", "conn_reuse_mode", "conntrack"} {
		for _, value := range []int{1, 0, 1} {
			must(t, i.SetSysctl(name, value))
			if text := readIn(t, ns, sysctlDir+name); text != strconv.Itoa(value) {
				t.Errorf("%s is %s after it was set to %d", name, text, value)
			}
			if got := mustGet(i.GetSysctl(name))(t); got != value {
				t.Errorf("%s is %d after it was set to %d", name, got, value)
			}
		}
	}
	if after, err := os.ReadFile(sysctlDir + "expire_nodest_conn"); err != nil || !bytes.Equal(home, after) {
		t.Errorf("the process's own expire_nodest_conn was %s and is %s, %v", home, after, err)
	}
	if left := opened(t, before); len(left) > 0 {
		t.Errorf("descriptors left open: %v", left)
	}
	if stray := strayThreads(t); len(stray) > 0 {
		t.Errorf("threads left in another namespace: %v", stray)
	}
}

// readIn reads a file as a thread in the namespace sees it.
func readIn(t *testing.T, ns netns.NsHandle, path string) string {
	t.Helper()
	var data []byte
	var err error
	within(t, ns, func() { data, err = os.ReadFile(path) })
	must(t, err)
	return strings.TrimSpace(string(data))
}

// Settings and values that the kernel rejects are errors with a hint.
func TestKernelSysctlErrors(t *testing.T) {
	i, ns := newKernelHandle(t)
	_, getErr := i.GetSysctl("no_such_setting")
	for _, err := range []error{getErr, i.SetSysctl("no_such_setting", 1)} {
		if !errors.Is(err, fs.ErrNotExist) || !errors.Is(err, syscall.ENOENT) || !strings.Contains(err.Error(), "net.ipv4.vs.no_such_setting") ||
			!strings.Contains(err.Error(), "has no such setting") {
			t.Errorf("no such setting: %v", err)
		}
	}
	err := i.SetSysctl("sync_version", 7)
	if !errors.Is(err, syscall.EINVAL) || !strings.Contains(err.Error(), "net.ipv4.vs.sync_version") {
		t.Errorf("sync_version 7: %v, want EINVAL", err)
	}
	if got := readIn(t, ns, sysctlDir+"sync_version"); got != "1" {
		t.Errorf("sync_version is %s after a value that was refused", got)
	}
}

// In a container /proc/sys is read-only: settings can be read, and the error of writing
// one gives the reason.
func TestKernelSysctlReadOnly(t *testing.T) {
	needKernel(t)
	c := helper("read-only-proc")
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func init() {
	addHelper("read-only-proc", func() error {
		if err := firstError(unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""),
			unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")); err != nil {
			return err
		}
		i, err := New("")
		if err != nil {
			return err
		}
		defer i.Close()
		if _, err := i.GetSysctl("expire_nodest_conn"); err != nil {
			return err
		}
		if err := i.SetSysctl("expire_nodest_conn", 1); !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), "mounted read-only") {
			return fmt.Errorf("%v, want EROFS", err)
		}
		return nil
	})
}

// In its own namespace a process without privileges can read settings and counters; it
// cannot write, or read in others.
func TestKernelBesideNetlinkUnprivileged(t *testing.T) {
	_, ns := newKernelHandle(t)
	if out, err := helperWith(t, "own-namespace", ns).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func init() {
	addHelper("own-namespace", func() error {
		own, other, err := homeAndOther()
		if err != nil {
			return err
		}
		if err := syscall.Setresuid(65534, 65534, 65534); err != nil { // all threads
			return err
		}
		if _, err := own.GetServices(); err != error(syscall.EPERM) {
			return fmt.Errorf("GetServices: %v, want EPERM: there are privileges left", err)
		}
		reading := func(i *Handle) (errs []error) {
			_, err1 := i.GetSysctl("expire_nodest_conn")
			_, err2 := i.GetTotals()
			errs = []error{err1, err2}
			for _, err := range i.Connections() {
				errs = append(errs, err)
			}
			return errs
		}
		if err := firstError(reading(own)...); err != nil {
			return fmt.Errorf("in the own namespace: %w", err)
		}
		refused := reading(other)
		if len(refused) != 3 {
			return fmt.Errorf("in another namespace Connections yields %v", refused[2:])
		}
		for _, err := range append(refused, other.SetSysctl("expire_nodest_conn", 1), own.SetSysctl("expire_nodest_conn", 1)) {
			if !errors.Is(err, fs.ErrPermission) {
				return fmt.Errorf("%v, want one of permissions", err)
			}
		}
		return nil
	})
}

// The totals are those in /proc/net/ip_vs_stats, and the sum over the services.
func TestKernelTotals(t *testing.T) {
	n := newNetwork(t)
	const sockets = 20
	targets := []struct{ client, virtual, real string }{{client4, virtual4, real4}, {client6, virtual6, real6}}
	for _, x := range targets {
		s := &Service{Address: net.ParseIP(x.virtual), Protocol: unix.IPPROTO_UDP, Port: 53, SchedName: RoundRobin}
		must(t, n.ipvs.NewService(s))
		must(t, n.ipvs.NewDestination(s, &Destination{Address: net.ParseIP(x.real), Port: 1053, Weight: 1}))
		serveUDP(t, n.real, hostPort(x.real, 1053), strings.Repeat("answer", 20))
		for range sockets {
			ask(t, dial(t, n.client, "udp", x.client, hostPort(x.virtual, 53)), "?", strings.Repeat("answer", 20))
		}
	}
	sum := func() (sum Stats64) {
		for _, s := range mustGet(n.ipvs.GetServices())(t) {
			sum.Connections += s.Stats64.Connections
			sum.PacketsIn += s.Stats64.PacketsIn
			sum.PacketsOut += s.Stats64.PacketsOut
			sum.BytesIn += s.Stats64.BytesIn
			sum.BytesOut += s.Stats64.BytesOut
		}
		return sum
	}
	var totals Stats64
	eventually(func() bool {
		totals = *mustGet(n.ipvs.GetTotals())(t)
		return countersOf(totals) == countersOf(sum()) && totals.Connections == 2*sockets && totals.PacketsOut == 2*sockets
	})
	want := counters{2 * sockets, 2 * sockets, 2 * sockets, sockets * (20 + 8 + 1 + 40 + 8 + 1), sockets * (20 + 8 + 120 + 40 + 8 + 120)}
	if got := countersOf(totals); got != want || got != countersOf(sum()) {
		t.Errorf("totals %v, want %v; the services' sum is %v", got, want, countersOf(sum()))
	}
	// All ten, while no rate changes.
	var numbers, got []uint64
	eventually(func() bool {
		before := readIn(t, n.director, "/proc/thread-self/net/ip_vs_stats")
		s := mustGet(n.ipvs.GetTotals())(t)
		got = []uint64{s.Connections, s.PacketsIn, s.PacketsOut, s.BytesIn, s.BytesOut, s.CPS, s.PPSIn, s.PPSOut, s.BPSIn, s.BPSOut}
		numbers = nil
		for _, line := range strings.Split(before, "\n") {
			var a, b, c, d, e uint64
			if n, _ := fmt.Sscanf(line, "%x %x %x %x %x", &a, &b, &c, &d, &e); n == 5 && !strings.Contains(line, "Conns") {
				numbers = append(numbers, a, b, c, d, e)
			}
		}
		return before == readIn(t, n.director, "/proc/thread-self/net/ip_vs_stats")
	})
	if !slices.Equal(got, numbers) {
		t.Errorf("totals %v, ip_vs_stats has %v", got, numbers)
	}
	must(t, n.ipvs.Zero())
	if totals := mustGet(n.ipvs.GetTotals())(t); countersOf(*totals) != (counters{}) {
		t.Errorf("after Zero: %+v", totals)
	}
}

// A persistent client stays on a destination of weight 0, unless
// expire_quiescent_template sends it to another.
func TestKernelSysctlQuiescentTemplate(t *testing.T) {
	n := newNetwork(t)
	s := &Service{Address: net.ParseIP(virtual4), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin,
		Flags: ServiceFlagPersistent, Timeout: 300, Netmask: 0xFFFFFFFF}
	must(t, n.ipvs.NewService(s))
	destinations := map[string]*Destination{}
	for _, port := range []uint16{8081, 8082} {
		d := &Destination{Address: net.ParseIP(real4), Port: port, Weight: 1}
		must(t, n.ipvs.NewDestination(s, d))
		answer := strconv.Itoa(int(port))
		serveTCP(t, n.real, net.JoinHostPort(real4, answer), answer)
		destinations[answer] = d
	}
	connect := func() string {
		t.Helper()
		c := dial(t, n.client, "tcp", client4, net.JoinHostPort(virtual4, "80"))
		defer c.Close()
		_, err := c.Write([]byte("?\n"))
		must(t, err)
		answer := make([]byte, 4)
		_, err = io.ReadFull(c, answer)
		must(t, err)
		return string(answer)
	}
	first := connect()
	destinations[first].Weight = 0
	must(t, n.ipvs.UpdateDestination(s, destinations[first]))
	must(t, n.ipvs.SetSysctl("expire_quiescent_template", 0))
	if got := connect(); got != first {
		t.Errorf("0: the client goes to %s, want %s of weight 0", got, first)
	}
	must(t, n.ipvs.SetSysctl("expire_quiescent_template", 1))
	if got := connect(); got == first {
		t.Errorf("1: the client stays on %s of weight 0", got)
	}
}
