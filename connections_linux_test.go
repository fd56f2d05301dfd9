package ipvs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"
)

func TestParseConnections(t *testing.T) {
	at := netip.MustParseAddrPort
	const v4 = " C0000202 C3A4 CB007101 0050 C6336402 1F90 "
	client, virtual, real := at("192.0.2.2:50084"), at("203.0.113.1:80"), at("198.51.100.2:8080")
	for _, test := range []struct {
		line string
		want Connection
	}{
		{"TCP" + v4 + "ESTABLISHED     899", Connection{6, client, virtual, real, "ESTABLISHED", 899 * time.Second, "", ""}},
		{"IP " + v4 + "NONE              0", Connection{0, client, virtual, real, "NONE", 0, "", ""}},
		{"ICMP" + v4 + "NONE 1", Connection{unix.IPPROTO_ICMP, client, virtual, real, "NONE", time.Second, "", ""}},
		{"ICMPv6" + v4 + "NONE 1", Connection{unix.IPPROTO_ICMPV6, client, virtual, real, "NONE", time.Second, "", ""}},
		{"ESP" + v4 + "NONE 1", Connection{unix.IPPROTO_ESP, client, virtual, real, "NONE", time.Second, "", ""}},
		{"AH" + v4 + "NONE 1", Connection{unix.IPPROTO_AH, client, virtual, real, "NONE", time.Second, "", ""}},
		{"IP_47" + v4 + "NONE 1", Connection{47, client, virtual, real, "NONE", time.Second, "", ""}},
		{"SCTP 2001:0db8:000c:0000:0000:0000:0000:0002 0FA0 0000:0000:0000:0000:0000:ffff:c000:0202 0F1C 0000:0000:0000:0000:0000:0000:0000:0001 FFFF SHUTDOWN-ACK-SENT 4294967",
			Connection{unix.IPPROTO_SCTP, at("[2001:db8:c::2]:4000"), at("[::ffff:192.0.2.2]:3868"), at("[::1]:65535"), "SHUTDOWN-ACK-SENT", 4294967 * time.Second, "", ""}},
		{"UDP C0000202 0000 CB007101 13C4 2001:0db8:000c:0000:0000:0000:0000:0002 13C4 NONE            980 sip  a b  \xff ",
			Connection{unix.IPPROTO_UDP, at("192.0.2.2:0"), at("203.0.113.1:5060"), at("[2001:db8:c::2]:5060"), "NONE", 980 * time.Second, "sip", " a b  \xff "}},
		{"UDP" + v4 + "UDP 1 sip", Connection{unix.IPPROTO_UDP, client, virtual, real, "UDP", time.Second, "sip", ""}},
	} {
		// Reads of one byte: lines do not end where reads do.
		got, err := allConnections(iotest.OneByteReader(strings.NewReader(connectionHead + test.line + "\n")))
		if err != nil || len(got) != 1 || got[0] != test.want {
			t.Errorf("%s\ngot  %+v, %v\nwant %+v", test.line, got, err, test.want)
		}
	}
	if got, err := allConnections(strings.NewReader(connectionHead)); len(got) != 0 || err != nil {
		t.Errorf("of an empty table: %v, %v", got, err)
	}
}

const connectionHead = "Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData\n"

func allConnections(r io.Reader) (all []Connection, err error) {
	for c, err := range parseConnections(r) {
		if err != nil {
			return all, err
		}
		all = append(all, *c)
	}
	return all, nil
}

// A malformed line ends the iteration with an error that names it.
func TestParseConnectionsMalformed(t *testing.T) {
	const good = "TCP C0000202 C3A4 CB007101 0050 C6336402 1F90 ESTABLISHED     899\n"
	for _, bad := range []string{
		"\n", "TCP\n",
		"TC C0000202 C3A4 CB007101 0050 C6336402 1F90 ESTABLISHED 899\n",
		"IP_ C0000202 C3A4 CB007101 0050 C6336402 1F90 ESTABLISHED 899\n",
		"IP_256 C0000202 C3A4 CB007101 0050 C6336402 1F90 ESTABLISHED 899\n",
		"TCP C000020 C3A4 CB007101 0050 C6336402 1F90 ESTABLISHED 899\n",
		"TCP C000020X C3A4 CB007101 0050 C6336402 1F90 ESTABLISHED 899\n",
		"TCP C0000202 10000 CB007101 0050 C6336402 1F90 ESTABLISHED 899\n",
		"TCP C0000202 C3A4 CB007101 -050 C6336402 1F90 ESTABLISHED 899\n",
		"TCP C0000202 C3A4 CB007101 0050 2001:0db8:000c:0000:0000:0000:0000.0002 1F90 ESTABLISHED 899\n",
		"TCP C0000202 C3A4 CB007101 0050 2001:0db8:000c:0000:0000:0000:0000:000g 1F90 ESTABLISHED 899\n",
		"TCP C0000202 C3A4 CB007101 0050 C6336402 1F90 899\n",
		"TCP C0000202 C3A4 CB007101 0050 C6336402 1F90 ESTABLISHED x\n",
		"TCP C0000202 C3A4 CB007101 0050 C6336402 1F90 ESTABLISHED 9223372037\n",
		strings.TrimSuffix(good, "\n"), // cut
		strings.Repeat("x", 2*connectionBuffer),
	} {
		got, err := allConnections(strings.NewReader(connectionHead + good + bad + good))
		if bad[len(bad)-1] != '\n' {
			got, err = allConnections(strings.NewReader(connectionHead + good + bad))
		}
		if len(got) != 1 || err == nil || !strings.Contains(err.Error(), "line 3 of ip_vs_conn") {
			t.Errorf("%.100q: %d connections, %v", bad, len(got), err)
		}
	}
	broken := errors.New("broken")
	got, err := allConnections(io.MultiReader(strings.NewReader(connectionHead+good), iotest.ErrReader(broken)))
	if len(got) != 1 || !errors.Is(err, broken) {
		t.Errorf("%d connections, %v, want one and the error of reading", len(got), err)
	}
}

// A truncated last line is an error, and an error names the first of several mistakes
// in a line.
func TestParseConnectionsErrors(t *testing.T) {
	const line = "TCP C0000202 C3A4 CB007101 0050 C6336402 1F90 ESTABLISHED     899"
	if _, err := allConnections(strings.NewReader(connectionHead + line)); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut: %v", err)
	}
	bad := strings.Replace(strings.Replace(line, "C3A4", "xxxx", 1), "899", "yyy", 1) + "\n"
	if _, err := allConnections(strings.NewReader(connectionHead + bad)); err == nil ||
		!strings.Contains(err.Error(), `"xxxx" is not a port`) || strings.Contains(err.Error(), `"yyy" is not`) {
		t.Errorf("two errors: %v", err)
	}
}

// endlessConnections is a table of n connections that is generated while it is read.
type endlessConnections struct {
	n, at int
	rest  []byte
}

func (e *endlessConnections) Read(b []byte) (int, error) {
	if len(e.rest) == 0 {
		if e.at == e.n {
			return 0, io.EOF
		}
		e.rest = fmt.Appendf(e.rest[:0], "TCP %08X %04X CB007101 0050 C6336402 1F90 ESTABLISHED     899\n", e.at, e.at&0xffff)
		e.at++
	}
	n := copy(b, e.rest)
	e.rest = e.rest[n:]
	return n, nil
}

// The memory needed does not depend on the number of entries.
func TestParseConnectionsMemory(t *testing.T) {
	const n = 200_000
	var before, during runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	count := 0
	for c, err := range parseConnections(&endlessConnections{n: n}) {
		must(t, err)
		if c.Client.Addr() != netip.AddrFrom4([4]byte{byte(count >> 24), byte(count >> 16), byte(count >> 8), byte(count)}) {
			t.Fatalf("entry %d is %+v", count, c)
		}
		count++
		if count == n {
			runtime.GC()
			runtime.ReadMemStats(&during)
		}
	}
	if count != n {
		t.Errorf("%d entries, want %d", count, n)
	}
	if grown := int64(during.HeapAlloc) - int64(before.HeapAlloc); grown > 1<<20 {
		t.Errorf("%d bytes more are in use at entry %d", grown, n)
	}
}

// A loop that ends early reads no further than its buffer.
func TestParseConnectionsEarly(t *testing.T) {
	e := &endlessConnections{n: 1_000_000}
	for range parseConnections(e) {
		break
	}
	if e.at > connectionBuffer/50 {
		t.Errorf("%d lines were read for one", e.at)
	}
}

// An error of opening the file is yielded once, without a connection; for a closed
// handle it is ErrClosed.
func TestConnectionsErrors(t *testing.T) {
	closed, _ := newFake(t, nil)
	closed.Close()
	for name, i := range map[string]*Handle{"nil": nil, "zero": {}, "closed": closed} {
		turns := 0
		for c, err := range i.Connections() {
			turns++
			if c != nil || !errors.Is(err, ErrClosed) || !errors.Is(err, net.ErrClosed) {
				t.Errorf("%s: %v, %v, want ErrClosed", name, c, err)
			}
		}
		if turns != 1 {
			t.Errorf("%s: %d turns", name, turns)
		}
	}
}

func FuzzParseConnections(f *testing.F) {
	f.Add([]byte(connectionHead + "TCP C0000202 C3A4 CB007101 0050 C6336402 1F90 ESTABLISHED     899\n"))
	f.Add([]byte("UDP C0000202 0000 CB007101 13C4 2001:0db8:000c:0000:0000:0000:0000:0002 13C4 NONE            980 sip a@b\n"))
	f.Fuzz(func(t *testing.T, table []byte) {
		all, err := allConnections(bytes.NewReader(table))
		if lines := bytes.Count(table, []byte("\n")); len(all) > lines {
			t.Errorf("%d connections of %d lines, %v", len(all), lines, err)
		}
		for _, c := range all {
			if !c.Client.IsValid() || !c.Virtual.IsValid() || !c.Destination.IsValid() || c.State == "" || c.Expires < 0 {
				t.Errorf("%+v of %q", c, table)
			}
		}
	})
}
