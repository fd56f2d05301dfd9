package ipvs

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The cost of the Fake: time in tests, and nothing in programs that do not use it.

const (
	fakeTestServices     = 1000
	fakeTestDestinations = 10
)

// bigTable returns a table of newly made services and destinations.
func bigTable() (table []TableEntry) {
	for n := range fakeTestServices {
		e := TableEntry{Service: ipv4Service(n)}
		for d := range fakeTestDestinations {
			e.Destinations = append(e.Destinations, ipv4Destination(fakeTestDestinations*n+d))
		}
		table = append(table, e)
	}
	return table
}

// cpuTime returns the processor time that the process has used: a busy machine hardly
// affects it.
func cpuTime() time.Duration {
	var u unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// A table of thousands is quick enough for a unit test. Even an emulated machine stays
// within the limit; BenchmarkFake measures the time.
func TestFakeSpeed(t *testing.T) {
	limit := 5 * time.Second // some twenty times what it takes, and far below what a quadratic step would
	if inVM {
		limit = time.Minute // emulated
	}
	i := NewFake().Handle()
	r := Reconciler{Handle: i}
	want := bigTable()
	for _, step := range []struct {
		name    string
		do      func() (int, error)
		changes int
	}{
		{"made", func() (int, error) { c, err := r.Reconcile(want); return c.Total(), err }, fakeTestServices * (1 + fakeTestDestinations)},
		{"reconciled without a change", func() (int, error) { c, err := r.Reconcile(want); return c.Total(), err }, 0},
		{"listed", func() (int, error) { table, err := i.GetTable(); return len(table), err }, fakeTestServices},
	} {
		start := cpuTime()
		n, err := step.do()
		took := cpuTime() - start
		must(t, err)
		if n != step.changes {
			t.Errorf("%s: %d, want %d", step.name, n, step.changes)
		}
		t.Logf("%d services with %d destinations %s in %v of processor time", fakeTestServices, fakeTestDestinations, step.name, took)
		if took > limit {
			t.Errorf("%s in %v of processor time", step.name, took)
		}
	}
}

// BenchmarkFake makes, lists and reconciles 1,000 services with 10 destinations each.
func BenchmarkFake(b *testing.B) {
	want := bigTable()
	run := func(name string, f func()) {
		b.Run(name, func(b *testing.B) {
			start := cpuTime()
			for b.Loop() {
				f()
			}
			b.ReportMetric(float64((cpuTime()-start).Milliseconds())/float64(b.N), "cpu-ms/op")
		})
	}
	run("make", func() {
		i := NewFake().Handle()
		for _, e := range want {
			must(b, i.NewService(e.Service))
			for _, d := range e.Destinations {
				must(b, i.NewDestination(e.Service, d))
			}
		}
	})
	i := NewFake().Handle()
	r := Reconciler{Handle: i}
	must(b, second(r.Reconcile(want)))
	run("list", func() { must(b, second(i.GetTable())) })
	run("reconcile", func() { must(b, second(r.Reconcile(want))) })
}

// A program that does not use the Fake contains none of it, even if it can call every
// method of a Handle by name.
func TestFakeNotLinked(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("SKIP: needs the go command")
	}
	program := func(use string) string {
		return `package main

import (
	"os"
	"reflect"

	"github.com/moby/ipvs"
)

func main() {
	i, err := ipvs.New("")
	if err != nil {
		os.Exit(1)
	}
	_ = ` + use + `
	for _, v := range []any{i, &ipvs.Reconciler{Handle: i}, &ipvs.Batch{}} {
		reflect.ValueOf(v).MethodByName(os.Args[1]).Call(nil)
	}
}
`
	}
	symbols := func(use string) (of []string) {
		t.Helper()
		dir := t.TempDir()
		main, binary := filepath.Join(dir, "main.go"), filepath.Join(dir, "main")
		must(t, os.WriteFile(main, []byte(program(use)), 0o644))
		c := exec.Command("go", "build", "-o", binary, main)
		c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("go build: %v\n%s", err, out)
		}
		out, err := exec.Command("go", "tool", "nm", binary).Output()
		must(t, err)
		for line := range bytes.Lines(out) {
			if fields := strings.Fields(string(line)); strings.Contains(fields[len(fields)-1], "moby/ipvs.") {
				of = append(of, fields[len(fields)-1])
			}
		}
		return of
	}
	isFake := func(symbol string) bool { return strings.Contains(strings.ToLower(symbol), "fake") }
	without, with := symbols("i"), symbols("ipvs.NewFake().Handle()")
	if n := slices.IndexFunc(without, isFake); n >= 0 {
		t.Errorf("a program without a Fake has %s", without[n])
	}
	for _, name := range []string{"(*Handle).NewService", "(*Reconciler).Reconcile", "(*Batch).NewDestination"} {
		if !slices.ContainsFunc(without, func(s string) bool { return strings.HasSuffix(s, name) }) {
			t.Errorf("the program without a Fake does not have %s among %d symbols", name, len(without))
		}
	}
	if !slices.ContainsFunc(with, isFake) {
		t.Errorf("a program with a Fake has no symbol of it among %d", len(with))
	}
}
