package ipvs

import (
	"fmt"
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

// The Fake treats connections and counters as a kernel treats those of real traffic:
// updates keep them, and a destination that is deleted and added again gets them back,
// except for the counters if its service is a new one.
func TestKernelFakeTraffic(t *testing.T) {
	n := newNetwork(t)
	serveTCP(t, n.real, hostPort(real4, 8080), "yes")
	f := NewFake()
	kernel, fake := n.ipvs, f.Handle()
	s := &Service{Address: net.ParseIP(virtual4), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin, Netmask: ipv4Mask(32)}
	d := &Destination{Address: net.ParseIP(real4), Port: 8080, Weight: 1}
	for _, i := range []*Handle{kernel, fake} {
		must(t, firstError(i.NewService(s), i.NewDestination(s, d)))
	}
	c := dial(t, n.client, "tcp", client4, hostPort(virtual4, 80))
	ask(t, c, "?\n", "yes\n")

	type state struct {
		connections, persistent int // active and inactive together: the kernel may yet move one
		service, destination    string
	}
	stateOf := func(i *Handle) (st state) {
		service := mustGet(i.GetService(s))(t)
		st.service = fmt.Sprint(countersOf(service.Stats64))
		for _, d := range mustGet(i.GetDestinations(s))(t) {
			st.connections, st.persistent = d.ActiveConnections+d.InactiveConnections, d.PersistentConnections
			st.destination = fmt.Sprint(countersOf(d.Stats64))
		}
		return st
	}
	// The kernel adds up its counters every two seconds.
	if !eventually(func() bool {
		_, destination := statsOf(t, kernel, s)
		return destination.Connections == 1 && destination.PacketsIn >= 3 && destination.PacketsOut >= 2
	}) {
		t.Fatalf("the kernel counts nothing: %+v", stateOf(kernel))
	}
	service, destination := statsOf(t, kernel, s)
	must(t, firstError(f.SetStats(s, nil, service), f.SetStats(s, d, destination), f.SetConnections(s, d, 1, 0, 0)))
	heavy := *d
	heavy.Weight = 9
	for _, step := range []struct {
		name string
		do   func(*Handle) error
	}{
		{"nothing", func(*Handle) error { return nil }},
		{"an update", func(i *Handle) error { return firstError(i.UpdateService(s), i.UpdateDestination(s, &heavy)) }},
		{"deleted", func(i *Handle) error { return i.DelDestination(s, d) }},
		{"added again", func(i *Handle) error { return i.NewDestination(s, d) }},
		{"a new service", func(i *Handle) error {
			return firstError(i.DelService(s), i.NewService(s), i.NewDestination(s, d))
		}},
		{"flushed", func(i *Handle) error { return firstError(i.Flush(), i.NewService(s), i.NewDestination(s, d)) }},
		{"zero", (*Handle).Zero},
	} {
		must(t, step.do(kernel))
		must(t, step.do(fake))
		want, got := stateOf(kernel), stateOf(fake)
		t.Logf("%s: %+v", step.name, want)
		if got != want {
			t.Errorf("%s: the kernel %+v, the Fake %+v", step.name, want, got)
		}
	}
}
