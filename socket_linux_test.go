package ipvs

import (
	"errors"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Close returns at once, whatever other calls do: here one is inside sendmsg, and
// another waits for it. The descriptor stays open until the call leaves.
func TestCloseDuringSend(t *testing.T) {
	i, _ := newFake(t, acknowledge)
	s := i.socket
	inside, leave := make(chan int), make(chan struct{})
	answer := s.sendmsg
	s.sendmsg = func(fd int, b []byte) error {
		inside <- fd
		<-leave
		return answer(fd, b)
	}
	calls := make(chan error, 2)
	go func() { calls <- i.Flush() }()
	fd := <-inside
	go func() { calls <- i.Flush() }()
	closed := make(chan struct{})
	go func() { i.Close(); i.Close(); close(closed) }()
	select {
	case <-closed:
	case <-time.After(10 * time.Second):
		t.Fatal("Close waits for a call")
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
		t.Errorf("the descriptor of an ongoing call: %v", err)
	}
	if err := i.Zero(); err != ErrClosed || !errors.Is(err, net.ErrClosed) {
		t.Errorf("a call after Close: %v", err)
	}
	close(leave)
	for range 2 {
		if err := <-calls; err != ErrClosed {
			t.Errorf("an ongoing call: %v", err)
		}
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != unix.EBADF {
		t.Errorf("the descriptor after the last call: %v", err)
	}
}

// A descriptor that the process has reused is never touched: a thousand times one
// goroutine closes a handle while others call, and every descriptor that
// appears in its place stays empty and open.
func TestCloseNeverTouchesReusedDescriptors(t *testing.T) {
	for range times(200, 2000) {
		i, _ := newFake(t, acknowledge)
		var calls sync.WaitGroup
		for range 2 {
			calls.Add(1)
			go func() {
				defer calls.Done()
				for i.Flush() != ErrClosed {
				}
			}()
		}
		runtime.Gosched()
		i.Close()
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		must(t, err)
		calls.Wait()
		for _, fd := range fds {
			if n, err := unix.Read(fd, make([]byte, 1)); err != unix.EAGAIN {
				t.Fatalf("a reused descriptor: read %d, %v", n, err)
			}
			must(t, unix.Close(fd))
		}
	}
}

// A call that finds no room to send waits for it.
func TestSendWaitsForRoom(t *testing.T) {
	i, k := newFake(t, acknowledge)
	fill := make([]byte, 1024)
	for {
		if err := unix.Send(i.socket.fd, fill, 0); err == unix.EAGAIN {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	answer, tries := i.socket.sendmsg, 0
	i.socket.sendmsg = func(fd int, b []byte) error {
		tries++
		if err := unix.Send(fd, []byte{0}, 0); err != nil {
			return err
		}
		return answer(fd, b)
	}
	must(t, i.SetTimeout(time.Minute))
	done := make(chan error, 1)
	go func() { done <- i.Flush() }()
	select {
	case err := <-done:
		t.Fatalf("ended without room: %v", err)
	case <-time.After(3 * pollSlice):
	}
	for { // the other end reads, which makes room
		if _, err := unix.Read(k.wakeFD, fill); err == unix.EAGAIN {
			break
		}
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if tries < 2 || tries > 10 {
		t.Errorf("tried %d times: it does not wait, or polls in vain", tries)
	}
}

// Close ends a wait for room, too.
func TestCloseEndsWaitForRoom(t *testing.T) {
	i, _ := newFake(t, acknowledge)
	for unix.Send(i.socket.fd, make([]byte, 1024), 0) == nil {
	}
	i.socket.sendmsg = func(fd int, b []byte) error { return unix.EAGAIN }
	done := make(chan error, 1)
	go func() { done <- i.Flush() }()
	time.Sleep(2 * pollSlice)
	i.Close()
	if err := <-done; err != ErrClosed {
		t.Error(err)
	}
}

func TestWaitTimesOut(t *testing.T) {
	i, _ := newFake(t, acknowledge)
	for _, timeout := range []time.Duration{0, time.Microsecond, 3 * time.Millisecond, 2*pollSlice + 1} {
		start := time.Now()
		err := i.socket.wait(i.socket.fd, unix.POLLIN, start.Add(timeout))
		if took := time.Since(start); err != os.ErrDeadlineExceeded || took < timeout {
			t.Errorf("%v: %v after %v", timeout, err, took)
		}
	}
	if err := i.socket.wait(-1, unix.POLLNVAL, time.Now().Add(pollSlice)); err != os.ErrDeadlineExceeded {
		t.Errorf("a descriptor that is none: %v", err) // poll ignores it
	}
}

// A handle that is dropped without Close is closed by the garbage collector, both
// of its sockets, and never during a call.
func TestDroppedHandlesAreClosed(t *testing.T) {
	before := len(descriptors(t))
	const handles = 200
	func() {
		for range handles {
			s, err := openSocket()
			must(t, err)
			bulk, err := openSocket()
			must(t, err)
			i := &Handle{socket: s}
			i.closeWithHandle(s)
			i.bulk.Store(bulk)
			i.closeWithHandle(bulk)
		}
	}()
	for deadline := time.Now().Add(20 * time.Second); ; {
		runtime.GC()
		if now := len(descriptors(t)); now <= before {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("%d descriptors, %d before", now, before)
		}
		time.Sleep(10 * time.Millisecond)
	}

	// A call on a handle that nothing else refers to.
	released := make(chan struct{})
	done := make(chan error, 1)
	func() {
		i, _ := newFake(t, func(r []byte) []fakeReply {
			<-released
			return acknowledge(r)
		})
		detached := &Handle{socket: i.socket, family: i.family}
		i.socket = nil // the test's cleanup leaves it alone
		detached.timeout.Store(int64(time.Minute))
		detached.closeWithHandle(detached.socket)
		go func() { done <- detached.Flush() }()
	}()
	for range 5 {
		runtime.GC()
		time.Sleep(5 * time.Millisecond)
	}
	close(released)
	if err := <-done; err != nil {
		t.Errorf("a call on a handle that was dropped meanwhile: %v", err)
	}
}

// After a list that timed out, the next one waits for the old one to end, or
// ends with an error that matches os.ErrDeadlineExceeded; changes are sent.
func TestListAfterAbandonedList(t *testing.T) {
	i, k := newFake(t, func(r []byte) []fakeReply {
		if isDump(r) {
			return []fakeReply{{data: dataReply(r, unix.NLM_F_MULTI, cmdNewService, fill(fillService(nil, &someService, true))), endless: true}}
		}
		return acknowledge(r)
	})
	if _, err := i.GetServices(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	sent := len(k.requests)
	if _, err := i.GetServices(); !errors.Is(err, os.ErrDeadlineExceeded) || !errors.Is(err, errEarlierList) {
		t.Errorf("the next list: %v", err)
	}
	if n := len(k.requests) - sent; n != 0 {
		t.Errorf("%d requests sent while the kernel takes none", n)
	}
	k.end()
	k.mu.Lock()
	k.queue = nil
	k.mu.Unlock()
	k.respond = rightReplies
	if got, err := i.GetServices(); err != nil || len(got) != 2 {
		t.Errorf("after the old list ended: %d services, %v", len(got), err)
	}
}

// A second socket that could not be opened is tried again for the next long list.
func TestBulkSocketTriedAgain(t *testing.T) {
	i := new(Handle)
	s, err := openSocket()
	must(t, err)
	i.socket = s
	defer i.Close()
	var limit, none unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	none = unix.Rlimit{Cur: 0, Max: limit.Max}
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &none))
	refused := i.bulkSocket()
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	if refused != s {
		t.Fatal("a second socket without a descriptor for it")
	}
	if bulk := i.bulkSocket(); bulk == s {
		t.Skip("SKIP: SIOCGSKNS or setns is not permitted here")
	} else if len(bulk.in) != largeBuffer || i.bulkSocket() != bulk {
		t.Errorf("the second socket has a buffer of %d bytes", len(bulk.in))
	}
}
