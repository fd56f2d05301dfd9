//go:build linux

package property

import (
	"fmt"
	"math"
	"net"
	"slices"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// allSchedulers are those that any kernel has; needKernel finds out which this one has.
var allSchedulers = []string{
	ipvs.RoundRobin, ipvs.WeightedRoundRobin, ipvs.LeastConnection, ipvs.WeightedLeastConnection,
	ipvs.LocalityBasedLeastConnection, ipvs.LocalityBasedLeastConnectionWithReplication,
	ipvs.DestinationHashing, ipvs.SourceHashing, ipvs.ShortestExpectedDelay, ipvs.NeverQueue,
	ipvs.WeightedFailover, ipvs.WeightedOverflow, ipvs.MaglevHashing, ipvs.PowerOfTwoChoices,
}

// domain is a set of values to generate; each is a part of the previous one.
type domain int

const (
	taken    domain = iota // values that the kernel accepts
	readable               // values that ipvsadm -Sn reads without a mistake of its own
	written                // values that ipvsadm -Sn writes without loss
	restored               // values that ipvsadm -R accepts
)

const (
	// maxTimeout is the longest persistence that no kernel's ticks wrap: they are
	// counted in 32 bits, up to 1000 a second.
	maxTimeout = math.MaxUint32 / 1000
	// maxIpvsadmTimeout and maxIpvsadmWeight are ipvsadm's own limits.
	maxIpvsadmTimeout = 31 * 24 * 3600
	maxIpvsadmWeight  = math.MaxUint16
)

type generator struct {
	*rapid.T
	domain domain
}

func pick[T any](g generator, label string, from ...T) T {
	return rapid.SampledFrom(from).Draw(g.T, label)
}

// number is biased to small numbers and to the ends of the range.
func (g generator) number(label string, min, max uint32) uint32 {
	return rapid.Uint32Range(min, max).Draw(g.T, label)
}

func (g generator) bool(label string) bool { return rapid.Bool().Draw(g.T, label) }

// table makes 1 to 6 services with up to 5 destinations each, all different.
func (g generator) table() table {
	var t table
	services := map[string]bool{}
	for range g.number("services", 1, 6) {
		e := entry{service: g.service()}
		if id := serviceID(normalisedService(e.service)); services[id] {
			continue
		} else {
			services[id] = true
		}
		destinations := map[string]bool{}
		for range g.number("destinations", 0, 5) {
			d := g.destination(e.service)
			if id := destinationID(normalisedDestination(d)); !destinations[id] {
				destinations[id] = true
				e.destinations = append(e.destinations, d)
			}
		}
		t = append(t, e)
	}
	return t
}

// changed makes another table of the same services and destinations.
func (g generator) changed(t table) table {
	t = slices.Clone(t)
	for i := range t {
		g.settings(&t[i].service)
		t[i].destinations = slices.Clone(t[i].destinations)
		for j := range t[i].destinations {
			g.parameters(&t[i].destinations[j], t[i].service)
		}
	}
	return t
}

func (g generator) service() ipvs.Service {
	s := ipvs.Service{AddressFamily: pick[uint16](g, "family", unix.AF_INET, unix.AF_INET6)}
	family := s.AddressFamily
	if pick(g, "identity", "address", "address", "mark") == "mark" {
		s.FWMark = g.number("mark", 1, math.MaxUint32)
		if g.domain == written {
			s.FWMark = g.number("small mark", 1, math.MaxInt32) // ipvsadm writes larger ones as negative
		}
	}
	if s.FWMark == 0 || g.domain == taken && g.bool("ignored address") {
		s.Protocol = pick[uint16](g, "protocol", unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP)
		s.Address = g.address(family, false)
		s.Port = uint16(g.number("port", 1, math.MaxUint16))
		if s.FWMark == 0 && g.bool("family from address") {
			s.AddressFamily = 0
		}
	}
	g.settings(&s)
	if s.FWMark == 0 && s.Flags&ipvs.ServiceFlagPersistent != 0 && pick(g, "ports", "one", "one", "all") == "all" {
		s.Port = 0
	}
	return s
}

// settings fills in the settings of a service.
func (g generator) settings(s *ipvs.Service) {
	v6 := normalisedService(*s).AddressFamily == unix.AF_INET6
	udp := s.FWMark == 0 && s.Protocol == unix.IPPROTO_UDP
	s.SchedName = pick(g, "scheduler", schedulers...)
	s.Flags, s.Timeout, s.PEName = 0, 0, ""
	s.Netmask = g.netmask(v6, true)
	// A service of all ports must stay persistent for ipvsadm.
	if s.FWMark == 0 && s.Port == 0 || g.bool("persistent") {
		s.Flags |= ipvs.ServiceFlagPersistent
		s.Netmask = g.netmask(v6, g.bool("single clients"))
		s.Timeout = g.number("timeout", 1, maxIpvsadmTimeout)
		if g.domain != restored {
			s.Timeout = g.number("long timeout", 0, maxTimeout)
		}
		if udp && g.bool("sip") {
			s.PEName = "sip"
		}
	} else if g.domain == taken { // without effect, but kept
		s.Timeout = g.number("unused timeout", 0, maxTimeout)
		s.Netmask = g.netmask(v6, false)
	}
	if (udp || s.FWMark != 0) && g.bool("one packet") {
		s.Flags |= ipvs.ServiceFlagOnePacket
	}
	for _, flag := range []uint32{ipvs.ServiceFlagSched1, ipvs.ServiceFlagSched2, ipvs.ServiceFlagSched3} {
		if g.bool("scheduler flag") {
			s.Flags |= flag
		}
	}
	if hashes(*s) && (g.domain == restored || g.domain == written && s.Flags&(ipvs.ServiceFlagSched1|ipvs.ServiceFlagSched2) == 0) {
		// For sh and mh ipvsadm has no name for the third flag: where it is the only
		// one, -Sn writes an option without the value, "-b ", which -R refuses.
		s.Flags &^= ipvs.ServiceFlagSched3
	}
	if g.bool("hashed") { // as in a service that was read
		s.Flags |= ipvs.ServiceFlagHashed
	}
	if g.domain == taken {
		s.Flags |= g.number("unknown flags", 0, math.MaxUint32>>6) << 6
		s.Stats.Connections, s.Stats64.Connections = 1, 1
	}
}

// hashes reports whether the flags have names of their own for the scheduler.
func hashes(s ipvs.Service) bool {
	return s.SchedName == ipvs.SourceHashing || s.SchedName == ipvs.MaglevHashing
}

func (g generator) netmask(v6, single bool) uint32 {
	switch {
	case v6 && single && g.domain == taken:
		return pick[uint32](g, "prefix of a client", 0, 128) // 0 means 128
	case v6 && single:
		return 128
	case v6:
		return g.number("prefix", 1, 128)
	case single:
		return math.MaxUint32
	}
	mask, err := ipvs.IPv4Netmask(int(g.number("prefix", 0, 32)))
	if err != nil {
		g.Fatal(err)
	}
	return mask
}

// destination makes a destination of s.
func (g generator) destination(s ipvs.Service) ipvs.Destination {
	family := normalisedService(s).AddressFamily
	if pick(g, "destination's family", "same", "same", "other") == "other" {
		family = unix.AF_INET + unix.AF_INET6 - family
	}
	d := ipvs.Destination{Address: g.address(family, true), Port: uint16(g.number("port", 0, math.MaxUint16))}
	if g.bool("family given") {
		d.AddressFamily = family
	}
	g.parameters(&d, s)
	if g.domain == restored && s.FWMark == 0 && d.ConnectionFlags != ipvs.ConnectionFlagMasq {
		d.Port = s.Port // ipvsadm sets it
	}
	return d
}

// parameters fills in the settings of a destination of s.
func (g generator) parameters(d *ipvs.Destination, s ipvs.Service) {
	d.Weight = int(g.number("weight", 0, maxIpvsadmWeight))
	if g.domain != restored {
		d.Weight = int(g.number("any weight", 0, math.MaxInt32))
	}
	d.UpperThreshold, d.LowerThreshold = 0, 0
	if g.bool("thresholds") {
		d.UpperThreshold = g.number("upper", 0, math.MaxInt32)
		d.LowerThreshold = g.number("lower", 0, d.UpperThreshold)
	}
	methods := []uint32{ipvs.ConnectionFlagMasq, ipvs.ConnectionFlagDirectRoute, ipvs.ConnectionFlagTunnel, ipvs.ConnectionFlagTunnel}
	if g.domain <= readable {
		// ipvsadm lists a local node as -g.
		methods = append(methods, ipvs.ConnectionFlagLocalNode)
	}
	if g.domain == taken {
		methods = append(methods, ipvs.ConnFwdBypass)
	}
	d.ConnectionFlags = pick(g, "method", methods...)
	if normalisedDestination(*d).AddressFamily != normalisedService(s).AddressFamily {
		d.ConnectionFlags = ipvs.ConnectionFlagTunnel // the only one that the kernel takes
	}
	d.TunnelType, d.TunnelPort, d.TunnelFlags = 0, 0, 0
	if d.ConnectionFlags == ipvs.ConnectionFlagTunnel || g.domain < written && g.bool("unused tunnel") {
		g.tunnel(d)
	}
	if g.domain == taken {
		d.ConnectionFlags |= g.number("other connection flags", 0, math.MaxUint32>>3) << 3 // not sent
		d.ActiveConnections, d.Stats.Connections = 1, 1
	}
}

func (g generator) tunnel(d *ipvs.Destination) {
	d.TunnelType = pick[uint8](g, "tunnel", ipvs.TunnelIPIP, ipvs.TunnelGUE, ipvs.TunnelGRE)
	checksums := []uint16{ipvs.TunnelFlagNoChecksum, ipvs.TunnelFlagChecksum}
	if d.TunnelType == ipvs.TunnelGUE || g.domain < written {
		checksums = append(checksums, ipvs.TunnelFlagRemoteChecksum)
	}
	if g.domain == taken {
		// With both, ipvsadm -Sn reads beyond the end of an array.
		checksums = append(checksums, ipvs.TunnelFlagChecksum|ipvs.TunnelFlagRemoteChecksum)
	}
	if d.TunnelType != ipvs.TunnelIPIP || g.domain < written {
		d.TunnelFlags = pick(g, "checksum", checksums...)
	}
	if d.TunnelType == ipvs.TunnelGUE || g.domain < written {
		d.TunnelPort = uint16(g.number("tunnel port", 1, math.MaxUint16))
	}
}

// address makes an address, or a unicast one that the kernel takes for a
// destination. An IPv4 one has 4 or 16 bytes.
func (g generator) address(family uint16, unicast bool) net.IP {
	octet := rapid.Byte()
	if family == unix.AF_INET6 {
		prefixes := []string{"2001:db8::", "fd00::", "64:ff9b::", "::"}
		if !unicast {
			prefixes = append(prefixes, "fe80::", "ff02::")
		}
		ip := net.ParseIP(pick(g, "network", prefixes...))
		// Groups of zeros, which are what notations differ in.
		for i := 4; i < len(ip); i += 2 {
			if g.bool("group") {
				ip[i], ip[i+1] = octet.Draw(g.T, "octet"), octet.Draw(g.T, "octet")
			}
		}
		if ip.To4() != nil || unicast && ip.IsUnspecified() {
			ip[0] = 0x20 // ::ffff:0:0/96 is IPv4 for Go
		}
		return ip
	}
	var a [4]byte
	for i := range a {
		a[i] = octet.Draw(g.T, "octet")
	}
	if unicast {
		a[0] = 1 + a[0]%223
		if a[0] == 127 {
			a[1], a[3] = 0, a[3]|1 // not a broadcast address of lo
		}
	}
	ip := net.IPv4(a[0], a[1], a[2], a[3])
	if g.bool("four bytes") {
		return ip.To4()
	}
	return ip
}

// table is services with their destinations.
type table []entry

type entry struct {
	service      ipvs.Service
	destinations []ipvs.Destination
}

// serviceID identifies a service of a normalised table.
func serviceID(s ipvs.Service) string {
	if s.FWMark != 0 {
		return fmt.Sprintf("%d mark %d", s.AddressFamily, s.FWMark)
	}
	return fmt.Sprintf("%d %x %d %d", s.AddressFamily, []byte(s.Address), s.Protocol, s.Port)
}

// destinationID identifies a destination of a service.
func destinationID(d ipvs.Destination) string {
	return fmt.Sprintf("%d %x %d", d.AddressFamily, []byte(d.Address), d.Port)
}

func familyOf(ip net.IP) (uint16, net.IP) {
	if v4 := ip.To4(); v4 != nil {
		return unix.AF_INET, v4
	}
	return unix.AF_INET6, ip
}

// normalisedService is s as the kernel returns it, without counters.
func normalisedService(s ipvs.Service) ipvs.Service {
	if s.FWMark != 0 {
		s.Address, s.Protocol, s.Port = nil, 0, 0
	} else {
		s.AddressFamily, s.Address = familyOf(s.Address)
	}
	if s.AddressFamily == unix.AF_INET6 && s.Netmask == 0 {
		s.Netmask = 128
	}
	s.Flags |= ipvs.ServiceFlagHashed
	s.Stats, s.Stats64 = ipvs.SvcStats{}, ipvs.Stats64{}
	return s
}

// normalisedDestination is d as the kernel returns it, without counters.
func normalisedDestination(d ipvs.Destination) ipvs.Destination {
	d.AddressFamily, d.Address = familyOf(d.Address)
	d.ConnectionFlags &= ipvs.ConnectionFlagFwdMask
	d.ActiveConnections, d.InactiveConnections, d.PersistentConnections = 0, 0, 0
	d.Stats, d.Stats64 = ipvs.DstStats{}, ipvs.Stats64{}
	return d
}

// normalised is t as the kernel returns it, in the order of the identities.
func normalised(t table) table {
	var n table
	for _, e := range t {
		m := entry{service: normalisedService(e.service)}
		for _, d := range e.destinations {
			m.destinations = append(m.destinations, normalisedDestination(d))
		}
		n = append(n, m)
	}
	n.sort()
	return n
}

func (t table) sort() {
	compare := func(a, b string) int {
		switch {
		case a < b:
			return -1
		case a > b:
			return 1
		}
		return 0
	}
	slices.SortFunc(t, func(a, b entry) int { return compare(serviceID(a.service), serviceID(b.service)) })
	for _, e := range t {
		slices.SortFunc(e.destinations, func(a, b ipvs.Destination) int { return compare(destinationID(a), destinationID(b)) })
	}
}
