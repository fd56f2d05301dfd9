package ipvs

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

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

// SetConfig with timeouts that the kernel's seconds cannot represent.
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

// The family is taken from the address.
func TestRowFamilyFromAddress(t *testing.T) {
	if b, err := fillService(nil, &Service{Address: net.ParseIP("2001:db8::1")}, false); err != nil || !bytes.Contains(b, attr(1, ne16(unix.AF_INET6))) {
		t.Errorf("%x, %v", b, err)
	}
	_, err := fillService(nil, &Service{FWMark: 7}, false)
	if err == nil || !strings.Contains(err.Error(), "firewall mark 7") {
		t.Errorf("a firewall-mark service without a family: %v", err)
	}
}

// The destination's own family is sent.
func TestRowDestinationFamilyIsSent(t *testing.T) {
	i, k := newFake(t, acknowledge)
	if err := i.NewDestination(&someService, &Destination{Address: net.ParseIP("2001:db8::2"), ConnectionFlags: ConnectionFlagTunnel}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(k.requests[0], attr(11, ne16(unix.AF_INET6))) {
		t.Errorf("no family in\n%s", hex.Dump(k.requests[0]))
	}
}

// Bad input, which the original sends, or panics on, is an error.
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
