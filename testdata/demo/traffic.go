package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"
)

// The ports that every real server answers on.
const (
	realPortTCP    = 8080
	realPortTCPAlt = 8443
	realPortUDP    = 5353
)

// requestTimeout bounds one request. Even an emulated machine is faster: a request that takes longer is lost.
const requestTimeout = 5 * time.Second

// startRealServers makes every real server answer with its name, on all its addresses and ports.
// They serve until the program ends.
func startRealServers(n *testNetwork) error {
	for i, real := range realServers {
		err := n.reals[i].enter(func() error {
			for _, address := range []netip.Addr{real.address4, real.address6} {
				for _, port := range []uint16{realPortTCP, realPortTCPAlt} {
					listener, err := net.Listen("tcp", netip.AddrPortFrom(address, port).String())
					if err != nil {
						return err
					}
					go answerTCP(listener, real.name)
				}
				conn, err := net.ListenPacket("udp", netip.AddrPortFrom(address, realPortUDP).String())
				if err != nil {
					return err
				}
				go answerUDP(conn, real.name)
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("%s: %w", real.name, err)
		}
	}
	return nil
}

func answerTCP(listener net.Listener, name string) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		io.WriteString(conn, name)
		conn.Close()
	}
}

func answerUDP(conn net.PacketConn, name string) {
	request := make([]byte, 64)
	for {
		_, client, err := conn.ReadFrom(request)
		if err != nil {
			return
		}
		conn.WriteTo([]byte(name), client)
	}
}

// client sends requests to virtual services, whose real servers answer with their names.
type client struct {
	lastPort uint16
}

// ask sends one request from the address from and returns the index of the real server that answered.
// It must run in the client's namespace.
//
// Each request has a client port that no other one had. IPVS remembers for minutes which real server a client
// address and port belong to, so a repeated port would not be scheduled again; with ports picked at random
// that happens now and then.
func (c *client) ask(network string, from netip.Addr, to netip.AddrPort) (int, error) {
	c.lastPort++
	local := netip.AddrPortFrom(from, c.lastPort)
	dialer := net.Dialer{Timeout: requestTimeout, LocalAddr: net.TCPAddrFromAddrPort(local)}
	if network == "udp" {
		dialer.LocalAddr = net.UDPAddrFromAddrPort(local)
	}
	conn, err := dialer.Dial(network, to.String())
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(requestTimeout))
	if network == "udp" {
		if _, err := io.WriteString(conn, "who is there?"); err != nil {
			return 0, err
		}
	}
	answer := make([]byte, 64)
	n, err := conn.Read(answer)
	if err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	for i, real := range realServers {
		if real.name == string(answer[:n]) {
			return i, nil
		}
	}
	return 0, fmt.Errorf("%s answered %q, which is no real server's name", to, answer[:n])
}
