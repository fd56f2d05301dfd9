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

// Connection is an entry of the connection table: a connection, or what
// persistence remembers of a client, which has the client's port 0.
type Connection struct {
	// Protocol is the IP protocol, such as unix.IPPROTO_TCP. What the persistence of
	// a firewall-mark service remembers has 0 (unix.IPPROTO_IP).
	Protocol uint16

	// Client is where the connection comes from. Persistence with a netmask
	// remembers the client's network.
	Client netip.AddrPort

	// Virtual is the service's address and port. What the persistence of a
	// firewall-mark service remembers has the mark as the first four bytes of the
	// address, and port 0.
	Virtual netip.AddrPort

	// Destination is the real server.
	Destination netip.AddrPort

	// State is the state in the kernel's words, such as "ESTABLISHED"; they depend on
	// the protocol.
	State string

	// Expires is how long the entry stays if no packet comes, in whole seconds.
	Expires time.Duration

	// PEName is the persistence engine that made the entry, such as "sip", and PEData
	// what it knows the client by, such as the Call-ID. Both are empty without one.
	PEName, PEData string
}

// connectionBuffer is so large that any line fits many times.
const connectionBuffer = 64 << 10

// Connections reads the connection table of the handle's network namespace,
// whichever thread calls (/proc/net/ip_vs_conn, what ipvsadm -Lnc prints). It
// needs no privilege from a thread in that namespace, else CAP_SYS_ADMIN.
//
// Entries come as they are read, in no order, and the memory needed does not
// depend on how many there are. A loop may end early; each loop reads anew. An
// error comes with a nil connection, and is the last.
//
// It is not a snapshot: an entry that comes or goes meanwhile may be missed, and
// then others can be missed or come twice, since the kernel goes on at a position.
// Kernels before 7 look for that position from the start every few dozen entries,
// so that their time grows with the square of the table's length: on an emulated
// machine that reads 10,000 entries in 3 s, 200,000 take minutes (7.2: 28 s).
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
// entry. An error is the last that it yields.
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
		c.PEData = string(bytes.TrimPrefix(f.rest, []byte(" "))) // a client's: it may have any bytes
	}
	return c, nil
}

// interner keeps one string for each of the few words that come again and again.
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

// fields takes a line apart; err is the first error.
type fields struct {
	rest []byte
	err  error
}

// next returns the next field, nothing at the end of the line.
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
