package ipvs

import (
	"net"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"
)

// Each field that the fast decoder reads has its own value, and no other's.
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

// value32 and value64 are the values that counted gives counter n of the type.
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

// counted appends counters as kernels send them, all different.
func counted(b []byte, typ uint16, sizes [10]int) []byte {
	b, start := openNest(b, typ)
	native.PutUint32(b[start:], attrHdr(typ, 0)) // IPVS does not mark nested attributes
	for n, size := range sizes {
		value := make([]byte, size)
		for k := range value {
			value[k] = byte(16*int(typ) + 10*n + k)
		}
		b = appendBytes(b, uint16(n+1), value)
	}
	closeNest(b, start)
	return b
}

// laidOut returns a service and a destination as kernels send them, with a different
// value in every field.
func laidOut() (service, destination []byte) {
	sizes32, sizes64 := [10]int{4, 4, 4, 8, 8, 4, 4, 4, 4, 4}, [10]int{8, 8, 8, 8, 8, 8, 8, 8, 8, 8}
	address := []byte{10, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	s := appendUint16(nil, svcAttrAddressFamily, 2)
	s = appendUint16(s, svcAttrProtocol, 17)
	s = appendBytes(s, svcAttrAddress, address)
	s = appendPort(s, svcAttrPort, 8053)
	s = appendString(s, svcAttrSchedName, "wlc")
	s = appendFlags(s, svcAttrFlags, ipvsFlags{flags: 3, mask: 5})
	s = appendUint32(s, svcAttrTimeout, 360)
	s = appendUint32(s, svcAttrNetmask, 0x00FFFFFF)
	s = counted(s, svcAttrStats, sizes32)
	s = counted(s, svcAttrStats64, sizes64)

	d := appendBytes(nil, destAttrAddress, address)
	d = appendPort(d, destAttrPort, 8080)
	for n, typ := range []uint16{destAttrForwardingMethod, destAttrWeight} {
		d = appendUint32(d, typ, uint32(1000+n))
	}
	d = appendUint8(d, destAttrTunnelType, 1)
	d = appendPort(d, destAttrTunnelPort, 6080)
	d = appendUint16(d, destAttrTunnelFlags, 2)
	for n, typ := range []uint16{destAttrUpperThreshold, destAttrLowerThreshold, destAttrActiveConnections, destAttrInactiveConnections, destAttrPersistentConnections} {
		d = appendUint32(d, typ, uint32(2000+n))
	}
	d = appendUint16(d, destAttrAddressFamily, 2)
	d = counted(d, destAttrStats, sizes32)
	d = counted(d, destAttrStats64, sizes64)
	return s, d
}

// A message with the fixed layout is read by the fast decoder, with the result of the
// reference decoder. A message with any other header is not.
func TestLaidOut(t *testing.T) {
	service, destination := laidOut()
	readService := func(attrs []byte) bool {
		body := appendBytes(nil, cmdAttrService, attrs)
		var got, ref Service
		err, refErr := parseService(body, &got, new(addresses)), refDecode(body, cmdAttrService, &ref)
		compareParsed(t, got, ref, err, refErr)
		_, ok := new(Service).decodeFixed(attrs)
		return ok
	}
	readDestination := func(attrs []byte) bool {
		body := appendBytes(nil, cmdAttrDest, attrs)
		var got, ref Destination
		err, refErr := parseDestination(body, &got, new(addresses)), refDecode(body, cmdAttrDest, &ref)
		compareParsed(t, got, ref, err, refErr)
		_, ok := new(Destination).decodeFixed(attrs)
		return ok
	}
	for _, kind := range []struct {
		attrs   []byte
		laidOut func(attrs []byte) bool
		headers int
	}{{service, readService, 30}, {destination, readDestination, 35}} {
		if !kind.laidOut(kind.attrs) {
			t.Error("not taken for laid out as expected")
		}
		at := headers(kind.attrs, 0)
		if len(at) != kind.headers {
			t.Errorf("%d headers, want %d", len(at), kind.headers)
		}
		for _, at := range at {
			for _, bit := range []uint32{1, 1 << 8, 1 << 16, 1 << 24} {
				broken := append([]byte(nil), kind.attrs...)
				native.PutUint32(broken[at:], native.Uint32(broken[at:])^bit)
				if kind.laidOut(broken) {
					t.Errorf("taken for laid out as expected with %#x at %d", bit, at)
				}
			}
		}
	}
}

// headers returns the offsets of the attributes, including the counters.
func headers(attrs []byte, offset int) (at []int) {
	a := attributes{level: attrs}
	for a.next() {
		at = append(at, offset+a.at-attrHdrLen)
		if a.end-a.at > 16 {
			at = append(at, headers(a.value(), offset+a.at)...)
		}
	}
	return at
}

// The messages of all four kernels have the fixed layout, except for services with
// a firewall mark (in place of protocol, address and port) or a persistence engine
// (one attribute more). Without this test a new kernel could switch the fast path
// off unnoticed.
func TestGoldenMessagesAreFixed(t *testing.T) {
	series, err := goldenFiles.ReadDir(goldenDir)
	must(t, err)
	kernels := 0
	for _, dir := range series {
		if !dir.IsDir() {
			continue
		}
		kernels++
		files, err := goldenFiles.ReadDir(goldenDir + "/" + dir.Name())
		must(t, err)
		var services, destinations, general int
		for _, file := range files {
			text, err := goldenFiles.ReadFile(goldenDir + "/" + dir.Name() + "/" + file.Name())
			must(t, err)
			for _, d := range readDatagrams(t, string(text)) {
				if d.sent {
					continue
				}
				for rest := d.data; len(rest) > 0; {
					var m message
					rest, err = parseMessage(rest, &m)
					must(t, err)
					if m.typ <= unix.GENL_ID_CTRL { // not of IPVS
						continue
					}
					var s Service
					var dest Destination
					switch attrs := m.attrs(); m.body[0] {
					case cmdNewService:
						must(t, parseService(attrs, &s, new(addresses)))
						service, err := nested(attrs, cmdAttrService, "service")
						must(t, err)
						_, fixed := new(Service).decodeFixed(service)
						if want := s.FWMark == 0 && s.PEName == ""; fixed != want {
							t.Errorf("%s/%s: the layout of service %s is fixed: %v, want %v", dir.Name(), file.Name(), s.Rule(), fixed, want)
						}
						if services++; !fixed {
							general++
						}
					case cmdNewDest:
						must(t, parseDestination(attrs, &dest, new(addresses)))
						destination, err := nested(attrs, cmdAttrDest, "destination")
						must(t, err)
						if _, fixed := dest.decodeFixed(destination); !fixed {
							t.Errorf("%s/%s: the layout of destination %s is not fixed", dir.Name(), file.Name(), dest.Rule())
						}
						destinations++
					}
				}
			}
		}
		if services < 40 || destinations < 30 || general < 6 {
			t.Errorf("%s: %d services, %d of them not fixed, and %d destinations are too few to tell", dir.Name(), services, general, destinations)
		}
	}
	if kernels != 4 {
		t.Errorf("%d kernels", kernels)
	}
}
