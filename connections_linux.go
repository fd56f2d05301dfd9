package ipvs

// This file reads the connection table.

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"net/netip"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Connection is an entry of the connection table: a connection, or a persistence
// template, which keeps a client on its destination and has client port 0.
type Connection struct {
	// Protocol is the IP protocol, such as unix.IPPROTO_TCP. In a template of a
	// firewall-mark service it is 0 (unix.IPPROTO_IP).
	Protocol uint16

	// Client is the client's address and port. In a template the address is masked
	// with the service's netmask.
	Client netip.AddrPort

	// Virtual is the service's address and port. In a template of a firewall-mark
	// service the first four bytes of the address are the mark, and the port is 0.
	Virtual netip.AddrPort

	// Destination is the real server.
	Destination netip.AddrPort

	// State is the kernel's name for the state, such as "ESTABLISHED"; the names depend
	// on the protocol.
	State string

	// Expires is the time until the entry expires if no packet arrives, in whole seconds.
	Expires time.Duration

	// PEName is the persistence engine of a template, such as "sip", and PEData the data
	// by which it recognizes the client, such as the Call-ID. Both are empty without one.
	PEName, PEData string
}

// connectionBuffer is the size of the read buffer. Lines are far shorter.
const connectionBuffer = 64 << 10

// Connections iterates over the connection table of the handle's network namespace,
// whichever thread calls. It reads /proc/net/ip_vs_conn, as ipvsadm -Lnc does. It needs
// no privilege on a thread in that namespace, and CAP_SYS_ADMIN elsewhere.
//
// Entries are yielded as they are read, in no particular order, so memory use does
// not depend on the length of the table. The loop may end early, and its body may
// call the handle. Each loop reads the table again. An error is yielded with a nil
// connection and ends the iteration.
//
// It is not a snapshot: while entries come and go, others can be missed or yielded
// twice, since the kernel resumes at a position; and kernels from 7 on can leave out
// most entries while they enlarge their table. Kernels before 7 count up to that position
// from the start for every 4 KiB read, so the time grows with the square of the table's
// length.
func (i *Handle) Connections() iter.Seq2[*Connection, error] {
	return func(yield func(*Connection, error) bool) {
		if i == nil || i.socket == nil || i.closed.Load() {
			yield(nil, ErrClosed)
			return
		}
		file, err := openProc(i.socket, "ip_vs_conn")
		if err != nil {
			yield(nil, fmt.Errorf("ipvs: reading the connections: %w", err))
			return
		}
		defer file.Close()
		for c, err := range parseConnections(file) {
			switch {
			case i.closed.Load():
				c, err = nil, ErrClosed
			case err != nil:
				err = fmt.Errorf("ipvs: reading the connections: %w", err)
			}
			if !yield(c, err) || err != nil {
				return
			}
		}
	}
}

// parseConnections parses ip_vs_conn: a line of headings, and a line for each
// entry. It ends after the first error.
func parseConnections(r io.Reader) iter.Seq2[*Connection, error] {
	return func(yield func(*Connection, error) bool) {
		lines := bufio.NewReaderSize(r, connectionBuffer)
		var words interner
		for n := 0; ; n++ {
			line, err := lines.ReadSlice('\n')
			switch {
			case err == io.EOF && len(line) == 0:
				return
			case err == io.EOF:
				err = io.ErrUnexpectedEOF
			case n == 0 && err == nil && bytes.HasPrefix(line, []byte("Pro ")):
				continue
			}
			var c *Connection
			if err == nil {
				c, err = parseConnection(line[:len(line)-1], &words)
			}
			if err != nil {
				yield(nil, fmt.Errorf("%w (line %d of ip_vs_conn)", err, n+1))
				return
			}
			if !yield(c, nil) {
				return
			}
		}
	}
}

// parseConnection parses a line such as
//
//	TCP C0000202 C3A4 CB007101 0050 C6336402 1F90 ESTABLISHED     899 sip callid
func parseConnection(line []byte, words *interner) (*Connection, error) {
	f := fields{rest: line}
	c := &Connection{
		Protocol:    f.protocol(),
		Client:      f.addrPort(),
		Virtual:     f.addrPort(),
		Destination: f.addrPort(),
		State:       words.intern(f.next()),
		Expires:     f.seconds(),
	}
	if f.err == nil && c.State == "" {
		f.err = errors.New("there is no state")
	}
	if f.err != nil {
		return nil, fmt.Errorf("malformed connection %q: %w", line, f.err)
	}
	if name := f.next(); len(name) > 0 {
		c.PEName = words.intern(name)
		c.PEData = string(bytes.TrimPrefix(f.rest, []byte(" "))) // sent by a client: any bytes
	}
	return c, nil
}

// interner returns the same string for equal words, of which there are few.
type interner map[string]string

func (m *interner) intern(word []byte) string {
	if s, ok := (*m)[string(word)]; ok {
		return s
	}
	const few = 64
	if *m == nil || len(*m) == few {
		*m = interner{}
	}
	s := string(word)
	(*m)[s] = s
	return s
}

// fields parses the fields of a line; err is the first error.
type fields struct {
	rest []byte
	err  error
}

// next returns the next field, or nothing at the end of the line.
func (f *fields) next() []byte {
	line := bytes.TrimLeft(f.rest, " ")
	n := bytes.IndexByte(line, ' ')
	if n < 0 {
		n = len(line)
	}
	f.rest = line[n:]
	return line[:n]
}

func (f *fields) fail(what string, field []byte) {
	if f.err == nil {
		f.err = fmt.Errorf("%q is not %s", field, what)
	}
}

// protocol parses the name of a protocol as ip_vs_proto_name in the kernel
// writes it.
func (f *fields) protocol() uint16 {
	name := f.next()
	switch string(name) {
	case "TCP":
		return unix.IPPROTO_TCP
	case "UDP":
		return unix.IPPROTO_UDP
	case "SCTP":
		return unix.IPPROTO_SCTP
	case "IP":
		return unix.IPPROTO_IP
	case "ICMP":
		return unix.IPPROTO_ICMP
	case "ICMPv6":
		return unix.IPPROTO_ICMPV6
	case "ESP":
		return unix.IPPROTO_ESP
	case "AH":
		return unix.IPPROTO_AH
	}
	number, found := bytes.CutPrefix(name, []byte("IP_"))
	protocol, err := strconv.ParseUint(string(number), 10, 8)
	if !found || err != nil {
		f.fail("a protocol", name)
	}
	return uint16(protocol)
}

// addrPort parses an address and a port, all in hexadecimal digits.
func (f *fields) addrPort() netip.AddrPort {
	address, port := f.next(), f.next()
	var ip netip.Addr
	switch {
	case len(address) == 8:
		var b [4]byte
		if _, err := hex.Decode(b[:], address); err != nil {
			f.fail("an address", address)
		}
		ip = netip.AddrFrom4(b)
	case len(address) == 39: // always in full
		var b [16]byte
		for n := range 8 {
			group := address[5*n:]
			if _, err := hex.Decode(b[2*n:2*n+2], group[:4]); err != nil || n < 7 && group[4] != ':' {
				f.fail("an address", address)
			}
		}
		ip = netip.AddrFrom16(b)
	default:
		f.fail("an address", address)
	}
	number, err := strconv.ParseUint(string(port), 16, 16)
	if err != nil {
		f.fail("a port", port)
	}
	return netip.AddrPortFrom(ip, uint16(number))
}

func (f *fields) seconds() time.Duration {
	text := f.next()
	n, err := strconv.ParseUint(string(text), 10, 63)
	if err != nil || n > math.MaxInt64/uint64(time.Second) {
		f.fail("a number of seconds", text)
	}
	return time.Duration(n) * time.Second
}
