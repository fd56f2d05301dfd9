package ipvs

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netns"
)

// The model on a real kernel, with connections of a real client.
func TestKernelDrainModel(t *testing.T) {
	n := newNetwork(t)
	for port := uint16(8080); port < 8084; port++ {
		serveTCP(t, n.real, hostPort(real4, port), "answer")
	}
	other := openIn(t, n.director)
	ended, quieted, connected, faults := 0, 0, 0, map[string]int{}
	for seed := range uint64(3) {
		must(t, other.Flush())
		x := &drainModel{t: t, rand: rand.New(rand.NewPCG(seed, 2)), timeout: time.Second}
		x.open = func() *Handle { return openIn(t, n.director) }
		x.table = func() []TableEntry { return stableTable(t, other) }
		x.write = func(cmd uint8, s *Service, d *Destination) { // it may fail: what it changes may not be there
			var b Batch
			if cmd == cmdNewService || cmd == cmdSetService || cmd == cmdDelService {
				d = nil
			}
			b.add(cmd, s, d)
			other.Do(&b)
		}
		var open []net.Conn
		x.connect = func() {
			if len(open) > 0 && x.rand.IntN(3) == 0 {
				open[0].Close()
				open = open[1:]
			}
			if c := tryDial(n.client, hostPort(virtual4, uint16(80+x.rand.IntN(2)))); c != nil {
				open = append(open, c)
				connected++
			}
		}
		x.run(60)
		for _, c := range open {
			c.Close()
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
		ended, quieted = ended+x.ended, quieted+x.quieted
		for fault, n := range x.faults {
			faults[fault] += n
		}
	}
	t.Logf("%d drains ended, %d times weight 0, %d connections, faults %v", ended, quieted, connected, faults)
	if ended == 0 || quieted == 0 || connected == 0 || faults["lost"]+faults["closed"] == 0 {
		t.Error("too little happens")
	}
}

// stableTable returns the table when two readings of it are the same: Linux 7 and later
// list a growing table incompletely for a while.
func stableTable(t *testing.T, i *Handle) (table []TableEntry) {
	t.Helper()
	if kernelBefore(t, 7, 0) {
		return mustGet(i.GetTable())(t)
	}
	last := ""
	if !eventually(func() bool {
		table = mustGet(i.GetTable())(t)
		text := ""
		for _, e := range table {
			text += e.Service.Rule()
			for _, d := range e.Destinations {
				text += fmt.Sprintln(d.Rule(), d.ActiveConnections, d.InactiveConnections)
			}
		}
		same := text == last
		last = text
		return same || len(table) == 0
	}) {
		t.Error("the table does not become stable")
	}
	return table
}

// tryDial returns a connection to a server that has answered, or nil if there is none.
func tryDial(ns netns.NsHandle, to string) net.Conn {
	c, err := dialIn(ns, "tcp", to, 2*time.Second)
	if err != nil {
		return nil
	}
	c.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := io.WriteString(c, "?\n"); err == nil {
		_, err = io.ReadFull(c, make([]byte, len("answer\n")))
		if err == nil {
			return c
		}
	}
	c.Close()
	return nil
}

// dialIn connects from inside the namespace.
func dialIn(ns netns.NsHandle, protocol, to string, timeout time.Duration) (c net.Conn, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err = netns.Set(ns); err == nil {
			c, err = net.DialTimeout(protocol, to, timeout)
		}
	}()
	<-done
	return c, err
}
