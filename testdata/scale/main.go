//go:build linux

// Command scale programs a table of 10,000 services with 10 destinations each
// into the kernel, and changes it as a proxier does, with nothing but the public
// API. It works in its own network namespace, prints the cost of each step, and
// fails if a step did not make the right changes.
package main

import (
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

var (
	services     = flag.Int("services", 10000, "number of services")
	destinations = flag.Int("destinations", 10, "number of destinations of each")
)

func main() {
	log.SetFlags(0)
	flag.Parse()
	if err := run(); err != nil {
		log.Fatal("scale: ", err)
	}
}

// table makes the wanted table: n services with m destinations each.
func table(n, m int) []ipvs.TableEntry {
	address := func(first byte, n int) net.IP { return net.IPv4(first, byte(n>>16), byte(n>>8), byte(n)).To4() }
	entries := make([]ipvs.TableEntry, n)
	for s := range entries {
		entries[s].Service = &ipvs.Service{Address: address(10, s+1), Protocol: unix.IPPROTO_TCP, Port: 80,
			SchedName: ipvs.RoundRobin, Netmask: 0xFFFFFFFF}
		for d := range m {
			entries[s].Destinations = append(entries[s].Destinations,
				&ipvs.Destination{Address: address(100, s*m+d+1), Port: 8080, Weight: 1})
		}
	}
	return entries
}

func run() error {
	if err := newNamespace(); err != nil {
		return fmt.Errorf("a new network namespace: %w", err)
	}
	h, err := ipvs.New("")
	if err != nil {
		return err
	}
	defer h.Close()
	n, m := *services, *destinations
	want := table(n, m)
	r := &ipvs.Reconciler{Handle: h}
	reconcile := func() (ipvs.Changes, error) { return r.Reconcile(want) }

	fmt.Printf("%d services with %d destinations each\n\n%-40s %10s %10s %12s %10s\n", n, m, "step", "changes", "seconds", "changes/s", "peak MiB")
	if err := step("create everything", reconcile, ipvs.Changes{ServicesAdded: n, DestinationsAdded: n * m}); err != nil {
		return err
	}
	if err := check(h, n, n*m, 0); err != nil {
		return err
	}
	if err := step("reconcile again", reconcile, ipvs.Changes{}); err != nil {
		return err
	}

	overNetlink := func() (ipvs.Changes, error) {
		have, err := h.GetTable()
		if err != nil {
			return ipvs.Changes{}, err
		}
		batch, err := ipvs.Diff(have, want)
		if err == nil && batch.Len() != 0 {
			err = fmt.Errorf("%d changes", batch.Len())
		}
		return ipvs.Changes{}, err
	}
	if err := step("the same over netlink (GetTable, Diff)", overNetlink, ipvs.Changes{}); err != nil {
		return err
	}

	// One destination in a hundred gets another weight.
	updates := 0
	for number := 0; number < n*m; number += 100 {
		want[number/m].Destinations[number%m].Weight = 2
		updates++
	}
	if err := step("1 % changed", reconcile, ipvs.Changes{DestinationsUpdated: updates}); err != nil {
		return err
	}
	if err := step("reconcile again", reconcile, ipvs.Changes{}); err != nil {
		return err
	}

	// The last destination of each service is no longer wanted. The first call
	// takes its weight, a later one deletes it: nobody is connected.
	for s := range want {
		want[s].Destinations = want[s].Destinations[:m-1]
	}
	r.Drain = time.Hour
	if err := step("drain one destination of each service", reconcile, ipvs.Changes{DestinationsUpdated: n, Draining: n}); err != nil {
		return err
	}
	if err := check(h, n, n*m, n); err != nil {
		return err
	}
	if err := step("delete what has drained", reconcile, ipvs.Changes{DestinationsDeleted: n}); err != nil {
		return err
	}
	if err := check(h, n, n*(m-1), 0); err != nil {
		return err
	}
	if err := step("reconcile again", reconcile, ipvs.Changes{}); err != nil {
		return err
	}
	if err := step("flush", func() (ipvs.Changes, error) { return ipvs.Changes{}, h.Flush() }, ipvs.Changes{}); err != nil {
		return err
	}
	return check(h, 0, 0, 0)
}

// step runs f, prints its cost, and checks the changes that it reports.
func step(name string, f func() (ipvs.Changes, error), want ipvs.Changes) error {
	if err := resetPeak(); err != nil {
		return err
	}
	began := time.Now()
	changes, err := f()
	seconds := time.Since(began).Seconds()
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	peak, err := peakMemory()
	if err != nil {
		return err
	}
	fmt.Printf("%-40s %10d %10.2f %12.0f %10.1f\n", name, changes.Total(), seconds, float64(changes.Total())/seconds, peak)
	if (changes.RequeueAfter != 0) != (want.Draining != 0) {
		return fmt.Errorf("%s: to be called again after %v", name, changes.RequeueAfter)
	}
	changes.RequeueAfter = 0
	if changes != want {
		return fmt.Errorf("%s: made the changes %+v, want %+v", name, changes, want)
	}
	return nil
}

// check counts the kernel's entries, and the destinations of weight 0.
func check(h *ipvs.Handle, services, destinations, quiet int) error {
	entries, err := h.GetTable()
	if err != nil {
		return err
	}
	all, zero := 0, 0
	for _, e := range entries {
		all += len(e.Destinations)
		for _, d := range e.Destinations {
			if d.Weight == 0 {
				zero++
			}
		}
	}
	if len(entries) != services || all != destinations || zero != quiet {
		return fmt.Errorf("the kernel has %d services, %d destinations, %d of them with weight 0; want %d, %d, %d",
			len(entries), all, zero, services, destinations, quiet)
	}
	return nil
}

// newNamespace moves the process into a new network namespace.
func newNamespace() error {
	// Sockets are opened on this thread: ipvs.New("") uses the namespace of the calling
	// thread.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	// The kernel accepts no IPv4 destination before a device is up.
	if err := netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "lo"}}); err != nil {
		return err
	}
	// Kernels before 6.2 cannot switch off the estimation of rates.
	err := os.WriteFile("/proc/sys/net/ipv4/vs/run_estimation", []byte("0"), 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// resetPeak restarts the measurement of peakMemory. It does not free the heap of the
// previous step.
func resetPeak() error { return os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) }

// peakMemory returns the largest size of the process since resetPeak, in MiB (VmHWM).
func peakMemory() (float64, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for _, line := range strings.Split(string(status), "\n") {
		var kib float64
		if n, _ := fmt.Sscanf(line, "VmHWM: %f kB", &kib); n == 1 {
			return kib / 1024, nil
		}
	}
	return 0, errors.New("/proc/self/status has no VmHWM")
}
