//go:build linux

package property

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// inVM reports whether this is the project's own virtual machine: there, a missing
// kernel or ipvsadm is a failure and not a reason to skip.
var inVM = os.Getenv("IPVS_TEST_VM") != ""

// The main thread stays with the main goroutine: the others of a test end with
// it, in its namespace, but the main thread cannot.
func init() { runtime.LockOSThread() }

// Each run is the same, unless -rapid.seed or IPVS_PROPERTY_SEED says otherwise;
// a seed of 0 is a new one each time.
func init() {
	seed := os.Getenv("IPVS_PROPERTY_SEED")
	if seed == "" {
		seed = "1"
	}
	for name, value := range map[string]string{
		"rapid.seed": seed, "rapid.checks": "30", "rapid.nofailfile": "true", "rapid.shrinktime": "10s",
	} {
		if err := flag.Set(name, value); err != nil {
			panic(err)
		}
	}
}

// schedulers are those that this kernel has.
var (
	schedulers     []string
	findSchedulers sync.Once
)

// open moves the test into a network namespace of its own, for good: its thread
// ends with it.
func open(t *testing.T) *ipvs.Handle {
	t.Helper()
	unless := func(what string, err error) {
		t.Helper()
		switch {
		case err == nil:
		case inVM:
			t.Fatalf("%s: %v", what, err)
		default:
			t.Skipf("SKIP: needs root, a kernel with IPVS and ipvsadm: %s: %v", what, err)
		}
	}
	_, err := exec.LookPath("ipvsadm")
	unless("looking for ipvsadm", err)
	runtime.LockOSThread()
	unless("making a network namespace", unix.Unshare(unix.CLONE_NEWNET))
	// Without an address in it the kernel takes no IPv4 destination.
	must(t, netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "lo"}}))
	h, err := ipvs.New("")
	unless("opening a handle", err)
	t.Cleanup(h.Close)
	findSchedulers.Do(func() {
		for _, name := range allSchedulers {
			s := ipvs.Service{FWMark: 1, AddressFamily: unix.AF_INET, SchedName: name}
			if err := h.NewService(&s); errors.Is(err, syscall.ENOENT) {
				t.Logf("this kernel has no scheduler %s", name)
				continue
			} else {
				must(t, err)
			}
			must(t, h.DelService(&s))
			schedulers = append(schedulers, name)
		}
	})
	return h
}

func must(t rapid.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// create makes the namespace's table t.
func create(t rapid.TB, h *ipvs.Handle, tab table) {
	t.Helper()
	must(t, h.Flush())
	for _, e := range tab {
		if err := h.NewService(&e.service); err != nil {
			t.Fatalf("NewService %+v: %v", e.service, err)
		}
		for _, d := range e.destinations {
			if err := h.NewDestination(&e.service, &d); err != nil {
				t.Fatalf("NewDestination %+v of %+v: %v", d, e.service, err)
			}
		}
	}
}

func update(t rapid.TB, h *ipvs.Handle, tab table) {
	t.Helper()
	for _, e := range tab {
		if err := h.UpdateService(&e.service); err != nil {
			t.Fatalf("UpdateService %+v: %v", e.service, err)
		}
		for _, d := range e.destinations {
			if err := h.UpdateDestination(&e.service, &d); err != nil {
				t.Fatalf("UpdateDestination %+v of %+v: %v", d, e.service, err)
			}
		}
	}
}

// read reads the table with the library, without counters and in a fixed order.
func read(t rapid.TB, h *ipvs.Handle) table {
	t.Helper()
	services, err := h.GetServices()
	must(t, err)
	var tab table
	for _, s := range services {
		one, err := h.GetService(s)
		must(t, err)
		if !reflect.DeepEqual(withoutCounters(*one), withoutCounters(*s)) {
			t.Fatalf("GetService %+v\nGetServices %+v", *one, *s)
		}
		destinations, err := h.GetDestinations(s)
		must(t, err)
		e := entry{service: withoutCounters(*s)}
		for _, d := range destinations {
			d.Stats, d.Stats64 = ipvs.DstStats{}, ipvs.Stats64{}
			e.destinations = append(e.destinations, *d)
		}
		tab = append(tab, e)
	}
	tab.sort()
	return tab
}

func withoutCounters(s ipvs.Service) ipvs.Service {
	s.Stats, s.Stats64 = ipvs.SvcStats{}, ipvs.Stats64{}
	return s
}

// equal fails the test if the tables, both sorted, differ, and shows where.
func equal(t rapid.TB, what string, got, want table) {
	t.Helper()
	if reflect.DeepEqual(got, want) {
		return
	}
	lines := func(tab table) (all []string) {
		for _, e := range tab {
			all = append(all, fmt.Sprintf("%+v", e.service))
			for _, d := range e.destinations {
				all = append(all, fmt.Sprintf("%s: %+v", serviceID(e.service), d))
			}
		}
		return all
	}
	t.Fatalf("%s:%s", what, difference(lines(got), lines(want)))
}

// difference lists the lines that are in only one of two lists without duplicates.
func difference(got, want []string) string {
	var b strings.Builder
	for _, line := range got {
		if !slices.Contains(want, line) {
			b.WriteString("\ngot  " + line)
		}
	}
	for _, line := range want {
		if !slices.Contains(got, line) {
			b.WriteString("\nwant " + line)
		}
	}
	return b.String()
}

// The library reads created entries.
func TestCreateRead(t *testing.T) {
	h := open(t)
	rapid.Check(t, func(t *rapid.T) {
		tab := generator{t, taken}.table()
		create(t, h, tab)
		equal(t, "created and read", read(t, h), normalised(tab))
	})
}

// ipvsadm reads created and updated entries.
func TestIpvsadmReads(t *testing.T) {
	h := open(t)
	rapid.Check(t, func(t *rapid.T) {
		g := generator{t, readable}
		tab := g.table()
		create(t, h, tab)
		equal(t, "created, and read by ipvsadm", ipvsadmTable(t), visible(tab))
	})
}

// An update with the values that were read changes nothing.
func TestWriteBack(t *testing.T) {
	h := open(t)
	rapid.Check(t, func(t *rapid.T) {
		g := generator{t, pick(generator{T: t}, "domain", taken, readable)}
		create(t, h, g.table())
		var saved string
		if g.domain == readable {
			saved = ipvsadm(t, "", "-Sn")
		}
		before := read(t, h)
		update(t, h, before)
		equal(t, "written back", read(t, h), before)
		if g.domain == readable {
			if after := ipvsadm(t, "", "-Sn"); after != saved {
				t.Fatalf("before:\n%safter:\n%s", saved, after)
			}
		}
	})
}

// An update gives the new value, whatever the old one was.
func TestUpdate(t *testing.T) {
	h := open(t)
	rapid.Check(t, func(t *rapid.T) {
		g := generator{t, pick(generator{T: t}, "domain", taken, readable)}
		tab := g.table()
		create(t, h, tab)
		tab = g.changed(tab)
		update(t, h, tab)
		equal(t, "updated and read", read(t, h), normalised(tab))
		if g.domain == readable {
			equal(t, "updated, and read by ipvsadm", ipvsadmTable(t), visible(tab))
		}
	})
}

// Rule writes the lines of ipvsadm -Sn, except for the thresholds.
func TestString(t *testing.T) {
	h := open(t)
	rapid.Check(t, func(t *rapid.T) {
		create(t, h, generator{t, written}.table())
		var lines []string
		for _, e := range read(t, h) {
			if hashes(e.service) {
				// ipvsadm takes flag-3 for sh and mh, but does not write it; Rule does.
				e.service.Flags &^= ipvs.ServiceFlagSched3
			}
			service := e.service.Rule()
			lines = append(lines, "-A "+service)
			name, _, _ := strings.Cut(service, " -s ")
			for _, d := range e.destinations {
				d.UpperThreshold, d.LowerThreshold = 0, 0
				lines = append(lines, "-a "+name+" "+d.Rule())
			}
		}
		saved := strings.Split(strings.TrimSuffix(ipvsadm(t, "", "-Sn"), "\n"), "\n")
		if d := difference(lines, saved); d != "" {
			t.Fatalf("got from Rule, want from ipvsadm:%s", d)
		}
	})
}

// The library reads entries that ipvsadm -R made.
func TestIpvsadmRestores(t *testing.T) {
	h := open(t)
	rapid.Check(t, func(t *rapid.T) {
		tab := generator{t, restored}.table()
		must(t, h.Flush())
		ipvsadm(t, restoreText(tab), "-R")
		equal(t, "restored and read", read(t, h), normalised(tab))
	})
}

// The results of kernels for boundary values, and how series differ.
func TestKernelLimits(t *testing.T) {
	h := open(t)
	s := ipvs.Service{Address: net.IPv4(10, 0, 0, 1), Protocol: unix.IPPROTO_UDP, Port: 53, SchedName: ipvs.RoundRobin}
	must(t, h.NewService(&s))
	for _, c := range []struct {
		name        string
		destination ipvs.Destination
		want        error
	}{
		{"masquerading", ipvs.Destination{ConnectionFlags: ipvs.ConnFwdMasq}, nil},
		{"local node", ipvs.Destination{ConnectionFlags: ipvs.ConnFwdLocalNode}, nil},
		{"bypass", ipvs.Destination{ConnectionFlags: ipvs.ConnFwdBypass}, nil},
		{"method 7", ipvs.Destination{ConnectionFlags: 7}, nil},
		{"other family", ipvs.Destination{Address: net.ParseIP("2001:db8::1")}, syscall.EINVAL},
		{"other family, tunnel", ipvs.Destination{Address: net.ParseIP("2001:db8::1"), ConnectionFlags: ipvs.ConnFwdTunnel}, nil},
		{"multicast", ipvs.Destination{Address: net.IPv4(224, 0, 0, 1)}, syscall.EINVAL},
		{"lower above upper", ipvs.Destination{LowerThreshold: 1}, syscall.ERANGE},
		{"upper of 2^31", ipvs.Destination{UpperThreshold: 1 << 31}, refusesLargeThresholds(t)},
		{"GUE without port", ipvs.Destination{ConnectionFlags: ipvs.ConnFwdTunnel, TunnelType: ipvs.TunnelGUE}, syscall.EINVAL},
		{"unknown tunnel", ipvs.Destination{ConnectionFlags: ipvs.ConnFwdTunnel, TunnelType: 255, TunnelFlags: 0xffff}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := c.destination
			if d.Address == nil {
				d.Address = net.IPv4(10, 1, 0, 1)
			}
			if err := h.NewDestination(&s, &d); !errors.Is(err, c.want) {
				t.Fatalf("%v, want %v", err, c.want)
			}
			if c.want != nil {
				return
			}
			defer h.DelDestination(&s, &d)
			got, err := h.GetDestinations(&s)
			must(t, err)
			if len(got) != 1 || !reflect.DeepEqual(normalisedDestination(*got[0]), normalisedDestination(d)) {
				t.Errorf("got %+v", got)
			}
		})
	}
}

// refusesLargeThresholds returns the kernel's result for an upper threshold above
// 2^31-1: newer kernels, and corrected older ones, reject it.
func refusesLargeThresholds(t *testing.T) error {
	var name unix.Utsname
	must(t, unix.Uname(&name))
	release := unix.ByteSliceToString(name.Release[:])
	for _, series := range []string{"6.1.", "6.12.", "7."} {
		if strings.HasPrefix(release, series) {
			return syscall.EINVAL
		}
	}
	return nil
}

// For the kernel, services with IPv4-mapped IPv6 addresses are separate services.
func TestMappedAddress(t *testing.T) {
	h := open(t)
	const text = "-A -t [::ffff:10.0.0.1]:80 -s rr\n"
	ipvsadm(t, text, "-R")
	services, err := h.GetServices()
	must(t, err)
	if len(services) != 1 || services[0].Address.String() != "10.0.0.1" || len(services[0].Address) != net.IPv6len || services[0].AddressFamily != unix.AF_INET6 {
		t.Fatalf("%+v", services)
	}
	must(t, h.UpdateService(services[0]))
	if got := "-A " + services[0].Rule() + "\n"; got != text {
		t.Errorf("String is %q, ipvsadm prints %q", got, text)
	}
	must(t, h.DelService(services[0]))
}
