//go:build linux

package ipvs

import (
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	fakePortID = 4711
	fakeFamily = 33
)

// fakeKernel stands where a socket's system calls are, and answers from a
// script what no real kernel can be made to answer. The socket's descriptor is
// one end of a socket pair: it becomes readable for Go's poller when something
// is queued.
type fakeKernel struct {
	t       *testing.T
	wakeFD  int
	respond func(request []byte) []fakeReply // called for each message sent
	sendErr []error                          // of the next sends, in order

	mu       sync.Mutex
	queue    []fakeReply
	requests [][]byte
}

// fakeReply is what one recvmsg returns.
type fakeReply struct {
	data      []byte
	from      uint32 // the sender's netlink port id; the kernel's is 0
	truncated bool   // MSG_TRUNC
	err       error
	after     time.Duration // delays the reply
	endless   bool          // it comes again and again
}

// newFake returns a handle whose kernel is fake, with the family id known.
func newFake(t *testing.T, respond func(request []byte) []fakeReply) (*Handle, *fakeKernel) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	s := newSocket(fds[0], fakePortID)
	s.errorText = true // a fake has no socket options
	k := &fakeKernel{t: t, wakeFD: fds[1], respond: respond}
	s.sendmsg, s.recvmsg = k.sendmsg, k.recvmsg
	i := &Handle{socket: s, family: fakeFamily}
	i.timeout.Store(int64(50 * time.Millisecond))
	t.Cleanup(func() { k.close(i) })
	return i, k
}

// close closes both ends, before the test ends if it needs many.
func (k *fakeKernel) close(i *Handle) {
	k.mu.Lock()
	defer k.mu.Unlock()
	i.Close()
	if k.wakeFD >= 0 {
		unix.Close(k.wakeFD)
		k.wakeFD = -1
	}
}

func (k *fakeKernel) sendmsg(_ int, b []byte) error {
	k.mu.Lock()
	if len(k.sendErr) > 0 {
		err := k.sendErr[0]
		k.sendErr = k.sendErr[1:]
		if err != nil {
			k.mu.Unlock()
			return err
		}
	}
	k.mu.Unlock()
	for len(b) > 0 {
		var m message
		rest, err := m.cut(b)
		if err != nil {
			k.t.Errorf("the library sent what is not a message: %v", err)
			return nil
		}
		request := append([]byte(nil), b[:msgHdrLen+len(m.body)]...)
		b = rest
		k.mu.Lock()
		k.requests = append(k.requests, request)
		k.mu.Unlock()
		k.push(k.respond(request)...)
	}
	return nil
}

// push queues replies, each when its time has come.
func (k *fakeKernel) push(replies ...fakeReply) {
	for _, r := range replies {
		if r.after > 0 {
			time.AfterFunc(r.after, func() { r.after = 0; k.push(r) })
			continue
		}
		k.mu.Lock()
		k.queue = append(k.queue, r)
		if k.wakeFD >= 0 {
			unix.Write(k.wakeFD, []byte{0})
		}
		k.mu.Unlock()
	}
}

// end ends replies that come again and again.
func (k *fakeKernel) end() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for n := range k.queue {
		k.queue[n].endless = false
	}
}

func (k *fakeKernel) recvmsg(fd int, b []byte) (n int, from uint32, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.queue) == 0 {
		var wake [1]byte
		for {
			if _, err := unix.Read(fd, wake[:]); err != nil {
				return 0, 0, unix.EAGAIN
			}
		}
	}
	r := k.queue[0]
	if !r.endless {
		k.queue = k.queue[1:]
	}
	if r.err != nil {
		return 0, 0, r.err
	}
	copy(b, r.data)
	n = len(r.data)
	if r.truncated {
		n = len(b) + 1
	}
	return n, r.from, nil
}

// Replies made by hand.

func seqOf(request []byte) uint32 { return native.Uint32(request[8:]) }

// cmdOf returns the command of a request, none for a fence.
func cmdOf(request []byte) uint8 {
	if native.Uint16(request[4:]) < unix.NLMSG_MIN_TYPE {
		return cmdUnspec
	}
	return request[msgHdrLen]
}

// netlinkMessage makes a message of the kernel's to the fake's socket.
func netlinkMessage(typ, flags uint16, seq uint32, body []byte) []byte {
	b := native.AppendUint32(nil, uint32(msgHdrLen+len(body)))
	b = native.AppendUint16(b, typ)
	b = native.AppendUint16(b, flags)
	b = native.AppendUint32(b, seq)
	b = native.AppendUint32(b, fakePortID)
	return pad(append(b, body...), len(body))
}

// errorReply answers a request with an error number, 0 to acknowledge it.
func errorReply(request []byte, errno syscall.Errno) []byte {
	body := native.AppendUint32(nil, uint32(-int32(errno)))
	return netlinkMessage(unix.NLMSG_ERROR, 0, seqOf(request), append(body, request[:msgHdrLen]...))
}

// dataReply answers a request with a message of IPVS; flags NLM_F_MULTI makes it a part of a dump.
func dataReply(request []byte, flags uint16, cmd uint8, attrs []byte) []byte {
	return netlinkMessage(fakeFamily, flags, seqOf(request), append([]byte{cmd, genlVersion, 0, 0}, attrs...))
}

// doneReply ends a dump.
func doneReply(request []byte, errno syscall.Errno) []byte {
	return netlinkMessage(unix.NLMSG_DONE, unix.NLM_F_MULTI, seqOf(request), native.AppendUint32(nil, uint32(-int32(errno))))
}

// familyReply answers the question for the family id.
func familyReply(request []byte, family uint16) []byte {
	attrs := appendString(nil, unix.CTRL_ATTR_FAMILY_NAME, genlName)
	attrs = appendUint16(attrs, unix.CTRL_ATTR_FAMILY_ID, family)
	return netlinkMessage(unix.GENL_ID_CTRL, 0, seqOf(request), append([]byte{unix.CTRL_CMD_NEWFAMILY, 2, 0, 0}, attrs...))
}

func isFamilyRequest(request []byte) bool { return native.Uint16(request[4:]) == unix.GENL_ID_CTRL }

func one(b []byte) []fakeReply { return []fakeReply{{data: b}} }

// acknowledge is a kernel to which everything is right.
func acknowledge(request []byte) []fakeReply { return one(errorReply(request, 0)) }
