package ipvs

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net"
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestIsBigEndian(t *testing.T) {
	if got := native.Uint16([]byte{0, 1}) == 1; got != isBigEndian {
		t.Errorf("isBigEndian is %v, native says %v", isBigEndian, got)
	}
}

// Byte orders. The recordings come from little-endian machines. On big-endian ones
// their bytes are swapped first, by a decoder that is independent of the library.

// swapper swaps the bytes of the numbers in b, which are in the byte order from.
type swapper func(b []byte, from binary.ByteOrder) error

// asIs is for strings, addresses, ports and single bytes.
func asIs([]byte, binary.ByteOrder) error { return nil }

// number is for one or more numbers of the given size.
func number(size int) swapper {
	return func(b []byte, _ binary.ByteOrder) error {
		if len(b)%size != 0 {
			return fmt.Errorf("%d bytes for numbers of %d", len(b), size)
		}
		for n := range slices.Chunk(b, size) {
			slices.Reverse(n)
		}
		return nil
	}
}

// attributesOf is for attributes that are each of a known kind.
func attributesOf(known map[uint16]swapper) swapper {
	return swapAttributes(func(typ uint16) swapper { return known[typ] })
}

// arrayOf is for attributes of one kind, numbered through.
func arrayOf(element swapper) swapper {
	return swapAttributes(func(uint16) swapper { return element })
}

func swapAttributes(kind func(typ uint16) swapper) swapper {
	return func(b []byte, from binary.ByteOrder) error {
		for len(b) > 0 {
			size, typ := int(from.Uint16(b)), from.Uint16(b[2:])&0x3FFF
			swapValue := kind(typ)
			if swapValue == nil {
				return fmt.Errorf("attribute %d is not known", typ)
			}
			if err := swapValue(b[4:size], from); err != nil {
				return fmt.Errorf("attribute %d: %w", typ, err)
			}
			if err := number(2)(b[:4], from); err != nil {
				return err
			}
			b = b[min((size+3)&^3, len(b)):]
		}
		return nil
	}
}

// The layouts, after linux/ip_vs.h, linux/genetlink.h and linux/netlink.h.
var (
	number16, number32, number64 = number(2), number(4), number(8)

	statsSwapper = attributesOf(map[uint16]swapper{1: number32, 2: number32, 3: number32, 4: number64, 5: number64,
		6: number32, 7: number32, 8: number32, 9: number32, 10: number32, 11: asIs})
	stats64Swapper = attributesOf(map[uint16]swapper{1: number64, 2: number64, 3: number64, 4: number64, 5: number64,
		6: number64, 7: number64, 8: number64, 9: number64, 10: number64, 11: asIs})
	serviceSwapper = map[uint16]swapper{
		1:  number16, // address family
		2:  number16, // protocol
		3:  asIs,     // address
		4:  asIs,     // port
		5:  number32, // firewall mark
		6:  asIs,     // scheduler
		7:  number32, // flags and their mask
		8:  number32, // timeout
		9:  number32, // netmask, for IPv6
		10: statsSwapper,
		11: asIs, // persistence engine
		12: stats64Swapper,
	}
	destinationSwapper = attributesOf(map[uint16]swapper{
		1:  asIs,     // address
		2:  asIs,     // port
		3:  number32, // forwarding method
		4:  number32, // weight
		5:  number32, // thresholds
		6:  number32,
		7:  number32, // connections
		8:  number32,
		9:  number32,
		10: statsSwapper,
		11: number16, // address family
		12: stats64Swapper,
		13: asIs,     // tunnel type
		14: asIs,     // tunnel port
		15: number16, // tunnel flags
	})
	commandLayout = attributesOf(map[uint16]swapper{1: swapService, 2: destinationSwapper,
		4: number32, 5: number32, 6: number32}) // timeouts
	controllerLayout = attributesOf(map[uint16]swapper{
		1: number16, // family id
		2: asIs,     // family name
		3: number32, // version
		4: number32, // header size
		5: number32, // largest attribute
		6: arrayOf(commandsLayout),
		7: arrayOf(groupsLayout),
	})
	commandsLayout    = attributesOf(map[uint16]swapper{1: number32, 2: number32}) // command, flags
	groupsLayout      = attributesOf(map[uint16]swapper{1: asIs, 2: number32})     // name, id
	extendedAckLayout = attributesOf(map[uint16]swapper{
		1: asIs,     // text
		2: number32, // offset of the error
	})
)

// swapService is for a service. The netmask is four bytes for IPv4 and a number
// for IPv6; the address family comes first.
func swapService(b []byte, from binary.ByteOrder) error {
	layout := serviceSwapper
	if from.Uint16(b[2:]) != 1 {
		return errors.New("a service that does not begin with its address family")
	}
	if from.Uint16(b[4:]) == unix.AF_INET {
		layout = maps.Clone(layout)
		layout[9] = asIs
	}
	return attributesOf(layout)(b, from)
}

// swapMessages swaps the numbers in the messages of a datagram.
func swapMessages(b []byte, from binary.ByteOrder) error {
	for len(b) > 0 {
		size := from.Uint32(b)
		if err := swapMessage(b[:size], from); err != nil {
			return err
		}
		b = b[min((int(size)+3)&^3, len(b)):]
	}
	return nil
}

func swapMessage(b []byte, from binary.ByteOrder) error {
	const header, extended = unix.SizeofNlMsghdr, 0x200 // NLM_F_ACK_TLVS
	typ, flags, body := from.Uint16(b[4:]), from.Uint16(b[6:]), b[header:]
	swapHeader(b)
	switch typ {
	case unix.NLMSG_ERROR:
		// The error number, the header of the request, and perhaps more in words.
		slices.Reverse(body[:4])
		swapHeader(body[4:])
		if flags&extended == 0 && len(body) > 4+header {
			return errors.New("an error with the whole request in it")
		}
		return extendedAckLayout(body[4+header:], from)
	case unix.NLMSG_DONE:
		slices.Reverse(body[:4])
		return extendedAckLayout(body[4:], from)
	case unix.GENL_ID_CTRL:
		return controllerLayout(body[4:], from)
	default:
		return commandLayout(body[4:], from)
	}
}

// swapHeader swaps the numbers in a struct nlmsghdr.
func swapHeader(b []byte) {
	for _, field := range [][]byte{b[:4], b[4:6], b[6:8], b[8:12], b[12:16]} {
		slices.Reverse(field)
	}
}

// Messages of kernels that are too old to be recorded, written by hand from
// linux/ip_vs.h, in both byte orders. They are parts of dumps.

// oldDestination is a destination as before 3.18: no address family, no 64-bit
// counters, no tunnel.
var oldDestination = map[bool]string{
	false: `
	c8000000 21000200 01000000 67120000  05010000 b4000200  14000100 0a010203 00000000 00000000 00000000
	06000200 1f900000  08000300 03000000  08000400 01000100  08000500 64000000  08000600 32000000
	08000700 05000000  08000800 06000000  08000900 07000000  5c000a00  08000100 11000000
	08000200 12000000  08000300 13000000  0c000400 14000000 01000000  0c000500 15000000 01000000
	08000600 16000000  08000700 17000000  08000800 18000000  08000900 19000000  08000a00 1a000000`,
	true: `
	000000c8 00210002 00000001 00001267  05010000 00b40002  00140001 0a010203 00000000 00000000 00000000
	00060002 1f900000  00080003 00000003  00080004 00010001  00080005 00000064  00080006 00000032
	00080007 00000005  00080008 00000006  00080009 00000007  005c000a  00080001 00000011
	00080002 00000012  00080003 00000013  000c0004 00000001 00000014  000c0005 00000001 00000015
	00080006 00000016  00080007 00000017  00080008 00000018  00080009 00000019  0008000a 0000001a`,
}

// oldServices are two services as before 4.1, without 64-bit counters.
var oldServices = map[bool]string{
	false: `
	c4000000 21000200 01000000 67120000  01010000 b0000100  06000100 02000000  06000200 06000000
	14000300 0a000001 00000000 00000000 00000000  06000400 00500000  08000600 77727200
	0c000700 03000000 ffffffff  08000800 68010000  08000900 fffff000  5c000a00  08000100 21000000
	08000200 22000000  08000300 23000000  0c000400 24000000 01000000  0c000500 25000000 01000000
	08000600 26000000  08000700 27000000  08000800 28000000  08000900 29000000  08000a00 2a000000

	b0000000 21000200 01000000 67120000  01010000 9c000100  06000100 0a000000  08000500 04030201
	07000600 72720000  08000b00 73697000  0c000700 02000000 ffffffff  08000800 00000000
	08000900 40000000  5c000a00  08000100 31000000  08000200 32000000  08000300 33000000
	0c000400 34000000 01000000  0c000500 35000000 01000000  08000600 36000000  08000700 37000000
	08000800 38000000  08000900 39000000  08000a00 3a000000`,
	true: `
	000000c4 00210002 00000001 00001267  01010000 00b00001  00060001 00020000  00060002 00060000
	00140003 0a000001 00000000 00000000 00000000  00060004 00500000  00080006 77727200
	000c0007 00000003 ffffffff  00080008 00000168  00080009 fffff000  005c000a  00080001 00000021
	00080002 00000022  00080003 00000023  000c0004 00000001 00000024  000c0005 00000001 00000025
	00080006 00000026  00080007 00000027  00080008 00000028  00080009 00000029  0008000a 0000002a

	000000b0 00210002 00000001 00001267  01010000 009c0001  00060001 000a0000  00080005 01020304
	00070006 72720000  0008000b 73697000  000c0007 00000002 ffffffff  00080008 00000000
	00080009 00000040  005c000a  00080001 00000031  00080002 00000032  00080003 00000033
	000c0004 00000001 00000034  000c0005 00000001 00000035  00080006 00000036  00080007 00000037
	00080008 00000038  00080009 00000039  0008000a 0000003a`,
}

func TestGoldenByHandDestination(t *testing.T) {
	v6 := net.ParseIP("2001:db8::1")
	want := Destination{Address: net.IP{10, 1, 2, 3}, Port: 8080, Weight: 65537, ConnectionFlags: ConnectionFlagDirectRoute,
		AddressFamily: unix.AF_INET, UpperThreshold: 100, LowerThreshold: 50, ActiveConnections: 5, InactiveConnections: 6,
		PersistentConnections: 7,
		Stats: DstStats{Connections: 0x11, PacketsIn: 0x12, PacketsOut: 0x13, BytesIn: 1<<32 + 0x14, BytesOut: 1<<32 + 0x15,
			CPS: 0x16, PPSIn: 0x17, PPSOut: 0x18, BPSIn: 0x19, BPSOut: 0x1a},
		Stats64: Stats64{Connections: 0x11, PacketsIn: 0x12, PacketsOut: 0x13, BytesIn: 1<<32 + 0x14, BytesOut: 1<<32 + 0x15,
			CPS: 0x16, PPSIn: 0x17, PPSOut: 0x18, BPSIn: 0x19, BPSOut: 0x1a}}
	want6 := want
	want6.Address, want6.AddressFamily = v6, unix.AF_INET6
	for address, want := range map[string]*Destination{
		"0a010203000000000000000000000000": &want,
		hex.EncodeToString(v6):             &want6,
		"00000000000000000000000000000000": nil, // of neither family
	} {
		part := fromHex(t, oldDestination[isBigEndian])
		copy(part[28:44], fromHex(t, address))
		i, _ := newFake(t, func(r []byte) []fakeReply { return []fakeReply{{data: part}, {data: doneReply(r, 0)}} })
		got, err := i.GetDestinations(&someService)
		if want == nil {
			if got != nil || err == nil || !strings.HasPrefix(err.Error(), "ipvs: malformed reply: ") {
				t.Errorf("address %s: %s, error %v", address, show(got), err)
			}
		} else if err != nil || !reflect.DeepEqual(got, []*Destination{want}) {
			t.Errorf("address %s: error %v, got\n%s\nwant\n%+v", address, err, show(got), *want)
		}
	}
}

func TestGoldenByHandServices(t *testing.T) {
	i, _ := newFake(t, func(r []byte) []fakeReply {
		return []fakeReply{{data: fromHex(t, oldServices[isBigEndian])}, {data: doneReply(r, 0)}}
	})
	step := goldenStep{want: []*Service{
		{Address: net.IP{10, 0, 0, 1}, Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: "wrr",
			Flags: ServiceFlagHashed | ServiceFlagPersistent, Timeout: 360, Netmask: ipv4Mask(20), AddressFamily: unix.AF_INET,
			Stats: SvcStats{Connections: 0x21, PacketsIn: 0x22, PacketsOut: 0x23, BytesIn: 1<<32 + 0x24, BytesOut: 1<<32 + 0x25,
				CPS: 0x26, PPSIn: 0x27, PPSOut: 0x28, BPSIn: 0x29, BPSOut: 0x2a},
			Stats64: Stats64{Connections: 0x21, PacketsIn: 0x22, PacketsOut: 0x23, BytesIn: 1<<32 + 0x24, BytesOut: 1<<32 + 0x25,
				CPS: 0x26, PPSIn: 0x27, PPSOut: 0x28, BPSIn: 0x29, BPSOut: 0x2a}},
		{FWMark: 0x01020304, SchedName: "rr", PEName: "sip", Flags: ServiceFlagHashed, Netmask: 64, AddressFamily: unix.AF_INET6,
			Stats: SvcStats{Connections: 0x31, PacketsIn: 0x32, PacketsOut: 0x33, BytesIn: 1<<32 + 0x34, BytesOut: 1<<32 + 0x35,
				CPS: 0x36, PPSIn: 0x37, PPSOut: 0x38, BPSIn: 0x39, BPSOut: 0x3a},
			Stats64: Stats64{Connections: 0x31, PacketsIn: 0x32, PacketsOut: 0x33, BytesIn: 1<<32 + 0x34, BytesOut: 1<<32 + 0x35,
				CPS: 0x36, PPSIn: 0x37, PPSOut: 0x38, BPSIn: 0x39, BPSOut: 0x3a}},
	}}
	got, err := i.GetServices()
	step.check(t, got, err)
}

// The handwritten messages in two byte orders check swapMessages, too.
func TestGoldenByteOrders(t *testing.T) {
	for _, text := range []map[bool]string{oldDestination, oldServices} {
		little, big := fromHex(t, text[false]), fromHex(t, text[true])
		b := bytes.Clone(little)
		if err := swapMessages(b, binary.LittleEndian); err != nil || !bytes.Equal(b, big) {
			t.Errorf("error %v, got\n%swant\n%s", err, hex.Dump(b), hex.Dump(big))
		}
		if err := swapMessages(b, binary.BigEndian); err != nil || !bytes.Equal(b, little) {
			t.Errorf("error %v, got\n%swant\n%s", err, hex.Dump(b), hex.Dump(little))
		}
	}
}
