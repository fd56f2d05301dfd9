package ipvs

// This file has the descriptor: send, receive, wait, close.

import (
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sendTimeout bounds the wait for room to send a request. The kernel works a
// request off while it is being sent, so there is no wait in practice.
const sendTimeout = 30 * time.Second

// Sizes of the buffer for replies. The kernel makes each part of a dump as
// large as the largest buffer that the socket ever read with, up to 32 KiB, and
// clears it first: for the few destinations of a service that costs more than
// all the rest. So much is the least that it makes with pages of 4 KiB; where it
// makes them larger, the buffer grows.
const (
	smallBuffer = 3776
	largeBuffer = 32768
)

// socket is a non-blocking generic netlink socket. It is not safe for concurrent
// use, but for close, which may come at any time.
//
// Almost always the kernel has answered when sendmsg returns, and no wait is
// needed. Only a socket that has to wait joins Go's poller, which has deadlines,
// and ends the wait when the socket is closed: to be in it costs every message
// some hundred instructions.
type socket struct {
	portID uint32 // the socket's netlink address; the kernel puts it into every reply
	in     []byte // what replies are read into
	source source

	// lateReplies: an exchange was given up, what is queued may belong to it.
	lateReplies bool
	// errorText: wantErrorText was called.
	errorText bool

	// The system calls; tests replace them to provoke faults.
	sendmsg func(fd int, b []byte) error
	recvmsg func(fd int, b []byte) (n int, from uint32, err error)

	// mu keeps the descriptor open during a system call.
	mu     sync.Mutex
	fd     int
	closed bool
	file   *os.File // owns fd once the socket is in the poller; nil before
}

// openSocket opens a socket in the network namespace of the calling thread.
func openSocket() (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_GENERIC)
	if err != nil {
		return nil, fmt.Errorf("ipvs: opening a netlink socket: %w", err)
	}
	portID, err := configure(fd)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return newSocket(fd, portID), nil
}

// configure binds the socket and returns the port id that the kernel chose.
func configure(fd int) (portID uint32, err error) {
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

// newSocket makes a socket of a non-blocking descriptor, which it takes over.
func newSocket(fd int, portID uint32) *socket {
	s := &socket{fd: fd, portID: portID, in: make([]byte, smallBuffer), sendmsg: sendmsg}
	s.recvmsg = s.source.recvmsg
	return s
}

func sendmsg(fd int, b []byte) error { return unix.Send(fd, b, 0) }

// source is where the kernel says whose message it is.
type source struct {
	address unix.RawSockaddrNetlink
	size    uint32
}

// recvmsg returns the length of the datagram, even if that is more than fits,
// and the port id of its sender. unix.Recvfrom does the same with two
// allocations.
func (s *source) recvmsg(fd int, b []byte) (n int, from uint32, err error) {
	s.size = unix.SizeofSockaddrNetlink
	r, _, errno := syscall.Syscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)),
		unix.MSG_TRUNC, uintptr(unsafe.Pointer(&s.address)), uintptr(unsafe.Pointer(&s.size)))
	if errno != 0 {
		return 0, 0, errno
	}
	return int(r), s.address.Pid, nil
}

// close closes the socket; calls under way end with ErrClosed.
func (s *socket) close() {
	s.mu.Lock()
	closed, file := s.closed, s.file
	s.closed = true
	s.mu.Unlock()
	switch {
	case closed:
	case file != nil:
		file.Close() // ends a wait
	default:
		unix.Close(s.fd) // nobody uses it: they look at closed first
	}
}

// withFD calls f with the descriptor, which stays open meanwhile.
func (s *socket) withFD(f func(fd int) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	return f(s.fd)
}

// wantErrorText asks for error replies that say in words what is wrong, and need
// not echo the request. Kernels before 4.3 and 4.12 do without.
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
	s.withFD(func(fd int) error {
		receive, _ = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
		send, _ = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
		return nil
	})
	return receive, send
}

// pollable returns the socket as it is in Go's pollable, where it can wait.
func (s *socket) pollable() (*os.File, syscall.RawConn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, ErrClosed
	}
	if s.file == nil {
		s.file = os.NewFile(uintptr(s.fd), "netlink")
	}
	raw, err := s.file.SyscallConn()
	return s.file, raw, err
}

// send sends b, one or more whole requests, as one datagram.
func (s *socket) send(b []byte) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	err := s.trySend(s.fd, b)
	s.mu.Unlock()
	if err == unix.EAGAIN {
		return s.sendWaiting(b)
	}
	return err
}

// sendWaiting is send for a socket that has no room now.
func (s *socket) sendWaiting(b []byte) error {
	file, raw, err := s.pollable()
	if err != nil {
		return err
	}
	if err := file.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
		return err
	}
	waitErr := raw.Write(func(fd uintptr) bool {
		err = s.trySend(int(fd), b)
		return err != unix.EAGAIN
	})
	if waitErr != nil {
		return waitErr
	}
	return err
}

func (s *socket) trySend(fd int, b []byte) error {
	for {
		if err := s.sendmsg(fd, b); err != unix.EINTR {
			return err
		}
	}
}

// receive returns one datagram that the kernel sent; it is valid until the next
// call. If none is there the error is EAGAIN.
func (s *socket) receive() ([]byte, error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, ErrClosed
	}
	datagram, err := s.tryReceive(s.fd)
	s.mu.Unlock()
	return datagram, err
}

// receiveUntil is receive, but waits for a datagram until the deadline.
func (s *socket) receiveUntil(deadline time.Time) (datagram []byte, err error) {
	file, raw, err := s.pollable()
	if err != nil {
		return nil, err
	}
	if err := file.SetReadDeadline(deadline); err != nil {
		return nil, err
	}
	waitErr := raw.Read(func(fd uintptr) bool {
		datagram, err = s.tryReceive(int(fd))
		return err != unix.EAGAIN
	})
	if waitErr != nil {
		return nil, waitErr
	}
	return datagram, err
}

func (s *socket) tryReceive(fd int) ([]byte, error) {
	for {
		n, from, err := s.recvmsg(fd, s.in)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		// Other processes can send to this socket too. Only the kernel's address is 0.
		// It counts as an empty datagram: the caller knows when to stop.
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

// drain reads away what an exchange that was given up left behind: late
// replies, and the rest of a dump, during which the kernel takes no other. What
// it cannot get rid of is left to the sequence numbers.
func (s *socket) drain(end time.Time) {
	for s.lateReplies && time.Now().Before(end) {
		switch _, err := s.receive(); err {
		case nil, errTruncated, unix.ENOBUFS:
		case unix.EAGAIN:
			s.lateReplies = false
		default:
			return
		}
	}
}
