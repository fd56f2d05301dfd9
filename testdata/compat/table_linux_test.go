//go:build linux

package compat

import (
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	original "github.com/moby/ipvs"
	checkout "ipvs.test/checkout"

	"golang.org/x/sys/unix"
)

// TestSameTable does what TestRandom does not: large tables, handles for several
// namespaces, and calls without the capability for them.
func TestSameTable(t *testing.T) {
	needKernel(t)
	for _, test := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"namespaces", testNamespaces},
		{"new", testNew},
		{"denied", testDenied},
	} {
		t.Run(test.name, test.run)
	}
}

// create programs entries, and fails if the kernel rejects one.
func create(t *testing.T, name string, l library, entries []entry) {
	t.Helper()
	for _, e := range entries {
		if err := l.NewService(e.service); err != nil {
			t.Fatalf("%s: new service %s: %v", name, line(e.service), err)
		}
		for _, d := range e.destinations {
			if err := l.NewDestination(e.service, d); err != nil {
				t.Fatalf("%s: new destination %s -> %s: %v", name, line(e.service), line(d), err)
			}
		}
	}
}

func flush(t *testing.T, name string, l library) {
	t.Helper()
	if err := l.Flush(); err != nil {
		t.Fatalf("%s: flush: %v", name, err)
	}
}

func count(entries []entry) int {
	n := len(entries)
	for _, e := range entries {
		n += len(e.destinations)
	}
	return n
}

// testNamespaces opens handles for the namespace of the thread and for
// another one: each must reach the table it should, and the thread must be
// where it was.
func testNamespaces(t *testing.T) {
	here, there := newNamespace(t), newNamespace(t)
	mark := func(n uint32) *original.Service {
		return with(markService(), func(s *original.Service) { s.FWMark = n })
	}
	here.do(t, func() {
		hereID, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		for i, open := range []func(path string) (library, error){
			func(path string) (library, error) { h, err := original.New(path); return direct{h}, err },
			func(path string) (library, error) {
				h, err := checkout.New(path)
				return converted{h}, err
			},
		} {
			for j, path := range []string{"", there.path()} {
				l, err := open(path)
				if err != nil {
					t.Fatal(err)
				}
				create(t, fmt.Sprint(i), l, []entry{{service: mark(uint32(1 + 2*i + j))}})
				l.Close()
				if id, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || id != hereID {
					t.Fatalf("%d: the thread is in %s, was in %s (%v)", i, id, hereID, err)
				}
			}
		}
	})
	for j, ns := range []namespace{here, there} {
		p := ns.pair(t)
		if got := p.read(t); len(got) != 2 {
			t.Errorf("namespace %d: %d services, want 2: %q", j, len(got), got)
		}
		for i := range 2 {
			if s := mark(uint32(1 + 2*i + j)); !p.checkout.IsServicePresent(s) {
				t.Errorf("namespace %d: no %s", j, line(s))
			}
		}
	}
}

func testNew(t *testing.T) {
	p := newPair(t)
	g := newGenerator(t)
	entries := g.entries(300)
	// One whose destinations come in several messages.
	many := entry{service: markService()}
	for i := range 700 {
		d := g.destination(syscall.AF_INET)
		d.Port = uint16(1 + i)
		many.destinations = append(many.destinations, d)
	}
	entries = append(entries, many)

	create(t, "original", p.original, entries)
	o := p.read(t)
	if len(o) != count(entries) {
		t.Fatalf("%d services and destinations programmed, %d read", count(entries), len(o))
	}
	for _, e := range entries {
		sameRead(t, p, operation{method: "GetService", service: identityOf(e.service)})
	}
	// Whole lists, in their order, over several messages.
	sameRead(t, p, operation{method: "GetServices"})
	sameRead(t, p, operation{method: "GetDestinations", service: many.service})
	flush(t, "original", p.original)
	if left := p.read(t); len(left) != 0 {
		t.Fatal("left after the original's flush: ", left)
	}

	create(t, "checkout", p.checkout, entries)
	c := p.read(t)
	compare(t, "programmed by the original", o, "programmed by the checkout", c)
	flush(t, "checkout", p.checkout)
	if left := p.read(t); len(left) != 0 {
		t.Fatal("left after the checkout's flush: ", left)
	}
	t.Logf("%d services, %d destinations", len(entries), len(o)-len(entries))
}

// sameRead reads something that exists with both.
func sameRead(t *testing.T, p pair, op operation) {
	t.Helper()
	if o, c := readBoth(op, p.original, p.checkout); !same(o, c) || o.err != nil {
		t.Errorf("%s\n\toriginal: %s\n\tcheckout: %s", op, o, c)
	}
}

func v4Service() *original.Service {
	return &original.Service{
		Address: net.IPv4(10, 1, 1, 1), Protocol: syscall.IPPROTO_TCP, Port: 80,
		SchedName: original.RoundRobin, Netmask: 0xffffffff, AddressFamily: syscall.AF_INET,
	}
}

func markService() *original.Service {
	return &original.Service{FWMark: 1, SchedName: original.RoundRobin, Netmask: 0xffffffff, AddressFamily: syscall.AF_INET}
}

func v4Destination() *original.Destination {
	return &original.Destination{Address: net.IPv4(10, 2, 2, 2), Port: 8080, Weight: 1}
}

// with changes a copy.
func with[T any](v *T, change func(*T)) *T {
	c := *v
	change(&c)
	return &c
}

// testDenied makes calls on a thread that has lost its capabilities.
func testDenied(t *testing.T) {
	ns := newNamespace(t)
	p := ns.pair(t)
	for _, m := range calls {
		op := operation{method: m.name, service: v4Service(), destination: v4Destination(), config: &original.Config{TimeoutTCP: time.Minute}}
		if op.method == "New" || op.method == "SetTunnel" || op.method == "IsServicePresent" {
			continue // needs none, is not the original's, has no error to return
		}
		var o, c outcome
		ns.do(t, func() {
			header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var had, less [2]unix.CapUserData
			if err := unix.Capget(&header, &had[0]); err != nil {
				t.Fatal(err)
			}
			less = had
			less[0].Effective, less[1].Effective = 0, 0
			if err := unix.Capset(&header, &less[0]); err != nil {
				t.Fatal(err)
			}
			o, c = op.call(p.original), op.call(p.checkout)
			if err := unix.Capset(&header, &had[0]); err != nil {
				t.Fatal(err)
			}
		})
		if !same(o, c) || o.err != syscall.EPERM {
			t.Errorf("%s: original: %s, checkout: %s, want %s", op.method, o, c, describe(syscall.EPERM))
		}
	}
}
