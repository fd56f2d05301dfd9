package ipvs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Clients that send requests while the table changes.

// asker sends requests repeatedly, and remembers those that were not answered.
type asker struct {
	name     string
	answered atomic.Int64
	stop     chan struct{}
	done     sync.WaitGroup
	mu       sync.Mutex
	failures []string

	// While the kernel changes the scheduler of a service it has none for some
	// milliseconds, and refuses new clients, which ask again.
	mayBeRefused atomic.Bool
}

// newAsker asks until the test ends.
func newAsker(t *testing.T, name string, ask func() error) *asker {
	a := &asker{name: name, stop: make(chan struct{})}
	a.done.Add(1)
	go func() {
		defer a.done.Done()
		for {
			select {
			case <-a.stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
			err := ask()
			for errors.Is(err, syscall.ECONNREFUSED) && a.mayBeRefused.Load() {
				time.Sleep(50 * time.Millisecond)
				err = ask()
			}
			if err != nil {
				a.mu.Lock()
				a.failures = append(a.failures, err.Error())
				a.mu.Unlock()
			} else {
				a.answered.Add(1)
			}
		}
	}()
	t.Cleanup(a.end)
	return a
}

func (a *asker) end() {
	select {
	case <-a.stop:
	default:
		close(a.stop)
	}
	a.done.Wait()
}

// wantAnswers waits for more answers to each asker, and fails if a request was not
// answered.
func wantAnswers(t *testing.T, step string, askers ...*asker) {
	t.Helper()
	for _, a := range askers {
		before := a.answered.Load()
		if !eventually(func() bool { return a.answered.Load() >= before+10 }) {
			t.Errorf("%s: %s has %d answers more", step, a.name, a.answered.Load()-before)
		}
		a.mu.Lock()
		if len(a.failures) > 0 {
			t.Errorf("%s: %s, beside %d answers: %q", step, a.name, a.answered.Load(), a.failures)
		}
		a.failures = nil
		a.mu.Unlock()
	}
	if t.Failed() {
		t.FailNow()
	}
}

// webServer answers HTTP requests with its name.
func webServer(t *testing.T, ns netns.NsHandle, address string) *http.Server {
	t.Helper()
	var l net.Listener
	var err error
	within(t, ns, func() { l, err = net.Listen("tcp", address) })
	must(t, err)
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, address) })}
	go s.Serve(l)
	t.Cleanup(func() { s.Close() })
	return s
}

// webAsker makes HTTP requests, each over a new connection, or over one that is kept.
func webAsker(t *testing.T, n *network, name, url string, keepAlive bool) (*asker, *http.Transport) {
	transport := &http.Transport{DisableKeepAlives: !keepAlive, DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
		return dialIn(n.client, network, address, trafficTimeout)
	}}
	client := &http.Client{Transport: transport, Timeout: trafficTimeout}
	return newAsker(t, name, func() error {
		r, err := client.Get(url)
		if err != nil {
			return err
		}
		defer r.Body.Close()
		_, err = io.ReadAll(r.Body)
		return err
	}), transport
}

// HTTP clients, one with new connections and one that keeps its own, through
// everything that a proxier does.
func TestKernelDrainHTTP(t *testing.T) {
	n := newNetwork(t)
	webServer(t, n.real, hostPort(real4, 8080))
	b := webServer(t, n.real, hostPort(real4, 8081))
	to := func(ports ...uint16) (dests []*Destination) {
		for _, port := range ports {
			dests = append(dests, &Destination{Address: net.ParseIP(real4), Port: port, Weight: 1})
		}
		return dests
	}
	service := Service{Address: net.ParseIP(virtual4), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin, Netmask: 0xFFFFFFFF}
	clock := time.Unix(1000, 0)
	r := &Reconciler{Handle: n.ipvs, Drain: time.Minute, now: func() time.Time { return clock }}
	reconcile := func(draining int, want ...TableEntry) {
		t.Helper()
		if got := mustGet(r.Reconcile(want))(t); got.Draining != draining {
			t.Errorf("%+v, want %d to drain", got, draining)
		}
	}
	reconcile(0, TableEntry{&service, to(8080, 8081)})
	fresh, _ := webAsker(t, n, "new connections", "http://"+hostPort(virtual4, 80), false)
	kept, transport := webAsker(t, n, "a kept connection", "http://"+hostPort(virtual4, 80), true)
	// over waits until no connection of the clients needs the draining destinations,
	// and ends their time.
	over := func(step string, want ...TableEntry) {
		t.Helper()
		wantAnswers(t, step+", draining", fresh, kept)
		reconcile(len(r.drains), want...)
		transport.CloseIdleConnections()
		wantAnswers(t, step+", other connection", fresh, kept)
		transport.CloseIdleConnections() // in case the previous request is still in progress
		wantAnswers(t, step+", other connection", fresh, kept)
		clock = clock.Add(time.Minute)
		reconcile(0, want...)
		wantAnswers(t, step+", drained", fresh, kept)
	}
	wantAnswers(t, "begin", fresh, kept)

	reconcile(1, TableEntry{&service, to(8080)})
	b.SetKeepAlivesEnabled(false) // as a server does that is to end: clients go elsewhere
	over("scale down", TableEntry{&service, to(8080)})
	must(t, b.Close())

	webServer(t, n.real, hostPort(real4, 8081))
	reconcile(0, TableEntry{&service, to(8080, 8081)})
	wantAnswers(t, "scale up", fresh, kept)

	fresh.mayBeRefused.Store(true)
	kept.mayBeRefused.Store(true)
	service.SchedName = SourceHashing
	reconcile(1, TableEntry{&service, to(8081)})
	over("scheduler sh, and scale down", TableEntry{&service, to(8081)})
	reconcile(0, TableEntry{&service, to(8080, 8081)})
	service.SchedName = WeightedLeastConnection
	reconcile(1, TableEntry{&service, to(8081)})
	service.SchedName = MaglevHashing
	over("scheduler wlc, then mh", TableEntry{&service, to(8081)})

	fresh.mayBeRefused.Store(false)
	kept.mayBeRefused.Store(false)

	mark := Service{FWMark: 7, AddressFamily: unix.AF_INET, SchedName: RoundRobin, Netmask: 0xFFFFFFFF}
	rule := func(action string) {
		t.Helper()
		var out []byte
		var err error
		within(t, n.director, func() {
			out, err = exec.Command("iptables", "-t", "mangle", action, "PREROUTING", "-d", virtual4, "-p", "tcp", "--dport", "80", "-j", "MARK", "--set-mark", "7").CombinedOutput()
		})
		if err != nil {
			t.Fatalf("iptables: %v: %s", err, out)
		}
	}
	rule("-A")
	reconcile(1, TableEntry{&mark, to(8080, 8081)})
	over("address to mark", TableEntry{&mark, to(8080, 8081)})
	// A mark takes precedence: it drains without refusing anyone once no packet is
	// marked.
	reconcile(0, TableEntry{&mark, to(8080, 8081)}, TableEntry{&service, to(8080)})
	rule("-D")
	reconcile(2, TableEntry{&service, to(8080)})
	over("mark to address", TableEntry{&service, to(8080)})

	// No service can replace another under its connections, with requests on the way:
	// only new ones continue.
	kept.end()
	fresh.end()
	anyPort := service
	anyPort.Port, anyPort.Flags, anyPort.Timeout, anyPort.SchedName = 0, ServiceFlagPersistent, 60, RoundRobin
	webServer(t, n.real, hostPort(real4, 80)) // clients' port is the server's
	reconcile(0, TableEntry{&anyPort, []*Destination{{Address: net.ParseIP(real4), Port: 0, Weight: 1}}})
	fresh, _ = webAsker(t, n, "new connections", "http://"+hostPort(virtual4, 80), false)
	wantAnswers(t, "port 0", fresh)
}

// A UDP client that keeps its port goes through scale-down, at once, scale-up and
// another scheduler. A server that is no longer wanted ends at once, too.
func TestKernelDrainUDP(t *testing.T) {
	n := newNetwork(t)
	sysctl(t, n.director, "net/ipv4/vs/expire_nodest_conn", "1")
	serve := func(port uint16) net.PacketConn {
		return answerUDP(t, n.real, hostPort(real4, port), func(question []byte) []byte { return question })
	}
	to := func(ports ...uint16) (dests []*Destination) {
		for _, port := range ports {
			dests = append(dests, &Destination{Address: net.ParseIP(real4), Port: port, Weight: 1})
		}
		return dests
	}
	service := Service{Address: net.ParseIP(virtual4), Protocol: unix.IPPROTO_UDP, Port: 53, SchedName: RoundRobin, Netmask: 0xFFFFFFFF}
	r := &Reconciler{Handle: n.ipvs, Drain: time.Hour}
	reconcile := func(ports ...uint16) {
		t.Helper()
		if got := mustGet(r.Reconcile([]TableEntry{{&service, to(ports...)}}))(t); got.Draining != 0 {
			t.Errorf("%+v", got)
		}
	}
	a, b := serve(5300), serve(5301)
	reconcile(5300, 5301)
	asking := func(c net.Conn) func() error {
		number := 0
		return func() error { // as a resolver: it asks again
			number++
			question, answer := fmt.Sprintf("question %d", number), make([]byte, 2048)
			for range 3 {
				if _, err := io.WriteString(c, question); err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
					return err
				}
				c.SetReadDeadline(time.Now().Add(2 * time.Second))
				for {
					n, err := c.Read(answer)
					if err != nil {
						break
					}
					if string(answer[:n]) == question {
						return nil
					}
				}
			}
			return fmt.Errorf("no answer to %s", question)
		}
	}
	var askers []*asker
	for k := range 4 { // on both servers
		c := dial(t, n.client, "udp", client4, hostPort(virtual4, 53))
		c.SetDeadline(time.Time{})
		askers = append(askers, newAsker(t, fmt.Sprintf("client %d", k), asking(c)))
	}
	wantAnswers(t, "begin", askers...)
	reconcile(5300)
	b.Close()
	wantAnswers(t, "scale down", askers...)
	serve(5301)
	reconcile(5300, 5301)
	wantAnswers(t, "scale up", askers...)
	reconcile(5301)
	a.Close()
	wantAnswers(t, "the other one", askers...)
	service.SchedName = SourceHashing
	serve(5300)
	reconcile(5300, 5301)
	wantAnswers(t, "scheduler sh", askers...)
	reconcile(5300)
	wantAnswers(t, "scale down with sh", askers...)
}

// New clients from many addresses while a destination drains: none is refused by a
// service whose scheduler hashes. Without the fallback flag many would be.
func TestKernelDrainHashing(t *testing.T) {
	n := newNetwork(t)
	serveTCP(t, n.real, hostPort(real4, 8080), "A")
	serveTCP(t, n.real, hostPort(real4, 8081), "B")
	var from []string
	for k := range 20 {
		address := fmt.Sprintf("192.0.2.%d", 20+k)
		iproute(t, n.client, "addr add "+address+"/24 dev director")
		from = append(from, address)
	}
	refused := func() (count int) {
		for _, address := range from {
			var c net.Conn
			var err error
			within(t, n.client, func() {
				d := net.Dialer{Timeout: trafficTimeout, LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
				c, err = d.Dial("tcp", hostPort(virtual4, 80))
			})
			switch {
			case errors.Is(err, syscall.ECONNREFUSED):
				count++
			case err != nil:
				t.Fatal(err)
			default:
				c.Close()
			}
		}
		return count
	}
	for _, scheduler := range []string{SourceHashing, MaglevHashing, DestinationHashing} {
		s := &Service{Address: net.ParseIP(virtual4), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: scheduler, Netmask: 0xFFFFFFFF}
		both := []*Destination{{Address: net.ParseIP(real4), Port: 8080, Weight: 1}, {Address: net.ParseIP(real4), Port: 8081, Weight: 1}}
		want := []TableEntry{{s, both[1:]}}
		clock := time.Unix(1000, 0)
		r := &Reconciler{Handle: n.ipvs, Drain: time.Minute, now: func() time.Time { return clock }}
		must(t, second(r.Reconcile([]TableEntry{{s, both}})))
		if got := refused(); got != 0 {
			t.Errorf("%s: %d refused before", scheduler, got)
		}
		got := mustGet(r.Reconcile(want))(t)
		if scheduler == DestinationHashing {
			if got.Draining != 0 || refused() != 0 {
				t.Errorf("dh: %+v, or clients are refused", got)
			}
			continue
		}
		if got.Draining != 1 || got.ServicesUpdated != 1 {
			t.Errorf("%s: %+v", scheduler, got)
		}
		if got := refused(); got != 0 {
			t.Errorf("%s: %d refused while one drains", scheduler, got)
		}
		must(t, n.ipvs.UpdateService(s)) // without the flag, to see that this shows anything
		if got := refused(); got == 0 {
			t.Errorf("%s: nobody is refused without the flag", scheduler)
		}
		must(t, second(r.Reconcile(want)))
		clock = clock.Add(time.Minute)
		must(t, second(r.Reconcile(want)))
		if got := refused(); got != 0 {
			t.Errorf("%s: %d refused after", scheduler, got)
		}
		if flags := mustGet(n.ipvs.GetService(s))(t).Flags; flags != ServiceFlagHashed {
			t.Errorf("%s: flags %#x after", scheduler, flags)
		}
		must(t, second(r.Reconcile(nil)))
		clock = clock.Add(time.Minute)
		must(t, second(r.Reconcile(nil)))
	}
	if table := mustGet(n.ipvs.GetTable())(t); slices.ContainsFunc(table, func(e TableEntry) bool { return e.Service.SchedName != DestinationHashing }) {
		t.Errorf("%d services are left", len(table))
	}
}
