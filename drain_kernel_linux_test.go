package ipvs

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Draining with real connections: through a director with two services, each with
// the same two real servers, called A and B.

// A destination that is no longer wanted gets no new connections, and is deleted when
// the download from it has ended.
func TestKernelDrainDownload(t *testing.T) {
	x := newDownload(t, client4, virtual4, real4)
	want := withoutA(x.table())
	x.reconcile(t, want, Changes{DestinationsUpdated: 1, Draining: 1, RequeueAfter: time.Second})
	x.wantA(t, 0)
	x.goesOn(t)
	x.wantNew(t, 80, map[string]int{"B": 10})
	// The other service keeps its own.
	x.wantNew(t, 81, map[string]int{"A": 2, "B": 2})
	quiet := x.table()
	quiet[0].Destinations[0].Weight = 0
	checkTable(t, x.ipvs, quiet)
	x.drains(t, want, Changes{DestinationsDeleted: 1})
	x.wantNew(t, 80, map[string]int{"B": 2})
}

const (
	// drainFin is how long the director remembers a connection that the server has
	// ended and the client has not: if the client ended it, too, it would be in
	// TIME_WAIT for two minutes, which cannot be changed.
	drainFin = time.Second
	// drainLimit is longer than any test lasts.
	drainLimit = 10 * time.Minute

	drainPart  = 1000                  // bytes that a server sends at once
	drainPause = 10 * time.Millisecond // and how long it waits before the next ones
)

// drainsOn is what a call returns while one destination drains.
var drainsOn = Changes{Draining: 1, RequeueAfter: time.Second}

type drainTest struct {
	*network
	r                           *Reconciler
	clientIP, virtualIP, realIP string

	toA            net.Conn     // through the first service
	sent, received atomic.Int64 // parts of the download
	finish         chan struct{}
	downloaded     chan error
}

// drainTable has both services, with A and B as destinations.
func drainTable(virtual, real string) (table []TableEntry) {
	for _, port := range []uint16{80, 81} {
		s := &Service{Address: net.ParseIP(virtual), Protocol: unix.IPPROTO_TCP, Port: port, SchedName: RoundRobin, Netmask: 0xFFFFFFFF}
		if s.Address.To4() == nil {
			s.Netmask = 128
		}
		table = append(table, TableEntry{s, []*Destination{
			{Address: net.ParseIP(real), Port: 8080, Weight: 3},
			{Address: net.ParseIP(real), Port: 8081, Weight: 1},
		}})
	}
	return table
}

// withoutA removes A from the first service.
func withoutA(table []TableEntry) []TableEntry {
	table[0].Destinations = table[0].Destinations[1:]
	return table
}

// newDrain makes the network and the table, with a connection to A.
func newDrain(t *testing.T, client, virtual, real string) *drainTest {
	t.Helper()
	x := &drainTest{network: newNetwork(t), clientIP: client, virtualIP: virtual, realIP: real,
		finish: make(chan struct{}), downloaded: make(chan error, 1)}
	must(t, x.ipvs.SetConfig(&Config{TimeoutTCPFin: drainFin}))
	x.r = &Reconciler{Handle: x.ipvs, Drain: drainLimit}
	x.serve(t, "A", 8080)
	x.serve(t, "B", 8081)
	onlyA := x.table()
	onlyA[0].Destinations = onlyA[0].Destinations[:1]
	x.reconcile(t, onlyA, Changes{ServicesAdded: 2, DestinationsAdded: 3})
	x.toA = x.dial(t, 80)
	ask(t, x.toA, "name\n", "A\n")
	x.reconcile(t, x.table(), Changes{DestinationsAdded: 1})
	return x
}

// newDownload also begins a download from A.
func newDownload(t *testing.T, client, virtual, real string) *drainTest {
	t.Helper()
	x := newDrain(t, client, virtual, real)
	if _, err := io.WriteString(x.toA, "download\n"); err != nil {
		t.Fatal(err)
	}
	go func() { x.downloaded <- x.read() }()
	x.goesOn(t)
	return x
}

func (x *drainTest) table() []TableEntry { return drainTable(x.virtualIP, x.realIP) }

// downloadPart returns part n of a download.
func downloadPart(server string, n int64) string {
	return fmt.Sprintf("%s%0*d\n", server, drainPart-2, n)
}

// serve answers "name", and "download" with parts until the test finishes it.
func (x *drainTest) serve(t *testing.T, name string, port uint16) {
	t.Helper()
	acceptTCP(t, x.network.real, hostPort(x.realIP, port), func(c net.Conn) {
		c.SetDeadline(time.Now().Add(4 * trafficTimeout))
		for lines := bufio.NewScanner(c); lines.Scan(); {
			if lines.Text() == "name" {
				fmt.Fprintln(c, name)
				continue
			}
			for {
				if _, err := io.WriteString(c, downloadPart(name, x.sent.Load())); err != nil {
					return // the client notices
				}
				x.sent.Add(1)
				select {
				case <-x.finish:
					return
				case <-time.After(drainPause):
				}
			}
		}
	})
}

// read is the client's end of the download: every part has to be what A sends.
func (x *drainTest) read() error {
	for got := make([]byte, drainPart); ; x.received.Add(1) {
		n, err := io.ReadFull(x.toA, got)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("after %d bytes: %w", x.received.Load()*drainPart+int64(n), err)
		}
		if want := downloadPart("A", x.received.Load()); string(got) != want {
			return fmt.Errorf("part %d is %q", x.received.Load(), got)
		}
	}
}

func (x *drainTest) dial(t *testing.T, port uint16) net.Conn {
	t.Helper()
	c := dial(t, x.network.client, "tcp", x.clientIP, hostPort(x.virtualIP, port))
	must(t, c.SetDeadline(time.Now().Add(4*trafficTimeout)))
	return c
}

// goesOn checks that the download continues: more data arrives than can have been in
// transit.
func (x *drainTest) goesOn(t *testing.T) {
	t.Helper()
	before := x.received.Load()
	eventually(func() bool { return x.received.Load() >= before+20 })
	if after := x.received.Load(); after < before+20 {
		t.Fatalf("of the download arrive %d parts more, then none in %v", after-before, trafficTimeout)
	}
}

// wantNew opens connections one after the other, and counts which server answers.
func (x *drainTest) wantNew(t *testing.T, port uint16, want map[string]int) {
	t.Helper()
	got := map[string]int{}
	for n := 0; n < want["A"]+want["B"]; n++ {
		c := x.dial(t, port)
		if _, err := io.WriteString(c, "name\n"); err != nil {
			t.Fatal(err)
		}
		name, err := bufio.NewReader(c).ReadString('\n')
		must(t, err)
		got[strings.TrimSpace(name)]++
		must(t, c.Close())
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("new connections to port %d: %v, want %v", port, got, want)
	}
}

func (x *drainTest) reconcile(t *testing.T, want []TableEntry, changes Changes) {
	t.Helper()
	if got := mustGet(x.r.Reconcile(want))(t); soon(got) != changes {
		t.Errorf("reconciled %+v, want %+v", got, changes)
	}
}

// soon returns changes with a RequeueAfter of a second if it is between that and
// what it has grown to after a few looks, however slow the machine is.
func soon(c Changes) Changes {
	if c.RequeueAfter > time.Second && c.RequeueAfter < 10*time.Second {
		c.RequeueAfter = time.Second
	}
	return c
}

// wantA checks, with ipvsadm, the weight of A in the first service; there is one
// connection.
func (x *drainTest) wantA(t *testing.T, weight uint64) {
	t.Helper()
	got := ipvsadmNumbers(t, x.director, []string{hostPort(x.realIP, 8080)}, 3, "-t", hostPort(x.virtualIP, 80))[0]
	if want := []uint64{weight, 1, 0}; !slices.Equal(got, want) {
		t.Errorf("weight, active and inactive connections of A: %v, want %v", got, want)
	}
}

// atA returns the connections from the first service to A that the director knows.
func (x *drainTest) atA(t *testing.T) []string {
	t.Helper()
	// Without client and state.
	line := connectionLine("TCP", hostPort(x.clientIP, 0), hostPort(x.virtualIP, 80), hostPort(x.realIP, 8080), "")
	path := strings.Join(strings.Fields(line)[3:], " ")
	return slices.DeleteFunc(connections(t, x.director), func(line string) bool { return !strings.Contains(line, path) })
}

// endDownload lets the server end the download, and checks that it is complete.
func (x *drainTest) endDownload(t *testing.T) {
	t.Helper()
	close(x.finish)
	select {
	case err := <-x.downloaded:
		must(t, err)
	case <-time.After(trafficTimeout):
		t.Fatal("the download does not end")
	}
	if sent, received := x.sent.Load(), x.received.Load(); received != sent || received < 40 {
		t.Errorf("%d parts of the download arrived, %d were sent", received, sent)
	}
}

// drains checks that the download can continue and end, and that the draining
// destination is then deleted, with the wanted changes.
func (x *drainTest) drains(t *testing.T, want []TableEntry, last Changes) {
	t.Helper()
	for range 2 {
		x.reconcile(t, want, drainsOn)
		x.wantA(t, 0)
		x.goesOn(t)
	}
	x.endDownload(t)
	var got Changes
	eventually(func() bool { got = mustGet(x.r.Reconcile(want))(t); return soon(got) != drainsOn })
	if got != last {
		t.Errorf("after the download: %+v, want %+v", got, last)
	}
	if left := x.atA(t); len(left) > 0 {
		t.Errorf("deleted before its connections had gone: %q", left)
	}
	checkTable(t, x.ipvs, want)
	x.reconcile(t, want, Changes{})
}

// A service that is no longer wanted gets no new connections, and is deleted with its
// last destination that had any.
func TestKernelDrainService(t *testing.T) {
	x := newDownload(t, client6, virtual6, real6)
	want := x.table()[1:]
	x.reconcile(t, want, Changes{DestinationsUpdated: 2, Draining: 2, RequeueAfter: time.Second})
	x.wantA(t, 0)
	quiet := x.table()
	for _, d := range quiet[0].Destinations {
		d.Weight = 0
	}
	checkTable(t, x.ipvs, quiet)
	x.goesOn(t)
	var err error
	within(t, x.network.client, func() {
		var c net.Conn
		if c, err = net.DialTimeout("tcp", hostPort(x.virtualIP, 80), trafficTimeout); err == nil {
			c.Close()
		}
	})
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a new connection: %v, want it refused", err)
	}
	// B had no connection.
	x.reconcile(t, want, Changes{DestinationsDeleted: 1, Draining: 1, RequeueAfter: time.Second})
	quiet[0].Destinations = quiet[0].Destinations[:1]
	checkTable(t, x.ipvs, quiet)
	x.drains(t, want, Changes{ServicesDeleted: 1})
	x.wantNew(t, 81, map[string]int{"A": 2, "B": 2})
}

// A destination that is wanted again while it drains gets its weight and new
// connections back.
func TestKernelDrainWantedAgain(t *testing.T) {
	x := newDownload(t, client4, virtual4, real4)
	for _, test := range []struct {
		name        string
		want        []TableEntry
		begin, back Changes
	}{
		{"destination", withoutA(x.table()),
			Changes{DestinationsUpdated: 1, Draining: 1, RequeueAfter: time.Second}, Changes{DestinationsUpdated: 1}},
		{"service", x.table()[1:],
			Changes{DestinationsUpdated: 2, Draining: 2, RequeueAfter: time.Second}, Changes{DestinationsUpdated: 2}},
	} {
		x.reconcile(t, test.want, test.begin)
		x.wantA(t, 0)
		x.goesOn(t)
		x.reconcile(t, x.table(), test.back)
		x.wantA(t, 3)
		checkTable(t, x.ipvs, x.table())
		x.goesOn(t)
	}
	x.wantNew(t, 80, map[string]int{"A": 5, "B": 5})
	x.reconcile(t, x.table(), Changes{})
	x.endDownload(t)
}

func init() {
	// Reconciles, without A in the first service, until it is killed.
	addHelper("drain", func() error {
		i, err := NewAt(netns.NsHandle(3))
		if err != nil {
			return err
		}
		for r := (&Reconciler{Handle: i, Drain: drainLimit}); ; time.Sleep(50 * time.Millisecond) {
			if _, err := r.Reconcile(withoutA(drainTable(virtual4, real4))); err != nil {
				return err
			}
		}
	})
}

// A process begins to drain and is killed; the next one, which remembers nothing,
// continues.
func TestKernelDrainTakenOver(t *testing.T) {
	x := newDownload(t, client4, virtual4, real4)
	c := runIn(t, x.director, "drain")
	defer c.Wait()
	defer c.Process.Kill()
	eventually(func() bool {
		dests := mustGet(x.ipvs.GetDestinations(x.table()[0].Service))(t)
		return slices.ContainsFunc(dests, func(d *Destination) bool { return d.Weight == 0 })
	})
	x.wantA(t, 0)
	must(t, c.Process.Kill())
	c.Wait()

	x.r = &Reconciler{Handle: openIn(t, x.director), Drain: drainLimit}
	want := withoutA(x.table())
	x.reconcile(t, want, drainsOn) // nothing is left to change
	x.wantNew(t, 80, map[string]int{"B": 4})
	x.drains(t, want, Changes{DestinationsDeleted: 1})
}

// A connection that does not end keeps its destination only until the time limit.
func TestKernelDrainTimeLimit(t *testing.T) {
	x := newDrain(t, client4, virtual4, real4)
	x.r.Drain = 3 * time.Second
	want := withoutA(x.table())
	before := time.Now()
	got := mustGet(x.r.Reconcile(want))(t)
	begun := time.Now()
	if got != (Changes{DestinationsUpdated: 1, Draining: 1, RequeueAfter: time.Second}) {
		t.Errorf("begins to drain: %+v", got)
	}
	// A caller that calls again after RequeueAfter.
	for got.Draining > 0 {
		if got.RequeueAfter <= 0 || got.RequeueAfter > time.Second {
			t.Fatalf("call again in %v", got.RequeueAfter)
		}
		x.wantA(t, 0)
		time.Sleep(got.RequeueAfter)
		called := time.Now()
		got = mustGet(x.r.Reconcile(want))(t)
		if took := called.Sub(begun); took >= x.r.Drain && got.Draining > 0 {
			t.Fatalf("still there after %v", took)
		}
	}
	if took := time.Since(before); took < x.r.Drain {
		t.Errorf("deleted after %v already", took)
	}
	if got != (Changes{DestinationsDeleted: 1}) {
		t.Errorf("at the end of the time: %+v", got)
	}
	checkTable(t, x.ipvs, want)
	if left := x.atA(t); len(left) != 1 || !strings.Contains(left[0], " ESTABLISHED ") {
		t.Errorf("connections to A: %q, want the one that has not ended", left)
	}
	// The kernel drops the connection's packets, but resumes it if the destination is
	// added again.
	if _, err := io.WriteString(x.toA, "name\n"); err != nil {
		t.Fatal(err)
	}
	must(t, x.toA.SetReadDeadline(time.Now().Add(time.Second)))
	if n, err := x.toA.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("an answer from a destination that is not there: %d bytes, %v", n, err)
	}
	must(t, x.toA.SetReadDeadline(time.Now().Add(trafficTimeout)))
	x.reconcile(t, x.table(), Changes{DestinationsAdded: 1})
	ask(t, x.toA, "", "A\n")
	x.wantA(t, 3)
}
