package ipvs

// This file decodes replies. The parse functions take the body of a message, the
// assemble functions the attributes of one service or destination.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// attributes walks the attributes of one level, in place:
//
//	for a := (attributes{level: b}); a.next(); {
//		switch a.typ { case svcAttrTimeout: s.Timeout = a.uint32() }
//	}
//	return a.err
//
// The first malformed attribute ends the walk, and err says why.
type attributes struct {
	level   []byte
	typ     uint16
	at, end int // the current value is level[at:end]
	after   int // where the next attribute begins
	err     error
}

// next moves to the next attribute and reports whether there is one.
func (a *attributes) next() bool {
	rest := a.level[min(a.after, len(a.level)):] // padding after the last attribute is optional
	if len(rest) < attrHdrLen {
		return a.finish(len(rest), 0)
	}
	size := int(native.Uint16(rest))
	a.typ = native.Uint16(rest[2:]) & attrTypeMask
	if size < attrHdrLen || size > len(rest) {
		return a.finish(len(rest), size)
	}
	a.at, a.end = a.after+attrHdrLen, a.after+size
	a.after += align(size)
	return true
}

// finish ends the walk, with an error unless it ends where an attribute does.
func (a *attributes) finish(left, size int) bool {
	switch {
	case left == 0 || a.err != nil:
	case left < attrHdrLen:
		a.err = fmt.Errorf("ipvs: malformed reply: %d bytes left where an attribute should start", left)
	default:
		a.err = fmt.Errorf("ipvs: malformed reply: attribute %d claims %d bytes of %d", a.typ, size, left)
	}
	return false
}

// value returns the current value.
func (a *attributes) value() []byte { return a.level[a.at:a.end] }

// fits reports whether the value has the size of the type it is read as, and records an error if not.
func (a *attributes) fits(size int) bool {
	if a.end-a.at == size {
		return true
	}
	a.sizeError(size)
	return false
}

// sizeError ends the walk and records the error, unless there was an earlier one.
func (a *attributes) sizeError(size int) {
	a.nest(fmt.Errorf("ipvs: malformed reply: attribute %d has %d bytes, want %d", a.typ, a.end-a.at, size))
}

func (a *attributes) uint8() uint8 {
	if !a.fits(1) {
		return 0
	}
	return a.level[a.at]
}

func (a *attributes) uint16() uint16 {
	if !a.fits(2) {
		return 0
	}
	return native.Uint16(a.level[a.at:])
}

// port reads a number in network byte order.
func (a *attributes) port() uint16 {
	if !a.fits(2) {
		return 0
	}
	return binary.BigEndian.Uint16(a.level[a.at:])
}

func (a *attributes) uint32() uint32 {
	if !a.fits(4) {
		return 0
	}
	return native.Uint32(a.level[a.at:])
}

func (a *attributes) uint64() uint64 {
	if !a.fits(8) {
		return 0
	}
	return native.Uint64(a.level[a.at:])
}

// nest ends the walk if err, the error of a nested attribute, is not nil.
func (a *attributes) nest(err error) {
	if err != nil && a.err == nil {
		a.err, a.after = err, len(a.level)
	}
}

// text returns a string up to its NUL.
func (a *attributes) text() []byte { return text(a.value()) }

func text(value []byte) []byte {
	for i, c := range value {
		if c == 0 {
			return value[:i]
		}
	}
	return value
}

// nested returns the value of the first-level attribute typ. If it is missing, the error
// names it by what.
func nested(body []byte, typ uint16, what string) (value []byte, err error) {
	if len(body) >= attrHdrLen && headerDiff(body, typ, len(body)-attrHdrLen) == 0 {
		return body[attrHdrLen:], nil // the only attribute, as the kernel sends it
	}
	a := attributes{level: body}
	for a.next() {
		if a.typ == typ {
			value = a.value()
		}
	}
	if a.err == nil && value == nil {
		return nil, errMissing(what)
	}
	return value, a.err
}

// parseService decodes the service in a message into s.
func parseService(body []byte, s *Service, mem *addresses) error {
	attrs, err := nested(body, cmdAttrService, "service")
	if err != nil {
		return err
	}
	return assembleService(attrs, s, mem)
}

func assembleService(attrs []byte, s *Service, mem *addresses) error {
	if address, ok := s.decodeFixed(attrs); ok {
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

// setAddress sets the address, which every service has except for firewall-mark
// services.
func (s *Service) setAddress(address []byte, mem *addresses) (err error) {
	if s.AddressFamily != unix.AF_INET && s.AddressFamily != unix.AF_INET6 {
		return fmt.Errorf("ipvs: malformed reply: a service of address family %d", s.AddressFamily)
	}
	if s.FWMark == 0 {
		s.Address, err = mem.copyIP(s.AddressFamily, address)
	}
	return err
}

// parseDestination decodes the destination in a message into d.
func parseDestination(body []byte, d *Destination, mem *addresses) error {
	attrs, err := nested(body, cmdAttrDest, "destination")
	if err != nil {
		return err
	}
	return assembleDestination(attrs, d, mem)
}

func assembleDestination(attrs []byte, d *Destination, mem *addresses) error {
	if address, ok := d.decodeFixed(attrs); ok {
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
	d.Address, err = mem.copyIP(d.AddressFamily, address)
	return err
}

// getIPFamily returns the family of a destination's address from a kernel before 3.18,
// which sends 16 bytes without a family. If only the first four bytes are not zero, it
// is an IPv4 address.
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

// assembleStats decodes the 32-bit counters.
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

// assembleStats64 decodes the 64-bit counters, which Linux 4.1 and later send.
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

// decode decodes a change from its request; the destination is nil for a change of a
// service.
func decode(msg []byte) (*Service, *Destination) {
	var memory addresses
	body := msg[msgHdrLen+genlHdrLen:]
	s, d := new(Service), new(Destination)
	if err := parseService(body, s, &memory); err != nil {
		s = nil
	}
	if err := parseDestination(body, d, &memory); err != nil {
		d = nil
	}
	return s, d
}

// parseConfig decodes the timeouts, which the kernel sends in seconds.
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

// schedulerName returns the name as a string, without an allocation for the
// schedulers of current kernels.
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

// addresses allocates memory for the addresses of an answer, many at a time.
type addresses struct {
	free  []byte
	chunk int // size of the last allocation
}

// copyIP returns a copy of an address in the length of its family. The kernel sends 16
// bytes for both families.
func (m *addresses) copyIP(family uint16, address []byte) (net.IP, error) {
	size := net.IPv6len
	if family == unix.AF_INET {
		size = net.IPv4len
	}
	if family != unix.AF_INET && family != unix.AF_INET6 || len(address) != net.IPv6len && len(address) != size {
		return nil, fmt.Errorf("ipvs: malformed reply: an address of family %d with %d bytes", family, len(address))
	}
	if len(m.free) < size {
		m.chunk = min(max(2*m.chunk, 8*net.IPv4len), 1024)
		m.free = make([]byte, m.chunk)
	}
	ip := m.free[:size:size]
	m.free = m.free[size:]
	if size == net.IPv4len { // copy is a call, which costs more
		native.PutUint32(ip, native.Uint32(address))
	} else {
		copy(ip, address)
	}
	return ip, nil
}
