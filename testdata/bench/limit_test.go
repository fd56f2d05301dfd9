//go:build linux

package bench

import (
	"encoding/binary"
	"flag"
	"fmt"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The limit: the messages are made beforehand, and of the replies only their
// errors are looked at. What is left is the kernel's own work, and the system
// calls to reach it.

// The kernel's numbers, from linux/ip_vs.h.
const (
	cmdNewService, cmdSetService, cmdDelService, cmdGetService = 1, 2, 3, 4
	cmdNewDest, cmdSetDest, cmdDelDest, cmdGetDest             = 5, 6, 7, 8

	attrService, attrDest = 1, 2

	svcFamily, svcProtocol, svcAddress, svcPort            = 1, 2, 3, 4
	svcScheduler, svcFlags, svcTimeout, svcNetmask         = 6, 7, 8, 9
	dstAddress, dstPort, dstForward, dstWeight, dstU, dstL = 1, 2, 3, 4, 5, 6
)

var commands = map[op]uint8{newService: cmdNewService, setService: cmdSetService, delService: cmdDelService,
	newDestination: cmdNewDest, setDestination: cmdSetDest, delDestination: cmdDelDest}

// atOnce is how many changes a batch sends at once; more cost as much each.
const atOnce = 128

var destinationsBuffer = flag.Int("buffer", 0, "size of the limit's buffer for lists of destinations; 0: the best")

// bestBuffer returns the size of the receive buffer that makes the list of so
// many destinations cheapest, as measured on 6.12. 3,776 bytes is the least
// that a part of a dump can have there: with larger ones the kernel allocates
// more than a page for each part. From 32 KiB on they make no difference.
func bestBuffer(destinations int) int {
	switch {
	case *destinationsBuffer > 0:
		return *destinationsBuffer
	case destinations <= 50:
		return 3776
	default:
		return 64 << 10
	}
}

type limit struct {
	family      uint16
	fd, bulk    int // the kernel fits parts of a dump to the largest buffer a socket ever used
	in, bulkIn  []byte
	changes     [][]byte // one request each, to be acknowledged
	sends       [][]byte // many requests each, the last to be acknowledged
	dump        []byte   // lists the services
	dumps       [][]byte // list the destinations of one
	reconciling int      // number of changes

	opt       int      // a socket for getsockopt
	optCounts []byte   // room for all services, with their numbers of destinations
	optDests  [][]byte // request for the destinations of one, with room for them
}

func openLimit(ns namespace) (client, error) {
	c := new(limit)
	return c, ns.do(func() error {
		family, err := netlink.GenlFamilyGet("IPVS")
		if err != nil {
			return err
		}
		c.family = family.ID
		c.bulkIn = make([]byte, 64<<10)
		if c.fd, err = netlinkSocket(); err == nil {
			c.bulk, err = netlinkSocket()
		}
		if err == nil {
			c.opt, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		}
		return err
	})
}

func netlinkSocket() (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_GENERIC)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	}
	if err == nil {
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10})
	}
	return fd, err
}

func (c *limit) close() {
	unix.Close(c.fd)
	unix.Close(c.bulk)
	unix.Close(c.opt)
}

// message returns a request; a full one has the attributes that creates and updates
// need.
func (c *limit) message(cmd uint8, flags uint16, s *service, d *destination, full bool) []byte {
	b := native.AppendUint32(nil, 0)
	b = native.AppendUint16(b, c.family)
	b = native.AppendUint16(b, flags|unix.NLM_F_REQUEST)
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0, cmd, 1, 0, 0)
	if s != nil {
		b = nest(b, attrService, func(b []byte) []byte {
			b = attr(b, svcFamily, native.AppendUint16(nil, unix.AF_INET))
			b = attr(b, svcProtocol, native.AppendUint16(nil, unix.IPPROTO_TCP))
			b = attr(b, svcAddress, s.address[:])
			b = attr(b, svcPort, binary.BigEndian.AppendUint16(nil, servicePort))
			if full && d == nil {
				b = attr(b, svcScheduler, []byte(scheduler+"\x00"))
				b = attr(b, svcFlags, []byte{0, 0, 0, 0, 255, 255, 255, 255})
				b = attr(b, svcTimeout, native.AppendUint32(nil, s.timeout))
				b = attr(b, svcNetmask, []byte{255, 255, 255, 255})
			}
			return b
		})
	}
	if d != nil {
		b = nest(b, attrDest, func(b []byte) []byte {
			b = attr(b, dstAddress, d.address[:])
			b = attr(b, dstPort, binary.BigEndian.AppendUint16(nil, destinationPort))
			if full {
				b = attr(b, dstForward, native.AppendUint32(nil, 0))
				b = attr(b, dstWeight, native.AppendUint32(nil, d.weight))
				b = attr(b, dstU, native.AppendUint32(nil, 0))
				b = attr(b, dstL, native.AppendUint32(nil, 0))
			}
			return b
		})
	}
	native.PutUint32(b, uint32(len(b)))
	return b
}

func attr(b []byte, typ uint16, value []byte) []byte {
	b = native.AppendUint16(b, uint16(4+len(value)))
	b = append(native.AppendUint16(b, typ), value...)
	return append(b, make([]byte, -len(value)&3)...)
}

func nest(b []byte, typ uint16, fill func([]byte) []byte) []byte {
	return attr(b, typ|unix.NLA_F_NESTED, fill(nil))
}

func (c *limit) prepare(table []service, changes []change) {
	c.changes, c.sends, c.dumps = nil, nil, nil
	c.dump = c.message(cmdGetService, unix.NLM_F_DUMP, nil, nil, false)
	c.in = make([]byte, 4<<10)
	for n := range table {
		c.in = make([]byte, bestBuffer(len(table[n].destinations)))
		c.dumps = append(c.dumps, c.message(cmdGetDest, unix.NLM_F_DUMP, &table[n], nil, false))
	}
	var send []byte
	for n, change := range changes {
		full := change.op != delService && change.op != delDestination
		message := func(flags uint16) []byte {
			return c.message(commands[change.op], flags, change.service, change.destination, full)
		}
		c.changes = append(c.changes, message(unix.NLM_F_ACK))
		if (n+1)%atOnce != 0 && n+1 != len(changes) {
			send = append(send, message(0)...)
			continue
		}
		c.sends = append(c.sends, append(send, message(unix.NLM_F_ACK)...))
		send = nil
	}
}

func (c *limit) apply(n int) error { return exchange(c.fd, c.in, c.changes[n]) }

func (c *limit) collect() {}

func (c *limit) applyAll() error {
	for _, send := range c.sends {
		if err := exchange(c.fd, c.in, send); err != nil {
			return err
		}
	}
	return nil
}

func (c *limit) services() (int, error) { return -1, exchange(c.bulk, c.bulkIn, c.dump) }

func (c *limit) destinations(n int) (int, error) { return -1, exchange(c.fd, c.in, c.dumps[n]) }

func (c *limit) table() (services, destinations int, err error) {
	if _, err = c.services(); err != nil {
		return 0, 0, err
	}
	for n := range c.dumps {
		if _, err = c.destinations(n); err != nil {
			return 0, 0, err
		}
	}
	return -1, -1, nil
}

func (c *limit) prepareReconcile(from, to []service) {
	changes := updates(from, to)
	c.reconciling = len(changes)
	c.prepare(to, changes)
	c.optCounts = make([]byte, 8+104*len(to))
	native.PutUint32(c.optCounts, uint32(len(to)))
	c.optDests = nil
	for n := range to {
		s := &to[n]
		b := make([]byte, 24+96*len(s.destinations))
		native.PutUint16(b, unix.IPPROTO_TCP)
		copy(b[4:], s.address[:])
		binary.BigEndian.PutUint16(b[8:], servicePort)
		native.PutUint32(b[16:], uint32(len(s.destinations)))
		c.optDests = append(c.optDests, b)
	}
}

// reconcile is the reading of the table, and the changes. Services have to be listed
// over netlink, since nothing else reports those of IPv6 and persistence engines.
func (c *limit) reconcile() (int, error) {
	if _, err := c.services(); err != nil {
		return 0, err
	}
	const getServices, getDests = 64 + 1024 + 64 + 2, 64 + 1024 + 64 + 4
	if err := getsockopt(c.opt, getServices, c.optCounts); err != nil {
		return 0, err
	}
	for _, b := range c.optDests {
		if err := getsockopt(c.opt, getDests, b); err != nil {
			return 0, err
		}
	}
	return c.reconciling, c.applyAll()
}

func getsockopt(fd, option int, b []byte) error {
	size := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.IPPROTO_IP, uintptr(option),
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// exchange sends requests, and receives until the last is acknowledged or its
// dump has ended.
func exchange(fd int, in, out []byte) error {
	if _, err := transfer(unix.SYS_SENDTO, fd, out); err != nil {
		return err
	}
	for {
		n, err := transfer(unix.SYS_RECVFROM, fd, in)
		if err != nil {
			return err
		}
		if n < unix.SizeofNlMsghdr+4 {
			return fmt.Errorf("a reply of %d bytes", n)
		}
		if typ := native.Uint16(in[4:]); typ == unix.NLMSG_ERROR || typ == unix.NLMSG_DONE {
			if errno := int32(native.Uint32(in[unix.SizeofNlMsghdr:])); errno < 0 {
				return unix.Errno(-errno)
			}
			return nil
		}
	}
}

func transfer(call uintptr, fd int, b []byte) (int, error) {
	n, _, errno := unix.Syscall6(call, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), 0, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
