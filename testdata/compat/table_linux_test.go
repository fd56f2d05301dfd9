//go:build linux

package compat

import (
	"fmt"
	"net"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	original "github.com/moby/ipvs"
	checkout "ipvs.test/checkout"

	"golang.org/x/sys/unix"
)

// TestSameTable programs the same generated tables with both libraries, reads
// them with both, and compares what the kernel was told, what came back, and
// every error on the way.
func TestSameTable(t *testing.T) {
	needKernel(t)
	for _, test := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"namespaces", testNamespaces},
		{"new", testNew},
		{"rewrite", testRewrite},
		{"edges", testEdges},
		{"changes", testChanges},
		{"refused", testRefused},
		{"denied", testDenied},
		{"config", testConfig},
	} {
		t.Run(test.name, test.run)
	}
}

// create programs entries, and fails where the kernel refuses one.
func create(t *testing.T, name string, l library, entries []entry) {
	t.Helper()
	for _, e := range entries {
		if err := l.NewService(e.service); err != nil {
			t.Fatalf("%s: new service %s: %v", name, line(e.service), err)
		}
		for _, d := range e.destinations {
			if err := l.NewDestination(e.service, d); err != nil {
				t.Fatalf("%s: new destination %s -> %s: %v", name, line(e.service), line(d), err)
			}
		}
	}
}

func flush(t *testing.T, name string, l library) {
	t.Helper()
	if err := l.Flush(); err != nil {
		t.Fatalf("%s: flush: %v", name, err)
	}
}

func count(entries []entry) int {
	n := len(entries)
	for _, e := range entries {
		n += len(e.destinations)
	}
	return n
}

// testNamespaces opens handles for the namespace of the thread and for
// another one: each must reach the table it should, and the thread must be
// where it was.
func testNamespaces(t *testing.T) {
	here, there := newNamespace(t), newNamespace(t)
	mark := func(n uint32) *original.Service {
		return with(markService(), func(s *original.Service) { s.FWMark = n })
	}
	here.do(t, func() {
		hereID, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		for i, open := range []func(path string) (library, error){
			func(path string) (library, error) { return original.New(path) },
			func(path string) (library, error) {
				h, err := checkout.New(path)
				return converted{h}, err
			},
		} {
			for j, path := range []string{"", there.path()} {
				l, err := open(path)
				if err != nil {
					t.Fatal(err)
				}
				create(t, fmt.Sprint(i), l, []entry{{service: mark(uint32(1 + 2*i + j))}})
				l.Close()
				if id, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || id != hereID {
					t.Fatalf("%d: the thread is in %s, was in %s (%v)", i, id, hereID, err)
				}
			}
		}
	})
	for j, ns := range []namespace{here, there} {
		p := pair{ns.original(t), converted{ns.checkout(t)}}
		if got := p.read(t); len(got) != 2 {
			t.Errorf("namespace %d: %d services, want 2: %q", j, len(got), got)
		}
		for i := range 2 {
			if s := mark(uint32(1 + 2*i + j)); !p.checkout.IsServicePresent(s) {
				t.Errorf("namespace %d: no %s", j, line(s))
			}
		}
	}
}

func testNew(t *testing.T) {
	p := newPair(t)
	g := newGenerator(t)
	entries := g.entries(300)
	// One whose destinations come in several messages.
	many := entry{service: markService()}
	for i := range 700 {
		d := g.destination(syscall.AF_INET)
		d.Port = uint16(1 + i)
		many.destinations = append(many.destinations, d)
	}
	entries = append(entries, many)

	create(t, "original", p.original, entries)
	o := p.read(t)
	if len(o) != count(entries) {
		t.Fatalf("%d services and destinations programmed, %d read", count(entries), len(o))
	}
	for _, e := range entries {
		sameLookup(t, p, e.service)
	}
	flush(t, "original", p.original)
	if left := p.read(t); len(left) != 0 {
		t.Fatal("left after the original's flush: ", left)
	}
	for _, e := range entries[:10] {
		sameLookup(t, p, e.service)
	}

	create(t, "checkout", p.checkout, entries)
	c := p.read(t)
	compare(t, "programmed by the original", o, "programmed by the checkout", c)
	flush(t, "checkout", p.checkout)
	if left := p.read(t); len(left) != 0 {
		t.Fatal("left after the checkout's flush: ", left)
	}
	t.Logf("%d services, %d destinations", len(entries), len(o)-len(entries))
}

// sameLookup asks both for one service, by its identity alone.
func sameLookup(t *testing.T, p pair, s *original.Service) {
	t.Helper()
	id := identityOf(s)
	o, oErr := p.original.GetService(id)
	c, cErr := p.checkout.GetService(id)
	sameError(t, "GetService "+line(id), oErr, cErr)
	if (o == nil) != (c == nil) || o != nil && line(o) != line(c) {
		t.Errorf("GetService %s:\noriginal: %+v\ncheckout: %+v", line(id), o, c)
	}
	if o, c := p.original.IsServicePresent(id), p.checkout.IsServicePresent(id); o != c {
		t.Errorf("IsServicePresent %s: checkout: %t, original: %t", line(id), c, o)
	}
}

// testRewrite reads a table and writes all of it back, with each library:
// nothing may change.
func testRewrite(t *testing.T) {
	ns := newNamespace(t)
	o, c := ns.original(t), ns.checkout(t)
	p := pair{o, converted{c}}
	entries := newGenerator(t).entries(100)
	create(t, "original", p.original, entries)
	before := p.read(t)
	if err := writeBack[original.Service, original.Destination](o); err != nil {
		t.Fatal("original: ", err)
	}
	compare(t, "before", before, "after the original", p.read(t))
	if err := writeBack[checkout.Service, checkout.Destination](c); err != nil {
		t.Fatal("checkout: ", err)
	}
	compare(t, "before", before, "after the checkout", p.read(t))
}

type updater[S, D any] interface {
	GetServices() ([]*S, error)
	GetDestinations(*S) ([]*D, error)
	UpdateService(*S) error
	UpdateDestination(*S, *D) error
}

func writeBack[S, D any](h updater[S, D]) error {
	services, err := h.GetServices()
	if err != nil {
		return err
	}
	for _, s := range services {
		if err := h.UpdateService(s); err != nil {
			return fmt.Errorf("%+v: %w", s, err)
		}
		destinations, err := h.GetDestinations(s)
		if err != nil {
			return err
		}
		for _, d := range destinations {
			if err := h.UpdateDestination(s, d); err != nil {
				return fmt.Errorf("%+v -> %+v: %w", s, d, err)
			}
		}
	}
	return nil
}

// testEdges programs services and destinations one by one that callers seldom
// have: whatever the kernel does with them, it must be the same.
func testEdges(t *testing.T) {
	p := newPair(t)
	type S = original.Service
	type D = original.Destination
	v4 := func(change func(*S, *D)) entry {
		e := entry{v4Service(), []*D{v4Destination()}}
		change(e.service, e.destinations[0])
		return e
	}
	v6 := func(change func(*S, *D)) entry {
		e := entry{v6Service(), []*D{v6Destination()}}
		change(e.service, e.destinations[0])
		return e
	}
	for _, test := range []struct {
		name string
		entry
	}{
		{"plain IPv4", v4(func(*S, *D) {})},
		{"plain IPv6", v6(func(*S, *D) {})},
		{"any address", v4(func(s *S, _ *D) { s.Address = net.IPv4zero })},
		{"any IPv6 address", v6(func(s *S, _ *D) { s.Address = net.IPv6zero })},
		{"multicast service", v4(func(s *S, _ *D) { s.Address = net.IPv4(224, 0, 0, 1) })},
		{"broadcast service", v4(func(s *S, _ *D) { s.Address = net.IPv4bcast })},
		{"link-local IPv6 service", v6(func(s *S, _ *D) { s.Address = net.ParseIP("fe80::1") })},
		{"port 0 without persistence", v4(func(s *S, _ *D) { s.Port = 0 })},
		{"port 65535", v4(func(s *S, d *D) { s.Port, d.Port = 65535, 65535 })},
		{"another protocol", v4(func(s *S, _ *D) { s.Protocol = syscall.IPPROTO_ICMP })},
		{"a protocol of more than 8 bits", v4(func(s *S, _ *D) { s.Protocol = 0x0106 })},
		{"no protocol", v4(func(s *S, _ *D) { s.Protocol = 0 })},
		{"all flags", v4(func(s *S, _ *D) { s.Flags = 0xffffffff; s.Timeout = 1 })},
		{"the longest timeout", v4(func(s *S, _ *D) { s.Flags = persistent; s.Timeout = 0xffffffff })},
		{"persistent without a timeout", v4(func(s *S, _ *D) { s.Flags = persistent })},
		{"netmask 0", v4(func(s *S, _ *D) { s.Netmask = 0 })},
		{"netmask with a hole", v4(func(s *S, _ *D) { s.Netmask = 0x00ff00ff })},
		{"IPv6 netmask 1", v6(func(s *S, _ *D) { s.Netmask = 1 })},
		{"no scheduler", v4(func(s *S, _ *D) { s.SchedName = "none" })},
		{"scheduler left out", v4(func(s *S, _ *D) { s.SchedName = "" })},
		{"15 bytes of scheduler", v4(func(s *S, _ *D) { s.SchedName = "fifteen-letters" })},
		{"mark with all bits", entry{with(markService(), func(s *S) { s.FWMark = 0xffffffff }), []*D{v4Destination()}}},
		{"IPv6 mark", entry{&S{FWMark: 1, SchedName: "rr", Netmask: 128, AddressFamily: syscall.AF_INET6}, []*D{v6Destination()}}},

		{"any address as a destination", v4(func(_ *S, d *D) { d.Address = net.IPv4zero })},
		{"broadcast destination", v4(func(_ *S, d *D) { d.Address = net.IPv4bcast })},
		{"loopback destination", v4(func(_ *S, d *D) { d.Address = net.IPv4(127, 0, 0, 1) })},
		{"any IPv6 address as a destination", v6(func(_ *S, d *D) { d.Address = net.IPv6zero })},
		{"IPv6 loopback destination", v6(func(_ *S, d *D) { d.Address = net.IPv6loopback })},
		{"link-local IPv6 destination", v6(func(_ *S, d *D) { d.Address = net.ParseIP("fe80::1") })},
		{"IPv6 destination that ends in zeros", v6(func(_ *S, d *D) { d.Address = net.ParseIP("2001:db8::") })},
		{"IPv6 destination with an IPv4 one inside", v6(func(_ *S, d *D) { d.Address = net.ParseIP("64:ff9b::10.0.0.1") })},
		{"destination port 0", v4(func(_ *S, d *D) { d.Port = 0 })},
		{"method 7", v4(func(_ *S, d *D) { d.ConnectionFlags = 7 })},
		{"largest thresholds", v4(func(_ *S, d *D) { d.UpperThreshold, d.LowerThreshold = 0xffffffff, 0xffffffff })},
		{"a lower threshold alone", v4(func(_ *S, d *D) { d.LowerThreshold = 1 })},
	} {
		t.Run(test.name, func(t *testing.T) {
			try := func(l library) (errs []error, table []string) {
				s, d := test.service, test.destinations[0]
				flush(t, "before", l)
				errs = append(errs, l.NewService(s), l.NewDestination(s, d), l.UpdateService(s), l.UpdateDestination(s, d))
				table = p.read(t)
				sameLookup(t, p, s)
				errs = append(errs, l.DelDestination(identityOf(s), &D{Address: d.Address, Port: d.Port}), l.DelService(identityOf(s)))
				return errs, append(table, p.read(t)...)
			}
			oErrs, o := try(p.original)
			cErrs, c := try(p.checkout)
			for i, call := range []string{"NewService", "NewDestination", "UpdateService", "UpdateDestination", "DelDestination", "DelService"} {
				sameError(t, call, oErrs[i], cErrs[i])
			}
			compare(t, "programmed by the original", o, "programmed by the checkout", c)
			t.Log(oErrs)
		})
	}
}

// change is one call that changes the table, or tries to.
type change struct {
	name        string
	service     *original.Service
	destination *original.Destination
}

func (c change) String() string {
	text := c.name + " " + line(c.service)
	if c.destination != nil {
		text += " -> " + line(c.destination)
	}
	return text
}

func (c change) apply(l library) error {
	switch c.name {
	case "NewService":
		return l.NewService(c.service)
	case "UpdateService":
		return l.UpdateService(c.service)
	case "DelService":
		return l.DelService(c.service)
	case "NewDestination":
		return l.NewDestination(c.service, c.destination)
	case "UpdateDestination":
		return l.UpdateDestination(c.service, c.destination)
	case "DelDestination":
		return l.DelDestination(c.service, c.destination)
	case "Flush":
		return l.Flush()
	}
	panic(c.name)
}

// changes makes n changes of a few services and destinations, so that many
// meet what an earlier one left, and some are refused.
func (g generator) changes(n int) []change {
	services := g.entries(12)
	for i, e := range services {
		for len(e.destinations) < 4 {
			e.destinations = append(e.destinations, g.destination(e.service.AddressFamily))
		}
		services[i] = e
	}
	var all []change
	for _, e := range services {
		all = append(all, change{"NewService", e.service, nil})
	}
	for len(all) < n {
		e := pick(g, services...)
		s := *e.service
		d := *pick(g, e.destinations...)
		if g.chance(2) {
			s = *identityOf(&s) // enough for all but the first two
		}
		switch k := g.IntN(200); {
		case k < 40:
			g.settings(&s)
			all = append(all, change{"NewService", &s, nil})
		case k < 70:
			g.settings(&s)
			all = append(all, change{"UpdateService", &s, nil})
		case k < 76:
			all = append(all, change{"DelService", &s, nil})
		case k < 140:
			g.weights(&d)
			if g.chance(20) {
				d.LowerThreshold = d.UpperThreshold + 1 // ERANGE
			}
			all = append(all, change{"NewDestination", &s, &d})
		case k < 180:
			g.weights(&d)
			if g.chance(20) {
				d.LowerThreshold = d.UpperThreshold + 1
			}
			all = append(all, change{"UpdateDestination", &s, &d})
		case k < 199:
			all = append(all, change{"DelDestination", &s, &d})
		default:
			all = append(all, change{"Flush", &s, nil})
		}
	}
	return all
}

// testChanges makes the same changes three times: all with the original, all
// with the checkout, and by turns. All three must end in the same errors and
// the same table, and pass through the same ones.
func testChanges(t *testing.T) {
	g := newGenerator(t)
	changes := g.changes(600)
	turns := make([]bool, len(changes))
	for i := range turns {
		turns[i] = g.chance(2)
	}

	type result struct {
		errors []error
		tables [][]string
	}
	run := func(t *testing.T, with func(p pair, i int) library) (r result) {
		p := newPair(t)
		for i, c := range changes {
			r.errors = append(r.errors, c.apply(with(p, i)))
			if i%50 == 49 {
				r.tables = append(r.tables, p.read(t))
			}
		}
		return r
	}
	want := run(t, func(p pair, _ int) library { return p.original })
	seen := map[error]int{}
	for _, err := range want.errors {
		seen[err]++
	}
	t.Log("the original's results: ", seen)
	for _, err := range []error{nil, syscall.EEXIST, syscall.ESRCH, syscall.ENOENT, syscall.ERANGE} {
		if seen[err] == 0 {
			t.Errorf("no change ended with %v: the comparison proves little", err)
		}
	}

	for name, with := range map[string]func(pair, int) library{
		"checkout": func(p pair, _ int) library { return p.checkout },
		"by turns": func(p pair, i int) library {
			if turns[i] {
				return p.original
			}
			return p.checkout
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := run(t, with)
			for i, c := range changes {
				sameError(t, fmt.Sprintf("change %d, %s", i, c), want.errors[i], got.errors[i])
			}
			for i := range want.tables {
				compare(t, fmt.Sprintf("with the original, table %d", i), want.tables[i], name, got.tables[i])
			}
		})
	}
}

func v4Service() *original.Service {
	return &original.Service{
		Address: net.IPv4(10, 1, 1, 1), Protocol: syscall.IPPROTO_TCP, Port: 80,
		SchedName: original.RoundRobin, Netmask: 0xffffffff, AddressFamily: syscall.AF_INET,
	}
}

func v6Service() *original.Service {
	return &original.Service{
		Address: net.ParseIP("2001:db8::1"), Protocol: syscall.IPPROTO_TCP, Port: 80,
		SchedName: original.RoundRobin, Netmask: 128, AddressFamily: syscall.AF_INET6,
	}
}

func markService() *original.Service {
	return &original.Service{FWMark: 1, SchedName: original.RoundRobin, Netmask: 0xffffffff, AddressFamily: syscall.AF_INET}
}

func v4Destination() *original.Destination {
	return &original.Destination{Address: net.IPv4(10, 2, 2, 2), Port: 8080, Weight: 1}
}

func v6Destination() *original.Destination {
	return &original.Destination{Address: net.ParseIP("2001:db8::2"), Port: 8080, Weight: 1}
}

// with changes a copy.
func with[T any](v *T, change func(*T)) *T {
	c := *v
	change(&c)
	return &c
}

// testRefused has both libraries ask for what the kernel refuses: the same
// bare error number must come back.
func testRefused(t *testing.T) {
	p := newPair(t)
	present, missing := v4Service(), with(v4Service(), func(s *original.Service) { s.Port = 81 })
	mark, noMark := markService(), with(markService(), func(s *original.Service) { s.FWMark = 2 })
	there := v4Destination()
	gone := with(there, func(d *original.Destination) { d.Port = 1 })
	create(t, "original", p.original, []entry{
		{present, []*original.Destination{there}},
		{v6Service(), []*original.Destination{v6Destination()}},
		{mark, []*original.Destination{there}},
	})
	before := p.read(t)

	type S = original.Service
	type D = original.Destination
	for _, test := range []struct {
		what string
		change
		want error
	}{
		{"duplicate service", change{"NewService", present, nil}, syscall.EEXIST},
		{"duplicate IPv6 service", change{"NewService", v6Service(), nil}, syscall.EEXIST},
		{"duplicate mark", change{"NewService", mark, nil}, syscall.EEXIST},
		{"unknown scheduler", change{"NewService", with(missing, func(s *S) { s.SchedName = "nosuch" }), nil}, syscall.ENOENT},
		{"update to an unknown scheduler", change{"UpdateService", with(present, func(s *S) { s.SchedName = "nosuch" }), nil}, syscall.ENOENT},
		{"unknown persistence engine", change{"NewService", with(missing, func(s *S) { s.PEName = "nosuch"; s.Flags = persistent }), nil}, syscall.ENOENT},
		{"IPv6 netmask too long", change{"NewService", with(v6Service(), func(s *S) { s.Port = 81; s.Netmask = 129 }), nil}, syscall.EINVAL},
		{"update of a missing service", change{"UpdateService", missing, nil}, syscall.ESRCH},
		{"update of a missing mark", change{"UpdateService", noMark, nil}, syscall.ESRCH},
		{"delete of a missing service", change{"DelService", missing, nil}, syscall.ESRCH},
		{"delete of another protocol", change{"DelService", with(present, func(s *S) { s.Protocol = syscall.IPPROTO_UDP }), nil}, syscall.ESRCH},
		{"delete of a missing mark", change{"DelService", noMark, nil}, syscall.ESRCH},

		{"duplicate destination", change{"NewDestination", present, there}, syscall.EEXIST},
		{"duplicate destination of a mark", change{"NewDestination", mark, there}, syscall.EEXIST},
		{"duplicate IPv6 destination", change{"NewDestination", v6Service(), v6Destination()}, syscall.EEXIST},
		{"destination for a missing service", change{"NewDestination", missing, there}, syscall.ESRCH},
		{"thresholds crossed", change{"NewDestination", present, with(gone, func(d *D) { d.UpperThreshold, d.LowerThreshold = 1, 2 })}, syscall.ERANGE},
		{"multicast destination", change{"NewDestination", present, with(gone, func(d *D) { d.Address = net.IPv4(224, 0, 0, 1) })}, syscall.EINVAL},
		{"multicast IPv6 destination", change{"NewDestination", v6Service(), with(v6Destination(), func(d *D) { d.Address = net.ParseIP("ff02::1") })}, syscall.EINVAL},
		{"update of a missing destination", change{"UpdateDestination", present, gone}, syscall.ENOENT},
		{"update of a destination of a missing service", change{"UpdateDestination", missing, there}, syscall.ESRCH},
		{"update to crossed thresholds", change{"UpdateDestination", present, with(there, func(d *D) { d.UpperThreshold, d.LowerThreshold = 1, 2 })}, syscall.ERANGE},
		{"delete of a missing destination", change{"DelDestination", present, gone}, syscall.ENOENT},
		{"delete of a destination of a missing service", change{"DelDestination", missing, there}, syscall.ESRCH},
		{"delete of a destination of a missing mark", change{"DelDestination", noMark, there}, syscall.ESRCH},
	} {
		t.Run(test.what, func(t *testing.T) {
			o, c := test.apply(p.original), test.apply(p.checkout)
			sameError(t, test.what, o, c)
			if o != test.want {
				t.Errorf("original: %s, want %s", describe(o), describe(test.want))
			}
		})
	}
	compare(t, "before", before, "after", p.read(t))

	for _, s := range []*S{missing, noMark} {
		sameLookup(t, p, s)
		o, oErr := p.original.GetDestinations(s)
		c, cErr := p.checkout.GetDestinations(s)
		sameError(t, "destinations of a missing service", oErr, cErr)
		if len(o) != 0 || len(c) != 0 {
			t.Errorf("destinations of a missing service: original: %v, checkout: %v", o, c)
		}
	}

	for name, path := range map[string]string{"no file": "/nonexistent/ns", "not a namespace": "/proc/self/status"} {
		t.Run("New: "+name, func(t *testing.T) {
			o, oErr := original.New(path)
			if oErr == nil {
				o.Close()
			}
			c, cErr := checkout.New(path)
			if cErr == nil {
				c.Close()
			}
			if oErr == nil || cErr == nil {
				t.Errorf("original: %s, checkout: %s", describe(oErr), describe(cErr))
			}
		})
	}
}

// testDenied makes calls on a thread that has lost its capabilities.
func testDenied(t *testing.T) {
	ns := newNamespace(t)
	p := pair{ns.original(t), converted{ns.checkout(t)}}
	calls := map[string]func(library) error{
		"Flush": library.Flush,
	}
	s, d := v4Service(), v4Destination()
	for _, name := range []string{"NewService", "UpdateService", "DelService", "NewDestination", "UpdateDestination", "DelDestination"} {
		calls[name] = change{name, s, d}.apply
	}
	calls["GetServices"] = func(l library) error { _, err := l.GetServices(); return err }
	calls["GetDestinations"] = func(l library) error { _, err := l.GetDestinations(s); return err }
	calls["GetService"] = func(l library) error { _, err := l.GetService(s); return err }
	calls["GetConfig"] = func(l library) error { _, err := l.GetConfig(); return err }
	calls["SetConfig"] = func(l library) error { return l.SetConfig(&original.Config{TimeoutTCP: time.Minute}) }
	for name, call := range calls {
		var o, c error
		ns.do(t, func() {
			header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var had, less [2]unix.CapUserData
			if err := unix.Capget(&header, &had[0]); err != nil {
				t.Fatal(err)
			}
			less = had
			less[0].Effective, less[1].Effective = 0, 0
			if err := unix.Capset(&header, &less[0]); err != nil {
				t.Fatal(err)
			}
			o, c = call(p.original), call(p.checkout)
			if err := unix.Capset(&header, &had[0]); err != nil {
				t.Fatal(err)
			}
		})
		sameError(t, name, o, c)
		if o != syscall.EPERM {
			t.Errorf("%s: original: %s, want %s", name, describe(o), describe(syscall.EPERM))
		}
	}
}

func testConfig(t *testing.T) {
	p := newPair(t)
	g := newGenerator(t)
	read := func() original.Config {
		t.Helper()
		o, err := p.original.GetConfig()
		if err != nil {
			t.Fatal("original: ", err)
		}
		c, err := p.checkout.GetConfig()
		if err != nil {
			t.Fatal("checkout: ", err)
		}
		if *o != *c {
			t.Errorf("read by the original: %v, by the checkout: %v", *o, *c)
		}
		return *o
	}
	timeout := func() time.Duration {
		seconds := time.Duration(g.IntN(5)*g.IntN(1000)) * time.Second
		if seconds > 0 && g.chance(3) {
			seconds += time.Duration(g.Int64N(int64(time.Second))) // cut
		}
		return seconds
	}
	initial := read()
	if initial.TimeoutTCP == 0 {
		t.Error("nothing read: ", initial)
	}
	var configs []original.Config
	for range 50 {
		configs = append(configs, original.Config{TimeoutTCP: timeout(), TimeoutTCPFin: timeout(), TimeoutUDP: timeout()})
	}
	// More than the kernel takes, less than the library refuses.
	configs = append(configs, original.Config{TimeoutTCP: (1<<31 - 1) * time.Second})
	apply := func(l library) (seen []string) {
		// Where a zero changes nothing, the start must be the same.
		if err := l.SetConfig(&initial); err != nil {
			t.Fatal(err)
		}
		for _, c := range configs {
			err := l.SetConfig(&c)
			seen = append(seen, fmt.Sprint(c, describe(err), read()))
		}
		return seen
	}
	o, c := apply(p.original), apply(p.checkout)
	if !slices.Equal(o, c) {
		t.Errorf("original:\n%q\ncheckout:\n%q", o, c)
	}
}
