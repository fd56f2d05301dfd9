package ipvs

// This file has the descriptor: send, receive, wait, close.

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sendTimeout bounds the wait for room to send a request. The kernel handles a
// request while it is being sent, so in practice there is no wait.
const sendTimeout = 30 * time.Second

// pollSlice is how long a waiting call takes at most to notice that the socket was
// closed.
const pollSlice = 20 * time.Millisecond

// Sizes of the buffer for replies. The kernel makes each part of a dump as large as the
// largest buffer that the socket ever read with, up to 32 KiB, and clears it first: for
// the few destinations of a service that costs more than everything else. The small
// size is the kernel's minimum with pages of 4 KiB; where pages are larger, the buffer
// grows. The first size is enough for answers of one message.
const (
	firstBuffer = 1024
	smallBuffer = 3776
	largeBuffer = 32768
)

// socket is a non-blocking generic netlink socket. It is not safe for concurrent
// use, except for close and withFD, which may be called at any time.
//
// The kernel has almost always answered when sendmsg returns, so waiting is rare. A
// wait therefore blocks its thread: Go's poller would cost every message several hundred
// instructions.
type socket struct {
	portID uint32 // the socket's netlink address, which the kernel puts into every reply
	in     []byte // the buffer for replies
	source source

	// lateReplies is set while queued replies may belong to an abandoned exchange.
	lateReplies bool
	// errorText is set after wantErrorText.
	errorText bool
	// another opens another socket to the same Fake; nil for the real kernel.
	another func() *socket

	// The system calls; tests replace them to provoke faults.
	sendmsg func(fd int, b []byte) error
	recvmsg func(fd int, b []byte) (n int, from uint32, err error)

	// refs counts the users of the descriptor, of which the open socket itself is one.
	// The last one closes it, so no system call ever uses a descriptor number that the
	// process has reused.
	fd     int
	refs   atomic.Int32
	closed atomic.Bool
}

// openSocket opens a socket in the network namespace of the calling thread.
func openSocket() (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_GENERIC)
	if err != nil {
		return nil, fmt.Errorf("ipvs: opening a netlink socket: %w", err)
	}
	portID, err := bind(fd)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return newSocket(fd, portID), nil
}

// bind binds the socket and returns the port ID that the kernel chose.
func bind(fd int) (portID uint32, err error) {
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, fmt.Errorf("ipvs: binding the netlink socket: %w", err)
	}
	addr, err := unix.Getsockname(fd)
	if err != nil {
		return 0, fmt.Errorf("ipvs: reading the netlink socket's address: %w", err)
	}
	nladdr, ok := addr.(*unix.SockaddrNetlink)
	if !ok {
		return 0, fmt.Errorf("ipvs: the netlink socket's address is a %T", addr)
	}
	return nladdr.Pid, nil
}

// newSocket returns a socket that owns the descriptor fd.
func newSocket(fd int, portID uint32) *socket {
	s := &socket{fd: fd, portID: portID, sendmsg: sendmsg}
	s.recvmsg = s.source.recvmsg
	s.refs.Store(1)
	return s
}

// noFD stands for the descriptor of a socket that has none.
const noFD = -1

// defaultQueue is the default size of a socket's receive queue and send buffer, in bytes
// (net.core.rmem_default, wmem_default).
const defaultQueue = 212992

// newSocketFunc returns a socket without a descriptor. The functions send and receive
// stand for the kernel, and another opens another socket to it. Such a socket does not
// wait: if receive returns EAGAIN, no reply will come.
func newSocketFunc(portID uint32, send func(int, []byte) error, receive func(int, []byte) (int, uint32, error), another func() *socket) *socket {
	s := newSocket(noFD, portID)
	s.sendmsg, s.recvmsg, s.another, s.errorText = send, receive, another, true
	return s
}

func sendmsg(fd int, b []byte) error { return unix.Send(fd, b, 0) }

// source holds the peer address that recvfrom fills in.
type source struct {
	address unix.RawSockaddrNetlink
	size    uint32
}

// recvmsg returns the length of the datagram, even if it does not fit into b, and the
// port ID of its sender. unix.Recvfrom does the same with two allocations.
func (s *source) recvmsg(fd int, b []byte) (n int, from uint32, err error) {
	s.size = unix.SizeofSockaddrNetlink
	r, _, errno := syscall.Syscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)),
		unix.MSG_TRUNC, uintptr(unsafe.Pointer(&s.address)), uintptr(unsafe.Pointer(&s.size)))
	if errno != 0 {
		return 0, 0, errno
	}
	return int(r), s.address.Pid, nil
}

// close closes the socket and returns at once. Ongoing calls end with ErrClosed;
// one that is inside the kernel keeps the descriptor open until it returns.
func (s *socket) close() {
	if !s.closed.Swap(true) {
		s.release()
	}
}

// acquire returns the descriptor, which stays open until release.
func (s *socket) acquire() (fd int, err error) {
	for {
		n := s.refs.Load()
		if n == 0 || s.closed.Load() {
			return -1, ErrClosed
		}
		if s.refs.CompareAndSwap(n, n+1) {
			return s.fd, nil
		}
	}
}

func (s *socket) release() {
	if s.refs.Add(-1) == 0 && s.fd != noFD {
		unix.Close(s.fd)
	}
}

// withFD calls f with the descriptor, which stays open meanwhile.
func (s *socket) withFD(f func(fd int) error) error {
	fd, err := s.acquire()
	if err != nil {
		return err
	}
	defer s.release()
	if fd == noFD {
		return errNoNamespace
	}
	return f(fd)
}

// wantErrorText asks for error replies that explain the error in words (Linux 4.12) and
// do not echo the request (Linux 4.3). It is no error if the kernel is older.
func (s *socket) wantErrorText() error {
	if s.errorText {
		return nil
	}
	return s.withFD(func(fd int) error {
		for _, option := range []int{unix.NETLINK_CAP_ACK, unix.NETLINK_EXT_ACK} {
			if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, option, 1); err != nil && err != unix.ENOPROTOOPT {
				return fmt.Errorf("ipvs: setting netlink socket option %d: %w", option, err)
			}
		}
		s.errorText = true
		return nil
	})
}

// buffers returns the sizes of the receive queue and the send buffer in bytes.
func (s *socket) buffers() (receive, send int) {
	if s.fd == noFD {
		return defaultQueue, defaultQueue
	}
	s.withFD(func(fd int) error {
		receive, _ = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
		send, _ = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
		return nil
	})
	return receive, send
}

// send sends b, one or more whole requests, as one datagram. The kernel handles
// the requests before it returns, however long that takes. Replies left over from an
// abandoned exchange are discarded first, which may take as long as drainTimeout.
func (s *socket) send(b []byte, drainTimeout time.Duration) error {
	if s.lateReplies {
		if err := s.drain(time.Now().Add(drainTimeout)); err != nil && (isDump(b) || err != errEarlierList) {
			return err
		}
	}
	fd, err := s.acquire()
	if err != nil {
		return err
	}
	defer s.release()
	var deadline time.Time
	for {
		err := s.sendmsg(fd, b)
		switch err {
		case unix.EINTR:
			continue
		case unix.EAGAIN:
		default:
			return err
		}
		if deadline.IsZero() {
			deadline = time.Now().Add(sendTimeout)
		}
		if err := s.wait(fd, unix.POLLOUT, deadline); err == os.ErrDeadlineExceeded {
			return fmt.Errorf("ipvs: no room to send a request within %v: %w", sendTimeout, err)
		} else if err != nil {
			return err
		}
	}
}

// receive returns one datagram that the kernel sent; it is valid until the next
// call. If there is none the error is EAGAIN.
func (s *socket) receive() ([]byte, error) {
	fd, err := s.acquire()
	if err != nil {
		return nil, err
	}
	datagram, err := s.read(fd)
	s.release()
	return datagram, err
}

// receiveUntil is like receive, but waits for a datagram until the deadline.
func (s *socket) receiveUntil(deadline time.Time) ([]byte, error) {
	fd, err := s.acquire()
	if err != nil {
		return nil, err
	}
	defer s.release()
	for {
		datagram, err := s.read(fd)
		if err != unix.EAGAIN {
			return datagram, err
		}
		if err := s.wait(fd, unix.POLLIN, deadline); err != nil {
			return nil, err
		}
	}
}

func (s *socket) read(fd int) ([]byte, error) {
	if s.in == nil {
		s.in = make([]byte, firstBuffer)
	}
	for {
		n, from, err := s.recvmsg(fd, s.in)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		// Other processes can send to this socket too; only the kernel's address is 0.
		// Their messages count as empty datagrams: the caller limits how long it reads.
		if from != 0 {
			return s.in[:0], nil
		}
		if n > len(s.in) {
			s.in = make([]byte, min(2*len(s.in), largeBuffer)) // for the next try
			return nil, errTruncated
		}
		return s.in[:n], nil
	}
}

// prepareDump makes room for the parts of a dump.
func (s *socket) prepareDump() {
	if len(s.in) < smallBuffer {
		s.in = make([]byte, smallBuffer)
	}
}

// wait waits until the descriptor is ready for events. On timeout the error is
// os.ErrDeadlineExceeded.
func (s *socket) wait(fd int, events int16, deadline time.Time) error {
	if fd == noFD {
		return os.ErrDeadlineExceeded
	}
	for {
		left := time.Until(deadline)
		switch {
		case s.closed.Load():
			return ErrClosed
		case left <= 0:
			return os.ErrDeadlineExceeded
		}
		ready := []unix.PollFd{{Fd: int32(fd), Events: events}}
		slice := (min(left, pollSlice) + time.Millisecond - 1) / time.Millisecond
		switch n, err := unix.Poll(ready, int(slice)); {
		case err != nil && err != unix.EINTR:
			return fmt.Errorf("ipvs: waiting for the kernel: %w", err)
		case n > 0:
			return nil
		}
	}
}

// errEarlierList reports that the rest of an abandoned list could not be read in time.
// Until it is read, the kernel accepts no request for another list.
var errEarlierList = fmt.Errorf("ipvs: an earlier list that was abandoned has not ended yet: %w", os.ErrDeadlineExceeded)

// drain discards replies left over from an abandoned exchange: late ones, and the rest
// of a list. Those that it cannot discard before the deadline are recognized later by
// their sequence numbers, but until then no other list can be requested.
func (s *socket) drain(deadline time.Time) error {
	for time.Now().Before(deadline) {
		switch _, err := s.receive(); {
		case err == unix.EAGAIN:
			s.lateReplies = false
			return nil
		case err == nil, err == errTruncated, err == unix.ENOBUFS:
		case errors.Is(err, ErrClosed):
			return err
		default:
			return nil // if it persists, sending the request reports it
		}
	}
	return errEarlierList
}
