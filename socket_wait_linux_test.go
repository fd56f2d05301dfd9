package ipvs

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// fullSocket returns a socket that has no room to send, what it was filled with,
// and the other end. Only the address family is other than netlink's.
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
	go func() { sent <- s.send(request) }()
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

// What send says after the wait is the error of the call.
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
