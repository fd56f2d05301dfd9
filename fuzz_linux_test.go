package ipvs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"net"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Fuzz tests of everything that reads bytes from the kernel. `make fuzz` runs them for
// FUZZTIME; corpora are in testdata/fuzz.

// The reference decoder: plain, slow, and obviously right. It copies every
// attribute into a list first, and then looks at each.

type refAttr struct {
	typ   uint16
	value []byte
}

var errRef = errors.New("the reference decoder refuses this")

func refAttrs(b []byte) (list []refAttr, err error) {
	for at := 0; at < len(b); {
		if len(b)-at < 4 {
			return nil, errRef
		}
		size := int(binary.NativeEndian.Uint16(b[at : at+2]))
		typ := binary.NativeEndian.Uint16(b[at+2:at+4]) & 0x3FFF
		if size < 4 || at+size > len(b) {
			return nil, errRef
		}
		list = append(list, refAttr{typ, append([]byte(nil), b[at+4:at+size]...)})
		at += (size + 3) / 4 * 4
	}
	return list, nil
}

// refSet writes a number of the attribute into a field of v, after a check of its size.
func refSet(field reflect.Value, value []byte, order binary.ByteOrder) error {
	var n uint64
	switch len(value) {
	case 1:
		n = uint64(value[0])
	case 2:
		n = uint64(order.Uint16(value))
	case 4:
		n = uint64(order.Uint32(value))
	case 8:
		n = order.Uint64(value)
	}
	size := int(field.Type().Size())
	if field.Kind() == reflect.Int { // 32 bits in the protocol
		if len(value) != 4 {
			return errRef
		}
		field.SetInt(int64(int(n)))
		return nil
	}
	if len(value) != size {
		return errRef
	}
	field.SetUint(n)
	return nil
}

var hostOrder = func() binary.ByteOrder {
	if lowByte == 0 {
		return binary.LittleEndian
	}
	return binary.BigEndian
}()

var (
	refStats  = map[uint16]string{1: "Connections", 2: "PacketsIn", 3: "PacketsOut", 4: "BytesIn", 5: "BytesOut", 6: "CPS", 7: "PPSIn", 8: "PPSOut", 9: "BPSIn", 10: "BPSOut"}
	refFields = map[string]map[uint16]string{
		"Service":     {1: "AddressFamily", 2: "Protocol", 5: "FWMark", 8: "Timeout", 9: "Netmask"},
		"Destination": {3: "ConnectionFlags", 4: "Weight", 5: "UpperThreshold", 6: "LowerThreshold", 7: "ActiveConnections", 8: "InactiveConnections", 9: "PersistentConnections", 11: "AddressFamily", 13: "TunnelType", 15: "TunnelFlags"},
	}
	refPorts   = map[string]map[uint16]string{"Service": {4: "Port"}, "Destination": {2: "Port", 14: "TunnelPort"}}
	refStrings = map[string]map[uint16]string{"Service": {6: "SchedName", 11: "PEName"}, "Destination": {}}
	refStats32 = map[string]uint16{"Service": 10, "Destination": 10}
	refStats64 = map[string]uint16{"Service": 12, "Destination": 12}
	refAddress = map[string]uint16{"Service": 3, "Destination": 1}
)

// refDecode decodes the service (outer attribute 1) or destination (2) in b into v.
func refDecode(b []byte, outer uint16, v any) error {
	level, err := refAttrs(b)
	if err != nil {
		return err
	}
	var inner []byte
	for _, a := range level {
		if a.typ == outer {
			inner = a.value
			if inner == nil {
				inner = []byte{}
			}
		}
	}
	if inner == nil {
		return errRef
	}
	attrs, err := refAttrs(inner)
	if err != nil {
		return err
	}
	s := reflect.ValueOf(v).Elem()
	kind := s.Type().Name()
	var address []byte
	wide := false
	for _, a := range attrs {
		switch {
		case refFields[kind][a.typ] != "":
			err = refSet(s.FieldByName(refFields[kind][a.typ]), a.value, hostOrder)
		case refPorts[kind][a.typ] != "":
			err = refSet(s.FieldByName(refPorts[kind][a.typ]), a.value, binary.BigEndian)
		case refStrings[kind][a.typ] != "":
			text, _, _ := strings.Cut(string(a.value), "\x00")
			s.FieldByName(refStrings[kind][a.typ]).SetString(text)
		case a.typ == refAddress[kind]:
			address = a.value
		case kind == "Service" && a.typ == 7: // flags and mask
			if len(a.value) != 8 {
				return errRef
			}
			err = refSet(s.FieldByName("Flags"), a.value[:4], hostOrder)
		case a.typ == refStats32[kind]:
			err = refCounters(s.FieldByName("Stats"), a.value)
		case a.typ == refStats64[kind]:
			wide = true
			err = refCounters(s.FieldByName("Stats64"), a.value)
		}
		if err != nil {
			return err
		}
	}
	if !wide {
		for _, name := range refStats {
			s.FieldByName("Stats64").FieldByName(name).SetUint(s.FieldByName("Stats").FieldByName(name).Uint())
		}
	}
	family := s.FieldByName("AddressFamily")
	if kind == "Service" && family.Uint() != unix.AF_INET && family.Uint() != unix.AF_INET6 {
		return errRef
	}
	if kind == "Service" && s.FieldByName("FWMark").Uint() != 0 {
		return nil
	}
	if kind == "Destination" && family.Uint() == 0 {
		if len(address) < 4 {
			return errRef
		}
		head := !bytes.Equal(address[:4], make([]byte, 4))
		tail := !bytes.Equal(address[4:], make([]byte, len(address)-4))
		switch {
		case !head && !tail:
			return errRef
		case !tail:
			family.SetUint(unix.AF_INET)
		default:
			family.SetUint(unix.AF_INET6)
		}
	}
	switch {
	case family.Uint() == unix.AF_INET && (len(address) == 4 || len(address) == 16):
		s.FieldByName("Address").Set(reflect.ValueOf(net.IP(address[:4])))
	case family.Uint() == unix.AF_INET6 && len(address) == 16:
		s.FieldByName("Address").Set(reflect.ValueOf(net.IP(address)))
	default:
		return errRef
	}
	return nil
}

func refCounters(s reflect.Value, b []byte) error {
	attrs, err := refAttrs(b)
	if err != nil {
		return err
	}
	for _, a := range attrs {
		if name := refStats[a.typ]; name != "" {
			if err := refSet(s.FieldByName(name), a.value, hostOrder); err != nil {
				return err
			}
		}
	}
	return nil
}

// The library and the reference decoder read the same from the same bytes.
func FuzzParse(f *testing.F) {
	for _, reply := range goldenReplies(f) {
		for len(reply) > 0 {
			var m message
			rest, err := parseMessage(reply, &m)
			if err != nil {
				f.Fatal(err)
			}
			reply = rest
			if len(m.body) >= genlHdrLen {
				f.Add(m.body[genlHdrLen:])
			}
		}
	}
	f.Add(fill(fillService(nil, &someService, true)))
	f.Add(fill(fillDestination(nil, &Destination{Address: net.IPv4(10, 1, 0, 1), TunnelType: 1, TunnelPort: 6080}, true)))
	f.Add(fill(fillDaemon(nil, &Daemon{State: DaemonMaster, MulticastInterface: "eth0", MulticastGroup: net.IPv4(224, 0, 0, 81)})))
	f.Fuzz(func(t *testing.T, b []byte) {
		var s, refS Service
		err, refErr := parseService(b, &s, new(addresses)), refDecode(b, 1, &refS)
		compareParsed(t, s, refS, err, refErr)
		var d, refD Destination
		err, refErr = parseDestination(b, &d, new(addresses)), refDecode(b, 2, &refD)
		compareParsed(t, d, refD, err, refErr)
		if c, err := parseConfig(b); err == nil && (c.TimeoutTCP < 0 || c.TimeoutTCP%time.Second != 0) {
			t.Errorf("config %+v", c)
		}
		if d, err := parseDaemon(b); err == nil && d.MulticastGroup != nil && len(d.MulticastGroup) != 4 && len(d.MulticastGroup) != 16 {
			t.Errorf("daemon %+v", d)
		}
	})
}

func compareParsed(t *testing.T, got, ref any, err, refErr error) {
	t.Helper()
	if (err == nil) != (refErr == nil) {
		t.Fatalf("library: %v, reference: %v", err, refErr)
	}
	if err == nil && !reflect.DeepEqual(got, ref) {
		t.Fatalf("library:   %+v\nreference: %+v", got, ref)
	}
	if err != nil && !strings.HasPrefix(err.Error(), "ipvs: malformed reply: ") {
		t.Fatalf("error %q", err)
	}
}

// Whole datagrams, as an answer to each kind of request.
func FuzzAnswer(f *testing.F) {
	for _, reply := range goldenReplies(f) {
		f.Add(reply, true)
		f.Add(reply, false)
	}
	r := newGenlRequest(nil, fakeFamily, cmdGetService, genlVersion, 0)
	f.Add(errorReply(r, unix.EEXIST), true)
	f.Add(doneReply(r, unix.ENOMEM), false)
	f.Fuzz(func(t *testing.T, b []byte, acked bool) {
		var services serviceList
		var destinations destinationList
		for _, parse := range []parser{&services, &destinations, nil} {
			a := answer{parser: parse, acked: acked}
			for rest := b; len(rest) > 0; {
				var m message
				next, err := parseMessage(rest, &m)
				if err != nil {
					break
				}
				if len(next) >= len(rest) {
					t.Fatal("no progress")
				}
				m.errorText()
				rest = next
				if _, err := a.take(&m); err != nil {
					break
				}
			}
		}
		services.finish()
		destinations.finish()
		seenDest := map[destinationKey]bool{}
		for _, d := range destinations.items {
			if seenDest[keyOfDestination(d)] {
				t.Fatal("a destination twice")
			}
			seenDest[keyOfDestination(d)] = true
		}
		seen := map[serviceKey]bool{}
		for _, s := range services.items {
			if seen[keyOfService(s)] {
				t.Fatal("a service twice")
			}
			seen[keyOfService(s)] = true
		}
	})
}

// A batch keeps its input, or returns an error for it.
func FuzzBatch(f *testing.F) {
	f.Add([]byte{10, 0, 0, 1}, uint16(0), uint16(6), uint16(80), uint32(0), "rr", "", uint32(3), []byte{10, 1, 0, 1}, 1, uint32(2))
	f.Add([]byte(net.ParseIP("2001:db8::1")), uint16(10), uint16(17), uint16(0), uint32(0), "sh", "sip", uint32(0), []byte{10, 1, 0, 1}, -1, uint32(0))
	f.Add([]byte{}, uint16(2), uint16(0), uint16(0), uint32(9), "", "", uint32(0), []byte{}, 1<<31-1, uint32(7))
	f.Fuzz(func(t *testing.T, address []byte, family, protocol, port uint16, fwmark uint32, sched, engine string, flags uint32, dest []byte, weight int, method uint32) {
		s := &Service{Address: address, AddressFamily: family, Protocol: protocol, Port: port, FWMark: fwmark, SchedName: sched, PEName: engine, Flags: flags}
		d := &Destination{Address: dest, Port: port, Weight: weight, ConnectionFlags: method, TunnelFlags: protocol}
		var b Batch
		b.NewService(s)
		b.UpdateService(s)
		b.DelService(s)
		b.NewDestination(s, d)
		b.UpdateDestination(s, d)
		b.DelDestination(s, d)
		sendable := 0
		for range b.messages {
			sendable++
		}
		if b.Len() != 6 || sendable+len(b.bad) != 6 {
			t.Fatalf("of 6 changes %d can be sent and %d cannot", sendable, len(b.bad))
		}
		for _, bad := range b.bad {
			if !strings.Contains(bad.Error(), "ipvs: ") {
				t.Fatalf("%v", bad)
			}
		}
		for n, msg := range b.messages {
			gotS, gotD := decode(msg)
			if gotS == nil || (gotD != nil) != (n >= 3) {
				t.Fatalf("change %d reads back as %v, %v", n, gotS, gotD)
			}
			if n < 2 && settingsOfService(gotS, gotS.AddressFamily) != settingsOfService(s, gotS.AddressFamily) {
				t.Fatalf("%+v reads back as %+v", s, gotS)
			}
			if n == 3 || n == 4 {
				if settingsOfDestination(gotD) != settingsOfDestination(d) {
					t.Fatalf("%+v reads back as %+v", d, gotD)
				}
			}
			key, err := sentServiceKey(s)
			if err != nil || key != keyOfService(gotS) {
				t.Fatalf("%+v reads back as %+v: %v", s, gotS, err)
			}
		}
		if strings.Count(b.String(), "\n") < 6 {
			t.Fatalf("String: %q", b.String())
		}
	})
}

// goldenReplies returns the recorded datagrams that kernels sent.
func goldenReplies(f *testing.F) (replies [][]byte) {
	must(f, fs.WalkDir(goldenFiles, goldenDir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".txt") {
			return err
		}
		text, err := goldenFiles.ReadFile(path)
		for _, d := range readDatagrams(f, string(text)) {
			if !d.sent {
				replies = append(replies, d.data)
			}
		}
		return err
	}))
	if len(replies) == 0 {
		f.Fatal("no golden messages")
	}
	return replies
}
