package ipvs

import (
	"bytes"
	"errors"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A closed socket sends and receives nothing.
func TestClosedSocket(t *testing.T) {
	i, k := newFake(t, acknowledge)
	s := i.socket
	s.close()
	if err := s.send([]byte("request"), time.Second); err != ErrClosed || len(k.requests) != 0 {
		t.Errorf("send: %v", err)
	}
	if got, err := s.receive(); err != ErrClosed || got != nil {
		t.Errorf("receive: %v, %v", got, err)
	}
	if got, err := s.receiveUntil(time.Now().Add(time.Minute)); err != ErrClosed || got != nil {
		t.Errorf("receiveUntil: %v, %v", got, err)
	}
	if err := s.wantErrorText(); err != nil { // the fake's has it already
		t.Error(err)
	}
	s.errorText = false
	if err := s.wantErrorText(); err != ErrClosed {
		t.Errorf("wantErrorText: %v", err)
	}
}

// Close returns at once, whatever other calls do: here one is inside sendmsg, and
// another waits for it. The descriptor stays open until the call returns.
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

// A descriptor that the process has reused is never touched: again and again one
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

// fullSocket returns a socket that has no room to send, what it was filled with, and
// the other end. Only the address family is not netlink's.
func fullSocket(t *testing.T) (s *socket, filler []byte, peer int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	s, filler = newSocket(fds[0], fakePortID), bytes.Repeat([]byte{'.'}, 4096)
	t.Cleanup(func() { s.close(); unix.Close(fds[1]) })
	for err == nil {
		err = s.sendmsg(fds[0], filler)
	}
	if err != unix.EAGAIN {
		t.Fatal(err)
	}
	return s, filler, fds[1]
}

// A request waits for room, and is sent when there is some.
func TestSendWaitsForRoom(t *testing.T) {
	s, filler, peer := fullSocket(t)
	request, sent := []byte("request"), make(chan error, 1)
	go func() { sent <- s.send(request, time.Second) }()
	select {
	case err := <-sent:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	var got []byte
	buffer, fillers := make([]byte, len(filler)), 0
	eventually(func() bool {
		for {
			n, err := unix.Read(peer, buffer)
			if err != nil {
				return got != nil
			}
			if bytes.Equal(buffer[:n], filler) {
				fillers++
			} else {
				got = bytes.Clone(buffer[:n])
			}
		}
	})
	if !bytes.Equal(got, request) || fillers == 0 {
		t.Errorf("after %d other datagrams it got %q", fillers, got)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

// Close ends the wait for room.
func TestCloseEndsSend(t *testing.T) {
	s, _, _ := fullSocket(t)
	i := &Handle{socket: s, family: fakeFamily}
	done := make(chan error, 1)
	go func() { done <- i.NewService(ipv4Service(1)) }()
	select {
	case err := <-done:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	i.Close()
	if err := <-done; err != ErrClosed {
		t.Errorf("got %v", err)
	}
}

// The error of send after the wait is the error of the call.
func TestSendFailsAfterWait(t *testing.T) {
	i, k := newFake(t, acknowledge)
	k.sendErr = []error{unix.EAGAIN, unix.ENOMEM}
	if err := i.NewService(ipv4Service(1)); !errors.Is(err, unix.ENOMEM) {
		t.Errorf("got %v", err)
	}
	k.sendErr = []error{unix.EAGAIN, nil}
	if err := i.NewService(ipv4Service(1)); err != nil || len(k.requests) != 1 {
		t.Errorf("%d requests, %v", len(k.requests), err)
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

// The sizes of the two buffers are not mixed up.
func TestSocketBuffers(t *testing.T) {
	s := netlinkSocket(t)
	defer s.close()
	must(t, s.withFD(func(fd int) error {
		return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 20000), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 30000))
	}))
	// The kernel doubles the requested size.
	if receive, send := s.buffers(); receive != 40000 || send != 60000 {
		t.Errorf("got %d, %d", receive, send)
	}
}

// The options for error texts are set, and once is enough.
func TestWantErrorText(t *testing.T) {
	s := netlinkSocket(t)
	defer s.close()
	must(t, s.wantErrorText())
	if !s.errorText {
		t.Error("the next batch sets them again")
	}
	must(t, s.withFD(func(fd int) error {
		for _, option := range []int{unix.NETLINK_CAP_ACK, unix.NETLINK_EXT_ACK} {
			if on, err := unix.GetsockoptInt(fd, unix.SOL_NETLINK, option); err != nil || on != 1 {
				t.Errorf("option %d: %d, %v", option, on, err)
			}
		}
		return nil
	}))
}
