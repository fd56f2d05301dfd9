//go:build linux

package compat

import (
	"math"
	"net"
	"strings"
	"syscall"
	"time"

	original "github.com/moby/ipvs"
)

// calls has the weight of each method in TestRandom.
var calls = []struct {
	name   string
	weight int
}{
	{"NewService", 160}, {"UpdateService", 80}, {"DelService", 15},
	{"NewDestination", 220}, {"UpdateDestination", 120}, {"DelDestination", 50},
	{"GetService", 50}, {"GetServices", 12}, {"GetDestinations", 60}, {"IsServicePresent", 30},
	{"GetConfig", 10}, {"SetConfig", 40}, {"RewriteService", 60}, {"RewriteDestination", 80},
	{"New", 6}, {"Flush", 3}, {"SetTunnel", 40},
}

func (g generator) method() string {
	total := 0
	for _, m := range calls {
		total += m.weight
	}
	k := g.IntN(total)
	for _, m := range calls {
		if k -= m.weight; k < 0 {
			return m.name
		}
	}
	panic("unreachable")
}

// pool has the services and destinations that most operations are about, so
// that many meet what an earlier one left.
type pool struct {
	services     []*original.Service
	destinations map[uint16][]*original.Destination // by address family
	made         []operation                        // those that made a destination
}

func (g generator) pool() *pool {
	p := &pool{destinations: map[uint16][]*original.Destination{}}
	for _, e := range g.entries(8) {
		p.services = append(p.services, e.service)
	}
	for _, family := range []uint16{syscall.AF_INET, syscall.AF_INET6} {
		for range 4 {
			p.destinations[family] = append(p.destinations[family], g.destination(family))
		}
	}
	return p
}

// operation makes an operation, valid or not.
func (g generator) operation(p *pool) operation {
	op := operation{method: g.method(), closed: g.chance(100)}
	// What the original cannot do is there, too, and meets what it does.
	op.foreign = op.method == "SetTunnel" || changes(op.method) && g.chance(12)
	op.closed = op.closed && !op.foreign && op.method != "New"
	switch {
	case op.method == "New":
		op.path = pick(g, "", "/nonexistent/ns", "/proc/self/status", "/proc", "/proc/self/ns/mnt", "a\x00b")
	case op.method == "SetConfig" && (op.foreign || !g.chance(12)):
		op.config = &original.Config{TimeoutTCP: g.timeout(), TimeoutTCPFin: g.timeout(), TimeoutUDP: g.timeout()}
	case takesDestination(op.method) && op.method != "NewDestination" && len(p.made) > 0 && !g.chance(4):
		last := pick(g, p.made[max(0, len(p.made)-20):]...)
		op.service, op.destination = g.oddService(identityOf(last.service)), g.changed(last.destination)
	case takesService(op.method):
		op.service = g.pooledService(p, op.method)
		if takesDestination(op.method) {
			family := uint16(syscall.AF_INET)
			if (op.service.AddressFamily == syscall.AF_INET6) != g.chance(25) {
				family = syscall.AF_INET6
			}
			op.destination = g.changed(pick(g, p.destinations[family]...))
		}
	}
	if ours := op.foreign || strings.HasPrefix(op.method, "Rewrite"); !ours {
		if g.chance(150) {
			op.service = nil
		}
		if g.chance(150) {
			op.destination = nil
		}
	}
	return op
}

func (g generator) pooledService(p *pool, method string) *original.Service {
	s := with(pick(g, p.services...), func(*original.Service) {})
	switch {
	case isSet(method):
		g.settings(s)
		if s.Protocol == syscall.IPPROTO_UDP && s.Flags&persistent != 0 && g.chance(2) {
			s.PEName = "sip"
		}
	case g.chance(2):
		s = identityOf(s) // enough for all but these
	}
	return g.oddService(s)
}

func (g generator) oddService(s *original.Service) *original.Service {
	for odd := g.chance(3); odd; odd = g.chance(4) {
		pick(g, oddServices...)(g, s)
	}
	return s
}

// changed returns a destination with other settings.
func (g generator) changed(d *original.Destination) *original.Destination {
	d = with(d, g.weights)
	if g.chance(6) {
		d.Weight = 1<<16 + g.IntN(1<<20) // most of the original's losses need this
	}
	for odd := g.chance(3); odd; odd = g.chance(4) {
		pick(g, oddDestinations...)(g, d)
	}
	return d
}

// oddAddresses has addresses of wrong lengths, and those that have a meaning of
// their own.
var oddAddresses = []net.IP{
	nil, {}, {10}, {10, 1, 1}, {10, 1, 1, 1, 1}, {10, 14: 1}, {0x20, 1, 16: 1}, {0x20, 1, 31: 1},
	net.IPv4(10, 9, 9, 9).To4(), net.IPv4(10, 9, 9, 9), net.ParseIP("2001:db8::9"), // plain ones, but of either family
	net.IPv4zero.To4(), net.IPv4zero, net.IPv6zero,
	net.IPv4bcast, net.IPv4(224, 0, 0, 1), net.ParseIP("ff02::1"),
	net.IPv4(127, 0, 0, 1), net.IPv6loopback, net.IPv4(169, 254, 0, 1), net.ParseIP("fe80::1"),
	net.ParseIP("2001:db8::"), net.ParseIP("a0a:a0a::"), net.ParseIP("64:ff9b::10.0.0.1"), net.ParseIP("::10.0.0.1"),
}

// oddServices give a service what callers seldom give, or should not.
var oddServices = []func(generator, *original.Service){
	func(_ generator, s *original.Service) { s.AddressFamily = 0 },
	func(_ generator, s *original.Service) { s.AddressFamily = otherFamily(s.AddressFamily) },
	func(g generator, s *original.Service) {
		s.AddressFamily = pick[uint16](g, syscall.AF_UNIX, 3, 255, 0x0200, math.MaxUint16)
	},
	func(g generator, s *original.Service) {
		s.Protocol = pick[uint16](g, 0, syscall.IPPROTO_ICMP, syscall.IPPROTO_TCP, syscall.IPPROTO_UDP, 132, 255, 0x0106, math.MaxUint16)
	},
	func(_ generator, s *original.Service) { s.Port = 0 },
	func(_ generator, s *original.Service) { s.Port = 65535 },
	func(g generator, s *original.Service) {
		s.SchedName = pick(g, "", "none", "RR", "rr ", "rr\x00x", "\x00", "ü", "%s", "fifteen-letters", "sixteen-letters!", strings.Repeat("x", 70000))
	},
	func(_ generator, s *original.Service) { s.SchedName = "nosuch" },
	func(g generator, s *original.Service) {
		s.PEName = pick(g, "sip", "nosuch", "sip\x00x", "fifteen-letters", "sixteen-letters!")
	},
	func(g generator, s *original.Service) {
		s.Flags = pick(g, uint32(math.MaxUint32), g.Uint32(), g.Uint32N(64))
	},
	func(g generator, s *original.Service) { s.Timeout = pick(g, 0, 1, uint32(math.MaxUint32), g.Uint32()) },
	func(g generator, s *original.Service) {
		s.Netmask = pick[uint32](g, 0, 1, 24, 32, 64, 128, 129, 0x00ff00ff, math.MaxUint32, g.Uint32())
	},
	func(g generator, s *original.Service) { s.Netmask = pick[uint32](g, 0, 0, 129) },
	func(g generator, s *original.Service) { s.FWMark = pick[uint32](g, 1, 2, math.MaxUint32) },
	func(_ generator, s *original.Service) { s.FWMark = 0 },
	func(g generator, s *original.Service) {
		s.Stats = original.SvcStats{Connections: g.Uint32(), BytesIn: g.Uint64()}
	},
	func(g generator, s *original.Service) { s.Address = pick(g, oddAddresses...) },
}

// oddDestinations do so with a destination.
var oddDestinations = []func(generator, *original.Destination){
	func(g generator, d *original.Destination) {
		d.AddressFamily = pick[uint16](g, syscall.AF_INET, syscall.AF_INET6)
	},
	func(g generator, d *original.Destination) {
		d.AddressFamily = pick[uint16](g, syscall.AF_UNIX, 255, math.MaxUint16)
	},
	func(_ generator, d *original.Destination) { d.Port = 0 },
	func(g generator, d *original.Destination) {
		d.Weight = pick(g, -1, 65535, 65536, 65537, math.MaxInt32, math.MaxInt32+1, math.MaxUint32, 1<<32, 1<<32+5, math.MinInt32, math.MinInt, math.MaxInt, g.Int())
	},
	func(g generator, d *original.Destination) {
		d.ConnectionFlags = pick[uint32](g, 4, 5, 6, 7, 0x0108, g.Uint32())
	},
	func(_ generator, d *original.Destination) { d.ConnectionFlags = original.ConnFwdTunnel },
	func(g generator, d *original.Destination) {
		d.UpperThreshold = pick[uint32](g, 0, 1, math.MaxInt32, 1<<31, math.MaxUint32, g.Uint32())
		d.LowerThreshold = pick[uint32](g, 0, 1, 2, math.MaxInt32, math.MaxUint32, g.Uint32())
	},
	func(g generator, d *original.Destination) {
		d.ActiveConnections, d.InactiveConnections, d.Stats.Connections = g.Int(), -1, g.Uint32()
	},
	func(g generator, d *original.Destination) { d.Address = pick(g, oddAddresses...) },
}

func otherFamily(family uint16) uint16 { return syscall.AF_INET + syscall.AF_INET6 - family }

// timeout makes a value for SetConfig; most are valid.
func (g generator) timeout() time.Duration {
	switch g.IntN(12) {
	case 0:
		return time.Duration(1 + g.IntN(int(time.Second)-1)) // less than a second
	case 1:
		return pick[time.Duration](g, -1, -time.Second, -time.Hour, math.MinInt64)
	case 2:
		return pick[time.Duration](g, 1<<31-1, 1<<31-1, 1<<30, 1<<31, 1<<32, 1<<32+1, math.MaxInt64/time.Second) * time.Second
	case 3, 4, 5:
		return 0
	}
	whole := time.Duration(1+g.IntN(100000)) * time.Second
	return whole + pick(g, 0, time.Duration(g.Int64N(int64(time.Second)))) // fractions are cut
}
