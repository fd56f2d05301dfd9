package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"syscall"
	"testing"
	"unsafe"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Failing allocations on a real kernel. Debian's kernels have no fault injection and no
// probes that let a function fail, and charge no memory cgroup for what IPVS and
// netlink need. So system calls fail instead, as they do when netlink gets no memory:
// with a seccomp filter on one thread, this process decides for each call whether it is
// carried out.

// faultsOf are the system calls that fail, and their errors. A kernel without memory
// for a reply, or for a part of a list, returns ENOBUFS. EAGAIN is not among them: Go's
// poller would wait for an event that never occurs. Nor is socket: Go assumes that it
// never blocks, so no thread might be left to decide.
var faultsOf = map[int32][]syscall.Errno{
	unix.SYS_BIND:     {unix.ENOMEM},
	unix.SYS_SENDTO:   {unix.ENOBUFS, unix.ENOMEM, unix.EINTR},
	unix.SYS_RECVFROM: {unix.ENOBUFS, unix.EINTR},
}

// From linux/seccomp.h, which x/sys v0.2.0 knows only in part.
const (
	seccompSetFilter   = 1          // SECCOMP_SET_MODE_FILTER
	seccompNewListener = 1 << 3     // SECCOMP_FILTER_FLAG_NEW_LISTENER
	seccompAllow       = 0x7FFF0000 // SECCOMP_RET_ALLOW
	seccompNotify      = 0x7FC00000 // SECCOMP_RET_USER_NOTIF
	seccompReceive     = 0xC0502100 // SECCOMP_IOCTL_NOTIF_RECV
	seccompSend        = 0xC0182101 // SECCOMP_IOCTL_NOTIF_SEND
	seccompContinue    = 1          // SECCOMP_USER_NOTIF_FLAG_CONTINUE
)

// seccompNotif is struct seccomp_notif: a system call that waits for a verdict.
type seccompNotif struct {
	id         uint64
	pid, flags uint32
	call       int32
	arch       uint32
	ip         uint64
	args       [6]uint64
}

// seccompVerdict is struct seccomp_notif_resp.
type seccompVerdict struct {
	id    uint64
	value int64
	errno int32
	flags uint32
}

// watchCalls makes the calling thread's system calls in faultsOf wait for a
// verdict. There is no way back: the thread must end. Other threads are not
// affected, nor are new ones, which Go does not make from a locked thread.
func watchCalls() (listener int, err error) {
	runtime.LockOSThread()
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}} // the call's number
	for call := range faultsOf {
		skip := uint8(len(faultsOf) + 1 - len(filter))
		filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(call), Jt: skip})
	}
	filter = append(filter, unix.SockFilter{Code: unix.BPF_RET, K: seccompAllow}, unix.SockFilter{Code: unix.BPF_RET, K: seccompNotify})
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, seccompSetFilter, seccompNewListener, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return -1, errno
	}
	return int(fd), nil
}

// failCalls makes one in eight of the watched calls fail until their thread has ended,
// and returns how often each failed.
func failCalls(listener int) (failed map[string]int) {
	defer unix.Close(listener)
	failed = map[string]int{}
	r := rand.New(rand.NewPCG(5, 6))
	away := make([]byte, largeBuffer)
	owed := map[uint64]bool{} // descriptors whose reply was taken away, and that was not said yet
	for {
		poll := []unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}}
		unix.Poll(poll, -1)
		if poll[0].Revents&unix.POLLIN == 0 {
			if poll[0].Revents != 0 {
				return failed // POLLHUP: no thread is left
			}
			continue
		}
		var n seccompNotif
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), seccompReceive, uintptr(unsafe.Pointer(&n))); errno != 0 {
			continue // a signal ended the call's wait: it comes again
		}
		v := seccompVerdict{id: n.id, flags: seccompContinue}
		fd, what := n.args[0], ""
		switch errnos := faultsOf[n.call]; {
		case n.call == unix.SYS_RECVFROM && owed[fd]:
			v.errno, what = -int32(unix.ENOBUFS), "ENOBUFS, reply lost"
		case r.IntN(8) == 0:
			errno := errnos[r.IntN(len(errnos))]
			v.errno, what = -int32(errno), unix.ErrnoName(errno)
			// A reply that the kernel could not allocate is lost, others are queued.
			if n.call == unix.SYS_RECVFROM && errno == unix.ENOBUFS && r.IntN(2) == 0 {
				if _, _, err := unix.Recvfrom(int(fd), away[:n.args[2]], unix.MSG_DONTWAIT); err == nil {
					what, owed[fd] = "ENOBUFS, reply lost", true
				}
			}
		}
		if v.errno != 0 {
			v.flags = 0
		}
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), seccompSend, uintptr(unsafe.Pointer(&v)))
		switch {
		case errno != 0: // a signal ended the call meanwhile: it comes again, and does not know the verdict
			failed["not told"]++
		case what != "":
			failed[fmt.Sprintf("call %d: %s", n.call, what)]++
			if n.call == unix.SYS_RECVFROM {
				delete(owed, fd)
			}
		}
	}
}

// While system calls fail at random, changes that are reported as made are made, those
// reported as rejected or not sent are not, and reads are right. An undisturbed handle
// on another thread reads the true table.
func TestKernelFailingCalls(t *testing.T) {
	needKernel(t)
	if runtime.GOARCH == "386" || runtime.GOARCH == "s390x" {
		t.Skip("SKIP: here Go makes these calls through socketcall, whose arguments no filter sees")
	}
	ns := newNamespace(t)
	fds := descriptors(t)
	clean, err := NewAt(ns)
	must(t, err)
	defer clean.Close()
	must(t, clean.NewService(&someService))
	var failed map[string]int
	ended := make(chan bool)
	t.Run("thread", func(t *testing.T) { // its own goroutine, with which the thread ends
		listener, err := watchCalls()
		if err != nil {
			close(ended)
			if inVM {
				t.Fatal(err)
			}
			t.Skip("SKIP: needs seccomp with user notification: ", err)
		}
		go func() { failed = failCalls(listener); close(ended) }()
		must(t, netns.Set(ns))
		failingCalls(t, clean)
	})
	<-ended
	t.Logf("failed: %v", failed)
	delete(failed, "not told")
	if failed != nil && len(failed) < 7 {
		t.Errorf("%d of the 7 faults happened: %v", len(failed), failed)
	}
	clean.Close()
	if left := opened(t, fds); len(left) > 0 {
		t.Errorf("descriptors left open: %v", left)
	}
}

func injected(err error) bool { return errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.ENOMEM) }

// failingCalls works on the table from a thread whose calls fail.
func failingCalls(t *testing.T, clean *Handle) {
	r := rand.New(rand.NewPCG(7, 8))
	counts := map[string]int{}
	// worked reports whether a call succeeded, and ends the test if its error is not an
	// injected one.
	worked := func(doing string, err error) bool {
		switch {
		case err == nil:
		case injected(err):
			doing += ", failed"
		default:
			t.Fatalf("%s: %v", doing, err)
		}
		counts[doing]++
		return err == nil
	}
	open := func() *Handle {
		for {
			if i, err := New(""); worked("New", err) {
				return i
			}
		}
	}
	weights := func(dests []*Destination) map[int]int {
		m := map[int]int{}
		for _, d := range dests {
			m[int(d.Port)] = d.Weight
		}
		return m
	}
	// truth is the table as the undisturbed handle on another thread reads it.
	truth := func() (m map[int]int) {
		read := make(chan error)
		go func() {
			dests, err := clean.GetDestinations(&someService)
			m = weights(dests)
			read <- err
		}()
		must(t, <-read)
		return m
	}
	i := open()
	defer func() { i.Close() }()
	is := map[int]int{} // weight of each destination, by port
	for range times(600, 10_000) {
		switch r.IntN(12) {
		default:
			randomChange(t, r, i, is, truth, counts)
		case 0, 1, 2, 3:
			if dests, err := i.GetDestinations(&someService); worked("GetDestinations", err) && (len(dests) != len(is) || !maps.Equal(weights(dests), is)) {
				t.Fatalf("read %v, want %v", weights(dests), is)
			}
		case 4:
			if s, err := i.GetServices(); worked("GetServices", err) && (len(s) != 1 || s[0].Rule() != "-t 10.0.0.1:80 -s rr") {
				t.Fatalf("read %v", s)
			}
		case 5:
			i.Close()
			i = open()
		}
	}
	for _, what := range []string{"New", "GetDestinations", "GetServices", "done", "refused", "not sent", "unknown, done", "unknown, not done", "New, failed", "GetDestinations, failed", "GetServices, failed"} {
		if counts[what] == 0 {
			t.Errorf("never: %s", what)
		}
	}
	t.Logf("%v", counts)
}

// randomChange makes a batch of changes to destinations, a sixth of which the kernel
// must refuse, and compares the reported outcome of each with the table.
func randomChange(t *testing.T, r *rand.Rand, i *Handle, is map[int]int, truth func() map[int]int, counts map[string]int) {
	var b Batch
	ports := r.Perm(250)[:1+r.IntN(40)]
	next, refused := maps.Clone(is), map[int]error{}
	for n, k := range ports {
		d := *ipv4Destination(1)
		d.Port, d.Weight = uint16(k), 1+r.IntN(1000)
		switch _, there := is[k]; {
		case r.IntN(6) == 0 && !there:
			b.UpdateDestination(&someService, &d)
			refused[n] = syscall.ENOENT
		case r.IntN(6) == 0 && there:
			b.NewDestination(&someService, &d)
			refused[n] = syscall.EEXIST
		case !there:
			b.NewDestination(&someService, &d)
			next[k] = d.Weight
		case r.IntN(3) == 0:
			b.DelDestination(&someService, &d)
			delete(next, k)
		default:
			b.UpdateDestination(&someService, &d)
			next[k] = d.Weight
		}
	}
	results := make([]error, len(ports))
	var failed *BatchError
	if err := i.Do(&b); errors.As(err, &failed) {
		for _, e := range failed.Errors {
			results[e.Index] = e.Err
		}
	} else if err != nil {
		t.Fatal(err)
	}
	got := truth()
	for n, k := range ports {
		done := got[k] == next[k] && refused[n] == nil // weight 0: not there
		what := ""
		switch err := results[n]; {
		case err == nil:
			what = "done"
			if !done {
				t.Fatalf("change %d of %d: success, but the kernel has weight %d, want %d (refusal: %v)", n, len(ports), got[k], next[k], refused[n])
			}
		case err == refused[n]:
			what = "refused"
		case !injected(err):
			t.Fatalf("change %d: %v", n, err)
		case errors.Is(err, ErrOutcomeUnknown) && done:
			what = "unknown, done"
		case errors.Is(err, ErrOutcomeUnknown):
			what = "unknown, not done"
		default:
			what = "not sent"
		}
		if !(what == "done" || what == "unknown, done") && got[k] != is[k] {
			t.Fatalf("change %d: %v, but the kernel has weight %d, had %d", n, results[n], got[k], is[k])
		}
		counts[what]++
		if is[k] = got[k]; is[k] == 0 {
			delete(is, k)
		}
	}
	if !maps.Equal(got, is) {
		t.Fatalf("the kernel has %v, want %v: others have changed too", got, is)
	}
}
