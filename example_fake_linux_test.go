package ipvs_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"
)

// proxier stands for a program that uses the package.
type proxier struct{ reconciler ipvs.Reconciler }

func newProxier(handle *ipvs.Handle) *proxier {
	return &proxier{ipvs.Reconciler{Handle: handle, Drain: time.Minute}}
}

var webService = &ipvs.Service{Address: net.IPv4(192, 0, 2, 10), Protocol: unix.IPPROTO_TCP, Port: 80,
	SchedName: ipvs.WeightedRoundRobin, Netmask: 0xFFFFFFFF}

func backend(address string) *ipvs.Destination {
	return &ipvs.Destination{Address: net.ParseIP(address), Port: 8080, Weight: 1}
}

// scale sets the backends of the service.
func (p *proxier) scale(addresses ...string) (ipvs.Changes, error) {
	entry := ipvs.TableEntry{Service: webService}
	for _, address := range addresses {
		entry.Destinations = append(entry.Destinations, backend(address))
	}
	return p.reconciler.Reconcile([]ipvs.TableEntry{entry})
}

// want checks what a call returned, and the destinations that the service then has, in
// ipvsadm's notation.
func want(t *testing.T, kernel *ipvs.Fake, err, wantErr error, destinations ...string) {
	t.Helper()
	if !errors.Is(err, wantErr) {
		t.Errorf("error %v, want %v", err, wantErr)
	}
	have, err := kernel.Handle().GetDestinations(webService)
	if err != nil {
		t.Fatal(err)
	}
	var rules []string
	for _, d := range have {
		rules = append(rules, d.Rule())
	}
	slices.Sort(rules) // the kernel's order means nothing
	if !slices.Equal(rules, destinations) {
		t.Errorf("destinations %q, want %q", rules, destinations)
	}
}

// The test in README: a program scales up, and replaces a backend that has connections
// while the kernel refuses a change.
func TestScale(t *testing.T) {
	kernel := ipvs.NewFake()
	p := newProxier(kernel.Handle()) // in production: a handle from ipvs.New
	_, err := p.scale("10.0.0.1", "10.0.0.2")
	want(t, kernel, err, nil, "-r 10.0.0.1:8080 -m -w 1", "-r 10.0.0.2:8080 -m -w 1")

	kernel.SetConnections(webService, backend("10.0.0.2"), 3, 0, 0) // active, inactive, persistent
	kernel.Fail("NewDestination", syscall.ENOMEM)                   // the next one is refused
	_, err = p.scale("10.0.0.1", "10.0.0.3")
	want(t, kernel, err, syscall.ENOMEM, "-r 10.0.0.1:8080 -m -w 1", "-r 10.0.0.2:8080 -m -w 0")
	_, err = p.scale("10.0.0.1", "10.0.0.3") // the next round
	want(t, kernel, err, nil, "-r 10.0.0.1:8080 -m -w 1", "-r 10.0.0.2:8080 -m -w 0", "-r 10.0.0.3:8080 -m -w 1")
	kernel.SetConnections(webService, backend("10.0.0.2"), 0, 0, 0)
	_, err = p.scale("10.0.0.1", "10.0.0.3")
	want(t, kernel, err, nil, "-r 10.0.0.1:8080 -m -w 1", "-r 10.0.0.3:8080 -m -w 1")
}

// A unit test of a program, with a Fake instead of a kernel: the program scales up and
// down, connections end, and the kernel fails.
func ExampleFake() {
	kernel := ipvs.NewFake()
	p := newProxier(kernel.Handle())

	changes, err := p.scale("10.0.0.1", "10.0.0.2")
	fmt.Println("scaled up:", changes.DestinationsAdded, "added,", err)

	// A backend that is no longer wanted drains as long as it has connections.
	kernel.SetConnections(webService, backend("10.0.0.2"), 3, 0, 0)
	changes, err = p.scale("10.0.0.1")
	fmt.Println("scaled down:", changes.Draining, "draining,", err)
	changes, err = p.scale("10.0.0.1")
	fmt.Println("not yet ended:", changes.Draining, "draining,", err)
	kernel.SetConnections(webService, backend("10.0.0.2"), 0, 0, 0)
	changes, err = p.scale("10.0.0.1")
	fmt.Println("connections ended:", changes.DestinationsDeleted, "deleted,", err)

	// The kernel rejects one change, and accepts it the next time.
	kernel.Fail("NewDestination", syscall.ENOMEM)
	_, err = p.scale("10.0.0.1", "10.0.0.3")
	fmt.Println("refused:", errors.Is(err, syscall.ENOMEM))
	changes, err = p.scale("10.0.0.1", "10.0.0.3")
	fmt.Println("tried again:", changes.DestinationsAdded, "added,", err)

	// The kernel makes a change, but its reply is lost.
	kernel.Fail("NewDestination", os.ErrDeadlineExceeded)
	_, err = p.scale("10.0.0.1", "10.0.0.3", "10.0.0.4")
	fmt.Println("reply lost:", errors.Is(err, ipvs.ErrOutcomeUnknown))
	changes, err = p.scale("10.0.0.1", "10.0.0.3", "10.0.0.4")
	fmt.Println("tried again:", changes.Total(), "changes,", err)

	// Output:
	// scaled up: 2 added, <nil>
	// scaled down: 1 draining, <nil>
	// not yet ended: 1 draining, <nil>
	// connections ended: 1 deleted, <nil>
	// refused: true
	// tried again: 1 added, <nil>
	// reply lost: true
	// tried again: 0 changes, <nil>
}

// The Fake checks what the kernel checks.
func ExampleFake_Handle() {
	handle := ipvs.NewFake().Handle()
	web := *webService
	fmt.Println(handle.NewService(&web))
	fmt.Println(handle.NewService(&web))
	web.SchedName = "nosuch"
	fmt.Println(handle.UpdateService(&web))
	fmt.Println(handle.NewDestination(&web, backend("224.0.0.1")))
	fmt.Println(handle.DelDestination(&web, backend("10.0.0.1")))

	// Output:
	// <nil>
	// file exists
	// no such file or directory
	// invalid argument
	// no such file or directory
}
