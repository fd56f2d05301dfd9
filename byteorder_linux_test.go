package ipvs

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestIsBigEndian(t *testing.T) {
	if got := native.Uint16([]byte{0, 1}) == 1; got != isBigEndian {
		t.Errorf("isBigEndian is %v, native says %v", isBigEndian, got)
	}
}

// swapper turns the numbers in b, which are in the byte order from, around.
type swapper func(b []byte, from binary.ByteOrder) error

// asIs is for strings, addresses, ports and single bytes.
func asIs([]byte, binary.ByteOrder) error { return nil }

// number is for one or more numbers of so many bytes.
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
		2: number32, // offset of what is wrong
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

// swapMessages turns the messages of a datagram around.
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

// swapHeader turns a struct nlmsghdr around.
func swapHeader(b []byte) {
	for _, field := range [][]byte{b[:4], b[4:6], b[6:8], b[8:12], b[12:16]} {
		slices.Reverse(field)
	}
}

// The two byte orders of the messages made by hand check swapMessages, too.
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
