package ipvs

import (
	"encoding/binary"
	"fmt"

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

// The encoder: functions that append one attribute to a message, as append does.

func appendAttrHdr(b []byte, typ uint16, valueLen int) []byte {
	b = native.AppendUint16(b, uint16(attrHdrLen+valueLen))
	return native.AppendUint16(b, typ)
}

func appendUint8(b []byte, typ uint16, v uint8) []byte {
	return append(appendAttrHdr(b, typ, 1), v, 0, 0, 0)
}

func appendUint16(b []byte, typ uint16, v uint16) []byte {
	return append(native.AppendUint16(appendAttrHdr(b, typ, 2), v), 0, 0)
}

func appendUint32(b []byte, typ uint16, v uint32) []byte {
	return native.AppendUint32(appendAttrHdr(b, typ, 4), v)
}

// appendPort appends a port, which travels in network byte order.
func appendPort(b []byte, typ uint16, port uint16) []byte {
	return append(binary.BigEndian.AppendUint16(appendAttrHdr(b, typ, 2), port), 0, 0)
}

func appendBytes(b []byte, typ uint16, v []byte) []byte {
	return pad(append(appendAttrHdr(b, typ, len(v)), v...), len(v))
}

// appendString appends s and the NUL that ends strings in the kernel.
func appendString(b []byte, typ uint16, s string) []byte {
	return pad(append(append(appendAttrHdr(b, typ, len(s)+1), s...), 0), len(s)+1)
}

// pad fills up to the alignment after a value of n bytes.
func pad(b []byte, n int) []byte {
	const zeros = "\x00\x00\x00"
	return append(b, zeros[:align(n)-n]...)
}

// openNest begins a nested attribute; closeNest, given the offset returned, ends it.
func openNest(b []byte, typ uint16) (_ []byte, start int) {
	return appendAttrHdr(b, typ|unix.NLA_F_NESTED, 0), len(b)
}

func closeNest(b []byte, start int) {
	native.PutUint16(b[start:], uint16(len(b)-start))
}

// attributes walks the attributes of one level, in place:
//
//	for a := (attributes{rest: b}); a.next(); {
//		switch a.typ { case svcAttrTimeout: s.Timeout = a.uint32() }
//	}
//	return a.err
//
// The first thing that is not as it should be ends the walk and stays in err.
type attributes struct {
	typ   uint16
	value []byte
	rest  []byte
	err   error
}

// next moves to the next attribute and reports whether there is one.
func (a *attributes) next() bool {
	if len(a.rest) == 0 || a.err != nil {
		return false
	}
	if len(a.rest) < attrHdrLen {
		a.err = fmt.Errorf("ipvs: malformed reply: %d bytes left where an attribute should start", len(a.rest))
		return false
	}
	size := int(native.Uint16(a.rest))
	a.typ = native.Uint16(a.rest[2:]) & attrTypeMask
	if size < attrHdrLen || size > len(a.rest) {
		a.err = fmt.Errorf("ipvs: malformed reply: attribute %d claims %d bytes of %d", a.typ, size, len(a.rest))
		return false
	}
	a.value = a.rest[attrHdrLen:size]
	// The padding after the last attribute may be missing.
	a.rest = a.rest[min(align(size), len(a.rest)):]
	return true
}

// fits reports whether the value has the size of the type it is read as, and records an error if not.
func (a *attributes) fits(size int) bool {
	if len(a.value) == size {
		return true
	}
	a.fail("%d bytes, want %d", len(a.value), size)
	return false
}

// fail records what is wrong with the current attribute, unless something was wrong before.
func (a *attributes) fail(format string, args ...any) {
	if a.err == nil {
		a.err = fmt.Errorf("ipvs: malformed reply: attribute %d: "+format, append([]any{a.typ}, args...)...)
	}
}

func (a *attributes) uint8() uint8 {
	if !a.fits(1) {
		return 0
	}
	return a.value[0]
}

func (a *attributes) uint16() uint16 {
	if !a.fits(2) {
		return 0
	}
	return native.Uint16(a.value)
}

// port reads a number in network byte order.
func (a *attributes) port() uint16 {
	if !a.fits(2) {
		return 0
	}
	return binary.BigEndian.Uint16(a.value)
}

func (a *attributes) uint32() uint32 {
	if !a.fits(4) {
		return 0
	}
	return native.Uint32(a.value)
}

func (a *attributes) uint64() uint64 {
	if !a.fits(8) {
		return 0
	}
	return native.Uint64(a.value)
}

// nest records what went wrong inside a nested attribute.
func (a *attributes) nest(err error) {
	if a.err == nil {
		a.err = err
	}
}

// text reads a string up to its NUL.
func (a *attributes) text() []byte {
	for i, c := range a.value {
		if c == 0 {
			return a.value[:i]
		}
	}
	return a.value
}
