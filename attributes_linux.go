package ipvs

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net"

	"golang.org/x/sys/cpu"
	"golang.org/x/sys/unix"
)

// Numbers travel in the byte order of the machine, but for ports and addresses.
var native = binary.NativeEndian

const (
	attrHdrLen = unix.SizeofNlAttr
	// The top two bits of an attribute's type are flags: nested, network byte order.
	attrTypeMask = ^uint16(unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
)

// align rounds n up to the four bytes at which netlink starts headers and attributes.
func align(n int) int { return (n + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1) }

// attrHdr returns an attribute's header as it lies in memory: the length with the
// header, and the type.
func attrHdr(typ uint16, valueLen int) uint32 {
	size := uint32(attrHdrLen + valueLen)
	if cpu.IsBigEndian {
		return size<<16 | uint32(typ)
	}
	return uint32(typ)<<16 | size
}

// The encoder: functions that append one attribute to a message, as append does.

// appendShort appends an attribute whose value has at most four bytes, which come
// as they are to lie in memory: in one go that is half the work.
func appendShort(b []byte, typ uint16, valueLen int, value uint32) []byte {
	hdr := attrHdr(typ, valueLen)
	if cpu.IsBigEndian {
		return native.AppendUint64(b, uint64(hdr)<<32|uint64(value))
	}
	return native.AppendUint64(b, uint64(value)<<32|uint64(hdr))
}

func appendUint32(b []byte, typ uint16, v uint32) []byte { return appendShort(b, typ, 4, v) }

func appendUint16(b []byte, typ uint16, v uint16) []byte {
	if cpu.IsBigEndian {
		return appendShort(b, typ, 2, uint32(v)<<16)
	}
	return appendShort(b, typ, 2, uint32(v))
}

func appendUint8(b []byte, typ uint16, v uint8) []byte {
	if cpu.IsBigEndian {
		return appendShort(b, typ, 1, uint32(v)<<24)
	}
	return appendShort(b, typ, 1, uint32(v))
}

// appendPort appends a port, which travels in network byte order.
func appendPort(b []byte, typ uint16, port uint16) []byte {
	if cpu.IsBigEndian {
		return appendUint16(b, typ, port)
	}
	return appendUint16(b, typ, bits.ReverseBytes16(port))
}

func appendBytes(b []byte, typ uint16, v []byte) []byte {
	b = native.AppendUint32(b, attrHdr(typ, len(v)))
	return pad(append(b, v...), len(v))
}

// appendAddress appends an address of 4 or 16 bytes.
func appendAddress(b []byte, typ uint16, address []byte) []byte {
	if len(address) == net.IPv4len {
		return appendUint32(b, typ, native.Uint32(address)) // the bytes as they lie there
	}
	return appendBytes(b, typ, address)
}

// appendString appends s and the NUL that ends strings in the kernel.
func appendString(b []byte, typ uint16, s string) []byte {
	b = native.AppendUint32(b, attrHdr(typ, len(s)+1))
	return pad(append(append(b, s...), 0), len(s)+1)
}

// pad fills up to the alignment after a value of n bytes.
func pad(b []byte, n int) []byte {
	const zeros = "\x00\x00\x00"
	if n%unix.NLA_ALIGNTO == 0 {
		return b
	}
	return append(b, zeros[:align(n)-n]...)
}

// openNest begins a nested attribute; closeNest, given the offset returned, ends it.
func openNest(b []byte, typ uint16) (_ []byte, start int) {
	return native.AppendUint32(b, attrHdr(typ|unix.NLA_F_NESTED, 0)), len(b)
}

func closeNest(b []byte, start int) {
	native.PutUint16(b[start:], uint16(len(b)-start))
}

// attributes walks the attributes of one level, in place:
//
//	for a := (attributes{level: b}); a.next(); {
//		switch a.typ { case svcAttrTimeout: s.Timeout = a.uint32() }
//	}
//	return a.err
//
// The first thing that is not as it should be ends the walk and stays in err.
type attributes struct {
	level   []byte
	typ     uint16
	at, end int // the current value is level[at:end]
	after   int // where the next attribute begins
	err     error
}

// next moves to the next attribute and reports whether there is one.
func (a *attributes) next() bool {
	rest := a.level[min(a.after, len(a.level)):] // the padding after the last attribute may be missing
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

// finish ends the walk, with an error if it does not end where an attribute does.
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
	a.misfit(size)
	return false
}

// misfit ends the walk, and says why unless something was wrong before.
func (a *attributes) misfit(size int) {
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

// nest ends the walk if something went wrong inside a nested attribute.
func (a *attributes) nest(err error) {
	if err != nil && a.err == nil {
		a.err, a.after = err, len(a.level)
	}
}

// text reads a string up to its NUL.
func (a *attributes) text() []byte { return text(a.value()) }

func text(value []byte) []byte {
	for i, c := range value {
		if c == 0 {
			return value[:i]
		}
	}
	return value
}
