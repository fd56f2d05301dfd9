//go:build linux

package compat

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"syscall"
	"testing"

	original "github.com/moby/ipvs"
)

const (
	persistent = 0x1
	hashed     = 0x2
	onePacket  = 0x4
)

var (
	schedulers = []string{
		original.RoundRobin, original.LeastConnection, original.DestinationHashing,
		original.SourceHashing, original.WeightedRoundRobin, original.WeightedLeastConnection,
		// The original has no constants for these, but callers use them.
		"sed", "nq", "mh", "lblc", "lblcr", "fo", "ovf", "none",
	}
	methods = []uint32{
		original.ConnFwdMasq, original.ConnFwdLocalNode, original.ConnFwdTunnel,
		original.ConnFwdDirectRoute, original.ConnFwdBypass,
	}
)

// entry is a service with its destinations.
type entry struct {
	service      *original.Service
	destinations []*original.Destination
}

// generator makes inputs. Those of service, destination and entries are valid;
// operation makes others too.
type generator struct{ *rand.Rand }

// newGenerator starts from a fixed seed, or the one in IPVS_COMPAT_SEED.
func newGenerator(t *testing.T) generator {
	t.Helper()
	seed := uint64(1)
	if v := os.Getenv("IPVS_COMPAT_SEED"); v != "" {
		var err error
		if seed, err = strconv.ParseUint(v, 0, 64); err != nil {
			t.Fatal("IPVS_COMPAT_SEED: ", err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("to repeat: IPVS_COMPAT_SEED=%d", seed)
		}
	})
	return generator{rand.New(rand.NewPCG(seed, 0))}
}

func pick[T any](g generator, from ...T) T { return from[g.IntN(len(from))] }

// identityOf returns a service with only its identity.
func identityOf(s *original.Service) *original.Service {
	return &original.Service{Address: s.Address, Protocol: s.Protocol, Port: s.Port, FWMark: s.FWMark, AddressFamily: s.AddressFamily}
}

// chance is true once in n times.
func (g generator) chance(n int) bool { return g.IntN(n) == 0 }

// address makes a unicast address. An IPv4 one has 4 or 16 bytes.
func (g generator) address(family uint16) net.IP {
	if family == syscall.AF_INET6 {
		ip := make(net.IP, 16)
		for i := range ip {
			ip[i] = byte(g.Uint32())
		}
		copy(ip, pick(g, []byte{0x20, 0x01, 0x0d, 0xb8}, []byte{0xfd, 0, 0, 0}))
		return ip
	}
	b := func() byte { return byte(g.Uint32()) }
	ip := pick(g, net.IPv4(10, b(), b(), b()), net.IPv4(172, 16, b(), b()), net.IPv4(198, 51, 100, b()))
	if g.chance(2) {
		return ip.To4()
	}
	return ip
}

func (g generator) port() uint16 { return uint16(1 + g.IntN(65535)) }

// netmask makes the mask of clients that persistence puts together.
func (g generator) netmask(family uint16) uint32 {
	if family == syscall.AF_INET6 {
		return uint32(1 + g.IntN(128))
	}
	// In memory order.
	return binary.NativeEndian.Uint32(net.CIDRMask(g.IntN(33), 32))
}

// settings fills in the settings that an update can change.
func (g generator) settings(s *original.Service) {
	s.SchedName = pick(g, schedulers...)
	s.Flags, s.Timeout = 0, 0
	s.Netmask = 0xffffffff
	if s.AddressFamily == syscall.AF_INET6 {
		s.Netmask = 128
	}
	if g.chance(2) {
		s.Flags |= persistent
		s.Timeout = pick(g, 1, 300, 10800, uint32(g.IntN(1<<20)))
		s.Netmask = g.netmask(s.AddressFamily)
	}
	if s.Protocol == syscall.IPPROTO_UDP && g.chance(3) {
		s.Flags |= onePacket
	}
	if g.chance(4) {
		s.Flags |= uint32(g.IntN(8)) << 3 // the scheduler's own flags
	}
	if g.chance(4) {
		s.Flags |= hashed // as when it was read back
	}
}

func (g generator) service() *original.Service {
	s := &original.Service{AddressFamily: pick[uint16](g, syscall.AF_INET, syscall.AF_INET6)}
	if g.chance(4) {
		s.FWMark = 1 + g.Uint32N(1<<32-1)
		if g.chance(4) { // these do not count then
			s.Address, s.Protocol, s.Port = g.address(s.AddressFamily), syscall.IPPROTO_TCP, g.port()
		}
	} else {
		s.Address = g.address(s.AddressFamily)
		s.Protocol = pick[uint16](g, syscall.IPPROTO_TCP, syscall.IPPROTO_UDP, 132)
		s.Port = g.port()
	}
	g.settings(s)
	if s.FWMark == 0 && s.Flags&persistent != 0 && g.chance(5) {
		s.Port = 0 // every port
	}
	return s
}

// weights fills in the settings that an update of a destination can change.
func (g generator) weights(d *original.Destination) {
	d.Weight = pick(g, 0, 1, 100, 65535, g.IntN(65536))
	d.ConnectionFlags = pick(g, methods...)
	if g.chance(8) { // only the method counts
		d.ConnectionFlags |= g.Uint32() &^ original.ConnectionFlagFwdMask
	}
	d.UpperThreshold, d.LowerThreshold = 0, 0
	if g.chance(3) {
		d.UpperThreshold = g.Uint32N(1 << pick[uint](g, 8, 16, 31))
		d.LowerThreshold = g.Uint32N(d.UpperThreshold + 1)
	}
}

func (g generator) destination(family uint16) *original.Destination {
	d := &original.Destination{Address: g.address(family), Port: g.port()}
	if g.chance(2) {
		d.AddressFamily = family
	}
	if g.chance(4) { // what callers write back of what they have read
		d.ActiveConnections, d.InactiveConnections = g.IntN(100), g.IntN(100)
		d.Stats.Connections = g.Uint32()
	}
	g.weights(d)
	return d
}

// entries makes n services, each with up to five destinations, all different.
func (g generator) entries(n int) []entry {
	var all []entry
	seen := map[string]bool{}
	for len(all) < n {
		e := entry{service: g.service()}
		if seen[identity(e.service)] {
			continue
		}
		seen[identity(e.service)] = true
		addresses := map[string]bool{}
		for range g.IntN(6) {
			d := g.destination(e.service.AddressFamily)
			if id := fmt.Sprint(d.Address, d.Port); !addresses[id] {
				addresses[id] = true
				e.destinations = append(e.destinations, d)
			}
		}
		all = append(all, e)
	}
	return all
}

// identity is the kernel's key of a service.
func identity(s *original.Service) string {
	if s.FWMark != 0 {
		return fmt.Sprint(s.AddressFamily, s.FWMark)
	}
	return fmt.Sprint(s.AddressFamily, s.Protocol, s.Address, s.Port)
}
