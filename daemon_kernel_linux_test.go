package ipvs

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Daemons have the settings that were requested, and the kernel's defaults for omitted
// ones, both as the library and as ipvsadm read them.
func TestKernelDaemon(t *testing.T) {
	i, ns := newDaemonHandle(t)
	group4, group6 := net.IPv4(239, 1, 2, 3).To4(), net.ParseIP("ff15::1:2")
	standard := net.IPv4(224, 0, 0, 81).To4()
	for name, test := range map[string]struct{ ask, want Daemon }{
		"IPv4, in 16 bytes": {
			Daemon{0, "sync", 255, 1234, group4.To16(), 65535, 255},
			Daemon{0, "sync", 255, 1234, group4, 65535, 255}},
		"IPv6": {
			Daemon{0, "sync", 8, 1234, group6, 9000, 5},
			Daemon{0, "sync", 8, 1234, group6, 9000, 5}},
		"defaults": {
			Daemon{0, "sync", 0, 0, nil, 0, 0},
			Daemon{0, "sync", 0, 0, standard, 8848, 1}},
		"defaults, IPv6": {
			Daemon{0, "sync", 0, 0, group6, 0, 0},
			Daemon{0, "sync", 0, 0, group6, 8848, 1}},
		"too long": {
			Daemon{0, "sync", 1, 65535, group4, 8848, 1},
			Daemon{0, "sync", 1, 65535 - 28, group4, 8848, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			master, backup := test.ask, test.ask
			master.State, backup.State = DaemonMaster, DaemonBackup
			wantMaster, wantBackup := test.want, test.want
			wantMaster.State, wantBackup.State = DaemonMaster, DaemonBackup
			if test.ask.SyncMaxLen == 0 {
				// A master does not look at the MTU of 9000.
				headers := uint16(20 + 8)
				if len(test.want.MulticastGroup) == net.IPv6len {
					headers = 40 + 8
				}
				wantMaster.SyncMaxLen, wantBackup.SyncMaxLen = 1500-headers, 9000-headers
			}
			startDaemon(t, i, backup)
			startDaemon(t, i, master)
			wantDaemons(t, i, ns, wantMaster, wantBackup)
			for _, again := range []Daemon{master, backup} {
				if err := i.NewDaemon(&again); err != error(syscall.EEXIST) {
					t.Errorf("a second %v: %v, want EEXIST", again.State, err)
				}
			}
			must(t, i.DelDaemon(DaemonBackup))
			wantDaemons(t, i, ns, wantMaster)
			must(t, i.DelDaemon(DaemonMaster))
			if got := mustGet(i.GetDaemons())(t); len(got) != 0 {
				t.Errorf("%d daemons after both were stopped", len(got))
			}
			for _, state := range []DaemonState{DaemonMaster, DaemonBackup} {
				if err := i.DelDaemon(state); err != error(syscall.ESRCH) {
					t.Errorf("stopping a %v that does not run: %v, want ESRCH", state, err)
				}
			}
		})
	}
	for name, test := range map[string]struct {
		err  error
		want syscall.Errno
	}{
		"no such interface":            {i.NewDaemon(&Daemon{State: DaemonMaster, MulticastInterface: "nosuch"}), syscall.ENODEV},
		"no such interface for backup": {i.NewDaemon(&Daemon{State: DaemonBackup, MulticastInterface: "nosuch"}), syscall.ENODEV},
		"IPv4 unicast":                 {i.NewDaemon(&Daemon{State: DaemonMaster, MulticastInterface: "sync", MulticastGroup: net.IPv4(10, 0, 0, 1)}), syscall.EINVAL},
		"IPv6 unicast":                 {i.NewDaemon(&Daemon{State: DaemonMaster, MulticastInterface: "sync", MulticastGroup: net.ParseIP("2001:db8::2")}), syscall.EINVAL},
		"stop an unknown state":        {i.DelDaemon(3), syscall.EINVAL},
	} {
		if test.err != error(test.want) {
			t.Errorf("%s: %v, want %v", name, test.err, test.want)
		}
	}
	wantDaemons(t, i, ns)
}

// newDaemonHandle opens a handle in a namespace with a link for daemons, whose
// MTU is not the usual one.
func newDaemonHandle(t *testing.T) (*Handle, netns.NsHandle) {
	t.Helper()
	i, ns := newKernelHandle(t)
	holdHooks()
	quickIPv6(t, ns)
	iproute(t, ns,
		"link add sync type dummy",
		"link set sync mtu 9000 up",
		"addr add 192.0.2.1/24 dev sync",
		"addr add 2001:db8::1/64 dev sync nodad")
	stopDaemons(t, i)
	return i, ns
}

// stopDaemons stops daemons that the test may have left running at its end.
func stopDaemons(t *testing.T, i *Handle) {
	t.Cleanup(func() {
		for _, state := range []DaemonState{DaemonMaster, DaemonBackup} {
			if err := i.DelDaemon(state); err != nil && err != error(syscall.ESRCH) {
				t.Errorf("stopping the %v: %v", state, err)
			}
		}
	})
}

// startDaemon starts a daemon and waits until its thread runs: the kernel does not
// answer the request to stop one whose thread has not run yet.
func startDaemon(t *testing.T, i *Handle, d Daemon) {
	t.Helper()
	must(t, i.NewDaemon(&d))
	var threads []string
	running := func() bool {
		threads = nil
		stats, _ := filepath.Glob("/proc/[0-9]*/stat")
		for _, name := range stats {
			data, _ := os.ReadFile(name) // a process may end
			if _, rest, found := strings.Cut(string(data), "(ipvs-"); found && (rest[0] == 'm' || rest[0] == 'b') {
				threads = append(threads, string(data))
			}
		}
		asleep := func(stat string) bool { return strings.Contains(stat, ") S ") }
		return len(threads) > 0 && !slices.ContainsFunc(threads, func(stat string) bool { return !asleep(stat) })
	}
	eventually(running)
	if !running() {
		t.Fatalf("the %v does not run: %s", d.State, threads)
	}
}

// wantDaemons checks the running daemons as the library and as ipvsadm read them.
func wantDaemons(t *testing.T, i *Handle, ns netns.NsHandle, want ...Daemon) {
	t.Helper()
	var got []Daemon
	for _, d := range mustGet(i.GetDaemons())(t) {
		got = append(got, *d)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	adm := ""
	for _, d := range want {
		adm += fmt.Sprintf("%v sync daemon (mcast=%s, syncid=%d, maxlen=%d, group=%v, port=%d, ttl=%d)\n",
			d.State, d.MulticastInterface, d.SyncID, d.SyncMaxLen, d.MulticastGroup, d.MulticastPort, d.MulticastTTL)
	}
	if got := ipvsadm(t, ns, "-Ln", "--daemon"); got != adm {
		t.Errorf("ipvsadm shows\n%swant\n%s", got, adm)
	}
}

// Connections of the master's director arrive in the backup's.
func TestKernelDaemonSync(t *testing.T) {
	n := newNetwork(t)
	other := newNamespace(t)
	quickIPv6(t, other)
	iproute(t, n.director, linkTo("sync", other, "sync"),
		"addr add 10.9.0.1/24 dev sync", "addr add 2001:db8:9::1/64 dev sync nodad", "link set sync up")
	iproute(t, other,
		"addr add 10.9.0.2/24 dev sync", "addr add 2001:db8:9::2/64 dev sync nodad", "link set sync up")
	backup := openIn(t, other)
	stopDaemons(t, n.ipvs)
	stopDaemons(t, backup)

	type path struct{ client, virtual, real string }
	paths := []path{
		{client4, net.JoinHostPort(virtual4, "80"), net.JoinHostPort(real4, "8080")},
		{client6, net.JoinHostPort(virtual6, "80"), net.JoinHostPort(real6, "8080")},
	}
	for _, p := range paths {
		host, _, _ := net.SplitHostPort(p.virtual)
		realHost, _, _ := net.SplitHostPort(p.real)
		s := &Service{Address: net.ParseIP(host), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin}
		must(t, n.ipvs.NewService(s))
		must(t, n.ipvs.NewDestination(s, &Destination{Address: net.ParseIP(realHost), Port: 8080, Weight: 1}))
		serveTCP(t, n.real, p.real, "answer")
	}
	for _, group := range []string{"239.1.2.3", "ff15::1:2"} {
		d := Daemon{State: DaemonMaster, MulticastInterface: "sync", SyncID: 7, MulticastGroup: net.ParseIP(group), MulticastPort: 9000}
		startDaemon(t, n.ipvs, d)
		d.State = DaemonBackup
		startDaemon(t, backup, d)
		var want []string
		for _, p := range paths {
			c := dial(t, n.client, "tcp", p.client, p.virtual)
			// By default the kernel first sends a connection at its third packet.
			for range 4 {
				ask(t, c, "question\n", "answer\n")
			}
			want = append(want, connectionLine("TCP", c.LocalAddr().String(), p.virtual, p.real, "ESTABLISHED "))
		}
		missing := func() []string {
			have := connections(t, other)
			return slices.DeleteFunc(slices.Clone(want), func(w string) bool {
				return slices.ContainsFunc(have, func(line string) bool { return strings.HasPrefix(line, w) })
			})
		}
		eventually(func() bool { return len(missing()) == 0 })
		if m := missing(); len(m) > 0 {
			t.Errorf("group %s: the backup lacks\n%s\nit has\n%s\nthe master\n%s", group, strings.Join(m, "\n"),
				strings.Join(connections(t, other), "\n"), strings.Join(connections(t, n.director), "\n"))
		}
		must(t, n.ipvs.DelDaemon(DaemonMaster))
		must(t, backup.DelDaemon(DaemonBackup))
	}
}

// A daemon and destinations of another address family than their service exclude each
// other; the kernel's error is returned unchanged.
func TestKernelMixedFamilyWithDaemon(t *testing.T) {
	i, ns := newDaemonHandle(t)
	must(t, i.NewService(&someService))
	mixed := &Destination{Address: net.ParseIP("2001:db8::2"), Port: 80, Weight: 1, ConnectionFlags: ConnectionFlagTunnel}
	for _, state := range []DaemonState{DaemonMaster, DaemonBackup} {
		d := Daemon{State: state, MulticastInterface: "sync"}
		startDaemon(t, i, d)
		if err := i.NewDestination(&someService, mixed); err != error(syscall.EINVAL) {
			t.Errorf("mixed family with a %v: %v, want EINVAL", state, err)
		}
		must(t, i.DelDaemon(state))
		must(t, i.NewDestination(&someService, mixed))
		if err := i.NewDaemon(&d); err != error(syscall.EINVAL) {
			t.Errorf("a %v with mixed family: %v, want EINVAL", state, err)
		}
		wantDaemons(t, i, ns)
		must(t, i.DelDestination(&someService, mixed))
	}
}

// A daemon that is stopped before its thread has run: the kernel sends no reply, but
// the daemon is stopped.
func TestKernelDaemonStoppedAtOnce(t *testing.T) {
	i, _ := newDaemonHandle(t)
	for n := range 50 {
		must(t, i.NewDaemon(&Daemon{State: DaemonMaster, MulticastInterface: "sync"}))
		start := time.Now()
		if err := i.DelDaemon(DaemonMaster); err != nil {
			t.Fatalf("turn %d: %v after %v", n, err, time.Since(start))
		}
		if daemons := mustGet(i.GetDaemons())(t); len(daemons) != 0 {
			t.Fatalf("turn %d: %d daemons run", n, len(daemons))
		}
	}
}
