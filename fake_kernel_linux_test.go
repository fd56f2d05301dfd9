package ipvs

import (
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The Fake and a kernel get the same calls, and return the same results.

// kernelDifferences are the differences of other kernels from 6.12, on which the Fake
// is modeled; its doc comment lists them. With them the Fake behaves like those
// kernels.
var kernelDifferences = []struct {
	what  string
	there func(t *testing.T) bool
	apply func(*fakePair)
}{
	{"Debian's 5.10 and 6.1 have no scheduler twos", func(t *testing.T) bool { return kernelBefore(t, 6, 2) }, func(p *fakePair) {
		p.fake.table.schedulers = slices.DeleteFunc(slices.Clone(fakeSchedulers), func(s string) bool { return s == PowerOfTwoChoices })
	}},
	{"5.10 takes any thresholds", func(t *testing.T) bool { return kernelBefore(t, 6, 1) }, func(p *fakePair) {
		p.fake.table.maxThreshold = math.MaxUint32
	}},
	// It rebuilds its table of services some milliseconds after it grew or shrank, and
	// lists it incompletely meanwhile.
	{"7.2 has random hashes of services", kernelAtLeast7, func(p *fakePair) {
		p.randomOrder = true
	}},
	{"7.2 has a small table of connections as long as there are few", kernelAtLeast7, func(p *fakePair) {
		p.fake.table.connectionTableSize = 256
	}},
}

// fakePair is a kernel and the Fake, with handles that get the same calls.
type fakePair struct {
	t           *testing.T
	fake        *Fake
	kernels     []*Handle
	fakes       []*Handle
	succeeded   int  // calls on the kernel, of those that were compared
	randomOrder bool // the order of the kernel's services is random
}

func newFakePair(t *testing.T) *fakePair {
	t.Helper()
	needKernel(t)
	ns := newNamespace(t)
	holdHooks()
	if inVM {
		// Every change of a scheduler waits for a grace period.
		must(t, os.WriteFile("/sys/kernel/rcu_expedited", []byte("1"), 0))
		t.Cleanup(func() { os.WriteFile("/sys/kernel/rcu_expedited", []byte("0"), 0) })
		// A 5.10 kernel hung while it loaded lblcr for a service, apparently because it
		// was removing an earlier test's namespace.
		for _, name := range append([]string{"pe_sip"}, fakeSchedulers...) {
			exec.Command("modprobe", "ip_vs_"+name).Run() // some kernels lack some
		}
	}
	quickIPv6(t, ns)
	iproute(t, ns, "link add sync type dummy", "link set sync up", "addr add 192.0.2.1/32 dev sync", "addr add 2001:db8:5::1/128 dev sync nodad")
	p := &fakePair{t: t, fake: NewFake()}
	for range 3 {
		p.kernels = append(p.kernels, openIn(t, ns))
		p.fakes = append(p.fakes, p.fake.Handle())
	}
	stopDaemons(t, p.kernels[0])
	for _, d := range kernelDifferences {
		if d.there(t) {
			t.Log(d.what)
			d.apply(p)
		}
	}
	if !p.randomOrder {
		p.findSalt()
	}
	return p
}

// findSalt determines the order of the kernel's services, which depends on the address
// of the namespace in memory: it is one of 256.
func (p *fakePair) findSalt() {
	p.t.Helper()
	var b Batch
	for n := range 256 {
		b.NewService(ipv4Service(n))
	}
	for n := range 256 {
		b.NewService(&Service{FWMark: uint32(n + 1), AddressFamily: unix.AF_INET, SchedName: RoundRobin})
	}
	i := p.kernels[0]
	must(p.t, i.Do(&b))
	services := mustGet(i.GetServices())(p.t)
	p.fake.table.salt = saltOf(services)
	must(p.t, p.fakes[0].Do(&b))
	p.same(named("512 services"), func(i *Handle) (any, error) { return i.GetServices() }, 0)
	must(p.t, i.Flush())
	must(p.t, p.fakes[0].Flush())
}

// same makes a call on both, and fails the test if the results differ.
func (p *fakePair) same(name fmt.Stringer, do func(*Handle) (any, error), n int) bool {
	p.t.Helper()
	want, wantErr := do(p.kernels[n])
	got, gotErr := do(p.fakes[n])
	if p.randomOrder {
		eventually(func() bool {
			if servicesIn(want) < servicesIn(got) {
				want, wantErr = do(p.kernels[n])
			}
			return servicesIn(want) >= servicesIn(got)
		})
	}
	return p.compare(name, want, wantErr, got, gotErr)
}

// compare compares the results of a kernel and the Fake.
func (p *fakePair) compare(name fmt.Stringer, want any, wantErr error, got any, gotErr error) bool {
	p.t.Helper()
	if wantErr == nil {
		p.succeeded++
	}
	if p.randomOrder {
		sortServices(want)
		sortServices(got)
	}
	if equalErrors(wantErr, gotErr) && reflect.DeepEqual(want, got) {
		return true
	}
	p.t.Errorf("%v\n%s", name, differingLines(describeResult(want, wantErr), describeResult(got, gotErr)))
	return false
}

// differingLines returns the lines that only one of two texts has, or both texts if
// only the order differs.
func differingLines(kernel, fake string) string {
	var b strings.Builder
	kernelLines, fakeLines := strings.Split(kernel, "\n"), strings.Split(fake, "\n")
	for _, line := range kernelLines {
		if !slices.Contains(fakeLines, line) {
			b.WriteString("only the kernel: " + line + "\n")
		}
	}
	for _, line := range fakeLines {
		if !slices.Contains(kernelLines, line) {
			b.WriteString("only the Fake:   " + line + "\n")
		}
	}
	if b.Len() == 0 {
		return "the kernel:\n" + kernel + "\nthe Fake:\n" + fake
	}
	return b.String()
}

// servicesIn returns the number of services in a list of them.
func servicesIn(result any) int {
	switch list := result.(type) {
	case []*Service:
		return len(list)
	case []TableEntry:
		return len(list)
	}
	return 0
}

// sortServices sorts lists whose order is random.
func sortServices(result any) {
	switch list := result.(type) {
	case []string:
		slices.Sort(list)
	case []*Service:
		slices.SortFunc(list, func(a, b *Service) int { return strings.Compare(serviceName(a), serviceName(b)) })
	case []TableEntry:
		slices.SortFunc(list, func(a, b TableEntry) int { return strings.Compare(serviceName(a.Service), serviceName(b.Service)) })
	}
}

// named is a name that exists already.
type named string

func (n named) String() string { return string(n) }

// The Fake returns this kernel's results for random calls. IPVS_TEST_LONG=1 makes
// 100,000 of them, IPVS_TEST_SEED chooses others.
func TestKernelFake(t *testing.T) {
	p := newFakePair(t)
	seed, _ := strconv.ParseUint(os.Getenv("IPVS_TEST_SEED"), 10, 64)
	r := newFakeRandom(seed)
	calls, changes, interleaved, most, failures := 0, 0, 0, 0, 0
	for n := range times(3000, 100_000) {
		o := r.operation()
		if o.lists && p.randomOrder {
			time.Sleep(100 * time.Millisecond) // the table is complete
		}
		ok := true
		if r.rarely(20) {
			ok = p.interleaved(r, o)
			interleaved++
		} else {
			ok = p.same(&o, o.do, r.IntN(3))
		}
		calls, changes = calls+1, changes+o.changes
		if calls%10_000 == 0 {
			t.Logf("%d calls", calls)
		}
		if s, reader := o.service, r.IntN(3); ok && s != nil {
			ok = p.same(after{"GetService", &o}, func(i *Handle) (any, error) { return i.GetService(s) }, reader) &&
				p.same(after{"GetDestinations", &o}, func(i *Handle) (any, error) { return i.GetDestinations(s) }, reader)
		}
		if ok && n%25 == 0 {
			ok = p.same(after{"GetTable", &o}, func(i *Handle) (any, error) { return i.GetTable() }, r.IntN(3))
			most = max(most, len(p.fake.table.services))
		}
		if !ok {
			if failures++; failures == 10 {
				t.Fatalf("seed %d: too many failures, after %d calls", seed, calls)
			}
			for _, i := range []*Handle{p.kernels[0], p.fakes[0]} { // go on from the same state
				must(t, i.Flush())
			}
		}
	}
	t.Logf("seed %d: %d calls and their readings, %d without an error, %d calls between the parts of a list, and %d changes in batches; up to %d services", seed, calls, p.succeeded, interleaved, changes, most)
	if most < 20 || interleaved == 0 {
		t.Error("the calls did not make a table worth comparing")
	}
}

// after names a reading after a call.
type after struct {
	what string
	call *fakeOperation
}

func (a after) String() string { return a.what + " after " + a.call.String() }

// interleaved reads a list of several parts, and makes this call and others on another
// handle between the parts. Lists of services are not among them if they can be
// incomplete.
func (p *fakePair) interleaved(r fakeRandom, o fakeOperation) bool {
	p.t.Helper()
	between := slices.DeleteFunc([]fakeOperation{o, r.operation(), r.operation()}, func(o fakeOperation) bool { return o.lists && p.randomOrder })
	s, _ := r.place()
	list := func(i *Handle) (any, error) { return i.GetServices() }
	if p.randomOrder || r.rarely(4) {
		list = func(i *Handle) (any, error) { return i.GetDestinations(s) }
	}
	type result struct {
		value any
		err   error
	}
	run := func(reader, other *Handle) (results []result) {
		receive, next := reader.socket.recvmsg, 0
		reader.socket.recvmsg = func(fd int, b []byte) (int, uint32, error) {
			n, from, err := receive(fd, b)
			if err == nil && next < len(between) {
				value, err := between[next].do(other)
				results = append(results, result{value, err})
				next++
			}
			return n, from, err
		}
		value, err := list(reader)
		reader.socket.recvmsg = receive
		return append(results, result{value, err})
	}
	want, got := run(p.kernels[0], p.kernels[1]), run(p.fakes[0], p.fakes[1])
	if len(want) != len(got) {
		p.t.Errorf("the kernel's list took %d parts, the Fake's %d", len(want)-1, len(got)-1)
		return false
	}
	for n := range want {
		var name fmt.Stringer = named(fmt.Sprintf("a list with %v", between))
		if n < len(want)-1 {
			name = &between[n]
		}
		if !p.compare(name, want[n].value, want[n].err, got[n].value, got[n].err) {
			return false
		}
	}
	return true
}

// The Fake starts the daemons that this kernel starts, with each value of each setting.
func TestKernelFakeDaemons(t *testing.T) {
	p := newFakePair(t)
	for _, d := range daemonSettings() {
		if !p.same(named(fmt.Sprintf("NewDaemon %+v", d)), startAndList(&d), 0) {
			continue
		}
		stop := func(i *Handle) (any, error) { return nil, i.DelDaemon(d.State) }
		p.same(named(fmt.Sprintf("DelDaemon %+v", d)), stop, 0)
	}
	if p.succeeded < 100 {
		t.Errorf("only %d daemons started and stopped", p.succeeded)
	}
}

// daemonSettings returns daemons that differ from the usual ones in one setting, and in
// all lengths for each group. Missing interfaces are not among them, since the Fake has
// every interface.
func daemonSettings() (all []Daemon) {
	for _, state := range []DaemonState{DaemonMaster, DaemonBackup, 0, 3} {
		usual := Daemon{State: state, MulticastInterface: "sync", SyncID: 7}
		add := func(set func(*Daemon)) {
			d := usual
			set(&d)
			all = append(all, d)
		}
		for _, group := range []string{"", "224.0.0.81", "ff02::81", "223.0.0.1", "239.255.0.1", "240.0.0.1", "fe02::1"} {
			for _, length := range []uint16{0, 1, 2, 1000, 1023, 1024, 1025, 1472, 1473, 65487, 65488, 65507, 65508, math.MaxUint16} {
				add(func(d *Daemon) { d.MulticastGroup, d.SyncMaxLen = net.ParseIP(group), length })
			}
		}
		for _, id := range []uint32{0, 1, 255, 256, math.MaxUint32} {
			add(func(d *Daemon) { d.SyncID = id })
		}
		for _, port := range []uint16{1, 8848, math.MaxUint16} {
			add(func(d *Daemon) { d.MulticastPort = port })
		}
		for _, ttl := range []uint8{1, 2, math.MaxUint8} {
			add(func(d *Daemon) { d.MulticastTTL = ttl })
		}
		for _, link := range []string{"", "1234567890123456"} {
			add(func(d *Daemon) { d.MulticastInterface = link })
		}
	}
	return all
}
