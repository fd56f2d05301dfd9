package ipvs

// This file validates services, destinations and settings, and encodes them as
// attributes. The append functions append one attribute to a message, and the fill
// functions all attributes of a request.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"net"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// align rounds n up to the four bytes at which netlink starts headers and attributes.
func align(n int) int { return (n + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1) }

// attrHdr returns an attribute header (length including the header, and type) as
// a native-endian uint32.
func attrHdr(typ uint16, valueLen int) uint32 {
	size := uint32(attrHdrLen + valueLen)
	if isBigEndian {
		return size<<16 | uint32(typ)
	}
	return uint32(typ)<<16 | size
}

// appendShort appends an attribute whose value has at most four bytes. value holds
// these bytes in memory order. Writing header and value at once halves the cost.
func appendShort(b []byte, typ uint16, valueLen int, value uint32) []byte {
	hdr := attrHdr(typ, valueLen)
	if isBigEndian {
		return native.AppendUint64(b, uint64(hdr)<<32|uint64(value))
	}
	return native.AppendUint64(b, uint64(value)<<32|uint64(hdr))
}

func appendUint32(b []byte, typ uint16, v uint32) []byte { return appendShort(b, typ, 4, v) }

func appendUint16(b []byte, typ uint16, v uint16) []byte {
	if isBigEndian {
		return appendShort(b, typ, 2, uint32(v)<<16)
	}
	return appendShort(b, typ, 2, uint32(v))
}

func appendUint8(b []byte, typ uint16, v uint8) []byte {
	if isBigEndian {
		return appendShort(b, typ, 1, uint32(v)<<24)
	}
	return appendShort(b, typ, 1, uint32(v))
}

// appendPort appends a port in network byte order.
func appendPort(b []byte, typ uint16, port uint16) []byte {
	if isBigEndian {
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
		return appendUint32(b, typ, native.Uint32(address)) // the bytes as they are
	}
	return appendBytes(b, typ, address)
}

// appendString appends s with a terminating NUL.
func appendString(b []byte, typ uint16, s string) []byte {
	b = native.AppendUint32(b, attrHdr(typ, len(s)+1))
	return pad(append(append(b, s...), 0), len(s)+1)
}

// pad appends the padding after a value of n bytes.
func pad(b []byte, n int) []byte {
	const zeros = "\x00\x00\x00"
	if n%unix.NLA_ALIGNTO == 0 {
		return b
	}
	return append(b, zeros[:align(n)-n]...)
}

// openNest begins a nested attribute. closeNest ends it, given the returned offset.
func openNest(b []byte, typ uint16) (_ []byte, start int) {
	return native.AppendUint32(b, attrHdr(typ|unix.NLA_F_NESTED, 0)), len(b)
}

func closeNest(b []byte, start int) {
	native.PutUint16(b[start:], uint16(len(b)-start))
}

// serviceFamily returns the address family of s, and its address in the length of
// that family, or nil for a firewall-mark service.
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
	return 0, nil, errUnknownFamily(s.AddressFamily)
}

// familyOf returns the family of an address, and the address in the length of that
// family. Unless asked is 0, it is an error if the family is not asked.
func familyOf(asked uint16, address net.IP, whose string) (family uint16, _ []byte, err error) {
	switch len(address) {
	case net.IPv4len:
		family = unix.AF_INET
	case net.IPv6len:
		family = unix.AF_INET6
		if asked != unix.AF_INET6 && isIPv4(address) { // an IPv4-mapped IPv6 address otherwise: see checkNew
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
		return 0, nil, errFamilyMismatch(asked, address, whose)
	}
	return 0, nil, errUnknownFamily(asked)
}

// isIPv4 reports whether an address of 16 bytes is an IPv4 address. It is a faster
// net.IP.To4.
func isIPv4(address net.IP) bool {
	return native.Uint64(address) == 0 && binary.BigEndian.Uint32(address[8:]) == 0x0000FFFF
}

// checkNew rejects a new service or destination of family AF_INET6 with an IPv4
// address in 16 bytes, as net.ParseIP returns it, which is a mistake. Existing ones
// that other programs created can be read, changed and deleted.
func checkNew(family uint16, address net.IP, whose string) error {
	if family == unix.AF_INET6 && address.To4() != nil {
		return errFamilyMismatch(family, address, whose)
	}
	return nil
}

// checkName checks a name, such as a scheduler's; maxLen includes the terminating NUL.
func checkName(what, name string, maxLen int) error {
	if len(name) >= maxLen {
		return fmt.Errorf("ipvs: %s %q has %d bytes, at most %d are possible", what, name, len(name), maxLen-1)
	}
	if strings.IndexByte(name, 0) >= 0 {
		return fmt.Errorf("ipvs: %s %q contains a NUL byte", what, name)
	}
	return nil
}

// filler appends the attributes of a request to b.
type filler func(b []byte) ([]byte, error)

// change returns a filler for a command on a service or a destination.
func change(cmd uint8, s *Service, d *Destination) filler {
	return func(b []byte) ([]byte, error) { return fillChange(b, cmd, s, d) }
}

// identity returns a filler for the identity of a service.
func identity(s *Service) filler {
	return func(b []byte) ([]byte, error) { return fillService(b, s, false) }
}

// fillChange appends the attributes of a command on a service or a destination.
func fillChange(b []byte, cmd uint8, s *Service, d *Destination) (_ []byte, err error) {
	switch cmd {
	case cmdNewService, cmdSetService, cmdDelService:
		if cmd == cmdNewService && s != nil && s.FWMark == 0 {
			if err := checkNew(s.AddressFamily, s.Address, "service"); err != nil {
				return b, err
			}
		}
		return fillService(b, s, cmd != cmdDelService)
	}
	if b, err = fillService(b, s, false); err != nil {
		return b, err
	}
	if cmd == cmdNewDest && d != nil {
		if err := checkNew(d.AddressFamily, d.Address, "destination"); err != nil {
			return b, err
		}
	}
	return fillDestination(b, d, cmd != cmdDelDest)
}

// fillService appends the identity of s and, if full, its settings.
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
		netmask := netmaskOf(s, family)
		if family == unix.AF_INET6 && netmask > 8*net.IPv6len {
			return b, fmt.Errorf("ipvs: netmask %d (%#x) of an IPv6 service is not a prefix length in 1..128: %w", netmask, netmask, syscall.EINVAL)
		}
		b = appendString(b, svcAttrSchedName, s.SchedName)
		if s.PEName != "" {
			b = appendString(b, svcAttrPEName, s.PEName)
		}
		b = appendFlags(b, svcAttrFlags, ipvsFlags{flags: s.Flags &^ ServiceFlagHashed, mask: math.MaxUint32})
		b = appendUint32(b, svcAttrTimeout, s.Timeout)
		b = appendUint32(b, svcAttrNetmask, netmask)
	}
	closeNest(b, nest)
	return b, nil
}

func appendFlags(b []byte, typ uint16, f ipvsFlags) []byte {
	b = native.AppendUint32(b, attrHdr(typ, 8))
	b = native.AppendUint32(b, f.flags)
	return native.AppendUint32(b, f.mask)
}

// netmaskOf returns the netmask to send for s. For IPv6, where the kernel accepts
// prefix lengths of 1 to 128, a netmask of 0 means that none was given.
func netmaskOf(s *Service, family uint16) uint32 {
	if family == unix.AF_INET6 && s.Netmask == 0 {
		return 128
	}
	return s.Netmask
}

// fillDestination appends the identity of d and, if full, its settings.
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
		// An omitted attribute means 0, and kernels before 5.3 do not know these.
		if d.TunnelType != 0 || d.TunnelPort != 0 || d.TunnelFlags != 0 {
			b = appendUint8(b, destAttrTunnelType, d.TunnelType)
			b = appendPort(b, destAttrTunnelPort, d.TunnelPort)
			b = appendUint16(b, destAttrTunnelFlags, d.TunnelFlags)
		}
	}
	closeNest(b, nest)
	return b, nil
}

// fillConfig appends the timeouts of c. The kernel ignores those that are 0.
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
