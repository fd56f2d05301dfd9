package ipvs

// This file has netlink messages, the discovery of the IPVS family, and the exchange
// of requests and replies with the kernel.

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// native is the byte order of numbers in messages, except for ports and addresses.
var native = binary.NativeEndian

// isBigEndian reports whether native is big-endian. It is a constant, so the
// compiler drops the other byte order's code.
const isBigEndian = runtime.GOARCH == "s390x" || runtime.GOARCH == "ppc64" || runtime.GOARCH == "mips" || runtime.GOARCH == "mips64"

const (
	msgHdrLen  = unix.SizeofNlMsghdr // struct nlmsghdr
	genlHdrLen = unix.GENL_HDRLEN    // struct genlmsghdr
	attrHdrLen = unix.SizeofNlAttr   // struct nlattr
	// The top two bits of an attribute's type are flags: nested, network byte order.
	attrTypeMask = ^uint16(unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)

	defaultTimeout = 3 * time.Second
	// Give up on a reply after this many timeouts.
	maxReplyTimeouts = 10
	// modprobeTimeout bounds a run of modprobe.
	modprobeTimeout = 30 * time.Second
	// modprobeWaitDelay is how long to wait for output after modprobe has ended.
	modprobeWaitDelay = time.Second
	// unloadPoll is the interval at which to check whether the module is unloaded.
	unloadPoll = 10 * time.Millisecond
	// familyAttempts limits how often a request is sent while the family keeps changing.
	familyAttempts = 4
	// dumpAttempts limits how often data is requested while the answers are unusable.
	dumpAttempts = 4
)

// ipvsFlags is the value of IPVS_SVC_ATTR_FLAGS, struct ip_vs_flags.
type ipvsFlags struct {
	flags, mask uint32
}

// newGenlRequest appends the headers of a request to b. Length, sequence number and
// family are filled in later.
func newGenlRequest(b []byte, family uint16, cmd uint8, version uint8, flags uint16) []byte {
	b = native.AppendUint32(b, 0)
	b = native.AppendUint16(b, family)
	b = native.AppendUint16(b, flags|unix.NLM_F_REQUEST)
	b = native.AppendUint64(b, 0)        // sequence number and port ID; the kernel fills in the latter
	return append(b, cmd, version, 0, 0) // struct genlmsghdr
}

func setLength(msg []byte)                { native.PutUint32(msg, uint32(len(msg))) }
func setFamily(msg []byte, family uint16) { native.PutUint16(msg[4:], family) }
func setFlags(msg []byte, flags uint16)   { native.PutUint16(msg[6:], flags) }
func setSequence(msg []byte, seq uint32)  { native.PutUint32(msg[8:], seq) }

func flagsOf(msg []byte) uint16  { return native.Uint16(msg[6:]) }
func commandOf(msg []byte) uint8 { return msg[msgHdrLen] }

// isDump reports whether a request asks for a list.
func isDump(msg []byte) bool { return flagsOf(msg)&unix.NLM_F_DUMP == unix.NLM_F_DUMP }

// message is one netlink message of a datagram.
type message struct {
	typ, flags  uint16
	seq, portID uint32
	body        []byte
	left        int // bytes of the datagram after this message
}

// parseMessage reads the first message of a datagram into m and returns the rest.
func parseMessage(b []byte, m *message) (rest []byte, err error) {
	if len(b) < msgHdrLen {
		return nil, fmt.Errorf("ipvs: malformed reply: %d bytes where a message should start", len(b))
	}
	size := native.Uint32(b)
	if size < msgHdrLen || uint64(size) > uint64(len(b)) {
		return nil, fmt.Errorf("ipvs: malformed reply: a message claims %d bytes of %d", size, len(b))
	}
	m.typ = native.Uint16(b[4:])
	m.flags = native.Uint16(b[6:])
	m.seq = native.Uint32(b[8:])
	m.portID = native.Uint32(b[12:])
	m.body = b[msgHdrLen:size]
	rest = b[min(align(int(size)), len(b)):]
	m.left = len(rest)
	return rest, nil
}

// attrs returns the attributes after the generic netlink header.
func (m *message) attrs() []byte { return m.body[genlHdrLen:] }

// errno returns the error number of an NLMSG_ERROR or NLMSG_DONE message, or nil if
// it is 0.
func (m *message) errno() (kernel error, malformed error) {
	if len(m.body) < 4 {
		return nil, fmt.Errorf("ipvs: malformed reply: %d bytes for an error number", len(m.body))
	}
	switch n := int32(native.Uint32(m.body)); {
	case n == 0:
		return nil, nil
	case n < 0 && n > -4096: // MAX_ERRNO
		return syscall.Errno(-n), nil
	default:
		return nil, fmt.Errorf("ipvs: malformed reply: error number %d", n)
	}
}

// errorText returns the text of the extended acknowledgement in an NLMSG_ERROR
// message, or "" if there is none.
func (m *message) errorText() string {
	if m.flags&unix.NLM_F_ACK_TLVS == 0 {
		return ""
	}
	// The request is echoed after the error number, with its payload unless capped.
	skip := 4 + msgHdrLen
	if m.flags&unix.NLM_F_CAPPED == 0 && len(m.body) >= skip {
		skip = 4 + align(int(min(native.Uint32(m.body[4:]), uint32(len(m.body)))))
	}
	a := attributes{level: m.body[min(skip, len(m.body)):]}
	for a.next() {
		if a.typ == unix.NLMSGERR_ATTR_MSG {
			return string(a.text())
		}
	}
	return ""
}

// requestSize is the initial size of a handle's request buffer: enough for almost any
// request. The buffer is allocated with the first one.
const requestSize = 256

// newRequest returns a request, valid until the next one is made.
func (i *Handle) newRequest(cmd uint8, flags uint16, fill filler) ([]byte, error) {
	if i.scratch == nil {
		i.scratch = make([]byte, 0, requestSize)
	}
	msg := newGenlRequest(i.scratch[:0], i.family, cmd, genlVersion, flags)
	if fill != nil {
		var err error
		if msg, err = fill(msg); err != nil {
			return nil, err
		}
	}
	i.scratch = msg // it may have grown
	setLength(msg)
	return msg, nil
}

// answerTo returns a taker for the answer to a request, valid until the next request is
// made.
func (i *Handle) answerTo(request []byte, p parser) *answer {
	i.answer = answer{parser: p, acked: flagsOf(request)&unix.NLM_F_ACK != 0}
	return &i.answer
}

// execute sends the request msg to IPVS and passes the messages of its answer to t.
// Errors from the kernel are returned as an unwrapped syscall.Errno. The caller
// holds i.mu.
func (i *Handle) execute(s *socket, msg []byte, t taker) error {
	for range familyAttempts {
		family := i.family
		setFamily(msg, family)
		err := i.exchange(s, msg, t)
		if err != syscall.ENOENT && err != syscall.EPROTONOSUPPORT {
			return err
		}
		// ENOENT comes either from IPVS itself, or from the family ID being outdated
		// since the module was reloaded. EPROTONOSUPPORT is the answer to a request for a
		// list while the module is being unloaded.
		for deadline := time.Now().Add(i.receiveTimeout()); ; time.Sleep(unloadPoll) {
			if setupErr := i.setup(s); setupErr != nil {
				return setupErr
			}
			if i.family != family {
				break // the request is sent again
			}
			if err == syscall.ENOENT || time.Now().After(deadline) {
				return err
			}
		}
	}
	return fmt.Errorf("%w: it was unloaded again each time", ErrNotSupported)
}

// exchange sends one or more requests as one datagram, each to the family that it
// names, and passes the messages of their answers to t.
func (i *Handle) exchange(s *socket, requests []byte, t taker) error {
	first := i.seq + 1
	for msg := range eachMessage(requests) {
		i.seq++
		setSequence(msg, i.seq)
	}
	if err := s.send(requests, i.receiveTimeout()); err != nil {
		return i.transportError("sending a request", err)
	}
	return i.receive(s, first, i.seq, t)
}

// eachMessage yields the requests in a datagram.
func eachMessage(datagram []byte) func(yield func(msg []byte) bool) {
	return func(yield func(msg []byte) bool) {
		for len(datagram) > 0 {
			size := native.Uint32(datagram)
			if !yield(datagram[:size:size]) {
				return
			}
			datagram = datagram[size:]
		}
	}
}

// A taker takes the messages of an answer one by one. For the last one, take returns
// true, and err is the kernel's verdict on the request. Otherwise err reports that the
// answer is malformed or unusable.
type taker interface {
	take(m *message) (done bool, err error)
}

// A parser parses the messages of an answer that carry data.
type parser interface {
	parse(m *message) error
}

// parserFunc is a parser of the attributes after the generic netlink header.
type parserFunc func(attrs []byte) error

func (f parserFunc) parse(m *message) error { return f(m.attrs()) }

// answer takes the messages of the answer to one request.
type answer struct {
	parser parser
	acked  bool // the request asked for an acknowledgement
}

// take processes one message.
func (a *answer) take(m *message) (done bool, err error) {
	if m.flags&unix.NLM_F_DUMP_INTR != 0 {
		return false, errInterrupted
	}
	switch m.typ {
	case unix.NLMSG_ERROR:
		errno, err := m.errno()
		if err != nil {
			return false, err
		}
		// An acknowledgement that was not requested ends nothing: the answer follows.
		return errno != nil || a.acked, errno
	case unix.NLMSG_DONE:
		errno, err := m.errno()
		if err != nil {
			return false, err
		}
		return true, errno
	}
	if len(m.body) < genlHdrLen {
		return false, fmt.Errorf("ipvs: malformed reply: %d bytes for a generic netlink header", len(m.body))
	}
	if a.parser != nil {
		if err := a.parser.parse(m); err != nil {
			return false, err
		}
	}
	// A message that is not part of a dump is the whole answer, except for an
	// acknowledgement.
	return m.flags&unix.NLM_F_MULTI == 0 && !a.acked, nil
}

// receive reads the answers to the requests with sequence numbers first to last and
// passes each message to t until t reports the end. Messages with other sequence
// numbers are late replies to abandoned requests and are skipped.
func (i *Handle) receive(s *socket, first, last uint32, t taker) error {
	late := s.lateReplies // replies to an earlier request may still follow
	s.lateReplies = true  // until the answer has ended
	// The clock is read only when needed: usually the whole answer is already queued.
	var waitEnd, end time.Time
	m := &i.message
	var done bool
	var verdict error
	for {
		datagram, err := s.receive()
		if err == unix.EAGAIN {
			if waitEnd.IsZero() {
				waitEnd = time.Now().Add(i.receiveTimeout())
			}
			datagram, err = s.receiveUntil(waitEnd)
		}
		if err != nil {
			return i.transportError("receiving a reply", err)
		}
		for len(datagram) > 0 {
			if datagram, err = parseMessage(datagram, m); err != nil {
				return err
			}
			if m.portID != s.portID || m.seq-first > last-first {
				continue
			}
			waitEnd = time.Time{}
			switch m.typ {
			case unix.NLMSG_NOOP:
				continue
			case unix.NLMSG_OVERRUN:
				return i.transportError("receiving a reply", unix.ENOBUFS)
			}
			ended, err := t.take(m)
			switch {
			case ended && !done:
				done, verdict = true, err
			case !ended && err != nil:
				return err
			}
		}
		if done {
			s.lateReplies = late
			return verdict
		}
		if end.IsZero() {
			end = time.Now().Add(i.answerTimeout())
		} else if time.Now().After(end) {
			return fmt.Errorf("ipvs: the kernel's reply did not end within %v: %w", i.answerTimeout(), os.ErrDeadlineExceeded)
		}
	}
}

// transportError returns the error of a call whose send or receive failed. After a
// failed receive the outcome in the kernel is unknown.
func (i *Handle) transportError(doing string, err error) error {
	switch {
	case i.closed.Load():
		return ErrClosed
	case err == os.ErrDeadlineExceeded:
		return fmt.Errorf("ipvs: no reply from the kernel within %v: %w", i.receiveTimeout(), err)
	case errors.Is(err, os.ErrDeadlineExceeded), err == errTruncated:
		return err
	case err == unix.ENOBUFS:
		return fmt.Errorf("ipvs: %s: the kernel had no room for it: %w", doing, err)
	default:
		return fmt.Errorf("ipvs: %s: %w", doing, err)
	}
}

// knownFamily is the family ID that a handle found last, or 0. A handle whose own ID
// turns out to be outdated replaces it.
var knownFamily atomic.Uint32

// warned keeps a missing IPVS from being logged more than once.
var warned atomic.Bool

// setup looks up the family ID of IPVS, loading the module if necessary.
func (i *Handle) setup(s *socket) error {
	family, err := i.getIPVSFamily(s)
	if err == syscall.ENOENT {
		// Linux 6.1 and later have already tried to load it, when asked for the family.
		modprobeErr := loadModule()
		family, err = i.getIPVSFamily(s)
		if err == syscall.ENOENT {
			return notSupported(modprobeErr)
		}
	}
	if err != nil {
		return err
	}
	warned.Store(false)
	knownFamily.CompareAndSwap(uint32(i.family), uint32(family))
	i.family = family
	return nil
}

// notSupported returns ErrNotSupported with the reason why the module could not be
// loaded, if there is one, and logs it once.
func notSupported(reason error) error {
	err := ErrNotSupported
	if reason != nil {
		err = fmt.Errorf("%w: %w", ErrNotSupported, reason)
	}
	if !warned.Swap(true) {
		logrus.Warn(err)
	}
	return err
}

// getIPVSFamily asks the kernel for the generic netlink family ID of IPVS. It
// returns ENOENT if there is no such family.
func (i *Handle) getIPVSFamily(s *socket) (family uint16, err error) {
	msg := newGenlRequest(nil, nl.GENL_ID_CTRL, nl.GENL_CTRL_CMD_GETFAMILY, nl.GENL_CTRL_VERSION, 0)
	msg = appendString(msg, nl.GENL_CTRL_ATTR_FAMILY_NAME, genlName)
	setLength(msg)
	parse := parserFunc(func(body []byte) error {
		a := attributes{level: body}
		for a.next() {
			if a.typ == nl.GENL_CTRL_ATTR_FAMILY_ID {
				family = a.uint16()
			}
		}
		return a.err
	})
	for range dumpAttempts {
		if err = i.exchange(s, msg, &answer{parser: parse}); err != errTruncated {
			break
		}
	}
	if err == nil && family < unix.NLMSG_MIN_TYPE {
		err = fmt.Errorf("ipvs: malformed reply: %d as the family ID of IPVS", family)
	}
	return family, err
}

// mayLoadModules reports whether the process may load modules.
func mayLoadModules() bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return true
	}
	return data[0].Effective&(1<<unix.CAP_SYS_MODULE) != 0
}

// loadModule is a variable for tests.
var loadModule = modprobe

// modprobe runs modprobe ip_vs for a bounded time. It does not wait for processes that
// modprobe leaves running with its output open.
func modprobe() error {
	if !mayLoadModules() {
		return errors.New("modprobe ip_vs not run: it needs CAP_SYS_MODULE")
	}
	ctx, cancel := context.WithTimeout(context.Background(), modprobeTimeout)
	defer cancel()
	command := exec.CommandContext(ctx, "modprobe", "ip_vs")
	command.WaitDelay = modprobeWaitDelay
	out, err := command.CombinedOutput()
	switch text := bytes.TrimSpace(out); {
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("modprobe ip_vs: not done within %v: %w", modprobeTimeout, err)
	case len(text) > 0:
		return fmt.Errorf("modprobe ip_vs: %w: %s", err, text)
	}
	return fmt.Errorf("modprobe ip_vs: %w", err)
}
