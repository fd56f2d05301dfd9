//go:build linux

package compat

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	original "github.com/moby/ipvs"
)

// operations is how many TestRandom makes.
const operations = 5000

// side is one of two namespaces side by side: in the first the original
// changes what is there, in the second the checkout. Both read both.
type side struct {
	pair
	closed pair
}

func newSide(t *testing.T) *side {
	ns := newNamespace(t)
	s := &side{ns.pair(t), ns.pair(t)}
	s.closed.original.Close()
	s.closed.checkout.Close()
	return s
}

// TestRandom makes the same random operations with both libraries, valid ones
// and others, and compares all that a caller sees, and what the kernel has
// then. Whatever is not the same must be a difference that is listed.
func TestRandom(t *testing.T) {
	needKernel(t)
	g := newGenerator(t)
	r := &random{t: t, a: newSide(t), b: newSide(t), differences: knownDifferences(), outcomes: map[string]int{}}
	r.config = operation{method: "GetConfig"}.call(r.b.checkout)
	p := g.pool()
	for n := range operations {
		if n%500 == 499 {
			p = g.pool()
			flush(t, "original", r.a.original)
			flush(t, "checkout", r.b.checkout)
		}
		op := g.operation(p)
		r.history = append(r.history, op.String())
		if r.try(op) == nil && op.method == "NewDestination" && op.service != nil && op.destination != nil {
			p.made = append(p.made, op)
		}
		if n%40 == 39 {
			r.sameTables()
		}
	}
	r.sameTables()
	r.report()
}

type random struct {
	t           *testing.T
	a, b        *side
	differences []*difference
	outcomes    map[string]int // of methods
	history     []string       // since the tables were compared last
	config      outcome        // of GetConfig, where the checkout makes the changes
	failures    int
}

func (r *random) failf(op operation, format string, args ...any) {
	r.t.Helper()
	r.t.Errorf("%s\n\t%s", op, fmt.Sprintf(format, args...))
	if r.failures++; r.failures >= 20 {
		r.t.Fatal("and no more of these")
	}
}

// try makes an operation on both sides, and returns the checkout's error.
func (r *random) try(op operation) error {
	r.t.Helper()
	if op.foreign {
		a, b := op.clone().call(r.a.checkout), op.clone().call(r.b.checkout)
		if !same(a, b) {
			r.failf(op, "where the original makes the changes: %s\n\twhere the checkout makes them: %s", a, b)
			r.resync()
		}
		if op.method == "SetConfig" {
			r.sameConfig(op, b.err)
		}
		return b.err
	}
	if !changes(op.method) {
		r.compare(op, r.a, r.a)
		return r.compare(op, r.b, r.b)
	}
	err := r.compare(op, r.a, r.b)
	switch {
	case op.service != nil:
		r.sameEntry(op)
	case op.method == "SetConfig":
		r.sameConfig(op, err)
	}
	return err
}

// compare makes an operation with the original on one side and the checkout on
// another, which may be the same, and returns the checkout's error.
func (r *random) compare(op operation, forOriginal, forCheckout *side) error {
	r.t.Helper()
	o, c := forOriginal.original, forCheckout.checkout
	if op.closed {
		o, c = forOriginal.closed.original, forCheckout.closed.checkout
	}
	was, is := readBoth(op, o, c)
	r.outcomes[op.method+": "+howItEnded(is)]++
	for corrected := op; !same(was, is); {
		d := r.find(corrected, was, is)
		if d != nil {
			d.seen++
		}
		if d == nil || d.correct == nil {
			if d == nil {
				r.failf(op, "original: %s\n\tcheckout: %s", was, is)
			}
			if changes(op.method) && was.err == nil && was.panicked == nil {
				r.resync() // what the original did is undone
			}
			break
		}
		corrected = corrected.clone()
		d.correct(&corrected)
		was = corrected.clone().call(o)
	}
	return is.err
}

func howItEnded(o outcome) string {
	switch _, bare := o.err.(syscall.Errno); {
	case o.panicked != nil:
		return "panic"
	case o.err != nil && !bare:
		return "an error of its own"
	}
	return describe(o.err)
}

func (r *random) find(op operation, o, c outcome) *difference {
	for _, d := range r.differences {
		if d.applies != nil && d.applies(op, o, c) {
			return d
		}
	}
	return nil
}

// readBoth makes a call with both. Services are listed again until the original
// does so twice in the same way: kernels from 7 on sort them anew for some time
// after the table grew.
func readBoth(op operation, o, c library) (was, is outcome) {
	was, is = op.clone().call(o), op.clone().call(c)
	for tries := 0; op.method == "GetServices" && !same(was, is) && tries < 50; tries++ {
		time.Sleep(10 * time.Millisecond)
		before := op.call(o)
		if was, is = op.call(o), op.call(c); same(before, was) && same(op.call(o), was) {
			break
		}
	}
	return was, is
}

// same reports whether two outcomes are the same to a caller.
func same(o, c outcome) bool {
	switch {
	case o.panicked != nil || c.panicked != nil:
		return false
	case !reflect.DeepEqual(o.value, c.value):
		return false
	case o.err == nil || c.err == nil:
		return o.err == c.err
	}
	_, oBare := o.err.(syscall.Errno)
	_, cBare := c.err.(syscall.Errno)
	return oBare == cBare && o.err.Error() == c.err.Error()
}

// snapshot reads a service and its destinations.
func (s *side) snapshot(of *original.Service) snapshot {
	h, id := s.checkout.(converted).h, service(identityOf(of))
	got, serviceErr := h.GetService(id)
	destinations, err := h.GetDestinations(id)
	return snapshot{got, destinations, fmt.Sprint(serviceErr, err)}
}

// sameEntry compares the service of an operation on both sides.
func (r *random) sameEntry(op operation) {
	r.t.Helper()
	a, b := r.a.snapshot(op.service), r.b.snapshot(op.service)
	if a.equal(b) {
		return
	}
	i := slices.IndexFunc(r.differences, func(d *difference) bool { return d.state != nil && d.state(op, a, b) })
	if i >= 0 {
		r.differences[i].seen++
	} else {
		r.failf(op, "then, where the original did it: %s\n\twhere the checkout did it: %s", a, b)
	}
	r.resync()
}

// sameConfig compares the timeouts after SetConfig. An error has changed none.
func (r *random) sameConfig(op operation, err error) {
	r.t.Helper()
	read := operation{method: "GetConfig"}
	a, b := read.call(r.a.checkout), read.call(r.b.checkout)
	if !same(a, b) || err != nil && !same(b, r.config) {
		r.failf(op, "then, where the original did it: %s\n\twhere the checkout did it: %s\n\tbefore: %s", a, b, r.config)
		r.resync()
	}
	r.config = b
}

// sameTables compares the tables of both sides.
func (r *random) sameTables() {
	r.t.Helper()
	a, b := r.tables()
	if !slices.Equal(a, b) {
		compare(r.t, "where the original did it", a, "where the checkout did it", b)
		r.t.Fatal("after these operations:\n\t" + strings.Join(r.history, "\n\t"))
	}
	r.history = r.history[:0]
}

// tables reads both tables. Where they differ it reads again, as a list can be
// without an entry while a kernel from 7 on sorts the services anew.
func (r *random) tables() (a, b []string) {
	r.t.Helper()
	for tries := range 3 {
		if a, b = r.a.table(r.t), r.b.table(r.t); slices.Equal(a, b) {
			break
		}
		time.Sleep(time.Duration(tries) * 20 * time.Millisecond)
	}
	return a, b
}

// table lists all that the checkout reads, with the place of each destination.
func (s *side) table(t *testing.T) []string {
	t.Helper()
	h := s.checkout.(converted).h
	services, err := h.GetServices()
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, service := range services {
		lines = append(lines, line(service))
		destinations, err := h.GetDestinations(service)
		if err != nil {
			t.Fatal(err)
		}
		for i, d := range destinations {
			lines = append(lines, fmt.Sprintf("%s -> %d: %s", line(service), i, line(d)))
		}
	}
	slices.Sort(lines)
	return lines
}

// resync makes the two sides the same again, after an operation that the two
// libraries are meant to do differently: services that differ go.
func (r *random) resync() {
	r.t.Helper()
	config, err := r.b.checkout.GetConfig()
	if err == nil {
		err = r.a.checkout.SetConfig(config)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	for range 5 {
		a, b := r.tables()
		if slices.Equal(a, b) {
			return
		}
		differ := map[string]bool{}
		for _, lines := range [][2][]string{{a, b}, {b, a}} {
			for _, l := range lines[0] {
				if !slices.Contains(lines[1], l) {
					service, _, _ := strings.Cut(l, " -> ")
					differ[service] = true
				}
			}
		}
		r.a.deleteServices(r.t, differ)
		r.b.deleteServices(r.t, differ)
	}
	r.t.Fatal("the tables cannot be made the same")
}

func (s *side) deleteServices(t *testing.T, lines map[string]bool) {
	t.Helper()
	h := s.checkout.(converted).h
	services, err := h.GetServices()
	if err != nil {
		t.Fatal(err)
	}
	for _, service := range services {
		if !lines[line(service)] {
			continue
		}
		if err := h.DelService(service); err != nil {
			t.Fatalf("delete %s: %v", line(service), err)
		}
	}
}

// often is how each method must have ended, for the comparison to prove
// something.
var often = map[string][]error{
	"NewService":         {nil, syscall.EEXIST, syscall.ENOENT},
	"UpdateService":      {nil, syscall.ESRCH, syscall.ENOENT},
	"DelService":         {nil, syscall.ESRCH},
	"NewDestination":     {nil, syscall.EEXIST, syscall.ESRCH, syscall.EINVAL, syscall.ERANGE},
	"UpdateDestination":  {nil, syscall.ENOENT, syscall.ESRCH, syscall.EINVAL, syscall.ERANGE},
	"DelDestination":     {nil, syscall.ENOENT, syscall.ESRCH},
	"GetService":         {nil, syscall.ESRCH},
	"GetServices":        {nil},
	"GetDestinations":    {nil},
	"IsServicePresent":   {nil},
	"GetConfig":          {nil},
	"SetConfig":          {nil, syscall.EINVAL},
	"RewriteService":     {nil, syscall.ESRCH},
	"RewriteDestination": {nil},
	"New":                {nil},
	"Flush":              {nil},
}

// report fails where the operations were not as various as they should be.
func (r *random) report() {
	r.t.Helper()
	for _, d := range r.differences {
		r.t.Logf("%5d times: %s", d.seen, d.row)
		if d.seen == 0 {
			r.t.Errorf("a listed difference was never seen: %s", d.row)
		}
	}
	for method, errs := range often {
		for _, err := range errs {
			if how := method + ": " + describe(err); r.outcomes[how] == 0 {
				r.t.Errorf("never seen: %s", how)
			}
		}
	}
	var lines []string
	for how, n := range r.outcomes {
		lines = append(lines, fmt.Sprintf("%s: %d", how, n))
	}
	slices.Sort(lines)
	r.t.Log("outcomes with the checkout:\n" + strings.Join(lines, "\n"))
}
