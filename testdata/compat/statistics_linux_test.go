//go:build linux

package compat

import (
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	original "github.com/moby/ipvs"
)

// TestSameStatistics sends a little traffic through a service of its own
// namespace and reads the counters with both. The rates change by
// themselves, so that the reading by the checkout counts only between two
// readings by the original that agree.
func TestSameStatistics(t *testing.T) {
	needKernel(t)
	ns := newNamespace(t)
	p := ns.pair(t)

	local := net.IPv4(127, 0, 0, 1)
	tcp := with(v4Service(), func(s *original.Service) { s.Address = local })
	udp := with(tcp, func(s *original.Service) { s.Protocol = syscall.IPPROTO_UDP })
	var server net.Listener
	var sink net.PacketConn
	var toTCP, toUDP net.Conn
	ns.do(t, func() {
		var err error
		if server, err = net.Listen("tcp4", "127.0.0.1:8080"); err != nil {
			t.Fatal(err)
		}
		if sink, err = net.ListenPacket("udp4", "127.0.0.1:8080"); err != nil {
			t.Fatal(err)
		}
		backend := &original.Destination{Address: local, Port: 8080, Weight: 1}
		create(t, "original", p.original, []entry{
			{tcp, []*original.Destination{backend}},
			{udp, []*original.Destination{backend}},
		})
		if toTCP, err = net.DialTimeout("tcp4", "127.0.0.1:80", 10*time.Second); err != nil {
			t.Fatal("through the service: ", err)
		}
		if toUDP, err = net.Dial("udp4", "127.0.0.1:80"); err != nil {
			t.Fatal(err)
		}
	})
	defer server.Close()
	defer sink.Close()
	defer toTCP.Close()
	defer toUDP.Close()
	peer, err := server.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	for i := range 20 {
		fmt.Fprintf(toTCP, "%05d", i)
		if _, err := io.ReadFull(peer, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(peer, "%010d", i)
		if _, err := io.ReadFull(toTCP, make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
		if _, err := toUDP.Write(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(3 * time.Second) // the kernel estimates the rates every 2 s

	for _, s := range []*original.Service{tcp, udp} {
		read := func(l library) (string, *original.Service, *original.Destination) {
			got, err := l.GetService(s)
			if err != nil {
				t.Fatal(err)
			}
			all, err := l.GetDestinations(s)
			if err != nil || len(all) != 1 {
				t.Fatal(all, err)
			}
			return fmt.Sprintf("%#v %#v", *got, *all[0]), got, all[0]
		}
		for tries := 1; ; tries++ {
			before, _, _ := read(p.original)
			got, service, destination := read(p.checkout)
			after, _, _ := read(p.original)
			if before != after && tries < 20 {
				continue
			}
			if got != after {
				t.Errorf("original: %s\ncheckout: %s", after, got)
			}
			c := service.Stats
			if c.Connections == 0 || c.PacketsIn < 20 || c.BytesIn < 20*20 || c != original.SvcStats(destination.Stats) ||
				destination.ActiveConnections+destination.InactiveConnections == 0 {
				t.Errorf("no traffic to tell counters apart by: %s", got)
			}
			t.Log(got)
			break
		}
	}
}
