//go:build linux

package ipvs

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// be16 and ne16, ne32 spell out expected bytes in network and native order.
func be16(v uint16) []byte { return binary.BigEndian.AppendUint16(nil, v) }
func ne16(v uint16) []byte { return binary.NativeEndian.AppendUint16(nil, v) }
func ne32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// attr spells out an attribute: length, type, value, padding.
func attr(typ uint16, value ...[]byte) []byte {
	v := bytes.Join(value, nil)
	b := bytes.Join([][]byte{ne16(uint16(4 + len(v))), ne16(typ), v}, nil)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

const nestedFlag = 0x8000

func TestFillServiceBytes(t *testing.T) {
	v6 := net.ParseIP("2001:db8::1")
	tests := []struct {
		name string
		s    Service
		full bool
		want [][]byte
	}{
		{"identity", Service{Address: net.ParseIP("10.0.0.1"), Protocol: 6, Port: 80, SchedName: "unused"}, false, [][]byte{
			attr(1, ne16(2)), attr(2, ne16(6)), attr(3, []byte{10, 0, 0, 1}), attr(4, be16(80)),
		}},
		{"firewall mark", Service{FWMark: 0x01020304, AddressFamily: 10, Protocol: 6, Port: 80}, false, [][]byte{
			attr(1, ne16(10)), attr(5, ne32(0x01020304)),
		}},
		{"full IPv4", Service{Address: net.IP{10, 0, 0, 1}, Protocol: 17, Port: 53, SchedName: "wrr", Flags: 0x7, Timeout: 300,
			Netmask: 0xFFFFFF, PEName: "sip", AddressFamily: 2}, true, [][]byte{
			attr(1, ne16(2)), attr(2, ne16(17)), attr(3, []byte{10, 0, 0, 1}), attr(4, be16(53)),
			attr(6, []byte("wrr\x00")), attr(11, []byte("sip\x00")), attr(7, ne32(0x5), ne32(0xFFFFFFFF)),
			attr(8, ne32(300)), attr(9, ne32(0xFFFFFF)),
		}},
		{"full IPv6, netmask left out", Service{Address: v6, Protocol: 132, Port: 0xABCD, SchedName: "rr"}, true, [][]byte{
			attr(1, ne16(10)), attr(2, ne16(132)), attr(3, v6), attr(4, be16(0xABCD)),
			attr(6, []byte("rr\x00")), attr(7, ne32(0), ne32(0xFFFFFFFF)), attr(8, ne32(0)), attr(9, ne32(128)),
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := fillService(nil, &test.s, test.full)
			if err != nil {
				t.Fatal(err)
			}
			if want := attr(1|nestedFlag, test.want...); !bytes.Equal(got, want) {
				t.Errorf("got\n%s\nwant\n%s", hex.Dump(got), hex.Dump(want))
			}
		})
	}
}

func TestFillDestinationBytes(t *testing.T) {
	tests := []struct {
		name string
		d    Destination
		full bool
		want [][]byte
	}{
		{"identity", Destination{Address: net.ParseIP("10.0.0.2"), Port: 8080, Weight: -1}, false, [][]byte{
			attr(1, []byte{10, 0, 0, 2}), attr(2, be16(8080)), attr(11, ne16(2)),
		}},
		{"full", Destination{Address: net.IP{10, 0, 0, 2}, Port: 8080, Weight: 65537, ConnectionFlags: 0xFFF2, UpperThreshold: 9, LowerThreshold: 8}, true, [][]byte{
			attr(1, []byte{10, 0, 0, 2}), attr(2, be16(8080)), attr(11, ne16(2)),
			attr(3, ne32(2)), attr(4, ne32(65537)), attr(5, ne32(9)), attr(6, ne32(8)),
		}},
		{"tunnel", Destination{Address: net.IP{10, 0, 0, 2}, ConnectionFlags: 2, TunnelType: 1, TunnelPort: 6080, TunnelFlags: 2}, true, [][]byte{
			attr(1, []byte{10, 0, 0, 2}), attr(2, be16(0)), attr(11, ne16(2)),
			attr(3, ne32(2)), attr(4, ne32(0)), attr(5, ne32(0)), attr(6, ne32(0)),
			attr(13, []byte{1}), attr(14, be16(6080)), attr(15, ne16(2)),
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := fillDestination(nil, &test.d, test.full)
			if err != nil {
				t.Fatal(err)
			}
			if want := attr(2|nestedFlag, test.want...); !bytes.Equal(got, want) {
				t.Errorf("got\n%s\nwant\n%s", hex.Dump(got), hex.Dump(want))
			}
		})
	}
}

// countModprobe replaces modprobe for the test, and counts its runs.
func countModprobe(t *testing.T) *int {
	runs := new(int)
	original := loadModule
	loadModule = func() error { *runs++; return errors.New("not here") }
	t.Cleanup(func() { loadModule = original })
	return runs
}

// Row of SPEC section 3: the original's New succeeds where there is no IPVS.
func TestRowNewWithoutIPVS(t *testing.T) {
	countModprobe(t)
	i, _ := newFake(t, func(r []byte) []fakeReply { return one(errorReply(r, syscall.ENOENT)) })
	if err := i.setup(i.socket); !errors.Is(err, ErrNotSupported) {
		t.Errorf("setup: %v, want ErrNotSupported", err)
	}
	for _, hint := range []string{"ip_vs", "CONFIG_IP_VS"} {
		if !strings.Contains(ErrNotSupported.Error(), hint) {
			t.Errorf("%q does not say %q", ErrNotSupported, hint)
		}
	}
}

// Row of SPEC section 3: the original always runs modprobe.
func TestRowModprobeOnlyIfNeeded(t *testing.T) {
	if !mayLoadModules() {
		t.Skip("SKIP: needs the right to load modules, without which modprobe is never run")
	}
	runs := countModprobe(t)
	i, k := newFake(t, func(r []byte) []fakeReply { return one(familyReply(r, 99)) })
	if err := i.setup(i.socket); err != nil || i.family != 99 || *runs != 0 {
		t.Errorf("%v, family %d, modprobe ran %d times, want 0", err, i.family, *runs)
	}
	k.respond = func(r []byte) []fakeReply {
		if *runs == 0 {
			return one(errorReply(r, syscall.ENOENT))
		}
		return one(familyReply(r, 100))
	}
	if err := i.setup(i.socket); err != nil || i.family != 100 || *runs != 1 {
		t.Errorf("%v, family %d, modprobe ran %d times, want 1", err, i.family, *runs)
	}
	*runs = 0
	k.respond = func(r []byte) []fakeReply { return one(errorReply(r, syscall.EPERM)) }
	if err := i.setup(i.socket); err != syscall.EPERM || *runs != 0 {
		t.Errorf("%v, modprobe ran %d times, want EPERM and 0", err, *runs)
	}
}

// Row of SPEC section 3: the original looks up the family id once a process.
func TestRowFamilyIDLookedUpAgain(t *testing.T) {
	const newFamily = fakeFamily + 1
	i, k := newFake(t, func(r []byte) []fakeReply {
		switch {
		case isFamilyRequest(r):
			return one(familyReply(r, newFamily))
		case native.Uint16(r[4:]) != newFamily:
			return one(errorReply(r, syscall.ENOENT)) // as genetlink answers for an unknown family
		}
		return acknowledge(r)
	})
	for call := range 2 {
		if err := i.Flush(); err != nil {
			t.Errorf("call %d: %v", call, err)
		}
	}
	if len(k.requests) != 4 { // stale, lookup, again; then just one
		t.Errorf("%d requests, want 4", len(k.requests))
	}
}

func TestRowPlainENOENTStays(t *testing.T) {
	i, k := newFake(t, func(r []byte) []fakeReply {
		if isFamilyRequest(r) {
			return one(familyReply(r, fakeFamily))
		}
		return one(errorReply(r, syscall.ENOENT))
	})
	if err := i.DelDestination(&someService, &someDestination); err != syscall.ENOENT {
		t.Errorf("got %v, want the bare ENOENT", err)
	}
	if len(k.requests) != 2 {
		t.Errorf("%d requests, want the call's and the lookup's", len(k.requests))
	}
}

var (
	someService     = Service{Address: net.IP{10, 0, 0, 1}, Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin}
	someDestination = Destination{Address: net.IP{10, 0, 0, 2}, Port: 8080, Weight: 1}
)

// Row of SPEC section 3: the original waits for ever when a reply is lost.
func TestRowLostReply(t *testing.T) {
	lost := true
	i, _ := newFake(t, func(r []byte) []fakeReply {
		if lost {
			return nil
		}
		return acknowledge(r)
	})
	start := time.Now()
	if err := i.Flush(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v, want os.ErrDeadlineExceeded", err)
	}
	if d := time.Since(start); d < 50*time.Millisecond || d > 2*time.Second {
		t.Errorf("ended after %v, want the time-out of 50ms", d)
	}
	lost = false
	if err := i.Flush(); err != nil {
		t.Errorf("the call after: %v", err)
	}
}

func TestRowLateReplyIsSkipped(t *testing.T) {
	calls := 0
	i, _ := newFake(t, func(r []byte) []fakeReply {
		calls++
		if calls == 1 { // arrives, with its error, inside the next call
			return []fakeReply{{data: errorReply(r, syscall.EEXIST), after: 80 * time.Millisecond}}
		}
		return []fakeReply{{data: errorReply(r, 0), after: 40 * time.Millisecond}}
	})
	if err := i.Flush(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v, want os.ErrDeadlineExceeded", err)
	}
	i.SetTimeout(5 * time.Second)
	if err := i.Flush(); err != nil {
		t.Errorf("the next call took the late reply: %v", err)
	}
}

func TestSetTimeout(t *testing.T) {
	i, _ := newFake(t, func([]byte) []fakeReply { return nil })
	for _, d := range []time.Duration{0, -time.Second} {
		if err := i.SetTimeout(d); err == nil {
			t.Errorf("SetTimeout(%v) is taken", d)
		}
	}
	if err := i.SetTimeout(120 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	err := i.Flush()
	if d := time.Since(start); !errors.Is(err, os.ErrDeadlineExceeded) || d < 120*time.Millisecond || d > 2*time.Second {
		t.Errorf("%v after %v", err, d)
	}
}

// Row of SPEC section 3: the original is not safe for concurrent use, and a
// closed handle may use a descriptor that is someone else's by then.
func TestRowCloseEndsCalls(t *testing.T) {
	i, _ := newFake(t, func([]byte) []fakeReply { return nil })
	i.SetTimeout(time.Minute)
	results := make(chan error)
	for range 4 { // one waits for a reply, the others for it
		go func() { results <- i.Flush() }()
	}
	time.Sleep(20 * time.Millisecond)
	i.Close()
	i.Close()
	for range 4 {
		select {
		case err := <-results:
			if !errors.Is(err, ErrClosed) || !errors.Is(err, net.ErrClosed) {
				t.Errorf("a call under way ended with %v", err)
			}
		case <-time.After(5 * time.Second):
			t.Fatal("a call goes on after Close")
		}
	}
	if _, err := i.GetServices(); !errors.Is(err, ErrClosed) {
		t.Errorf("a later call ended with %v", err)
	}
	var zero Handle
	zero.Close()
	if err := zero.Flush(); !errors.Is(err, ErrClosed) {
		t.Errorf("a call on the zero Handle ended with %v", err)
	}
}

// Row of SPEC section 3: weights are 32 bits wide.
func TestRowWeight32Bits(t *testing.T) {
	b := attr(2, attr(1, []byte{10, 0, 0, 2}, make([]byte, 12)), attr(11, ne16(2)), attr(4, ne32(65537)))
	var d Destination
	if err := parseDestination(b, &d, new(addresses)); err != nil || d.Weight != 65537 {
		t.Errorf("weight %d, error %v", d.Weight, err)
	}
}

// Row of SPEC section 3: what a caller reads and writes back is complete.
func TestRowEngineAndTunnelAreRead(t *testing.T) {
	want := Service{Address: net.IP{10, 0, 0, 1}, Protocol: 17, Port: 5060, SchedName: "rr", PEName: "sip",
		Flags: 1, Timeout: 60, Netmask: 0xFFFFFFFF, AddressFamily: 2}
	b, err := fillService(nil, &want, true)
	if err != nil {
		t.Fatal(err)
	}
	var got Service
	if err := parseService(b, &got, new(addresses)); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v (%v)\nwant %+v", got, err, want)
	}
	wantDest := Destination{Address: net.ParseIP("2001:db8::2"), Port: 1, Weight: 2, ConnectionFlags: 2, AddressFamily: 10,
		UpperThreshold: 3, LowerThreshold: 1, TunnelType: 1, TunnelPort: 6080, TunnelFlags: 2}
	if b, err = fillDestination(nil, &wantDest, true); err != nil {
		t.Fatal(err)
	}
	var gotDest Destination
	if err := parseDestination(b, &gotDest, new(addresses)); err != nil || !reflect.DeepEqual(gotDest, wantDest) {
		t.Errorf("got  %+v (%v)\nwant %+v", gotDest, err, wantDest)
	}
}

// Row of SPEC section 3: 32-bit counters wrap, so the 64-bit ones are read too.
func TestRowCounters64(t *testing.T) {
	const big = 1<<32 + 7
	stats := func(value func(v uint64) []byte) []byte {
		return bytes.Join([][]byte{
			attr(1, value(big+1)), attr(2, value(big+2)), attr(3, value(big+3)),
			attr(4, binary.NativeEndian.AppendUint64(nil, big+4)), attr(5, binary.NativeEndian.AppendUint64(nil, big+5)),
			attr(6, value(big+6)), attr(7, value(big+7)), attr(8, value(big+8)), attr(9, value(big+9)), attr(10, value(big+10)),
		}, nil)
	}
	narrow := stats(func(v uint64) []byte { return ne32(uint32(v)) }) // as the kernel truncates
	wide := stats(func(v uint64) []byte { return binary.NativeEndian.AppendUint64(nil, v) })
	want32 := SvcStats{Connections: 8, PacketsIn: 9, PacketsOut: 10, BytesIn: big + 4, BytesOut: big + 5,
		CPS: 13, PPSIn: 14, PPSOut: 15, BPSIn: 16, BPSOut: 17}
	want64 := Stats64{Connections: big + 1, PacketsIn: big + 2, PacketsOut: big + 3, BytesIn: big + 4, BytesOut: big + 5,
		CPS: big + 6, PPSIn: big + 7, PPSOut: big + 8, BPSIn: big + 9, BPSOut: big + 10}

	var s Service
	b := attr(1, attr(1, ne16(2)), attr(5, ne32(1)), attr(10, narrow), attr(12, wide))
	if err := parseService(b, &s, new(addresses)); err != nil || s.Stats != want32 || s.Stats64 != want64 {
		t.Errorf("service: %v\n%+v\n%+v", err, s.Stats, s.Stats64)
	}
	var d Destination
	b = attr(2, attr(1, make([]byte, 16)), attr(11, ne16(10)), attr(10, narrow), attr(12, wide))
	if err := parseDestination(b, &d, new(addresses)); err != nil || SvcStats(d.Stats) != want32 || d.Stats64 != want64 {
		t.Errorf("destination: %v\n%+v\n%+v", err, d.Stats, d.Stats64)
	}

	// Before 4.1 there are no 64-bit counters.
	s = Service{}
	b = attr(1, attr(1, ne16(2)), attr(5, ne32(1)), attr(10, narrow))
	filled := Stats64{Connections: 8, PacketsIn: 9, PacketsOut: 10, BytesIn: big + 4, BytesOut: big + 5,
		CPS: 13, PPSIn: 14, PPSOut: 15, BPSIn: 16, BPSOut: 17}
	if err := parseService(b, &s, new(addresses)); err != nil || s.Stats64 != filled {
		t.Errorf("without 64-bit counters: %v\n%+v", err, s.Stats64)
	}
}

// Row of SPEC section 3: a malformed or truncated reply panics in the original.
func TestRowMalformedReplies(t *testing.T) {
	good := attr(2, attr(1, []byte{10, 0, 0, 2}, make([]byte, 12)), attr(2, be16(80)), attr(11, ne16(2)), attr(4, ne32(1)), attr(10, attr(1, ne32(1))))
	for n := range len(good) {
		if err := parseDestination(good[:n], new(Destination), new(addresses)); err == nil {
			t.Errorf("the first %d of %d bytes are taken for a destination", n, len(good))
		}
	}
	for name, b := range map[string][]byte{
		"no destination":           attr(1),
		"empty destination":        attr(2),
		"attribute of 3 bytes":     attr(2, ne16(3), ne16(1)),
		"attribute beyond the end": attr(2, ne16(20), ne16(1), make([]byte, 4)),
		"weight of 8 bytes":        attr(2, attr(1, make([]byte, 16)), attr(11, ne16(2)), attr(4, ne32(1), ne32(0))),
		"weight of 2 bytes":        attr(2, attr(1, make([]byte, 16)), attr(11, ne16(2)), attr(4, ne16(1))),
		"address of 5 bytes":       attr(2, attr(1, make([]byte, 5)), attr(11, ne16(2))),
		"IPv6 address of 4 bytes":  attr(2, attr(1, make([]byte, 4)), attr(11, ne16(10))),
		"family 3":                 attr(2, attr(1, make([]byte, 16)), attr(11, ne16(3))),
		"counter of 2 bytes":       attr(2, attr(1, make([]byte, 16)), attr(11, ne16(2)), attr(10, attr(1, ne16(1)))),
		"no address":               attr(2, attr(11, ne16(2))),
	} {
		if err := parseDestination(b, new(Destination), new(addresses)); err == nil || !strings.HasPrefix(err.Error(), "ipvs: malformed reply: ") {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func TestGetIPFamily(t *testing.T) {
	tests := []struct {
		address []byte
		want    uint16
		fails   bool
	}{
		{append([]byte{10, 0, 0, 1}, make([]byte, 12)...), unix.AF_INET, false},
		{append([]byte{0, 0, 0, 1}, make([]byte, 12)...), unix.AF_INET, false},
		{[]byte{10, 0, 0, 1}, unix.AF_INET, false},
		{net.ParseIP("2001:db8::1"), unix.AF_INET6, false},
		{net.ParseIP("::1"), unix.AF_INET6, false},
		{net.ParseIP("fe80::"), unix.AF_INET, false}, // not to be told from 254.128.0.0
		{make([]byte, 16), 0, true},
		{nil, 0, true},
	}
	for _, test := range tests {
		if got, err := getIPFamily(test.address); got != test.want || (err != nil) != test.fails {
			t.Errorf("%v: family %d, error %v", test.address, got, err)
		}
	}
}

// Kernels before 3.18 send no family with a destination.
func TestDestinationWithoutFamily(t *testing.T) {
	for _, ip := range []net.IP{{10, 1, 2, 3}, net.ParseIP("2001:db8::1")} {
		var d Destination
		b := attr(2, attr(1, ip, make([]byte, 16-len(ip))), attr(2, be16(80)))
		if err := parseDestination(b, &d, new(addresses)); err != nil || !d.Address.Equal(ip) || len(d.Address) != len(ip) || (d.AddressFamily == unix.AF_INET) != (len(ip) == 4) {
			t.Errorf("%v: %+v, %v", ip, d, err)
		}
	}
}

// Row of SPEC section 3: SetConfig with what the kernel's seconds cannot hold.
func TestRowSetConfig(t *testing.T) {
	const s = time.Second
	for _, c := range []Config{
		{1, 0, 0}, {0, s - 1, 0}, {0, 0, 1000}, {-1, 0, 0}, {0, -s, 0}, {0, 0, math.MinInt64}, {(1 << 31) * s, 0, 0}, {0, 0, math.MaxInt64},
	} {
		i, k := newFake(t, acknowledge)
		if err := i.SetConfig(&c); err == nil || !strings.HasPrefix(err.Error(), "ipvs: Timeout") || len(k.requests) != 0 {
			t.Errorf("%+v: %v, %d requests", c, err, len(k.requests))
		}
	}
	i, k := newFake(t, acknowledge)
	if err := i.SetConfig(&Config{900*s + s/2, 0, (1<<31 - 1) * s}); err != nil {
		t.Fatal(err)
	}
	if got, want := k.requests[0][20:], bytes.Join([][]byte{attr(4, ne32(900)), attr(5, ne32(0)), attr(6, ne32(1<<31-1))}, nil); !bytes.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", hex.Dump(got), hex.Dump(want))
	}
	if err := i.SetConfig(nil); err == nil {
		t.Error("SetConfig(nil) is taken")
	}
}

// Row of SPEC section 3: the family comes from the address.
func TestRowFamilyFromAddress(t *testing.T) {
	if b, err := fillService(nil, &Service{Address: net.ParseIP("2001:db8::1")}, false); err != nil || !bytes.Contains(b, attr(1, ne16(unix.AF_INET6))) {
		t.Errorf("%x, %v", b, err)
	}
	_, err := fillService(nil, &Service{FWMark: 7}, false)
	if err == nil || !strings.Contains(err.Error(), "firewall mark 7") {
		t.Errorf("a firewall-mark service without a family: %v", err)
	}
}

// Row of SPEC section 3: the destination's own family is sent.
func TestRowDestinationFamilyIsSent(t *testing.T) {
	i, k := newFake(t, acknowledge)
	if err := i.NewDestination(&someService, &Destination{Address: net.ParseIP("2001:db8::2"), ConnectionFlags: ConnectionFlagTunnel}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(k.requests[0], attr(11, ne16(unix.AF_INET6))) {
		t.Errorf("no family in\n%s", hex.Dump(k.requests[0]))
	}
}

// Row of SPEC section 3: bad input is sent on, or panics, in the original.
func TestRowBadInput(t *testing.T) {
	i, k := newFake(t, acknowledge)
	v4, v6 := net.IP{10, 0, 0, 1}, net.ParseIP("2001:db8::1")
	long := strings.Repeat("x", 16)
	for name, err := range map[string]error{
		"nil service":             i.NewService(nil),
		"nil service, deleted":    i.DelService(nil),
		"nil service, got":        second(i.GetService(nil)),
		"nil service, its dests":  second(i.GetDestinations(nil)),
		"nil destination":         i.NewDestination(&someService, nil),
		"nil service, new dest":   i.NewDestination(nil, &someDestination),
		"nil destination updated": i.UpdateDestination(&someService, nil),
		"nil destination deleted": i.DelDestination(&someService, nil),
		"no address":              i.NewService(&Service{Protocol: 6, Port: 80}),
		"address of 5 bytes":      i.NewService(&Service{Address: make(net.IP, 5)}),
		"IPv6 address as IPv4":    i.NewService(&Service{Address: v6, AddressFamily: unix.AF_INET}),
		"IPv4 address as IPv6":    i.NewService(&Service{Address: v4, AddressFamily: unix.AF_INET6}),
		"16-byte IPv4 as IPv6":    i.NewService(&Service{Address: v4.To16(), AddressFamily: unix.AF_INET6}),
		"unknown family":          i.NewService(&Service{Address: v4, AddressFamily: 99}),
		"unknown family, fwmark":  i.NewService(&Service{FWMark: 1, AddressFamily: 99}),
		"scheduler of 16 bytes":   i.NewService(&Service{Address: v4, SchedName: long}),
		"scheduler with NUL":      i.UpdateService(&Service{Address: v4, SchedName: "r\x00r"}),
		"engine of 16 bytes":      i.NewService(&Service{Address: v4, SchedName: "rr", PEName: long}),
		"weight -1":               i.NewDestination(&someService, &Destination{Address: v4, Weight: -1}),
		"destination, no address": i.DelDestination(&someService, &Destination{Port: 1}),
		"destination, 16 bytes":   i.NewDestination(&someService, &Destination{Address: v4.To16(), AddressFamily: unix.AF_INET6}),
		"destination, wrong":      i.NewDestination(&someService, &Destination{Address: v6, AddressFamily: unix.AF_INET}),
	} {
		if err == nil || !strings.HasPrefix(err.Error(), "ipvs: ") {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if len(k.requests) != 0 {
		t.Errorf("%d requests were sent", len(k.requests))
	}
	if err := i.NewDestination(&someService, &Destination{Address: v4, Weight: -1}); !errors.Is(err, syscall.ERANGE) {
		t.Errorf("weight -1: %v, want one that matches the kernel's ERANGE", err)
	}
	if math.MaxInt > math.MaxInt32 {
		weight := math.MaxInt32
		weight++
		if err := i.NewDestination(&someService, &Destination{Address: v4, Weight: weight}); !errors.Is(err, syscall.ERANGE) {
			t.Errorf("weight 2^31: %v, want one that matches ERANGE", err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// Row of SPEC section 3: IsServicePresent answers false for every error, and
// GetService tells which it was.
func TestRowIsServicePresent(t *testing.T) {
	answer := syscall.ESRCH
	i, _ := newFake(t, func(r []byte) []fakeReply { return one(errorReply(r, answer)) })
	for _, answer = range []syscall.Errno{syscall.ESRCH, syscall.EPERM} {
		if i.IsServicePresent(&someService) {
			t.Errorf("present although the kernel said %v", answer)
		}
		if _, err := i.GetService(&someService); err != error(answer) {
			t.Errorf("GetService: %v, want the bare %v", err, answer)
		}
	}
}

func TestGetServiceWantsExactlyOne(t *testing.T) {
	b, err := fillService(nil, &someService, true)
	if err != nil {
		t.Fatal(err)
	}
	for n := range 4 {
		i, _ := newFake(t, func(r []byte) []fakeReply {
			if n == 0 {
				return one(doneReply(r, 0))
			}
			return one(bytes.Repeat(dataReply(r, 0, cmdNewService, b), n))
		})
		s, err := i.GetService(&someService)
		if n == 1 {
			if err != nil || s.SchedName != RoundRobin {
				t.Errorf("one service: %+v, %v", s, err)
			}
		} else if want := fmt.Sprintf("Expected only one service obtained=%d", n); err == nil || err.Error() != want {
			t.Errorf("%d services: %v, want %q", n, err, want)
		}
	}
}

func TestKernelErrorsAreBare(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EEXIST, syscall.ESRCH, syscall.EINVAL, syscall.EPERM, syscall.ERANGE} {
		i, _ := newFake(t, func(r []byte) []fakeReply { return one(errorReply(r, errno)) })
		for name, err := range map[string]error{
			"NewService":        i.NewService(&someService),
			"UpdateService":     i.UpdateService(&someService),
			"DelService":        i.DelService(&someService),
			"Flush":             i.Flush(),
			"NewDestination":    i.NewDestination(&someService, &someDestination),
			"UpdateDestination": i.UpdateDestination(&someService, &someDestination),
			"DelDestination":    i.DelDestination(&someService, &someDestination),
			"GetServices":       second(i.GetServices()),
			"GetDestinations":   second(i.GetDestinations(&someService)),
			"GetService":        second(i.GetService(&someService)),
			"GetConfig":         second(i.GetConfig()),
			"SetConfig":         i.SetConfig(&Config{}),
		} {
			if err != error(errno) {
				t.Errorf("%s: %v, want the bare %v", name, err, errno)
			}
		}
	}
}

// The error number in the message that ends a dump counts.
func TestDumpEndsWithError(t *testing.T) {
	i, _ := newFake(t, func(r []byte) []fakeReply { return one(doneReply(r, syscall.ENOMEM)) })
	if got, err := i.GetServices(); err != syscall.ENOMEM || got != nil {
		t.Errorf("got %v, %v", got, err)
	}
}

// A part of a dump that is larger than the buffer is asked for again.
func TestDumpLargerThanBuffer(t *testing.T) {
	const n = 100
	i, _ := newFake(t, func(r []byte) []fakeReply {
		var part []byte
		for n := range n {
			part = append(part, dataReply(r, unix.NLM_F_MULTI, cmdNewService, fill(fillService(nil, ipv4Service(n), true)))...)
		}
		return []fakeReply{{data: part}, {data: doneReply(r, 0)}}
	})
	if services, err := i.GetServices(); err != nil || len(services) != n {
		t.Errorf("%d services, %v", len(services), err)
	}
}

// Entries that come again in a later part of a dump, because the table changed
// between the two, are in the result once.
func TestDumpRepeatsEntries(t *testing.T) {
	services := func(r []byte, ports ...uint16) (b []byte) {
		for _, port := range ports {
			s := someService
			s.Port = port
			attrs, err := fillService(nil, &s, true)
			if err != nil {
				t.Fatal(err)
			}
			b = append(b, dataReply(r, unix.NLM_F_MULTI, cmdNewService, attrs)...)
		}
		return b
	}
	i, _ := newFake(t, func(r []byte) []fakeReply {
		return []fakeReply{{data: services(r, 1, 2, 1, 3)}, {data: services(r, 3, 4)}, {data: services(r, 4, 2, 5)}, {data: doneReply(r, 0)}}
	})
	got, err := i.GetServices()
	if err != nil {
		t.Fatal(err)
	}
	var ports []uint16
	for _, s := range got {
		ports = append(ports, s.Port)
	}
	if want := []uint16{1, 2, 3, 4, 5}; !slices.Equal(ports, want) {
		t.Errorf("ports %v, want %v", ports, want)
	}
}

// The kernel answers a request that ends with EINTR not at all. It stops a
// daemon so whose thread has not run yet.
func TestDelDaemonWithoutReply(t *testing.T) {
	var refuse syscall.Errno
	silent := true
	i, k := newFake(t, func(r []byte) []fakeReply {
		if cmdOf(r) != cmdDelDaemon {
			return acknowledge(r)
		}
		if silent {
			return nil
		}
		return one(errorReply(r, refuse))
	})
	if err := i.DelDaemon(DaemonMaster); err != nil {
		t.Errorf("no reply: %v", err)
	}
	if len(k.requests) != 2 || native.Uint16(k.requests[1][4:]) != unix.NLMSG_NOOP {
		t.Errorf("requests %x", k.requests)
	}
	silent = false
	for _, refuse = range []syscall.Errno{0, syscall.ESRCH} {
		var want error
		if refuse != 0 {
			want = refuse
		}
		if err := i.DelDaemon(DaemonMaster); err != want {
			t.Errorf("got %v, want %v", err, want)
		}
	}
}

// A time-out of for ever is one.
func TestLargestTimeout(t *testing.T) {
	i, _ := newFake(t, func(r []byte) []fakeReply {
		part := dataReply(r, unix.NLM_F_MULTI, cmdNewService, fill(fillService(nil, &someService, true)))
		return []fakeReply{{data: part}, {data: part}, {data: part}, {data: doneReply(r, 0)}}
	})
	if err := i.SetTimeout(math.MaxInt64); err != nil {
		t.Fatal(err)
	}
	if services, err := i.GetServices(); err != nil || len(services) != 1 {
		t.Errorf("%d services, %v", len(services), err)
	}
}

// Messages of other processes, without end, keep neither a call nor Close.
func TestForeignFlood(t *testing.T) {
	i, k := newFake(t, func(r []byte) []fakeReply {
		return []fakeReply{{data: errorReply(r, 0), from: 99, endless: true}}
	})
	must(t, i.SetTimeout(20*time.Millisecond))
	start := time.Now()
	if err := i.Flush(); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(start) > 5*time.Second {
		t.Errorf("%v after %v", err, time.Since(start))
	}
	must(t, i.SetTimeout(time.Minute))
	done := make(chan error)
	go func() { done <- i.Flush() }()
	time.Sleep(10 * time.Millisecond)
	i.Close()
	select {
	case err := <-done:
		if err != ErrClosed {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Error("Close does not end a call")
	}
	k.end()
}
