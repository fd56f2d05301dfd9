//go:build linux

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/ipvs"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// The unit tests: a kernel in memory, which needs no root and no module.

// fixture is a proxier that a test runs round by round.
type fixture struct {
	t      *testing.T
	kernel *ipvs.Fake
	file   string
	*proxier
}

func newFixture(t *testing.T, drain time.Duration) *fixture {
	f := &fixture{t: t, kernel: ipvs.NewFake(), file: filepath.Join(t.TempDir(), "services.yaml")}
	f.start(drain)
	return f
}

// start starts a proxier in place of the running one.
func (f *fixture) start(drain time.Duration) {
	network := &net.IPNet{IP: net.IPv4(10, 96, 0, 0), Mask: net.CIDRMask(12, 32)}
	f.proxier = newProxier(f.kernel.Handle(), f.file, network, drain)
}

// round gives the proxier a file, and returns how its round ends.
func (f *fixture) round(file string) (ipvs.Changes, error) {
	f.t.Helper()
	must(f.t, os.WriteFile(f.file, []byte(file), 0o644))
	must(f.t, f.load())
	return f.reconcile()
}

// mustRound is a round that succeeds.
func (f *fixture) mustRound(file string) ipvs.Changes {
	f.t.Helper()
	changes, err := f.round(file)
	must(f.t, err)
	return changes
}

// connections sets how many connections the service has to a backend.
func (f *fixture) connections(address string, n int) {
	f.t.Helper()
	must(f.t, f.kernel.SetConnections(mine, &ipvs.Destination{Address: net.ParseIP(address), Port: 8080}, n, 0, 0))
}

// wantTable checks the kernel's table, in the notation of ipvsadm -Sn.
func (f *fixture) wantTable(want ...string) {
	f.t.Helper()
	got, err := tableLines(f.kernel.Handle())
	must(f.t, err)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		f.t.Errorf("the table is\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// metric returns the value that Prometheus reads, or 0 for a counter that never counted.
func metric(name string) float64 {
	page := httptest.NewRecorder()
	promhttp.Handler().ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
	value, _ := metricValue(page.Body.String(), name)
	return value
}

func (f *fixture) wantMetric(name string, want float64) {
	f.t.Helper()
	if got := metric(name); got != want {
		f.t.Errorf("%s is %v, want %v", name, got, want)
	}
}

// wantFailed checks that an error names these changes, and no others.
func (f *fixture) wantFailed(err error, want ...string) {
	f.t.Helper()
	var failed *ipvs.BatchError
	if !errors.As(err, &failed) {
		f.t.Fatalf("the error is %v, want a BatchError", err)
	}
	var got []string
	for _, e := range failed.Errors {
		got = append(got, e.Op+" "+e.Destination.Rule())
	}
	if !slices.Equal(got, want) {
		f.t.Errorf("failed: %q, want %q", got, want)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const (
	three = "services:\n- {address: 10.96.0.1, port: 80, destinations: [{address: 10.1.0.1, port: 8080}, {address: 10.1.0.2, port: 8080}, {address: 10.1.0.3, port: 8080}]}\n"
	none  = "services: []\n"
	lineC = "-a -t 10.96.0.1:80 -r 10.1.0.3:8080 -m -w 1"
)

func TestScaleUp(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.mustRound(onlyA)
	f.wantTable(serviceA, lineA)
	if changes := f.mustRound(three); changes != (ipvs.Changes{DestinationsAdded: 2}) {
		t.Errorf("scaled up with %+v", changes)
	}
	f.wantTable(serviceA, lineA, lineB, lineC)
	if changes := f.mustRound(three); changes != (ipvs.Changes{}) {
		t.Errorf("nothing is to be done, but: %+v", changes)
	}
}

func TestIPv6(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.proxier = newProxier(f.kernel.Handle(), f.file, &net.IPNet{IP: net.ParseIP("fd00::"), Mask: net.CIDRMask(108, 128)}, time.Minute)
	f.mustRound("services:\n- {address: 'fd00::1', port: 53, protocol: udp, scheduler: wrr, destinations: [{address: 'fd01::1', port: 5353, weight: 3}]}\n")
	f.wantTable("-A -u [fd00::1]:53 -s wrr", "-a -u [fd00::1]:53 -r [fd01::1]:5353 -m -w 3")
}

// A backend that left the file serves its connections until they end.
func TestScaleDown(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.mustRound(both)
	f.connections("10.1.0.2", 3)
	for range 2 {
		if changes := f.mustRound(onlyA); changes.RequeueAfter <= 0 || changes.RequeueAfter > time.Minute {
			t.Errorf("draining, to be looked at after %v", changes.RequeueAfter)
		}
		f.wantTable(serviceA, lineA, drainB)
		f.wantMetric("proxier_draining_destinations", 1)
	}
	f.connections("10.1.0.2", 0)
	f.mustRound(onlyA)
	f.wantTable(serviceA, lineA)
	f.wantMetric("proxier_draining_destinations", 0)
}

// Connections that do not end are cut when their time is up.
func TestDrainTimeLimit(t *testing.T) {
	f := newFixture(t, 10*time.Millisecond)
	f.mustRound(both)
	f.connections("10.1.0.2", 3)
	changes := f.mustRound(onlyA)
	f.wantTable(serviceA, lineA, drainB)
	time.Sleep(changes.RequeueAfter)
	f.mustRound(onlyA)
	f.wantTable(serviceA, lineA)
}

// A service that left the file stays until its last connection has ended.
func TestServiceLeaves(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.mustRound(both)
	f.connections("10.1.0.2", 3)
	f.mustRound(none)
	f.wantTable(serviceA, "-a -t 10.96.0.1:80 -r 10.1.0.1:8080 -m -w 0", drainB)
	f.connections("10.1.0.2", 0)
	f.mustRound(none)
	f.wantTable()
}

// The kernel refuses one change: it is reported, the others are made, and the next round
// makes it.
func TestChangeRefused(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.mustRound(onlyA)
	f.kernel.Fail("NewDestination", syscall.ENOMEM)
	_, err := f.round(three)
	f.wantFailed(err, "NewDestination -r 10.1.0.2:8080 -m -w 1")
	if !errors.Is(err, syscall.ENOMEM) {
		t.Errorf("the error is %v", err)
	}
	f.wantTable(serviceA, lineA, lineC)
	f.wantMetric("proxier_failing_changes", 1)

	f.mustRound(three)
	f.wantTable(serviceA, lineA, lineB, lineC)
	f.wantMetric("proxier_failing_changes", 0)
}

// The kernel makes the changes, but its reply is lost: the next round reads their
// outcome.
func TestReplyLost(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.mustRound(onlyA)
	f.kernel.Fail("NewDestination", os.ErrDeadlineExceeded)
	changes, err := f.round(three)
	f.wantFailed(err, "NewDestination -r 10.1.0.2:8080 -m -w 1", "NewDestination -r 10.1.0.3:8080 -m -w 1")
	if !errors.Is(err, ipvs.ErrOutcomeUnknown) || changes.Total() != 0 {
		t.Errorf("the error is %v, the changes are %+v", err, changes)
	}
	if changes := f.mustRound(three); changes != (ipvs.Changes{}) {
		t.Errorf("made again: %+v", changes)
	}
	f.wantTable(serviceA, lineA, lineB, lineC)
}

// The reply to the list is lost: the table stays as it is, and so do the gauges.
func TestListLost(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.mustRound(both)
	f.connections("10.1.0.2", 3)
	f.mustRound(onlyA)
	f.kernel.Fail("GetServices", os.ErrDeadlineExceeded)
	if _, err := f.round(three); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the error is %v", err)
	}
	f.wantTable(serviceA, lineA, drainB)
	f.wantMetric("proxier_draining_destinations", 1)
	f.mustRound(three)
	f.wantTable(serviceA, lineA, lineB, lineC)
	f.wantMetric("proxier_draining_destinations", 0)
}

// Services of other networks are not touched, unwanted ones of our network are deleted,
// and changes of another program to a wanted one are undone.
func TestAnotherWriter(t *testing.T) {
	f := newFixture(t, 0)
	f.mustRound(onlyA)
	other := f.kernel.Handle()
	must(t, other.NewService(foreign))
	must(t, other.NewDestination(foreign, backendA))
	must(t, other.NewService(stray))
	must(t, other.DelService(mine))
	f.mustRound(onlyA)
	f.wantTable(serviceA, lineA, serviceForeign, lineForeign)

	f.mustRound(none)
	f.wantTable(serviceForeign, lineForeign)
}

// A new process continues where the last one stopped.
func TestRestart(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.mustRound(both)
	f.connections("10.1.0.2", 3)
	f.mustRound(onlyA)

	f.start(time.Minute)
	f.wantTable(serviceA, lineA, drainB)
	if changes := f.mustRound(onlyA); changes.Total() != 0 || changes.Draining != 1 {
		t.Errorf("while B drains, a restart makes %+v", changes)
	}
	f.start(time.Minute)
	f.mustRound(both) // wanted again
	f.wantTable(serviceA, lineA, lineB)
	f.mustRound(onlyA)
	f.start(time.Minute)
	f.connections("10.1.0.2", 0)
	f.mustRound(onlyA)
	f.wantTable(serviceA, lineA)
}

// A file that cannot be read changes nothing.
func TestBrokenFile(t *testing.T) {
	f := newFixture(t, time.Minute)
	f.mustRound(both)
	f.start(time.Minute)
	broke := func(want error) {
		t.Helper()
		if err := f.load(); err == nil || want != nil && !errors.Is(err, want) {
			t.Errorf("the file is taken: %v", err)
		}
		if changes, err := f.reconcile(); changes != (ipvs.Changes{}) || err != nil {
			t.Errorf("made %+v, %v", changes, err)
		}
		f.wantTable(serviceA, lineA, lineB)
	}
	must(t, os.Remove(f.file))
	broke(fs.ErrNotExist) // as the first of a process
	f.mustRound(both)
	must(t, os.WriteFile(f.file, []byte(broken), 0o644))
	broke(nil)
	must(t, os.WriteFile(f.file, []byte(strings.Replace(onlyA, "port", "protocol: icmp, port", 1)), 0o644))
	broke(nil)
}

// An invalid entry does not affect the others.
func TestBadEntries(t *testing.T) {
	f := newFixture(t, time.Minute)
	if _, err := f.round(bad); err == nil {
		t.Error("no error")
	}
	f.wantTable(serviceA, lineA, lineB, serviceBad, lineBad)
	f.wantMetric("proxier_failing_changes", 5)
}

// Each change is counted by its kind, and the time of the last success moves.
func TestMetrics(t *testing.T) {
	f := newFixture(t, time.Minute)
	const lastSuccess = "proxier_last_success_timestamp_seconds"
	for _, step := range []struct{ file, change, object string }{
		{onlyA, "added", "service"},
		{both, "added", "destination"},
		{strings.Replace(both, "port: 80,", "port: 80, scheduler: wrr,", 1), "updated", "service"},
		{onlyA, "updated", "destination"}, // drains, and the scheduler is rr again
		{onlyA, "deleted", "destination"},
		{none, "updated", "destination"},
		{none, "deleted", "service"},
	} {
		name := fmt.Sprintf("proxier_changes_total{change=%q,object=%q}", step.change, step.object)
		count, success := metric(name), metric(lastSuccess)
		f.mustRound(step.file)
		f.wantMetric(name, count+1)
		if metric(lastSuccess) <= success {
			t.Errorf("%s: the last success is where it was", name)
		}
	}
	success := metric(lastSuccess)
	f.kernel.Fail("NewService", syscall.ENOMEM)
	if _, err := f.round(onlyA); err == nil {
		t.Error("no error")
	}
	f.wantMetric(lastSuccess, success)
}
