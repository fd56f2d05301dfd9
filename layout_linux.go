package ipvs

import (
	"encoding/binary"
	"slices"
)

// layout is how a message is laid out whose attributes are all there, in the
// order in which every kernel so far sends them. Then the values are at known
// places, and need not be looked for one by one. A message that is laid out
// otherwise is read attribute by attribute; the result is the same.
type layout struct {
	size    int
	headers []place // of all attributes
}

// place is where an attribute has its header, and the header's four bytes.
type place struct {
	at   int
	word uint32
}

// field is an attribute of a layout: its type, and the size of its value.
type field struct {
	typ  uint16
	size int
}

// newLayout lays out the fields one behind the other.
func newLayout(fields ...field) (l layout) {
	for _, f := range fields {
		l.add(f.typ, f.size)
		l.size += align(f.size)
	}
	return l
}

// add adds an attribute's header.
func (l *layout) add(typ uint16, size int) {
	var word [attrHdrLen]byte
	putAttrHdr(word[:], typ, size)
	l.headers = append(l.headers, place{l.size, native.Uint32(word[:])})
	l.size += attrHdrLen
}

// nest adds an attribute with the fields of another layout in it.
func (l layout) nest(typ uint16, inner layout) layout {
	l.headers = slices.Clone(l.headers)
	l.add(typ, inner.size)
	for _, h := range inner.headers {
		l.headers = append(l.headers, place{l.size + h.at, h.word})
	}
	l.size += inner.size
	return l
}

// is tells whether the attributes are laid out so.
func (l *layout) is(attrs []byte) bool {
	if len(attrs) != l.size {
		return false
	}
	for n := range l.headers {
		h := &l.headers[n]
		if native.Uint32(attrs[h.at:]) != h.word {
			return false
		}
	}
	return true
}

var (
	// The counters come in the order of their numbers; bytes have 64 bits in both.
	statsLayout = newLayout(field{statsAttrConnections, 4}, field{statsAttrPacketsIn, 4}, field{statsAttrPacketsOut, 4},
		field{statsAttrBytesIn, 8}, field{statsAttrBytesOut, 8}, field{statsAttrCPS, 4}, field{statsAttrPPSIn, 4},
		field{statsAttrPPSOut, 4}, field{statsAttrBPSIn, 4}, field{statsAttrBPSOut, 4})
	stats64Layout = newLayout(field{statsAttrConnections, 8}, field{statsAttrPacketsIn, 8}, field{statsAttrPacketsOut, 8},
		field{statsAttrBytesIn, 8}, field{statsAttrBytesOut, 8}, field{statsAttrCPS, 8}, field{statsAttrPPSIn, 8},
		field{statsAttrPPSOut, 8}, field{statsAttrBPSIn, 8}, field{statsAttrBPSOut, 8})

	// A service is one up to its scheduler, whose name has no fixed length, and one behind it.
	serviceHeadLayout = newLayout(field{svcAttrAddressFamily, 2}, field{svcAttrProtocol, 2}, field{svcAttrAddress, 16}, field{svcAttrPort, 2})
	serviceTailLayout = newLayout(field{svcAttrFlags, 8}, field{svcAttrTimeout, 4}, field{svcAttrNetmask, 4}).
				nest(svcAttrStats, statsLayout).nest(svcAttrStats64, stats64Layout)

	destinationLayout = newLayout(field{destAttrAddress, 16}, field{destAttrPort, 2}, field{destAttrForwardingMethod, 4},
		field{destAttrWeight, 4}, field{destAttrTunnelType, 1}, field{destAttrTunnelPort, 2}, field{destAttrTunnelFlags, 2},
		field{destAttrUpperThreshold, 4}, field{destAttrLowerThreshold, 4}, field{destAttrActiveConnections, 4},
		field{destAttrInactiveConnections, 4}, field{destAttrPersistentConnections, 4}, field{destAttrAddressFamily, 2}).
		nest(destAttrStats, statsLayout).nest(destAttrStats64, stats64Layout)
)

// readLaidOut reads a service whose attributes are laid out as expected, and
// tells whether they are. The address is that in the message.
func (s *Service) readLaidOut(b []byte) (address []byte, ok bool) {
	head := serviceHeadLayout.size
	if len(b) < head+attrHdrLen || !serviceHeadLayout.is(b[:head]) || native.Uint16(b[head+2:]) != svcAttrSchedName {
		return nil, false
	}
	size := int(native.Uint16(b[head:]))
	tail := head + align(size)
	if size < attrHdrLen || tail > len(b) || !serviceTailLayout.is(b[tail:]) {
		return nil, false
	}
	s.AddressFamily = native.Uint16(b[4:])
	s.Protocol = native.Uint16(b[12:])
	s.Port = binary.BigEndian.Uint16(b[40:])
	s.SchedName = schedulerName(text(b[head+attrHdrLen : head+size]))
	address = b[20:36]
	b = b[tail:]
	s.Flags = native.Uint32(b[4:])
	s.Timeout = native.Uint32(b[16:])
	s.Netmask = native.Uint32(b[24:])
	s.Stats.readLaidOut(b[32:])
	s.Stats64.readLaidOut(b[124:])
	return address, true
}

// readLaidOut reads a destination whose attributes are laid out as expected.
func (d *Destination) readLaidOut(b []byte) {
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
	(*SvcStats)(&d.Stats).readLaidOut(b[120:])
	d.Stats64.readLaidOut(b[212:])
}

// readLaidOut reads 32-bit counters that are laid out as expected.
func (s *SvcStats) readLaidOut(b []byte) {
	b = b[:88]
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

// readLaidOut reads 64-bit counters that are laid out as expected.
func (s *Stats64) readLaidOut(b []byte) {
	b = b[:120]
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
