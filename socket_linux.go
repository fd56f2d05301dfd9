package ipvs

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// sendTimeout bounds the wait for room to send a request. The kernel works a
// request off while it is being sent, so there is no wait in practice.
const sendTimeout = 30 * time.Second

// Sizes of the buffer for replies. The kernel makes each part of a dump as
// large as the largest buffer that the socket ever read with, up to 32 KiB, and
// clears it first: for the few destinations of a service that costs more than
// all the rest.
const (
	smallBuffer = 4096
	largeBuffer = 32768
)

// errTruncated says that a datagram was larger than the buffer it was read into.
var errTruncated = errors.New("ipvs: the kernel's reply was larger than the buffer for it")

// socket is a generic netlink socket. It is non-blocking and waits in Go's
// poller, which gives it deadlines, and a Close that ends what is under way
// and cannot hit a descriptor that was reused since. It is not safe for
// concurrent use, but for Close.
type socket struct {
	file   *os.File
	raw    syscall.RawConn
	portID uint32 // the socket's netlink address; the kernel puts it into every reply
	in     []byte // what replies are read into

	// lateReplies: an exchange was given up, what is queued may belong to it.
	lateReplies bool

	// The system calls; tests replace them to provoke faults.
	sendmsg func(fd int, b []byte) error
	recvmsg func(fd int, b []byte) (n, flags int, from unix.Sockaddr, err error)

	// Arguments and results of the system call under way. They are fields, and
	// the two functions are bound once, so that no call has to allocate.
	out        []byte
	wait       bool
	n, flags   int
	from       unix.Sockaddr
	err        error
	onWritable func(fd uintptr) (done bool)
	onReadable func(fd uintptr) (done bool)
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
	return newSocket(fd, portID)
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
	// An error reply need not echo the request, and may say in words what is
	// wrong. Kernels before 4.3 and 4.12 do without.
	for _, option := range []int{unix.NETLINK_CAP_ACK, unix.NETLINK_EXT_ACK} {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, option, 1); err != nil && err != unix.ENOPROTOOPT {
			return 0, fmt.Errorf("ipvs: setting netlink socket option %d: %w", option, err)
		}
	}
	return nladdr.Pid, nil
}

// newSocket makes a socket of a non-blocking descriptor, which it takes over.
func newSocket(fd int, portID uint32) (*socket, error) {
	s := &socket{
		file:    os.NewFile(uintptr(fd), "netlink"),
		portID:  portID,
		in:      make([]byte, smallBuffer),
		sendmsg: sendmsg,
		recvmsg: recvmsg,
	}
	s.onWritable = s.tryToSend
	s.onReadable = s.tryToReceive
	// Without the poller, a wait would have no end: better no socket at all.
	err := s.file.SetDeadline(time.Time{})
	if err == nil {
		s.raw, err = s.file.SyscallConn()
	}
	if err != nil {
		s.file.Close()
		return nil, fmt.Errorf("ipvs: preparing the netlink socket: %w", err)
	}
	return s, nil
}

func sendmsg(fd int, b []byte) error { return unix.Send(fd, b, 0) }

func recvmsg(fd int, b []byte) (n, flags int, from unix.Sockaddr, err error) {
	n, _, flags, from, err = unix.Recvmsg(fd, b, nil, 0)
	return n, flags, from, err
}

func (s *socket) close() { s.file.Close() }

// receiveQueue returns the size of the receive queue in bytes.
func (s *socket) receiveQueue() (size int) {
	s.raw.Control(func(fd uintptr) {
		size, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF)
	})
	return size
}

// send sends b, one or more whole requests, as one datagram.
func (s *socket) send(b []byte) error {
	s.out, s.wait = b, false
	err := s.raw.Write(s.onWritable)
	if err == nil && s.err == unix.EAGAIN {
		s.wait = true
		if err = s.file.SetWriteDeadline(time.Now().Add(sendTimeout)); err == nil {
			err = s.raw.Write(s.onWritable)
			s.file.SetWriteDeadline(time.Time{})
		}
	}
	s.out = nil
	if err == nil {
		err = s.err
	}
	return err
}

func (s *socket) tryToSend(fd uintptr) (done bool) {
	for {
		if s.err = s.sendmsg(int(fd), s.out); s.err != unix.EINTR {
			return !s.wait || s.err != unix.EAGAIN
		}
	}
}

// receive returns one datagram that the kernel sent; it is valid until the next
// call. If none is there it waits until the deadline, or not at all if that is
// zero: then the error is EAGAIN.
func (s *socket) receive(deadline time.Time) ([]byte, error) {
	s.wait = !deadline.IsZero()
	if s.wait {
		if err := s.file.SetReadDeadline(deadline); err != nil {
			return nil, err
		}
		defer s.file.SetReadDeadline(time.Time{})
	}
	for {
		err := s.raw.Read(s.onReadable)
		if err == nil {
			err = s.err
		}
		if err != nil {
			return nil, err
		}
		// Other processes can send to this socket too. Only the kernel's address is 0.
		if from, ok := s.from.(*unix.SockaddrNetlink); !ok || from.Pid != 0 {
			continue
		}
		if s.flags&unix.MSG_TRUNC != 0 {
			s.in = make([]byte, largeBuffer) // for the next try
			return nil, errTruncated
		}
		return s.in[:s.n], nil
	}
}

func (s *socket) tryToReceive(fd uintptr) (done bool) {
	for {
		s.n, s.flags, s.from, s.err = s.recvmsg(int(fd), s.in)
		if s.err != unix.EINTR {
			return !s.wait || s.err != unix.EAGAIN
		}
	}
}

// drain reads away what an exchange that was given up left behind: late
// replies, and the rest of a dump, during which the kernel takes no other. What
// it cannot get rid of is left to the sequence numbers.
func (s *socket) drain(end time.Time) {
	for s.lateReplies && time.Now().Before(end) {
		switch _, err := s.receive(time.Time{}); err {
		case nil, errTruncated, unix.ENOBUFS:
		case unix.EAGAIN:
			s.lateReplies = false
		default:
			return
		}
	}
}

// openSocketAt opens a socket in the network namespace ns.
//
// A descriptor belongs to the namespace that its thread was in when it was
// opened, so a thread has to go there. That is never the caller's: if the way
// back fails, the goroutine ends while locked to its thread, and the runtime
// then ends the thread instead of running other goroutines in a foreign
// namespace.
func openSocketAt(ns netns.NsHandle) (*socket, error) {
	type result struct {
		s   *socket
		err error
	}
	results := make(chan result)
	go func() {
		runtime.LockOSThread()
		s, restored, err := openSocketThere(ns)
		if restored {
			runtime.UnlockOSThread()
		}
		results <- result{s, err}
	}()
	r := <-results
	return r.s, r.err
}

// openSocketThere moves the calling thread into ns, opens the socket and moves
// back; restored tells whether the thread is where it was before.
func openSocketThere(ns netns.NsHandle) (_ *socket, restored bool, err error) {
	home, err := netns.Get()
	if err != nil {
		return nil, true, fmt.Errorf("ipvs: opening the thread's own network namespace: %w", err)
	}
	defer home.Close()
	if err := netns.Set(ns); err != nil {
		return nil, true, fmt.Errorf("ipvs: entering the network namespace: %w", err)
	}
	s, err := openSocket()
	return s, netns.Set(home) == nil, err
}

// openSocketLike opens another socket in the network namespace of s. From a
// thread that is there already it needs no privilege.
func openSocketLike(s *socket) (like *socket, err error) {
	ns := netns.None()
	if controlErr := s.raw.Control(func(fd uintptr) {
		var n int
		n, err = unix.IoctlRetInt(int(fd), unix.SIOCGSKNS)
		ns = netns.NsHandle(n)
	}); controlErr != nil {
		return nil, controlErr
	}
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if here, err := netns.Get(); err == nil {
		defer here.Close()
		if here.Equal(ns) {
			return openSocket()
		}
	}
	return openSocketAt(ns)
}
