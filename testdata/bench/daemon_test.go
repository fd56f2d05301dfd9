//go:build linux

package bench

import (
	"runtime"
	"testing"

	moby "github.com/moby/ipvs"
	"golang.org/x/sys/unix"
	this "ipvs.test/checkout"
)

// A container daemon does this for each container: it opens a handle for a
// network namespace, checks whether a service exists, adds a destination, and
// closes the handle. An op is all of that; there are at most 500.
func BenchmarkDaemon(b *testing.B) {
	const services = 500
	if b.N > services {
		b.Fatalf("%d ops, at most %d are possible", b.N, services)
	}
	m := newMeter(b)
	ns := newNamespace(b)
	table := newTable(services, 1)
	fill(b, ns, table)
	added := func(n int) destination {
		return destination{address: [4]byte{10, 200, byte(n >> 8), byte(n)}, weight: 1}
	}
	var change func(n int) error
	switch path := ns.path(); *library {
	case "this":
		c := new(thisClient)
		c.types()
		all := changesOf(table, added, c.service, c.destination)
		change = func(n int) error {
			return daemonChange(all[n], func() (*this.Handle, error) { return this.New(path) })
		}
	case "moby":
		c := new(mobyClient)
		c.types()
		all := changesOf(table, added, c.service, c.destination)
		change = func(n int) error {
			return daemonChange(all[n], func() (*moby.Handle, error) { return moby.New(path) })
		}
	case "limit":
		change = limitDaemon(b, ns, table, added)
	default:
		b.Skip("it can neither choose a namespace nor close")
	}
	m.start()
	for n := range b.N {
		if err := change(n); err != nil {
			b.Fatal(err)
		}
	}
	m.stop()
	for n := range b.N {
		table[n].destinations = append(table[n].destinations, added(n))
	}
	verify(b, ns, table)
	m.report()
}

// changesOf returns the destinations to add, in a library's types.
func changesOf[S, D any](table []service, added func(int) destination, s func(*service) *S, d func(*destination) *D) (all []prepared[S, D]) {
	for n := range table {
		more := added(n)
		all = append(all, prepared[S, D]{newDestination, s(&table[n]), d(&more)})
	}
	return all
}

func daemonChange[S, D any, H interface {
	IsServicePresent(*S) bool
	NewDestination(*S, *D) error
	Close()
}](p prepared[S, D], open func() (H, error)) error {
	h, err := open()
	if err != nil {
		return err
	}
	defer h.Close()
	if !h.IsServicePresent(p.s) {
		return unix.ESRCH
	}
	return h.NewDestination(p.s, p.d)
}

// limitDaemon does the same with prepared bytes, on a thread that goes to the
// namespace and back for each socket, as the libraries do.
func limitDaemon(b *testing.B, ns namespace, table []service, added func(int) destination) func(n int) error {
	c := open(b, "limit", ns).(*limit)
	runtime.LockOSThread() // never unlocked: the thread ends with the benchmark
	in := make([]byte, 4<<10)
	var gets, news [][]byte
	for n := range table {
		d := added(n)
		gets = append(gets, c.message(cmdGetService, 0, &table[n], nil, false))
		news = append(news, c.message(cmdNewDest, unix.NLM_F_ACK, &table[n], &d, true))
	}
	path := ns.path()
	return func(n int) error {
		fd, err := openAt(path)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if _, err := transfer(unix.SYS_SENDTO, fd, gets[n]); err != nil {
			return err
		}
		if _, err := transfer(unix.SYS_RECVFROM, fd, in); err != nil { // the service
			return err
		}
		return exchange(fd, in, news[n])
	}
}
