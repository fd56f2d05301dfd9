package ipvs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	msgHdrLen  = unix.SizeofNlMsghdr // struct nlmsghdr
	genlHdrLen = unix.GENL_HDRLEN    // struct genlmsghdr

	defaultTimeout = 3 * time.Second
	// An answer that has not ended after so many time-outs never will.
	patience = 10
	// modprobeTimeout bounds the run of modprobe.
	modprobeTimeout = 30 * time.Second
	// dumpAttempts is how often a dump is tried whose answer was not usable.
	dumpAttempts = 4
)

// genlMsgHdr is the generic netlink header, struct genlmsghdr; two reserved bytes
// follow.
type genlMsgHdr struct {
	cmd, version uint8
}

// ipvsFlags is what IPVS_SVC_ATTR_FLAGS carries, struct ip_vs_flags.
type ipvsFlags struct {
	flags, mask uint32
}

// newGenlRequest appends the headers of a request to b. Its length, sequence
// number and family are written into them when they are known.
func newGenlRequest(b []byte, family uint16, cmd uint8, version uint8, flags uint16) []byte {
	b = native.AppendUint32(b, 0)
	b = native.AppendUint16(b, family)
	b = native.AppendUint16(b, flags|unix.NLM_F_REQUEST)
	b = native.AppendUint64(b, 0) // the sender's port id stays 0: the kernel knows whose socket it is
	h := genlMsgHdr{cmd: cmd, version: version}
	return append(b, h.cmd, h.version, 0, 0)
}

func setLength(msg []byte)                { native.PutUint32(msg, uint32(len(msg))) }
func setFamily(msg []byte, family uint16) { native.PutUint16(msg[4:], family) }
func setFlags(msg []byte, flags uint16)   { native.PutUint16(msg[6:], flags) }
func setSequence(msg []byte, seq uint32)  { native.PutUint32(msg[8:], seq) }

// message is one netlink message, cut out of a datagram.
type message struct {
	typ, flags  uint16
	seq, portID uint32
	body        []byte
	left        int // bytes of the datagram behind this message
}

// cut reads the first message of a datagram, and returns what is behind it.
func (m *message) cut(b []byte) (rest []byte, err error) {
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

// attrs returns what follows the generic netlink header.
func (m *message) attrs() []byte { return m.body[genlHdrLen:] }

// errno returns the error number of an NLMSG_ERROR or NLMSG_DONE message, nil for 0.
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

// errorText returns the kernel's words in an NLMSG_ERROR message, "" if there are none.
func (m *message) errorText() string {
	if m.flags&unix.NLM_F_ACK_TLVS == 0 {
		return ""
	}
	// Behind the error number the request is echoed, its payload too if not capped.
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

// errInterrupted says that the table changed during a dump in a way that the
// kernel calls inconsistent (NLM_F_DUMP_INTR).
var errInterrupted = fmt.Errorf("ipvs: the dump was interrupted by changes to the table: %w", unix.EINTR)

// execute sends the request msg, begun by newGenlRequest, to IPVS and hands the
// body of each message of its answer to p. What the kernel refuses comes
// back as a bare syscall.Errno. The caller holds i.mu.
func (i *Handle) execute(s *socket, msg []byte, p parser) error {
	family := i.family
	setFamily(msg, family)
	err := i.exchange(s, msg, p)
	if err != syscall.ENOENT {
		return err
	}
	// Either IPVS says so, or the family id is one from before the module was
	// loaded again: ask for it.
	if err := i.setup(s); err != nil {
		return err
	}
	if i.family == family {
		return err
	}
	setFamily(msg, i.family)
	return i.exchange(s, msg, p)
}

// exchange sends one request, to whichever family, and reads its answer.
func (i *Handle) exchange(s *socket, msg []byte, p parser) error {
	i.seq++
	first, last := i.seq, i.seq
	setLength(msg)
	setSequence(msg, first)
	a := &i.answer
	*a = answer{parser: p, acked: native.Uint16(msg[6:])&unix.NLM_F_ACK != 0}
	if a.acked && msg[msgHdrLen] == cmdDelDaemon {
		i.seq++
		last, a.fence = i.seq, i.seq
		msg = appendFence(msg, a.fence)
	}
	if err := i.send(s, msg); err != nil {
		return i.lost("sending a request", err)
	}
	err := i.receive(s, first, last, a)
	a.parser = nil // the caller's
	if err != nil {
		return err
	}
	return a.err
}

// appendFence appends a request that does nothing but to be acknowledged.
//
// The kernel sends no reply to a request that ends with EINTR. That is how it
// stops a daemon whose thread has not run yet: the daemon is stopped all the
// same. Where the fence is answered and the request before it was not, it ended so.
func appendFence(msg []byte, seq uint32) []byte {
	fence := len(msg)
	msg = append(msg, make([]byte, msgHdrLen)...)
	native.PutUint16(msg[fence+4:], unix.NLMSG_NOOP)
	setLength(msg[fence:])
	setFlags(msg[fence:], unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	setSequence(msg[fence:], seq)
	return msg
}

// taker takes the messages that answer what was sent, and says when it was the last.
type taker interface {
	take(m *message) (done bool, err error)
}

// parser takes the messages with an answer's data.
type parser interface {
	parse(m *message) error
}

// parserFunc is a parser of what follows the generic netlink header.
type parserFunc func(attrs []byte) error

func (f parserFunc) parse(m *message) error { return f(m.attrs()) }

// answer takes the messages that answer one request.
type answer struct {
	parser parser
	acked  bool   // the request asked for an acknowledgement
	fence  uint32 // sequence number of the fence sent behind it; 0 for none
	err    error
}

// take works off one message. done: it ended the answer, with the kernel's
// word on the request in a.err; an error: it cannot be understood or used.
func (a *answer) take(m *message) (done bool, err error) {
	if m.flags&unix.NLM_F_DUMP_INTR != 0 {
		return false, errInterrupted
	}
	switch m.typ {
	case unix.NLMSG_ERROR:
		if a.fence != 0 && m.seq == a.fence {
			return true, nil
		}
		a.err, err = m.errno()
		if a.fence != 0 {
			return false, err
		}
		// An acknowledgement nobody asked for ends nothing: the answer is still to come.
		return a.err != nil || a.acked, err
	case unix.NLMSG_DONE:
		a.err, err = m.errno()
		return true, err
	}
	if len(m.body) < genlHdrLen {
		return false, fmt.Errorf("ipvs: malformed reply: %d bytes for a generic netlink header", len(m.body))
	}
	if a.parser != nil {
		err = a.parser.parse(m)
	}
	// What is not part of a dump is the whole answer, but for an acknowledgement.
	return m.flags&unix.NLM_F_MULTI == 0 && !a.acked, err
}

// send sends one or more requests, after clearing away what an exchange that
// was given up left behind.
func (i *Handle) send(s *socket, b []byte) error {
	if i.closed.Load() {
		return ErrClosed
	}
	if s.lateReplies {
		s.drain(time.Now().Add(i.receiveTimeout()))
	}
	return s.send(b)
}

// receive reads the answers to the requests first to last, and hands each
// message to t until that says it is done. Messages that answer other requests
// are skipped: they are late replies to calls that were given up.
func (i *Handle) receive(s *socket, first, last uint32, t taker) error {
	err := i.receiveAll(s, first, last, t)
	if err != nil {
		s.lateReplies = true // the rest of the answer may still come
	}
	return err
}

func (i *Handle) receiveAll(s *socket, first, last uint32, t taker) error {
	// The clock is read when first needed: mostly the answer is there at once.
	var waitEnd, end time.Time
	m := &i.message
	for done := false; !done; {
		datagram, err := s.receive()
		if err == unix.EAGAIN {
			if waitEnd.IsZero() {
				waitEnd = time.Now().Add(i.receiveTimeout())
			}
			datagram, err = s.receiveUntil(waitEnd)
		}
		if err != nil {
			return i.lost("receiving a reply", err)
		}
		for len(datagram) > 0 {
			if datagram, err = m.cut(datagram); err != nil {
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
				return i.lost("receiving a reply", unix.ENOBUFS)
			}
			ended, err := t.take(m)
			if err != nil {
				return err
			}
			if ended {
				done = true
			}
		}
		if end.IsZero() {
			if !done {
				end = time.Now().Add(i.answerTimeout())
			}
		} else if !done && time.Now().After(end) {
			return fmt.Errorf("ipvs: the kernel's reply did not end within %v: %w", i.answerTimeout(), os.ErrDeadlineExceeded)
		}
	}
	return nil
}

// lost makes the library's error of a failed send or receive, after which
// nobody knows what the kernel did.
func (i *Handle) lost(doing string, err error) error {
	switch {
	case i.closed.Load():
		return ErrClosed
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("ipvs: no reply from the kernel within %v: %w", i.receiveTimeout(), err)
	case err == unix.ENOBUFS:
		return fmt.Errorf("ipvs: %s: the kernel had no room for it: %w", doing, err)
	case err == errTruncated:
		return err
	default:
		return fmt.Errorf("ipvs: %s: %w", doing, err)
	}
}

// knownFamily is the family id that was found last, by any handle; 0 as long as
// there is none. A handle that finds its own to be an old one replaces it.
var knownFamily atomic.Uint32

// warned keeps a missing IPVS from being logged again at each attempt.
var warned atomic.Bool

// setup finds out the family id of IPVS, loading the module if need be.
func (i *Handle) setup(s *socket) error {
	family, err := i.getIPVSFamily(s)
	if err == syscall.ENOENT && mayLoadModules() {
		// From 6.1 on the kernel has tried by itself when it was asked for the family.
		modprobeErr := loadModule()
		if family, err = i.getIPVSFamily(s); err == syscall.ENOENT && !warned.Swap(true) {
			logrus.WithError(modprobeErr).Warn("ipvs: the kernel has no IPVS, and modprobe ip_vs did not bring it")
		}
	}
	switch {
	case err == syscall.ENOENT:
		return ErrNotSupported
	case err != nil:
		return err
	}
	warned.Store(false)
	knownFamily.CompareAndSwap(uint32(i.family), uint32(family))
	i.family = family
	return nil
}

// getIPVSFamily asks the kernel for the generic netlink family of IPVS. The
// error is ENOENT if there is none.
func (i *Handle) getIPVSFamily(s *socket) (family uint16, err error) {
	msg := newGenlRequest(nil, nl.GENL_ID_CTRL, nl.GENL_CTRL_CMD_GETFAMILY, nl.GENL_CTRL_VERSION, 0)
	msg = appendString(msg, nl.GENL_CTRL_ATTR_FAMILY_NAME, genlName)
	err = i.exchange(s, msg, parserFunc(func(body []byte) error {
		a := attributes{level: body}
		for a.next() {
			if a.typ == nl.GENL_CTRL_ATTR_FAMILY_ID {
				family = a.uint16()
			}
		}
		return a.err
	}))
	if err == nil && family < unix.NLMSG_MIN_TYPE {
		err = fmt.Errorf("ipvs: malformed reply: %d as the family id of IPVS", family)
	}
	return family, err
}

// mayLoadModules tells whether it makes sense to run modprobe at all.
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

func modprobe() error {
	ctx, cancel := context.WithTimeout(context.Background(), modprobeTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "modprobe", "ip_vs").CombinedOutput()
	if err != nil {
		return fmt.Errorf("modprobe ip_vs: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// What is sent: services, destinations and settings as attributes.

// serviceFamily returns the address family that s is sent with, and the address
// in the length of that family; a firewall-mark service has none.
func serviceFamily(s *Service) (family uint16, address []byte, err error) {
	if s.FWMark == 0 {
		return familyOf(s.AddressFamily, s.Address, "service")
	}
	switch s.AddressFamily {
	case unix.AF_INET, unix.AF_INET6:
		return s.AddressFamily, nil, nil
	case 0:
		return 0, nil, fmt.Errorf("ipvs: the service of firewall mark %d has no address family", s.FWMark)
	}
	return 0, nil, unknownFamily(s.AddressFamily)
}

// familyOf returns the family of an address, which must be the one that is
// asked for unless that is 0, and the address in the length of the family.
func familyOf(asked uint16, address net.IP, whose string) (family uint16, _ []byte, err error) {
	switch len(address) {
	case net.IPv4len:
		family = unix.AF_INET
	case net.IPv6len:
		family = unix.AF_INET6
		if asked != unix.AF_INET6 && isIPv4(address) { // else it is one that maps an IPv4 address: checkNew
			family, address = unix.AF_INET, address[net.IPv6len-net.IPv4len:]
		}
	case 0:
		return 0, nil, fmt.Errorf("ipvs: the %s has no address", whose)
	default:
		return 0, nil, fmt.Errorf("ipvs: the %s's address has %d bytes, want 4 or 16", whose, len(address))
	}
	switch asked {
	case 0, family:
		return family, address, nil
	case unix.AF_INET, unix.AF_INET6:
		return 0, nil, contradicts(asked, address, whose)
	}
	return 0, nil, unknownFamily(asked)
}

// isIPv4 tells whether an address of 16 bytes is an IPv4 one; net.IP.To4, which
// tells the same, goes through the bytes one by one.
func isIPv4(address net.IP) bool {
	return native.Uint64(address) == 0 && binary.BigEndian.Uint32(address[8:]) == 0x0000FFFF
}

func contradicts(family uint16, address net.IP, whose string) error {
	return fmt.Errorf("ipvs: the %s's address %v is not of its address family %d", whose, address, family)
}

// checkNew refuses to make a service or destination of family AF_INET6 with an
// IPv4 address in 16 bytes, as net.ParseIP makes them: that is a mistake. One
// that is there, made by other means, can be read, changed and deleted.
func checkNew(family uint16, address net.IP, whose string) error {
	if family == unix.AF_INET6 && address.To4() != nil {
		return contradicts(family, address, whose)
	}
	return nil
}

func unknownFamily(family uint16) error {
	return fmt.Errorf("ipvs: address family %d is neither AF_INET (%d) nor AF_INET6 (%d): %w",
		family, unix.AF_INET, unix.AF_INET6, syscall.EAFNOSUPPORT)
}

// checkName tells what is wrong with the name of a kernel module part.
func checkName(what, name string, maxLen int) error {
	if len(name) >= maxLen {
		return fmt.Errorf("ipvs: %s %q has %d bytes, at most %d are possible", what, name, len(name), maxLen-1)
	}
	if strings.IndexByte(name, 0) >= 0 {
		return fmt.Errorf("ipvs: %s %q contains a NUL byte", what, name)
	}
	return nil
}

var (
	errNilService     = errors.New("ipvs: the service is nil")
	errNilDestination = errors.New("ipvs: the destination is nil")
)

// fillChange appends what a command on a service or a destination carries.
func fillChange(b []byte, cmd uint8, s *Service, d *Destination) (_ []byte, err error) {
	switch cmd {
	case cmdNewService, cmdSetService, cmdDelService:
		b, err = fillService(b, s, cmd != cmdDelService)
		if err == nil && cmd == cmdNewService && s.FWMark == 0 {
			err = checkNew(s.AddressFamily, s.Address, "service")
		}
		return b, err
	}
	if b, err = fillService(b, s, false); err != nil {
		return b, err
	}
	b, err = fillDestination(b, d, cmd != cmdDelDest)
	if err == nil && cmd == cmdNewDest {
		err = checkNew(d.AddressFamily, d.Address, "destination")
	}
	return b, err
}

// fillService appends s: what identifies it, and if full the rest of what a
// caller can set.
func fillService(b []byte, s *Service, full bool) ([]byte, error) {
	if s == nil {
		return b, errNilService
	}
	family, address, err := serviceFamily(s)
	if err != nil {
		return b, err
	}
	b, nest := openNest(b, cmdAttrService)
	b = appendUint16(b, svcAttrAddressFamily, family)
	if s.FWMark != 0 {
		b = appendUint32(b, svcAttrFWMark, s.FWMark)
	} else {
		b = appendUint16(b, svcAttrProtocol, s.Protocol)
		b = appendAddress(b, svcAttrAddress, address)
		b = appendPort(b, svcAttrPort, s.Port)
	}
	if full {
		if err := checkName("scheduler", s.SchedName, schedNameMaxLen); err != nil {
			return b, err
		}
		if err := checkName("persistence engine", s.PEName, peNameMaxLen); err != nil {
			return b, err
		}
		b = appendString(b, svcAttrSchedName, s.SchedName)
		if s.PEName != "" {
			b = appendString(b, svcAttrPEName, s.PEName)
		}
		b = appendFlags(b, svcAttrFlags, ipvsFlags{flags: s.Flags &^ ServiceFlagHashed, mask: math.MaxUint32})
		b = appendUint32(b, svcAttrTimeout, s.Timeout)
		b = appendUint32(b, svcAttrNetmask, netmaskOf(s, family))
	}
	closeNest(b, nest)
	return b, nil
}

func appendFlags(b []byte, typ uint16, f ipvsFlags) []byte {
	b = native.AppendUint32(b, attrHdr(typ, 8))
	b = native.AppendUint32(b, f.flags)
	return native.AppendUint32(b, f.mask)
}

// netmaskOf returns the netmask that s is sent with: for IPv6 a prefix length,
// of which the kernel takes 1 to 128 and 0 can only mean that none was given.
func netmaskOf(s *Service, family uint16) uint32 {
	if family == unix.AF_INET6 && s.Netmask == 0 {
		return 128
	}
	return s.Netmask
}

// fillDestination appends d: what identifies it, and if full the rest of what a
// caller can set.
func fillDestination(b []byte, d *Destination, full bool) ([]byte, error) {
	if d == nil {
		return b, errNilDestination
	}
	family, address, err := familyOf(d.AddressFamily, d.Address, "destination")
	if err != nil {
		return b, err
	}
	b, nest := openNest(b, cmdAttrDest)
	b = appendAddress(b, destAttrAddress, address)
	b = appendPort(b, destAttrPort, d.Port)
	b = appendUint16(b, destAttrAddressFamily, family)
	if full {
		if d.Weight < 0 || d.Weight > math.MaxInt32 {
			return b, fmt.Errorf("ipvs: weight %d is not in 0..%d: %w", d.Weight, math.MaxInt32, syscall.ERANGE)
		}
		b = appendUint32(b, destAttrForwardingMethod, d.ConnectionFlags&ConnectionFlagFwdMask)
		b = appendUint32(b, destAttrWeight, uint32(d.Weight))
		b = appendUint32(b, destAttrUpperThreshold, d.UpperThreshold)
		b = appendUint32(b, destAttrLowerThreshold, d.LowerThreshold)
		// Left out they mean 0, and kernels before 5.3 do not know them.
		if d.TunnelType != 0 || d.TunnelPort != 0 || d.TunnelFlags != 0 {
			b = appendUint8(b, destAttrTunnelType, d.TunnelType)
			b = appendPort(b, destAttrTunnelPort, d.TunnelPort)
			b = appendUint16(b, destAttrTunnelFlags, d.TunnelFlags)
		}
	}
	closeNest(b, nest)
	return b, nil
}

// fillConfig appends the timeouts of c. The kernel leaves those that are 0 as they are.
func fillConfig(b []byte, c *Config) ([]byte, error) {
	if c == nil {
		return b, errors.New("ipvs: the configuration is nil")
	}
	for _, timeout := range []struct {
		name  string
		typ   uint16
		value time.Duration
	}{
		{"TimeoutTCP", cmdAttrTimeoutTCP, c.TimeoutTCP},
		{"TimeoutTCPFin", cmdAttrTimeoutTCPFin, c.TimeoutTCPFin},
		{"TimeoutUDP", cmdAttrTimeoutUDP, c.TimeoutUDP},
	} {
		seconds := int64(timeout.value / time.Second)
		switch {
		case timeout.value < 0:
			return b, fmt.Errorf("ipvs: %s %v is negative", timeout.name, timeout.value)
		case timeout.value > 0 && seconds == 0:
			return b, fmt.Errorf("ipvs: %s %v is less than a second, the kernel's unit", timeout.name, timeout.value)
		case seconds > math.MaxInt32:
			return b, fmt.Errorf("ipvs: %s %v is more than 2^31-1 seconds", timeout.name, timeout.value)
		}
		b = appendUint32(b, timeout.typ, uint32(seconds))
	}
	return b, nil
}

// What is received. The parse functions take the body of a message, the
// assemble functions the attributes of one service or destination.

// missing is the error of a reply that lacks what every kernel sends.
func missing(what string) error {
	return fmt.Errorf("ipvs: malformed reply: no %s", what)
}

// nested returns the attribute typ of the first level; what names it where it is missing.
func nested(body []byte, typ uint16, what string) (value []byte, err error) {
	if len(body) >= attrHdrLen && differs(body, typ, len(body)-attrHdrLen) == 0 {
		return body[attrHdrLen:], nil // the only one: so the kernel sends it
	}
	a := attributes{level: body}
	for a.next() {
		if a.typ == typ {
			value = a.value()
		}
	}
	if a.err == nil && value == nil {
		return nil, missing(what)
	}
	return value, a.err
}

// parseService reads the service in a message into s.
func parseService(body []byte, s *Service, mem *addresses) error {
	attrs, err := nested(body, cmdAttrService, "service")
	if err != nil {
		return err
	}
	return assembleService(attrs, s, mem)
}

func assembleService(attrs []byte, s *Service, mem *addresses) error {
	if address, ok := s.readLaidOut(attrs); ok {
		return s.setAddress(address, mem)
	}
	var address []byte
	var has64 bool
	a := attributes{level: attrs}
	for a.next() {
		switch a.typ {
		case svcAttrAddressFamily:
			s.AddressFamily = a.uint16()
		case svcAttrProtocol:
			s.Protocol = a.uint16()
		case svcAttrAddress:
			address = a.value()
		case svcAttrPort:
			s.Port = a.port()
		case svcAttrFWMark:
			s.FWMark = a.uint32()
		case svcAttrSchedName:
			s.SchedName = schedulerName(a.text())
		case svcAttrFlags:
			if a.fits(8) {
				s.Flags = native.Uint32(a.value())
			}
		case svcAttrTimeout:
			s.Timeout = a.uint32()
		case svcAttrNetmask:
			s.Netmask = a.uint32()
		case svcAttrPEName:
			s.PEName = string(a.text())
		case svcAttrStats:
			a.nest(assembleStats(a.value(), &s.Stats))
		case svcAttrStats64:
			has64 = true
			a.nest(assembleStats64(a.value(), &s.Stats64))
		}
	}
	if a.err != nil {
		return a.err
	}
	if !has64 {
		s.Stats64 = s.Stats.widen()
	}
	return s.setAddress(address, mem)
}

// setAddress sets the address, which only a firewall-mark service does not have.
func (s *Service) setAddress(address []byte, mem *addresses) (err error) {
	if s.AddressFamily != unix.AF_INET && s.AddressFamily != unix.AF_INET6 {
		return fmt.Errorf("ipvs: malformed reply: a service of address family %d", s.AddressFamily)
	}
	if s.FWMark == 0 {
		s.Address, err = mem.take(s.AddressFamily, address)
	}
	return err
}

// parseDestination reads the destination in a message into d.
func parseDestination(body []byte, d *Destination, mem *addresses) error {
	attrs, err := nested(body, cmdAttrDest, "destination")
	if err != nil {
		return err
	}
	return assembleDestination(attrs, d, mem)
}

func assembleDestination(attrs []byte, d *Destination, mem *addresses) error {
	if address, ok := d.readLaidOut(attrs); ok {
		return d.setAddress(address, mem)
	}
	var address []byte
	var has64 bool
	a := attributes{level: attrs}
	for a.next() {
		switch a.typ {
		case destAttrAddress:
			address = a.value()
		case destAttrPort:
			d.Port = a.port()
		case destAttrForwardingMethod:
			d.ConnectionFlags = a.uint32()
		case destAttrWeight:
			d.Weight = int(a.uint32())
		case destAttrUpperThreshold:
			d.UpperThreshold = a.uint32()
		case destAttrLowerThreshold:
			d.LowerThreshold = a.uint32()
		case destAttrActiveConnections:
			d.ActiveConnections = int(a.uint32())
		case destAttrInactiveConnections:
			d.InactiveConnections = int(a.uint32())
		case destAttrPersistentConnections:
			d.PersistentConnections = int(a.uint32())
		case destAttrAddressFamily:
			d.AddressFamily = a.uint16()
		case destAttrTunnelType:
			d.TunnelType = a.uint8()
		case destAttrTunnelPort:
			d.TunnelPort = a.port()
		case destAttrTunnelFlags:
			d.TunnelFlags = a.uint16()
		case destAttrStats:
			a.nest(assembleStats(a.value(), (*SvcStats)(&d.Stats)))
		case destAttrStats64:
			has64 = true
			a.nest(assembleStats64(a.value(), &d.Stats64))
		}
	}
	if a.err != nil {
		return a.err
	}
	if !has64 {
		d.Stats64 = SvcStats(d.Stats).widen()
	}
	return d.setAddress(address, mem)
}

// setAddress sets the address, and the family if the kernel sent none.
func (d *Destination) setAddress(address []byte, mem *addresses) (err error) {
	if d.AddressFamily == 0 { // kernels before 3.18
		if d.AddressFamily, err = getIPFamily(address); err != nil {
			return err
		}
	}
	d.Address, err = mem.take(d.AddressFamily, address)
	return err
}

// getIPFamily tells the family of a destination's address as kernels before
// 3.18 send it: 16 bytes, and no word of the family. Four bytes that are not
// all zero with only zeros behind them are IPv4.
func getIPFamily(address []byte) (uint16, error) {
	if len(address) < net.IPv4len {
		return 0, fmt.Errorf("ipvs: malformed reply: an address of %d bytes", len(address))
	}
	head, tail := isZero(address[:net.IPv4len]), isZero(address[net.IPv4len:])
	switch {
	case head && tail:
		return 0, errors.New("ipvs: malformed reply: a destination without address family whose address is all zero")
	case tail:
		return unix.AF_INET, nil
	}
	return unix.AF_INET6, nil
}

func isZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// assembleStats reads the 32-bit counters.
func assembleStats(attrs []byte, s *SvcStats) error {
	a := attributes{level: attrs}
	for a.next() {
		switch a.typ {
		case statsAttrConnections:
			s.Connections = a.uint32()
		case statsAttrPacketsIn:
			s.PacketsIn = a.uint32()
		case statsAttrPacketsOut:
			s.PacketsOut = a.uint32()
		case statsAttrBytesIn:
			s.BytesIn = a.uint64()
		case statsAttrBytesOut:
			s.BytesOut = a.uint64()
		case statsAttrCPS:
			s.CPS = a.uint32()
		case statsAttrPPSIn:
			s.PPSIn = a.uint32()
		case statsAttrPPSOut:
			s.PPSOut = a.uint32()
		case statsAttrBPSIn:
			s.BPSIn = a.uint32()
		case statsAttrBPSOut:
			s.BPSOut = a.uint32()
		}
	}
	return a.err
}

// assembleStats64 reads the 64-bit counters, which kernels send from 4.1 on.
func assembleStats64(attrs []byte, s *Stats64) error {
	a := attributes{level: attrs}
	for a.next() {
		switch a.typ {
		case statsAttrConnections:
			s.Connections = a.uint64()
		case statsAttrPacketsIn:
			s.PacketsIn = a.uint64()
		case statsAttrPacketsOut:
			s.PacketsOut = a.uint64()
		case statsAttrBytesIn:
			s.BytesIn = a.uint64()
		case statsAttrBytesOut:
			s.BytesOut = a.uint64()
		case statsAttrCPS:
			s.CPS = a.uint64()
		case statsAttrPPSIn:
			s.PPSIn = a.uint64()
		case statsAttrPPSOut:
			s.PPSOut = a.uint64()
		case statsAttrBPSIn:
			s.BPSIn = a.uint64()
		case statsAttrBPSOut:
			s.BPSOut = a.uint64()
		}
	}
	return a.err
}

// widen returns the counters as Stats64, for kernels that send no 64-bit ones.
func (s SvcStats) widen() Stats64 {
	return Stats64{
		Connections: uint64(s.Connections),
		PacketsIn:   uint64(s.PacketsIn),
		PacketsOut:  uint64(s.PacketsOut),
		BytesIn:     s.BytesIn,
		BytesOut:    s.BytesOut,
		CPS:         uint64(s.CPS),
		BPSOut:      uint64(s.BPSOut),
		PPSIn:       uint64(s.PPSIn),
		PPSOut:      uint64(s.PPSOut),
		BPSIn:       uint64(s.BPSIn),
	}
}

// parseConfig reads the timeouts, which the kernel gives in seconds.
func parseConfig(body []byte) (Config, error) {
	var c Config
	a := attributes{level: body}
	for a.next() {
		switch a.typ {
		case cmdAttrTimeoutTCP:
			c.TimeoutTCP = time.Duration(a.uint32()) * time.Second
		case cmdAttrTimeoutTCPFin:
			c.TimeoutTCPFin = time.Duration(a.uint32()) * time.Second
		case cmdAttrTimeoutUDP:
			c.TimeoutUDP = time.Duration(a.uint32()) * time.Second
		}
	}
	return c, a.err
}

// schedulerName returns the name as a string, without an allocation for those
// that kernels have today.
func schedulerName(name []byte) string {
	switch string(name) {
	case RoundRobin:
		return RoundRobin
	case WeightedRoundRobin:
		return WeightedRoundRobin
	case LeastConnection:
		return LeastConnection
	case WeightedLeastConnection:
		return WeightedLeastConnection
	case SourceHashing:
		return SourceHashing
	case DestinationHashing:
		return DestinationHashing
	case MaglevHashing:
		return MaglevHashing
	case ShortestExpectedDelay:
		return ShortestExpectedDelay
	case NeverQueue:
		return NeverQueue
	case WeightedFailover:
		return WeightedFailover
	case WeightedOverflow:
		return WeightedOverflow
	case LocalityBasedLeastConnection:
		return LocalityBasedLeastConnection
	case LocalityBasedLeastConnectionWithReplication:
		return LocalityBasedLeastConnectionWithReplication
	case PowerOfTwoChoices:
		return PowerOfTwoChoices
	}
	return string(name)
}
