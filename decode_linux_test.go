package ipvs

import (
	"bytes"
	"encoding/binary"
	"net"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// All that a caller reads and writes back is complete.
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

// Weights are 32 bits wide.
func TestRowWeight32Bits(t *testing.T) {
	b := attr(2, attr(1, []byte{10, 0, 0, 2}, make([]byte, 12)), attr(11, ne16(2)), attr(4, ne32(65537)))
	var d Destination
	if err := parseDestination(b, &d, new(addresses)); err != nil || d.Weight != 65537 {
		t.Errorf("weight %d, error %v", d.Weight, err)
	}
}

// 32-bit counters wrap, so the 64-bit ones are read too.
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

// A malformed or truncated reply, on which the original panics, is an error.
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
		{net.ParseIP("fe80::"), unix.AF_INET, false}, // not distinguishable from 254.128.0.0
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
