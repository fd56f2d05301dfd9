package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestDiffText(t *testing.T) {
	a, c, gone := ipv4Service(1), ipv4Service(2), ipv4Service(3)
	changed := *a
	changed.SchedName = SourceHashing
	heavy := *ipv4Destination(1)
	heavy.Weight = 5
	b, err := Diff(
		[]TableEntry{{gone, nil}, {a, []*Destination{ipv4Destination(1), ipv4Destination(2)}}},
		[]TableEntry{{&changed, []*Destination{&heavy, ipv4Destination(3)}}, {c, []*Destination{ipv4Destination(4)}}})
	must(t, err)
	const want = `-a -t 10.0.0.1:80 -r 10.1.0.3:8080 -m -w 1
-A -t 10.0.0.2:80 -s rr
-a -t 10.0.0.2:80 -r 10.1.0.4:8080 -m -w 1
-E -t 10.0.0.1:80 -s sh
-e -t 10.0.0.1:80 -r 10.1.0.1:8080 -m -w 5
-d -t 10.0.0.1:80 -r 10.1.0.2:8080
-D -t 10.0.0.3:80
`
	if b.String() != want {
		t.Errorf("got\n%swant\n%s", b, want)
	}
}

// tableFrom makes a table of the bytes. There are few different services,
// destinations and settings, so that two tables have much in common.
func tableFrom(data []byte) []TableEntry {
	next := func(n int) int {
		if len(data) == 0 {
			return 0
		}
		v := int(data[0]) % n
		data = data[1:]
		return v
	}
	var table []TableEntry
	services := []Service{
		{Address: net.IPv4(10, 0, 0, 1), Protocol: unix.IPPROTO_TCP, Port: 80},
		{Address: net.IP{10, 0, 0, 1}, Protocol: unix.IPPROTO_UDP, Port: 80},
		{Address: net.IPv4(10, 0, 0, 2), Protocol: unix.IPPROTO_TCP, Port: 80, AddressFamily: unix.AF_INET},
		{Address: net.ParseIP("2001:db8::1"), Protocol: unix.IPPROTO_TCP, Port: 80},
		{FWMark: 1, AddressFamily: unix.AF_INET},
		{FWMark: 1, AddressFamily: unix.AF_INET6},
	}
	for _, s := range services {
		if next(4) == 0 {
			continue
		}
		s.SchedName = []string{RoundRobin, SourceHashing}[next(2)]
		s.Flags = []uint32{0, ServiceFlagPersistent, ServiceFlagHashed, ServiceFlagPersistent | ServiceFlagHashed}[next(4)]
		s.Timeout = uint32(next(2))
		s.Netmask = []uint32{0, 128}[next(2)]
		s.PEName = []string{"", "sip"}[next(2)]
		s.Stats.Connections, s.Stats64.BytesIn = uint32(next(3)), uint64(next(3))
		e := TableEntry{Service: &s}
		for n := range 4 {
			if next(3) == 0 {
				continue
			}
			d := &Destination{Address: net.IPv4(10, 1, 0, byte(n/2)), Port: uint16(n % 2), Weight: next(3),
				ConnectionFlags:   []uint32{ConnectionFlagMasq, ConnectionFlagTunnel, ConnectionFlagTunnel | 0x100}[next(3)],
				UpperThreshold:    uint32(next(2)),
				TunnelType:        uint8(next(2)),
				ActiveConnections: next(2),
			}
			if next(2) == 0 {
				d.Address, d.AddressFamily = d.Address.To4(), unix.AF_INET
			}
			e.Destinations = append(e.Destinations, d)
		}
		table = append(table, e)
	}
	return table
}

// model is a table as the kernel would have it: settings by key.
type model map[serviceKey]*modelService

type modelService struct {
	settings     serviceSettings
	destinations map[destinationKey]destinationSettings
}

func modelOf(t *testing.T, table []TableEntry) model {
	t.Helper()
	m := model{}
	for _, e := range table {
		must(t, m.apply(cmdNewService, e.Service, nil))
		for _, d := range e.Destinations {
			must(t, m.apply(cmdNewDest, e.Service, d))
		}
	}
	return m
}

// apply makes one change, or rejects it as the kernel would.
func (m model) apply(cmd uint8, s *Service, d *Destination) error {
	key, err := sentServiceKey(s)
	if err != nil {
		return err
	}
	service := m[key]
	if (service == nil) != (cmd == cmdNewService) {
		return fmt.Errorf("%s: service there: %v", notation(opName(cmd), s, d), service != nil)
	}
	if d == nil {
		switch cmd {
		case cmdNewService:
			m[key] = &modelService{settingsOfService(s, key.family), map[destinationKey]destinationSettings{}}
		case cmdSetService:
			service.settings = settingsOfService(s, key.family)
		case cmdDelService:
			delete(m, key)
		}
		return nil
	}
	dest, err := sentDestinationKey(d)
	if err != nil {
		return err
	}
	if _, there := service.destinations[dest]; there != (cmd != cmdNewDest) {
		return fmt.Errorf("%s: destination there: %v", notation(opName(cmd), s, d), there)
	}
	if cmd == cmdDelDest {
		delete(service.destinations, dest)
	} else {
		service.destinations[dest] = settingsOfDestination(d)
	}
	return nil
}

func (m model) equal(o model) bool {
	return maps.EqualFunc(m, o, func(a, b *modelService) bool {
		return a.settings == b.settings && maps.Equal(a.destinations, b.destinations)
	})
}

// fewest returns the smallest number of changes that lead from m to o.
func (m model) fewest(o model) (n int) {
	for key, want := range o {
		have := m[key]
		if have == nil {
			n += 1 + len(want.destinations)
			continue
		}
		if have.settings != want.settings {
			n++
		}
		for dest, settings := range want.destinations {
			if had, there := have.destinations[dest]; !there || had != settings {
				n++
			}
		}
		for dest := range have.destinations {
			if _, wanted := want.destinations[dest]; !wanted {
				n++
			}
		}
	}
	for key := range m {
		if o[key] == nil {
			n++
		}
	}
	return n
}

// checkDiff checks what must hold of the difference of any two tables.
func checkDiff(t *testing.T, have, want []TableEntry) {
	t.Helper()
	b, err := Diff(have, want)
	if err != nil {
		t.Fatal(err)
	}
	is, goal := modelOf(t, have), modelOf(t, want)
	if fewest := is.fewest(goal); b.Len() != fewest {
		t.Fatalf("%d changes, %d are enough:\n%s", b.Len(), fewest, b)
	}
	// New entries come first, then changed ones, deleted destinations, and deleted
	// services.
	phase := map[uint8]int{cmdNewService: 1, cmdNewDest: 1, cmdSetService: 2, cmdSetDest: 2, cmdDelDest: 3, cmdDelService: 4}
	last := 0
	for n, msg := range b.messages {
		cmd := commandOf(msg)
		s, d := decode(msg)
		if phase[cmd] < last {
			t.Fatalf("change %d is out of order:\n%s", n, b)
		}
		last = phase[cmd]
		must(t, is.apply(cmd, s, d))
	}
	if !is.equal(goal) {
		t.Fatalf("the changes lead elsewhere:\n%s", b)
	}
	for _, table := range [][]TableEntry{have, want} {
		if same, err := Diff(table, table); err != nil || same.Len() != 0 {
			t.Fatalf("a table differs from itself: %v\n%s", err, same)
		}
	}
}

func TestDiffProperties(t *testing.T) {
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 0))
		var tables [2][]TableEntry
		for n := range tables {
			data := make([]byte, 200)
			for at := range data {
				data[at] = byte(r.Uint32())
			}
			tables[n] = tableFrom(data)
		}
		if checkDiff(t, tables[0], tables[1]); t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func FuzzDiff(f *testing.F) {
	f.Add([]byte{}, []byte{1, 1, 1, 1})
	f.Add([]byte("some table of some bytes"), []byte("and another one of others"))
	f.Fuzz(func(t *testing.T, have, want []byte) { checkDiff(t, tableFrom(have), tableFrom(want)) })
}

// An invalid entry is a change that cannot be sent and affects nothing else: the
// existing entry in its place stays, and all other changes are made.
func TestDiffBadInput(t *testing.T) {
	service := func(change func(*Service)) *Service {
		s := ipv4Service(1)
		change(s)
		return s
	}
	same := func(*Service) {}
	long := strings.Repeat("x", 16)
	dests := func() []*Destination { return []*Destination{ipv4Destination(1)} }
	mapped := ipv4Destination(1)
	mapped.AddressFamily = unix.AF_INET6
	heavy := *ipv4Destination(1)
	heavy.Weight = -1
	four := ipv4Service(1)
	four.Address = four.Address.To4() // the same service, written otherwise
	const (
		is    = "-t 10.0.0.1:80"
		dest  = is + " -r 10.1.0.1:8080"
		added = "-A " + is + " -s rr\n"
	)
	bad := func(n int, text string) string { return fmt.Sprintf("# not possible: change %d, %s\n", n, text) }
	for _, test := range []struct {
		name         string
		want         []TableEntry
		empty, there string // the changes if nothing is there, and if the service is, with two destinations
	}{
		{"service twice", []TableEntry{{service(same), dests()}, {four, []*Destination{ipv4Destination(7)}}},
			added + "-a " + dest + " -m -w 1\n" + bad(2, "NewService "+is+": ipvs: wanted twice; the first one counts"),
			bad(0, "UpdateService "+is+": ipvs: wanted twice; the first one counts") + "-d " + is + " -r 10.1.0.2:8080\n"},
		{"destination twice, ready and not", []TableEntry{{service(same), []*Destination{ipv4Destination(1), &heavy}}},
			added + "-a " + dest + " -m -w 1\n" + bad(2, "NewDestination "+dest+": ipvs: wanted twice; the first one counts"),
			bad(0, "UpdateDestination "+dest+": ipvs: wanted twice; the first one counts") + "-d " + is + " -r 10.1.0.2:8080\n"},
		{"nil service", []TableEntry{{nil, dests()}, {service(same), dests()}},
			bad(0, "NewService: ipvs: the service is nil") + added + "-a " + dest + " -m -w 1\n",
			bad(0, "NewService: ipvs: the service is nil") + "-d " + is + " -r 10.1.0.2:8080\n"},
		{"nil destination", []TableEntry{{service(same), append(dests(), nil)}},
			added + "-a " + dest + " -m -w 1\n" + bad(2, "NewDestination "+is+": ipvs: the destination is nil"),
			bad(0, "NewDestination "+is+": ipvs: the destination is nil") + "-d " + is + " -r 10.1.0.2:8080\n"},
		{"no address", []TableEntry{{&Service{Protocol: 6, Port: 80}, dests()}, {service(same), []*Destination{ipv4Destination(1), ipv4Destination(2)}}},
			bad(0, "NewService -t <nil>:80: ipvs: the service has no address") + added + "-a " + dest + " -m -w 1\n-a " + is + " -r 10.1.0.2:8080 -m -w 1\n",
			bad(0, "NewService -t <nil>:80: ipvs: the service has no address")},
		{"weight out of range", []TableEntry{{service(same), []*Destination{&heavy}}},
			added + bad(1, "NewDestination "+dest+": ipvs: weight -1 is not in 0..2147483647: numerical result out of range"),
			bad(0, "UpdateDestination "+dest+": ipvs: weight -1 is not in 0..2147483647: numerical result out of range") + "-d " + is + " -r 10.1.0.2:8080\n"},
		{"scheduler name too long", []TableEntry{{service(func(s *Service) { s.SchedName = long }), []*Destination{&heavy}}},
			bad(0, "NewService "+is+`: ipvs: scheduler "xxxxxxxxxxxxxxxx" has 16 bytes, at most 15 are possible`) +
				bad(1, "NewDestination "+dest+": ipvs: weight -1 is not in 0..2147483647: numerical result out of range"),
			bad(0, "UpdateService "+is+`: ipvs: scheduler "xxxxxxxxxxxxxxxx" has 16 bytes, at most 15 are possible`) +
				bad(1, "UpdateDestination "+dest+": ipvs: weight -1 is not in 0..2147483647: numerical result out of range")},
		{"engine name too long", []TableEntry{{service(func(s *Service) { s.PEName = long }), dests()}},
			bad(0, "NewService "+is+`: ipvs: persistence engine "xxxxxxxxxxxxxxxx" has 16 bytes, at most 15 are possible`),
			bad(0, "UpdateService "+is+`: ipvs: persistence engine "xxxxxxxxxxxxxxxx" has 16 bytes, at most 15 are possible`)},
		// These are meant to be the existing services and destinations.
		{"family that contradicts the address", []TableEntry{{service(func(s *Service) { s.AddressFamily, s.Address = unix.AF_INET6, s.Address.To4() }), dests()}},
			bad(0, "NewService "+is+": ipvs: the service's address 10.0.0.1 is not of its address family 10"),
			bad(0, "NewService "+is+": ipvs: the service's address 10.0.0.1 is not of its address family 10")},
		{"family that contradicts the address in 16 bytes", []TableEntry{{service(func(s *Service) { s.AddressFamily = unix.AF_INET6 }), dests()}},
			bad(0, "NewService -t [::ffff:10.0.0.1]:80: ipvs: the service's address 10.0.0.1 is not of its address family 10"),
			bad(0, "NewService -t [::ffff:10.0.0.1]:80: ipvs: the service's address 10.0.0.1 is not of its address family 10")},
		{"destination's family that contradicts its address", []TableEntry{{service(same), []*Destination{mapped}}},
			added + bad(1, "NewDestination "+is+" -r [::ffff:10.1.0.1]:8080: ipvs: the destination's address 10.1.0.1 is not of its address family 10"),
			bad(0, "NewDestination "+is+" -r [::ffff:10.1.0.1]:8080: ipvs: the destination's address 10.1.0.1 is not of its address family 10") +
				"-d " + is + " -r 10.1.0.2:8080\n"},
		{"unknown family", []TableEntry{{service(func(s *Service) { s.AddressFamily = 7 }), dests()}},
			bad(0, "NewService "+is+": ipvs: address family 7 is neither AF_INET (2) nor AF_INET6 (10): address family not supported by protocol"),
			bad(0, "NewService "+is+": ipvs: address family 7 is neither AF_INET (2) nor AF_INET6 (10): address family not supported by protocol")},
	} {
		there := []TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(1), ipv4Destination(2)}}}
		for have, want := range map[*[]TableEntry]string{{}: test.empty, &there: test.there} {
			if got := mustGet(Diff(*have, test.want))(t).String(); got != want {
				t.Errorf("%s, with %d services there:\n%swant\n%s", test.name, len(*have), got, want)
			}
		}
	}
	// A firewall mark without a family can be meant for either.
	marks := []TableEntry{{&Service{FWMark: 1, AddressFamily: unix.AF_INET}, nil}, {&Service{FWMark: 1, AddressFamily: unix.AF_INET6}, nil}, {&Service{FWMark: 2, AddressFamily: unix.AF_INET}, nil}}
	if got, want := mustGet(Diff(marks, []TableEntry{{&Service{FWMark: 1}, nil}}))(t).String(),
		bad(0, "NewService -f 1: ipvs: the service of firewall mark 1 has no address family")+"-D -f 2\n"; got != want {
		t.Errorf("mark without family:\n%swant\n%s", got, want)
	}
	if _, err := Diff([]TableEntry{{}}, nil); !errors.Is(err, errNilService) {
		t.Errorf("nil service in have: %v", err)
	}
}

// An invalid destination is reported even if its service is invalid, or if it is
// invalid only as a new one.
func TestDiffBadDestinationOfBadService(t *testing.T) {
	v6 := &Destination{AddressFamily: unix.AF_INET6, Address: net.ParseIP("10.1.0.1"), Weight: 1}
	b, err := Diff(nil, []TableEntry{{&Service{Protocol: unix.IPPROTO_TCP, Port: 80}, []*Destination{v6, ipv4Destination(2)}}})
	must(t, err)
	i, k := newFake(t, acknowledge)
	var failed *BatchError
	if err := i.Do(b); !errors.As(err, &failed) || len(failed.Errors) != 2 || len(k.requests) != 0 ||
		failed.Errors[1].Destination == nil || !strings.Contains(failed.Errors[1].Error(), "is not of its address family") {
		t.Errorf("%d requests, %v", len(k.requests), err)
	}
}

// Diff rejects an existing table with an entry that no kernel can have.
func TestDiffBadExistingTable(t *testing.T) {
	bad := []TableEntry{{ipv4Service(1), []*Destination{{Port: 80}}}}
	want := []TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(1)}}}
	if b, err := Diff(bad, want); err == nil || b != nil || !strings.HasSuffix(err.Error(), " (of the existing service -t 10.0.0.1:80)") {
		t.Errorf("got %v, %v", b, err)
	}
}

// The settings of a tunnel that is not used make no difference.
func TestDiffUnusedTunnel(t *testing.T) {
	for _, c := range []struct {
		have, want uint32
		changes    int
	}{
		{ConnectionFlagMasq, ConnectionFlagMasq, 0},
		{ConnectionFlagDirectRoute, ConnectionFlagDirectRoute | 0x100, 0},
		{ConnectionFlagTunnel, ConnectionFlagTunnel, 1},
		{ConnectionFlagTunnel, ConnectionFlagMasq, 1},
		{ConnectionFlagMasq, ConnectionFlagTunnel, 1},
	} {
		have, want := *ipv4Destination(1), *ipv4Destination(1)
		have.ConnectionFlags, have.TunnelType, have.TunnelPort = c.have, TunnelGUE, 6080
		want.ConnectionFlags, want.TunnelFlags = c.want, TunnelFlagChecksum
		b := mustGet(Diff([]TableEntry{{ipv4Service(1), []*Destination{&have}}}, []TableEntry{{ipv4Service(1), []*Destination{&want}}}))(t)
		if b.Len() != c.changes {
			t.Errorf("from method %d to %d: %d changes, want %d:\n%s", c.have, c.want, b.Len(), c.changes, b)
		}
	}
}

// The shortcut for destinations in the same order does not affect the changes.
func TestDiffListed(t *testing.T) {
	r := rand.New(rand.NewPCG(21, 22))
	data := make([]byte, 200)
	random := func() []TableEntry {
		for n := range data {
			data[n] = byte(r.Uint32())
		}
		return tableFrom(data)
	}
	same := 0
	for range 400 {
		have, want := random(), random()
		for n := range have { // as the kernel lists it
			for m, d := range have[n].Destinations {
				listed := normalisedDest(d)
				listed.ConnectionFlags &= ConnectionFlagFwdMask
				have[n].Destinations[m] = &listed
			}
			have[n].Destinations = dropDuplicates(have[n].Destinations, keyOfDestination)
			if n < len(want) && r.IntN(2) == 0 {
				want[n] = TableEntry{have[n].Service, slices.Clone(have[n].Destinations)}
				if r.IntN(2) == 0 {
					slices.Reverse(want[n].Destinations)
				}
				if k := len(want[n].Destinations); k > 0 && r.IntN(3) == 0 {
					changed := *want[n].Destinations[r.IntN(k)]
					changed.Weight++
					want[n].Destinations[r.IntN(k)] = &changed
				}
				if sameDestinations(have[n].Destinations, want[n].Destinations) {
					same++
				}
			}
		}
		full := mustGet(Diff(have, want))(t)
		listed := mustGet((&differ{listed: true}).diff(have, want))(t)
		if full.String() != listed.String() {
			t.Fatalf("the changes are\n%s\nwithout the order\n%s", listed, full)
		}
	}
	if same < 100 {
		t.Errorf("%d times nothing had to be matched: the test shows nothing", same)
	}
}
