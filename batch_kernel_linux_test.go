package ipvs

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestKernelBatch(t *testing.T) {
	i, ns := newKernelHandle(t)
	const services, dests = 300, 3
	var b Batch
	var want []string
	for n := range services {
		s := ipv4Service(n)
		b.NewService(s)
		want = append(want, "-A "+s.Rule())
		for m := range dests {
			d := ipv4Destination(m)
			b.NewDestination(s, d)
			want = append(want, fmt.Sprintf("-a %s %s", serviceName(s), d.Rule()))
		}
		if n == 150 { // in the middle, what fails
			b.NewService(s)
			b.DelDestination(s, ipv4Destination(99))
		}
	}
	err := i.Do(&b)
	var failed *BatchError
	if !errors.As(err, &failed) || len(failed.Errors) != 2 || failed.Errors[0].Err != syscall.EEXIST || failed.Errors[1].Err != syscall.ENOENT {
		t.Fatalf("got %v", err)
	}
	got := strings.Split(strings.TrimSpace(ipvsadm(t, ns, "-Sn")), "\n")
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("ipvsadm shows %d lines, want %d", len(got), len(want))
	}
	// The list is now long enough for large buffers; both ways give the same result.
	for range 2 {
		var table []TableEntry
		eventually(func() bool { // kernels from 7 on list a growing table incompletely
			table = mustGet(i.GetTable())(t)
			return len(table) == services
		})
		if len(table) != services {
			t.Errorf("%d services", len(table))
		}
		for _, e := range table {
			if len(e.Destinations) != dests {
				t.Errorf("%v has %d destinations", e.Service, len(e.Destinations))
			}
		}
	}
	if i.bulk.Load() == nil {
		t.Error("a long list is still read with small buffers")
	}
	b.Reset()
	for n := range services {
		b.DelService(ipv4Service(n))
	}
	must(t, i.Do(&b))
	if services := mustGet(i.GetServices())(t); len(services) != 0 {
		t.Errorf("%d services left", len(services))
	}
}

// With a small receive queue sends are small, so that the replies fit even if all
// changes fail.
func TestKernelDoAllFail(t *testing.T) {
	i, ns := newKernelHandle(t)
	for _, queue := range []int{0, 20000, 1} {
		if queue > 0 {
			must(t, unix.SetsockoptInt(i.socket.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, queue))
		}
		var b Batch
		for n := range 1000 {
			b.DelService(ipv4Service(n))
		}
		err := i.Do(&b)
		var failed *BatchError
		if !errors.As(err, &failed) || len(failed.Errors) != 1000 {
			t.Fatalf("queue %d: %v", queue, err)
		}
		for n, op := range failed.Errors {
			if op.Index != n || op.Err != syscall.ESRCH {
				t.Fatalf("queue %d: %v", queue, op)
			}
		}
	}
	if out := ipvsadm(t, ns, "-Sn"); out != "" {
		t.Errorf("ipvsadm shows %s", out)
	}
}

// With a small send buffer sends are small.
func TestKernelDoSmallSendBuffer(t *testing.T) {
	i, _ := newKernelHandle(t)
	must(t, unix.SetsockoptInt(i.socket.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1))
	var b Batch
	for n := range 300 {
		b.NewService(ipv4Service(n))
	}
	must(t, i.Do(&b))
	var got int
	if !eventually(func() bool { got = len(mustGet(i.GetServices())(t)); return got == 300 }) {
		t.Errorf("%d services", got)
	}
	// The kernel accepts at most the size of the buffer less 32 bytes.
	var updates Batch
	for n := range 60 {
		updates.UpdateService(ipv4Service(n))
	}
	for extra := range 64 {
		must(t, unix.SetsockoptInt(i.socket.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 2304+extra))
		if err := i.Do(&updates); err != nil {
			_, send := i.socket.buffers()
			t.Fatalf("a send buffer of %d bytes: %v", send, err)
		}
	}
}
