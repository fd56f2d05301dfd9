package ipvs

import (
	"net"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"
)

// value32 and value64 are what counted puts into counter n of the type.
func value32(typ uint16, n int) uint32 {
	return native.Uint32([]byte{byte(16*int(typ) + 10*n), byte(16*int(typ) + 10*n + 1), byte(16*int(typ) + 10*n + 2), byte(16*int(typ) + 10*n + 3)})
}

func value64(typ uint16, n int) uint64 {
	var b [8]byte
	for k := range b {
		b[k] = byte(16*int(typ) + 10*n + k)
	}
	return native.Uint64(b[:])
}

func fixedStats(typ uint16) SvcStats {
	return SvcStats{
		Connections: value32(typ, 0), PacketsIn: value32(typ, 1), PacketsOut: value32(typ, 2),
		BytesIn: value64(typ, 3), BytesOut: value64(typ, 4),
		CPS: value32(typ, 5), PPSIn: value32(typ, 6), PPSOut: value32(typ, 7), BPSIn: value32(typ, 8), BPSOut: value32(typ, 9),
	}
}

func fixedStats64(typ uint16) Stats64 {
	return Stats64{
		Connections: value64(typ, 0), PacketsIn: value64(typ, 1), PacketsOut: value64(typ, 2),
		BytesIn: value64(typ, 3), BytesOut: value64(typ, 4),
		CPS: value64(typ, 5), PPSIn: value64(typ, 6), PPSOut: value64(typ, 7), BPSIn: value64(typ, 8), BPSOut: value64(typ, 9),
	}
}

// Each field that is read in one go has its own value, and no other's.
func TestDecodeFixedValues(t *testing.T) {
	service, destination := laidOut()
	var s Service
	address, ok := s.decodeFixed(service)
	wantService := Service{
		AddressFamily: unix.AF_INET, Protocol: unix.IPPROTO_UDP, Port: 8053, SchedName: "wlc",
		Flags: 3, Timeout: 360, Netmask: 0x00FFFFFF,
		Stats: fixedStats(svcAttrStats), Stats64: fixedStats64(svcAttrStats64),
	}
	if !ok || !reflect.DeepEqual(s, wantService) {
		t.Errorf("%v, got\n%+v, want\n%+v", ok, s, wantService)
	}
	if want := (net.IP{10, 1, 2, 3}); len(address) != net.IPv6len || !want.Equal(address[:4]) {
		t.Errorf("got address %v", address)
	}
	var d Destination
	address, ok = d.decodeFixed(destination)
	wantDestination := Destination{
		Port: 8080, ConnectionFlags: 1000, Weight: 1001, TunnelType: 1, TunnelPort: 6080, TunnelFlags: 2,
		UpperThreshold: 2000, LowerThreshold: 2001, ActiveConnections: 2002, InactiveConnections: 2003, PersistentConnections: 2004,
		AddressFamily: unix.AF_INET,
		Stats:         DstStats(fixedStats(destAttrStats)), Stats64: fixedStats64(destAttrStats64),
	}
	if !ok || !reflect.DeepEqual(d, wantDestination) {
		t.Errorf("%v, got\n%+v, want\n%+v", ok, d, wantDestination)
	}
	if want := (net.IP{10, 1, 2, 3}); len(address) != net.IPv6len || !want.Equal(address[:4]) {
		t.Errorf("got address %v", address)
	}
}
