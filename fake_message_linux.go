package ipvs

// This file decodes requests and encodes replies for the Fake.

import (
	"bytes"
	"encoding/binary"
	"syscall"

	"golang.org/x/sys/unix"
)

// fakeKind describes the values that an attribute may have (NLA_*): a kind, and a size
// in the low byte. 0 stands for an attribute that does not exist.
type fakeKind uint16

const (
	fakeNumber fakeKind = (iota + 1) << 8 // at least size bytes; the kernel reads the first ones
	fakeBytes                             // at most size bytes
	fakeText                              // at most size bytes and a NUL
	fakeNested                            // nothing, or attributes

	fakeUint8  = fakeNumber | 1
	fakeUint16 = fakeNumber | 2
	fakeUint32 = fakeNumber | 4
)

// fakePolicy has the attributes that a level may have, by type. Others are ignored.
type fakePolicy []fakeKind

var (
	fakeControlPolicy = fakePolicy{
		unix.CTRL_ATTR_FAMILY_ID:   fakeUint16,
		unix.CTRL_ATTR_FAMILY_NAME: fakeText | 15,
	}
	fakeCommandPolicy = fakePolicy{
		cmdAttrService:       fakeNested,
		cmdAttrDest:          fakeNested,
		cmdAttrDaemon:        fakeNested,
		cmdAttrTimeoutTCP:    fakeUint32,
		cmdAttrTimeoutTCPFin: fakeUint32,
		cmdAttrTimeoutUDP:    fakeUint32,
	}
	fakeServicePolicy = fakePolicy{
		svcAttrAddressFamily: fakeUint16,
		svcAttrProtocol:      fakeUint16,
		svcAttrAddress:       fakeBytes | 16,
		svcAttrPort:          fakeUint16,
		svcAttrFWMark:        fakeUint32,
		svcAttrSchedName:     fakeText | (schedNameMaxLen - 1),
		svcAttrFlags:         fakeBytes | 8,
		svcAttrTimeout:       fakeUint32,
		svcAttrNetmask:       fakeUint32,
		svcAttrStats:         fakeNested,
		svcAttrPEName:        fakeText | peNameMaxLen,
	}
	fakeDestPolicy = fakePolicy{
		destAttrAddress:               fakeBytes | 16,
		destAttrPort:                  fakeUint16,
		destAttrForwardingMethod:      fakeUint32,
		destAttrWeight:                fakeUint32,
		destAttrUpperThreshold:        fakeUint32,
		destAttrLowerThreshold:        fakeUint32,
		destAttrActiveConnections:     fakeUint32,
		destAttrInactiveConnections:   fakeUint32,
		destAttrPersistentConnections: fakeUint32,
		destAttrStats:                 fakeNested,
		destAttrAddressFamily:         fakeUint16,
		destAttrTunnelType:            fakeUint8,
		destAttrTunnelPort:            fakeUint16,
		destAttrTunnelFlags:           fakeUint16,
	}
	fakeDaemonPolicy = fakePolicy{
		daemonAttrState:      fakeUint32,
		daemonAttrInterface:  fakeText | (interfaceNameMaxLen - 1),
		daemonAttrSyncID:     fakeUint32,
		daemonAttrSyncMaxLen: fakeUint16,
		daemonAttrGroup:      fakeUint32,
		daemonAttrGroup6:     fakeNumber | 16,
		daemonAttrPort:       fakeUint16,
		daemonAttrTTL:        fakeUint8,
	}
)

// fakeAttrs has the values of a level's attributes, by type; nil for a missing one.
type fakeAttrs [destAttrTunnelFlags + 1][]byte

// parse reads the attributes of a level. If one occurs twice, the last one counts.
func (p fakePolicy) parse(level []byte) (attrs fakeAttrs, errno syscall.Errno) {
	for len(level) >= attrHdrLen {
		size := int(native.Uint16(level))
		typ := int(native.Uint16(level[2:]) & attrTypeMask)
		if size < attrHdrLen || size > len(level) {
			break // the kernel ignores the rest
		}
		value := level[attrHdrLen:size:size]
		level = level[min(align(size), len(level)):]
		if typ >= len(p) || p[typ] == 0 {
			continue
		}
		if errno := p[typ].check(value); errno != 0 {
			return attrs, errno
		}
		attrs[typ] = value
	}
	return attrs, 0
}

// check returns the kernel's error for a value, or 0 if it is valid.
func (k fakeKind) check(value []byte) syscall.Errno {
	size, n := int(k&0xFF), len(value)
	outOfRange := false
	switch k &^ 0xFF {
	case fakeNumber:
		outOfRange = n < size
	case fakeBytes:
		outOfRange = n > size
	case fakeText:
		if bytes.IndexByte(value[:min(n, size+1)], 0) < 0 {
			return syscall.EINVAL
		}
		outOfRange = n > size+1 || n == size+1 && value[n-1] != 0
	case fakeNested:
		outOfRange = n > 0 && n < attrHdrLen
	}
	if outOfRange {
		return syscall.ERANGE
	}
	return 0
}

// has reports whether all these attributes are present.
func (a *fakeAttrs) has(types ...uint16) bool {
	for _, typ := range types {
		if a[typ] == nil {
			return false
		}
	}
	return true
}

// The following methods return an attribute's value, or 0 if it is missing.

func (a *fakeAttrs) uint8(typ uint16) (v uint8) {
	if a[typ] != nil {
		v = a[typ][0]
	}
	return v
}

func (a *fakeAttrs) uint16(typ uint16) (v uint16) {
	if a[typ] != nil {
		v = native.Uint16(a[typ])
	}
	return v
}

func (a *fakeAttrs) port(typ uint16) (v uint16) {
	if a[typ] != nil {
		v = binary.BigEndian.Uint16(a[typ])
	}
	return v
}

func (a *fakeAttrs) uint32(typ uint16) (v uint32) {
	if a[typ] != nil {
		v = native.Uint32(a[typ])
	}
	return v
}

// address returns an address; for IPv4 only the first four bytes count.
func (a *fakeAttrs) address(typ uint16, family uint16) (address [16]byte) {
	copy(address[:], a[typ])
	if family == unix.AF_INET {
		clear(address[4:])
	}
	return address
}

// openFakeNest begins a nested attribute without NLA_F_NESTED, as IPVS sends it;
// closeNest ends it.
func openFakeNest(b []byte, typ uint16) (_ []byte, start int) {
	return native.AppendUint32(b, attrHdr(typ, 0)), len(b)
}

func appendFakeUint64(b []byte, typ uint16, v uint64) []byte {
	return native.AppendUint64(native.AppendUint32(b, attrHdr(typ, 8)), v)
}

// append appends the service as the kernel sends it.
func (s *fakeService) append(b []byte) []byte {
	b, nest := openFakeNest(b, cmdAttrService)
	b = appendUint16(b, svcAttrAddressFamily, s.key.family)
	if s.key.fwmark != 0 {
		b = appendUint32(b, svcAttrFWMark, s.key.fwmark)
	} else {
		b = appendUint16(b, svcAttrProtocol, s.key.protocol)
		b = appendBytes(b, svcAttrAddress, s.key.address[:])
		b = appendPort(b, svcAttrPort, uint16(s.key.port))
	}
	b = appendString(b, svcAttrSchedName, s.scheduler)
	if s.engine != "" {
		b = appendString(b, svcAttrPEName, s.engine)
	}
	b = appendFlags(b, svcAttrFlags, ipvsFlags{flags: s.flags | ServiceFlagHashed, mask: ^uint32(0)})
	b = appendUint32(b, svcAttrTimeout, s.timeout/fakeTicks)
	b = appendUint32(b, svcAttrNetmask, s.netmask)
	b = appendFakeStats(b, svcAttrStats, svcAttrStats64, &s.stats)
	closeNest(b, nest)
	return b
}

// append appends the destination as the kernel sends it.
func (d *fakeDestination) append(b []byte) []byte {
	b, nest := openFakeNest(b, cmdAttrDest)
	b = appendBytes(b, destAttrAddress, d.key.address[:])
	b = appendPort(b, destAttrPort, d.key.port)
	b = appendUint32(b, destAttrForwardingMethod, d.method)
	b = appendUint32(b, destAttrWeight, uint32(d.weight))
	b = appendUint8(b, destAttrTunnelType, d.tunnelType)
	b = appendPort(b, destAttrTunnelPort, d.tunnelPort)
	b = appendUint16(b, destAttrTunnelFlags, d.tunnelFlags)
	b = appendUint32(b, destAttrUpperThreshold, d.upper)
	b = appendUint32(b, destAttrLowerThreshold, d.lower)
	b = appendUint32(b, destAttrActiveConnections, d.active)
	b = appendUint32(b, destAttrInactiveConnections, d.inactive)
	b = appendUint32(b, destAttrPersistentConnections, d.persistent)
	b = appendUint16(b, destAttrAddressFamily, d.key.family)
	b = appendFakeStats(b, destAttrStats, destAttrStats64, &d.stats)
	closeNest(b, nest)
	return b
}

// appendFakeStats appends the counters in 32 and in 64 bits.
func appendFakeStats(b []byte, typ, typ64 uint16, s *Stats64) []byte {
	b, nest := openFakeNest(b, typ)
	b = appendUint32(b, statsAttrConnections, uint32(s.Connections))
	b = appendUint32(b, statsAttrPacketsIn, uint32(s.PacketsIn))
	b = appendUint32(b, statsAttrPacketsOut, uint32(s.PacketsOut))
	b = appendFakeUint64(b, statsAttrBytesIn, s.BytesIn)
	b = appendFakeUint64(b, statsAttrBytesOut, s.BytesOut)
	b = appendUint32(b, statsAttrCPS, uint32(s.CPS))
	b = appendUint32(b, statsAttrPPSIn, uint32(s.PPSIn))
	b = appendUint32(b, statsAttrPPSOut, uint32(s.PPSOut))
	b = appendUint32(b, statsAttrBPSIn, uint32(s.BPSIn))
	b = appendUint32(b, statsAttrBPSOut, uint32(s.BPSOut))
	closeNest(b, nest)
	b, nest = openFakeNest(b, typ64)
	for n, v := range []uint64{s.Connections, s.PacketsIn, s.PacketsOut, s.BytesIn, s.BytesOut,
		s.CPS, s.PPSIn, s.PPSOut, s.BPSIn, s.BPSOut} {
		b = appendFakeUint64(b, statsAttrConnections+uint16(n), v)
	}
	closeNest(b, nest)
	return b
}

// append appends the daemon as the kernel sends it.
func (d *fakeDaemon) append(b []byte) []byte {
	b, nest := openFakeNest(b, cmdAttrDaemon)
	b = appendUint32(b, daemonAttrState, uint32(d.state))
	b = appendString(b, daemonAttrInterface, d.link)
	b = appendUint32(b, daemonAttrSyncID, d.syncID)
	b = appendUint16(b, daemonAttrSyncMaxLen, d.maxLen)
	b = appendUint16(b, daemonAttrPort, d.port)
	b = appendUint8(b, daemonAttrTTL, d.ttl)
	if len(d.group) == 16 {
		b = appendBytes(b, daemonAttrGroup6, d.group)
	} else {
		b = appendBytes(b, daemonAttrGroup, d.group)
	}
	closeNest(b, nest)
	return b
}
