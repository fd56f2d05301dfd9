//go:build linux

package bench

import (
	"flag"
	"maps"
	"runtime"
	"testing"
	"time"

	moby "github.com/moby/ipvs"
	"golang.org/x/sys/unix"
	this "ipvs.test/checkout"
)

var library = flag.String("lib", "this", "what to measure: this, netlink, moby, cloudflare or limit")

// meter is the benchmark's timer, and that of the processor times.
type meter struct {
	b            *testing.B
	began        unix.Rusage
	mallocs      uint64 // when it began
	user, system int64
	allocations  uint64
}

// newMeter begins a benchmark, with the timer stopped.
func newMeter(b *testing.B) *meter {
	b.StopTimer()
	b.ResetTimer()
	b.ReportAllocs()
	return &meter{b: b}
}

func (m *meter) start() {
	// The library is not charged for collecting the garbage of the preparation, nor
	// for work that the kernel deferred.
	runtime.GC()
	time.Sleep(100 * time.Millisecond)
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	m.mallocs = memory.Mallocs
	unix.Getrusage(unix.RUSAGE_SELF, &m.began)
	m.b.StartTimer()
}

func (m *meter) stop() {
	m.b.StopTimer()
	var now unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &now)
	m.user += now.Utime.Nano() - m.began.Utime.Nano()
	m.system += now.Stime.Nano() - m.began.Stime.Nano()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	m.allocations += memory.Mallocs - m.mallocs
}

func (m *meter) report() {
	// As allocs/op, which is a whole number.
	m.b.ReportMetric(float64(m.allocations)/float64(m.b.N), "mallocs/op")
	m.b.ReportMetric(float64(m.user)/float64(m.b.N), "user-ns/op")
	m.b.ReportMetric(float64(m.system)/float64(m.b.N), "sys-ns/op")
}

// fill makes the table in the namespace, the same way for all libraries.
func fill(b *testing.B, ns namespace, table []service) {
	b.Helper()
	c := open(b, "limit", ns).(*limit)
	c.prepare(nil, creates(table))
	if err := c.applyAll(); err != nil {
		b.Fatal("filling the table: ", err)
	}
	settle(b, ns, len(table))
}

// settle waits until lists have all services: from Linux 7 on they can miss some for
// a while after the table has grown.
func settle(b *testing.B, ns namespace, services int) {
	b.Helper()
	h, err := this.New(ns.path())
	if err != nil {
		b.Fatal(err)
	}
	defer h.Close()
	complete := 0
	for deadline := time.Now().Add(10 * time.Second); complete < 20; time.Sleep(time.Millisecond) {
		list, err := h.GetServices()
		if err != nil {
			b.Fatal(err)
		}
		if complete++; len(list) != services {
			complete = 0
		}
		if time.Now().After(deadline) {
			b.Fatalf("a list has %d services, want %d", len(list), services)
		}
	}
}

// verify fails unless the table is the one in the namespace.
func verify(b *testing.B, ns namespace, table []service) {
	b.Helper()
	h, err := this.New(ns.path())
	if err != nil {
		b.Fatal(err)
	}
	defer h.Close()
	entries, err := h.GetTable()
	if err != nil {
		b.Fatal(err)
	}
	type key struct{ service, destination [4]byte } // the service itself: no destination
	want := map[key]uint32{}
	for _, s := range table {
		want[key{service: s.address}] = s.timeout
		for _, d := range s.destinations {
			want[key{s.address, d.address}] = d.weight
		}
	}
	have := map[key]uint32{}
	for _, e := range entries {
		have[key{service: [4]byte(e.Service.Address)}] = e.Service.Timeout
		for _, d := range e.Destinations {
			have[key{[4]byte(e.Service.Address), [4]byte(d.Address)}] = uint32(d.Weight)
		}
	}
	if !maps.Equal(have, want) {
		b.Fatalf("the kernel's table is not what it should be: %d entries, want %d", len(have), len(want))
	}
}

// one makes changes one at a time, a table's worth of them after the other,
// each in a new namespace, from the table from to the table to. An op is one
// change.
func one(b *testing.B, from, to []service, changes []change) {
	m := newMeter(b)
	for left := b.N; left > 0; left -= len(changes) {
		ns := newNamespace(b)
		fill(b, ns, from)
		c := open(b, *library, ns)
		c.prepare(nil, changes)
		m.start()
		for n := range min(left, len(changes)) {
			if err := c.apply(n); err != nil {
				b.Fatal(err)
			}
		}
		m.stop()
		if left >= len(changes) {
			verify(b, ns, to)
		}
	}
	m.report()
}

// batch makes the same changes in batches of a table's worth. An op is one
// change, and -benchtime must be a multiple of their number. If the batch is
// collected beforehand, only sending it is measured.
func batch(b *testing.B, from, to []service, changes []change, beforehand bool) {
	m := newMeter(b)
	for left := b.N; left > 0; left -= len(changes) {
		ns := newNamespace(b)
		fill(b, ns, from)
		c, ok := open(b, *library, ns).(batcher)
		if !ok {
			b.Skip("it has no batches")
		}
		c.prepare(nil, changes[:min(left, len(changes))])
		if beforehand {
			c.collect()
		}
		m.start()
		if !beforehand {
			c.collect()
		}
		if err := c.applyAll(); err != nil {
			b.Fatal(err)
		}
		m.stop()
		if left >= len(changes) {
			verify(b, ns, to)
		}
	}
	m.report()
}

// Creating the table, 12,000 changes. An op is one change.
func BenchmarkCreate(b *testing.B)      { one(b, nil, standard(), creates(standard())) }
func BenchmarkCreateBatch(b *testing.B) { batch(b, nil, standard(), creates(standard()), false) }

// Another weight for each destination, 10,000 changes. An op is one change.
func BenchmarkUpdate(b *testing.B) {
	table := changed(standard(), 1, false)
	one(b, standard(), table, updates(standard(), table))
}

func BenchmarkUpdateBatch(b *testing.B) {
	table := changed(standard(), 1, false)
	batch(b, standard(), table, updates(standard(), table), false)
}

// What of that is sending, and the kernel's work.
func BenchmarkSendBatch(b *testing.B) {
	table := changed(standard(), 1, false)
	batch(b, standard(), table, updates(standard(), table), true)
}

// Deleting each destination, then its service, 12,000 changes. An op is one change.
func BenchmarkDelete(b *testing.B)      { one(b, standard(), nil, deletes(standard())) }
func BenchmarkDeleteBatch(b *testing.B) { batch(b, standard(), nil, deletes(standard()), false) }

// filled returns a client for a namespace with the table.
func filled(b *testing.B, table []service) client {
	b.Helper()
	ns := newNamespace(b)
	fill(b, ns, table)
	c := open(b, *library, ns)
	c.prepare(table, nil)
	return c
}

// found checks a count; -1 is that of one that does not count.
func found(b *testing.B, what string, n, want int, err error) {
	if err != nil {
		b.Fatal(err)
	}
	if n != -1 && n != want {
		b.Fatalf("%d %s found, want %d", n, what, want)
	}
}

// Listing the services. An op is one service, and -benchtime must be a
// multiple of 2,000. The first list is not counted: a handle that lives gets
// to know its table.
func BenchmarkListServices(b *testing.B) {
	m, table := newMeter(b), standard()
	c := filled(b, table)
	n, err := c.services()
	found(b, "services", n, len(table), err)
	m.start()
	for left := b.N; left > 0; left -= len(table) {
		n, err := c.services()
		found(b, "services", n, len(table), err)
	}
	m.stop()
	m.report()
}

// Listing the destinations of one service after the other. An op is one list.
// There are 10,000 destinations altogether.
func listDestinations(b *testing.B, each int) {
	m, table := newMeter(b), newTable(10000/each, each)
	c := filled(b, table)
	n, err := c.destinations(0)
	found(b, "destinations", n, each, err)
	m.start()
	for i := range b.N {
		n, err := c.destinations(i % len(table))
		found(b, "destinations", n, each, err)
	}
	m.stop()
	m.report()
}

func BenchmarkListDestinations5(b *testing.B)   { listDestinations(b, 5) }
func BenchmarkListDestinations50(b *testing.B)  { listDestinations(b, 50) }
func BenchmarkListDestinations500(b *testing.B) { listDestinations(b, 500) }

// Reading the whole table. An op is all of it; as above, once before.
func BenchmarkTable(b *testing.B) {
	m, table := newMeter(b), standard()
	c := filled(b, table)
	read := func() {
		services, destinations, err := c.table()
		found(b, "services", services, 2000, err)
		found(b, "destinations", destinations, 10000, err)
	}
	read()
	m.start()
	for range b.N {
		read()
	}
	m.stop()
	m.report()
}

// reconcile brings the table from one state to another, and next time back.
// An op is one reconciliation; as above, once before.
func reconcile(b *testing.B, from, to []service) {
	m := newMeter(b)
	ns := newNamespace(b)
	fill(b, ns, from)
	c, ok := open(b, *library, ns).(reconciler)
	if !ok {
		b.Skip("it has no reconciliation")
	}
	want := len(updates(from, to))
	once := func() {
		changes, err := c.reconcile()
		found(b, "changes", changes, want, err)
	}
	// A first time, for all but the changes.
	c.prepareReconcile(from, to)
	once()
	for range b.N {
		from, to = to, from
		c.prepareReconcile(from, to)
		m.start()
		once()
		m.stop()
	}
	verify(b, ns, to)
	m.report()
}

func BenchmarkReconcileNothing(b *testing.B) { reconcile(b, standard(), standard()) }

// Another weight for 100 of 10,000 destinations.
func BenchmarkReconcileOnePercent(b *testing.B) {
	reconcile(b, standard(), changed(standard(), 100, false))
}

// Other settings for all 2,000 services and 10,000 destinations.
func BenchmarkReconcileEverything(b *testing.B) {
	reconcile(b, standard(), changed(standard(), 1, true))
}

// A handle for another namespace. An op is to open it and to close it.
// cloudflare/ipvs can do neither: its caller has to change the namespace, and
// what it opened it cannot close.
func BenchmarkNewClose(b *testing.B) {
	m := newMeter(b)
	ns := newNamespace(b)
	var newClose func() error
	switch path := ns.path(); *library {
	case "this":
		newClose = func() error {
			h, err := this.New(path)
			if err == nil {
				h.Close()
			}
			return err
		}
	case "moby":
		newClose = func() error {
			h, err := moby.New(path)
			if err == nil {
				h.Close()
			}
			return err
		}
	case "limit":
		runtime.LockOSThread() // never unlocked: the thread ends with the benchmark
		newClose = func() error { return socketAt(path) }
	default:
		b.Skip("it can neither choose a namespace nor close")
	}
	if err := newClose(); err != nil {
		b.Fatal(err)
	}
	m.start()
	for range b.N {
		if err := newClose(); err != nil {
			b.Fatal(err)
		}
	}
	m.stop()
	m.report()
}

// socketAt opens and closes a socket in a namespace.
func socketAt(path string) error {
	fd, err := openAt(path)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// openAt opens a socket in a namespace. A library does not know in which one the
// thread is that it runs on, so it has to open that as well, for the way back. openAt
// does not look the family of IPVS up: a process that did once knows it.
func openAt(path string) (fd int, err error) {
	home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(home)
	ns, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(ns)
	if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
		return -1, err
	}
	fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_GENERIC)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	}
	if back := unix.Setns(home, unix.CLONE_NEWNET); err == nil {
		err = back
	}
	return fd, err
}
