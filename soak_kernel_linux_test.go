package ipvs

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// usage is what must stay flat: memory in use, descriptors, threads.
type usage struct{ heap, rss, fds, threads int }

func usageNow(t *testing.T) (u usage) {
	t.Helper()
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	status, err := os.ReadFile("/proc/self/status")
	must(t, err)
	for _, line := range strings.Split(string(status), "\n") {
		name, value, _ := strings.Cut(line, ":")
		n, _ := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
		switch name {
		case "VmRSS":
			u.rss = n
		case "Threads":
			u.threads = n
		}
	}
	u.heap, u.fds = int(m.HeapAlloc>>10), len(descriptors(t))
	return u
}

// A long run of mixed operations: memory, descriptors and threads stay flat.
// IPVS_TEST_QUEUE makes the receive queue small: then errors are allowed, but no false
// successes.
func TestKernelSoak(t *testing.T) {
	needKernel(t)
	ns := newNamespace(t)
	queue, _ := strconv.Atoi(os.Getenv("IPVS_TEST_QUEUE"))
	operations := times(20_000, 1_000_000)
	if n, err := strconv.Atoi(os.Getenv("IPVS_TEST_OPERATIONS")); err == nil {
		operations = n
	}
	open := func() *Handle {
		i, err := NewAt(ns)
		must(t, err)
		if queue > 0 {
			must(t, unix.SetsockoptInt(i.socket.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, queue))
		}
		return i
	}
	i := open()
	defer func() { i.Close() }()
	r := rand.New(rand.NewPCG(1, 2))
	is := map[int]int{} // weight of the destination of each service
	failures := 0
	fail := func(err error) {
		failures++
		if queue == 0 {
			t.Fatal(err)
		}
	}
	step := func() (n int) {
		switch k := r.IntN(400); r.IntN(6) {
		case 0, 1: // a batch
			var b Batch
			next := maps.Clone(is)
			for range 50 {
				k := r.IntN(400)
				d := ipv4Destination(1)
				d.Weight = 1 + r.IntN(100)
				if _, there := next[k]; there {
					b.UpdateDestination(ipv4Service(k), d)
				} else {
					b.NewService(ipv4Service(k))
					b.NewDestination(ipv4Service(k), d)
				}
				next[k] = d.Weight
			}
			if err := i.Do(&b); err != nil {
				fail(err)
				is = read(t, i)
			} else {
				is = next
			}
			return b.Len()
		case 2:
			if err := i.DelService(ipv4Service(k)); err == nil {
				delete(is, k)
			} else if _, there := is[k]; there || err != syscall.ESRCH {
				fail(err)
				is = read(t, i)
			}
		case 3:
			dests, err := i.GetDestinations(ipv4Service(k))
			if err != nil {
				fail(err)
			} else if w, there := is[k]; there != (len(dests) == 1) || there && dests[0].Weight != w {
				t.Fatalf("service %d: %v, want weight %d", k, dests, w)
			}
		case 4:
			services, err := i.GetServices()
			if err != nil {
				fail(err)
				return 1
			}
			// While their table grows, Linux 7 and later list it incompletely.
			eventually(func() bool {
				again, err := i.GetServices()
				if err == nil {
					services = again
				}
				return len(services) == len(is)
			})
			if len(services) != len(is) {
				t.Fatalf("%d services, want %d", len(services), len(is))
			}
			return len(services)
		case 5:
			i.Close()
			i = open()
		}
		return 1
	}
	var report []string
	var marks []usage
	for done, mark := 0, 0; ; {
		if done >= mark*operations/2 {
			u := usageNow(t)
			marks = append(marks, u)
			report = append(report, fmt.Sprintf("after %d operations: heap %d KiB, RSS %d KiB, %d descriptors, %d threads", done, u.heap, u.rss, u.fds, u.threads))
			if mark++; mark == 3 {
				break
			}
		}
		done += step()
	}
	t.Logf("%s; %d failures", strings.Join(report, "; "), failures)
	middle, end := marks[1], marks[2]
	// A handle has a second descriptor once it listed many services.
	if end.heap > middle.heap+1024 || end.rss > middle.rss+16384 || end.fds > middle.fds+1 || end.threads > middle.threads+2 {
		t.Errorf("grows: %+v, %+v, %+v", marks[0], middle, end)
	}
	if !eventually(func() bool { return reflect.DeepEqual(read(t, i), is) }) {
		t.Errorf("the table is not what the results said")
	}
}

// read returns the weights of the table, from a handle with its own queue.
func read(t *testing.T, i *Handle) map[int]int {
	t.Helper()
	weights := map[int]int{}
	for {
		table, err := i.GetTable()
		if err != nil {
			continue // under memory pressure
		}
		for _, e := range table {
			k := int(e.Service.Address[2])<<8 | int(e.Service.Address[3])
			weights[k] = -1
			if len(e.Destinations) == 1 {
				weights[k] = e.Destinations[0].Weight
			}
		}
		return weights
	}
}
