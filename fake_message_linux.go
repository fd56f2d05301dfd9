package ipvs

// This file has the messages as the Fake reads and writes them.

import (
	"bytes"
	"encoding/binary"
	"syscall"

	"golang.org/x/sys/unix"
)

// fakeKind says which values an attribute may have (NLA_*): the size in its low
// byte, and what it is the size of. 0 is for one that there is not.
type fakeKind uint16

const (
	fakeNumber fakeKind = (iota + 1) << 8 // at least so many bytes: of longer ones the kernel reads the first
	fakeBytes                             // at most so many bytes
	fakeText                              // at most so many bytes and a NUL
	fakeNested                            // nothing, or attributes

	fakeUint8  = fakeNumber | 1
	fakeUint16 = fakeNumber | 2
	fakeUint32 = fakeNumber | 4
)

// fakePolicy has the attributes that a level may have, by type. What it does not
// have is ignored.
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

// fakeAttrs has the values of a level, by type; nil where there is none.
type fakeAttrs [destAttrTunnelFlags + 1][]byte

// parse reads the attributes of a level. Of one that is there twice the last counts.
func (p fakePolicy) parse(level []byte) (attrs fakeAttrs, errno syscall.Errno) {
	for len(level) >= attrHdrLen {
		size := int(native.Uint16(level))
		typ := int(native.Uint16(level[2:]) & attrTypeMask)
		if size < attrHdrLen || size > len(level) {
			break // the kernel ignores what is not an attribute, and what comes after it
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

// check reports what is wrong with a value.
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

// has reports whether all these attributes are there.
func (a *fakeAttrs) has(types ...uint16) bool {
	for _, typ := range types {
		if a[typ] == nil {
			return false
		}
	}
	return true
}

// These return an attribute's value, 0 if there is none.

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

// address returns an address; for IPv4 the first four bytes count.
func (a *fakeAttrs) address(typ uint16, family uint16) (address [16]byte) {
	copy(address[:], a[typ])
	if family == unix.AF_INET {
		clear(address[4:])
	}
	return address
}

// openFakeNest begins a nested attribute, which IPVS does not mark as one; closeNest ends it.
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
