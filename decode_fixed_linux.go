package ipvs

// This file has the fast path of decoding. Known kernels send the attributes in a
// fixed order, so values can be read at fixed offsets; anything else takes the
// general decoder, with the same result.
//
// The functions that compare headers have no branches: they collect the bits in
// which the headers differ from the expected ones, and 0 means that they are equal.

import "encoding/binary"

// Sizes of the fixed layouts, in bytes.
const (
	statsSize   = 3*8 + 2*12 + 5*8
	stats64Size = 10 * 12

	// A service has a head and a tail, with the scheduler's name between them.
	serviceHeadSize = 8 + 8 + 20 + 8
	serviceTailSize = 12 + 8 + 8 + attrHdrLen + statsSize + attrHdrLen + stats64Size

	destinationSize = 20 + 12*8 + attrHdrLen + statsSize + attrHdrLen + stats64Size
)

// headerDiff compares the header at the start of b with that of an attribute of
// type typ with a value of valueLen bytes.
func headerDiff(b []byte, typ uint16, valueLen int) uint32 {
	return native.Uint32(b) ^ attrHdr(typ, valueLen)
}

func serviceHeadDiff(b *[serviceHeadSize]byte) uint32 {
	return headerDiff(b[0:], svcAttrAddressFamily, 2) |
		headerDiff(b[8:], svcAttrProtocol, 2) |
		headerDiff(b[16:], svcAttrAddress, 16) |
		headerDiff(b[36:], svcAttrPort, 2)
}

func serviceTailDiff(b *[serviceTailSize]byte) uint32 {
	return headerDiff(b[0:], svcAttrFlags, 8) |
		headerDiff(b[12:], svcAttrTimeout, 4) |
		headerDiff(b[20:], svcAttrNetmask, 4) |
		headerDiff(b[28:], svcAttrStats, statsSize) |
		statsDiff((*[statsSize]byte)(b[32:])) |
		headerDiff(b[120:], svcAttrStats64, stats64Size) |
		stats64Diff((*[stats64Size]byte)(b[124:]))
}

func destinationDiff(b *[destinationSize]byte) uint32 {
	return headerDiff(b[0:], destAttrAddress, 16) |
		headerDiff(b[20:], destAttrPort, 2) |
		headerDiff(b[28:], destAttrForwardingMethod, 4) |
		headerDiff(b[36:], destAttrWeight, 4) |
		headerDiff(b[44:], destAttrTunnelType, 1) |
		headerDiff(b[52:], destAttrTunnelPort, 2) |
		headerDiff(b[60:], destAttrTunnelFlags, 2) |
		headerDiff(b[68:], destAttrUpperThreshold, 4) |
		headerDiff(b[76:], destAttrLowerThreshold, 4) |
		headerDiff(b[84:], destAttrActiveConnections, 4) |
		headerDiff(b[92:], destAttrInactiveConnections, 4) |
		headerDiff(b[100:], destAttrPersistentConnections, 4) |
		headerDiff(b[108:], destAttrAddressFamily, 2) |
		headerDiff(b[116:], destAttrStats, statsSize) |
		statsDiff((*[statsSize]byte)(b[120:])) |
		headerDiff(b[208:], destAttrStats64, stats64Size) |
		stats64Diff((*[stats64Size]byte)(b[212:]))
}

// The counters are in the order of their attribute numbers; bytes are counted in 64
// bits in both sets.
func statsDiff(b *[statsSize]byte) uint32 {
	return headerDiff(b[0:], statsAttrConnections, 4) |
		headerDiff(b[8:], statsAttrPacketsIn, 4) |
		headerDiff(b[16:], statsAttrPacketsOut, 4) |
		headerDiff(b[24:], statsAttrBytesIn, 8) |
		headerDiff(b[36:], statsAttrBytesOut, 8) |
		headerDiff(b[48:], statsAttrCPS, 4) |
		headerDiff(b[56:], statsAttrPPSIn, 4) |
		headerDiff(b[64:], statsAttrPPSOut, 4) |
		headerDiff(b[72:], statsAttrBPSIn, 4) |
		headerDiff(b[80:], statsAttrBPSOut, 4)
}

func stats64Diff(b *[stats64Size]byte) uint32 {
	return headerDiff(b[0:], statsAttrConnections, 8) |
		headerDiff(b[12:], statsAttrPacketsIn, 8) |
		headerDiff(b[24:], statsAttrPacketsOut, 8) |
		headerDiff(b[36:], statsAttrBytesIn, 8) |
		headerDiff(b[48:], statsAttrBytesOut, 8) |
		headerDiff(b[60:], statsAttrCPS, 8) |
		headerDiff(b[72:], statsAttrPPSIn, 8) |
		headerDiff(b[84:], statsAttrPPSOut, 8) |
		headerDiff(b[96:], statsAttrBPSIn, 8) |
		headerDiff(b[108:], statsAttrBPSOut, 8)
}

// decodeFixed decodes a service with the fixed layout; ok reports whether b has that
// layout. The address is a part of b.
func (s *Service) decodeFixed(b []byte) (address []byte, ok bool) {
	const head = serviceHeadSize
	if len(b) < head+attrHdrLen || serviceHeadDiff((*[head]byte)(b)) != 0 || native.Uint16(b[head+2:]) != svcAttrSchedName {
		return nil, false
	}
	size := int(native.Uint16(b[head:]))
	after := head + align(size)
	if size < attrHdrLen || len(b) != after+serviceTailSize {
		return nil, false
	}
	tail := (*[serviceTailSize]byte)(b[after:])
	if serviceTailDiff(tail) != 0 {
		return nil, false
	}
	s.AddressFamily = native.Uint16(b[4:])
	s.Protocol = native.Uint16(b[12:])
	s.Port = binary.BigEndian.Uint16(b[40:])
	s.SchedName = schedulerName(text(b[head+attrHdrLen : head+size]))
	s.Flags = native.Uint32(tail[4:])
	s.Timeout = native.Uint32(tail[16:])
	s.Netmask = native.Uint32(tail[24:])
	s.Stats.decodeFixed((*[statsSize]byte)(tail[32:]))
	s.Stats64.decodeFixed((*[stats64Size]byte)(tail[124:]))
	return b[20:36], true
}

// decodeFixed decodes a destination with the fixed layout; ok reports whether attrs has
// that layout. The address is a part of attrs.
func (d *Destination) decodeFixed(attrs []byte) (address []byte, ok bool) {
	if len(attrs) != destinationSize {
		return nil, false
	}
	b := (*[destinationSize]byte)(attrs)
	if destinationDiff(b) != 0 {
		return nil, false
	}
	d.Port = binary.BigEndian.Uint16(b[24:])
	d.ConnectionFlags = native.Uint32(b[32:])
	d.Weight = int(native.Uint32(b[40:]))
	d.TunnelType = b[48]
	d.TunnelPort = binary.BigEndian.Uint16(b[56:])
	d.TunnelFlags = native.Uint16(b[64:])
	d.UpperThreshold = native.Uint32(b[72:])
	d.LowerThreshold = native.Uint32(b[80:])
	d.ActiveConnections = int(native.Uint32(b[88:]))
	d.InactiveConnections = int(native.Uint32(b[96:]))
	d.PersistentConnections = int(native.Uint32(b[104:]))
	d.AddressFamily = native.Uint16(b[112:])
	(*SvcStats)(&d.Stats).decodeFixed((*[statsSize]byte)(b[120:]))
	d.Stats64.decodeFixed((*[stats64Size]byte)(b[212:]))
	return attrs[attrHdrLen:20], true
}

// decodeFixed decodes 32-bit counters with the fixed layout.
func (s *SvcStats) decodeFixed(b *[statsSize]byte) {
	s.Connections = native.Uint32(b[4:])
	s.PacketsIn = native.Uint32(b[12:])
	s.PacketsOut = native.Uint32(b[20:])
	s.BytesIn = native.Uint64(b[28:])
	s.BytesOut = native.Uint64(b[40:])
	s.CPS = native.Uint32(b[52:])
	s.PPSIn = native.Uint32(b[60:])
	s.PPSOut = native.Uint32(b[68:])
	s.BPSIn = native.Uint32(b[76:])
	s.BPSOut = native.Uint32(b[84:])
}

// decodeFixed decodes 64-bit counters with the fixed layout.
func (s *Stats64) decodeFixed(b *[stats64Size]byte) {
	s.Connections = native.Uint64(b[4:])
	s.PacketsIn = native.Uint64(b[16:])
	s.PacketsOut = native.Uint64(b[28:])
	s.BytesIn = native.Uint64(b[40:])
	s.BytesOut = native.Uint64(b[52:])
	s.CPS = native.Uint64(b[64:])
	s.PPSIn = native.Uint64(b[76:])
	s.PPSOut = native.Uint64(b[88:])
	s.BPSIn = native.Uint64(b[100:])
	s.BPSOut = native.Uint64(b[112:])
}
