package ipvs

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// list collects the services or destinations of an answer. They lie in memory
// many together: a table of thousands would else be as many allocations.
//
// A dump comes in parts, and what was added to the table between two of them
// (for kernels before 7, in any network namespace) can bring entries of the
// earlier parts again. K is what identifies an entry.
type list[T any, K comparable] struct {
	items     []*T
	slab      []T
	addresses addresses
	seen      map[K]struct{} // the items, once there is a second part
}

const (
	minSlab = 8
	maxSlab = 64 // a caller that keeps one item keeps its slab
)

// add adds the item in a message of part number part of the answer, unless an
// earlier part had it.
func (l *list[T, K]) add(part int, body []byte, parse func([]byte, *T, *addresses) error, key func(*T) K) error {
	if len(l.slab) == 0 {
		l.slab = make([]T, min(max(len(l.items), minSlab), maxSlab))
	}
	item := &l.slab[0]
	if err := parse(body, item, &l.addresses); err != nil {
		return err
	}
	if part > 0 && l.again(key, item) {
		*item = *new(T)
		return nil
	}
	l.slab = l.slab[1:]
	l.items = append(l.items, item)
	return nil
}

// again tells whether an item came before, and remembers it.
func (l *list[T, K]) again(key func(*T) K, item *T) bool {
	if l.seen == nil {
		l.seen = make(map[K]struct{}, 4*len(l.items))
		for _, earlier := range l.items {
			l.seen[key(earlier)] = struct{}{}
		}
	}
	before := len(l.seen)
	l.seen[key(item)] = struct{}{}
	return len(l.seen) == before
}

// reset forgets the items, for an answer that is asked for again.
func (l *list[T, K]) reset() { l.items, l.seen = nil, nil }

type serviceList struct{ list[Service, serviceKey] }

// parse takes a message with a service.
func (l *serviceList) parse(part int, body []byte) error {
	return l.add(part, body, parseService, keyOfService)
}

type destinationList struct {
	list[Destination, destinationKey]
}

// parse takes a message with a destination.
func (l *destinationList) parse(part int, body []byte) error {
	return l.add(part, body, parseDestination, keyOfDestination)
}

// serviceKey is what identifies a service in its network namespace.
type serviceKey struct {
	fwmark   uint32
	family   uint16
	protocol uint16
	port     uint32 // in 32 bits: a key without gaps is hashed in one go
	address  [net.IPv6len]byte
}

func keyOfService(s *Service) serviceKey {
	k := serviceKey{fwmark: s.FWMark, family: s.AddressFamily}
	if s.FWMark == 0 {
		k.protocol, k.port = s.Protocol, uint32(s.Port)
		copy(k.address[:], s.Address)
	}
	return k
}

// destinationKey is what identifies a destination in its service.
type destinationKey struct {
	family, port uint16
	address      [net.IPv6len]byte
}

func keyOfDestination(d *Destination) destinationKey {
	k := destinationKey{family: d.AddressFamily, port: d.Port}
	copy(k.address[:], d.Address)
	return k
}

// addresses hands out memory for the addresses of an answer, many together.
type addresses struct {
	free  []byte
	chunk int // how much was taken last
}

// take copies an address as the kernel sends it, 16 bytes whatever the family,
// in the length of its family.
func (m *addresses) take(family uint16, address []byte) (net.IP, error) {
	size := net.IPv6len
	if family == unix.AF_INET {
		size = net.IPv4len
	}
	if family != unix.AF_INET && family != unix.AF_INET6 || len(address) != net.IPv6len && len(address) != size {
		return nil, fmt.Errorf("ipvs: malformed reply: an address of family %d with %d bytes", family, len(address))
	}
	if len(m.free) < size {
		m.chunk = min(max(2*m.chunk, net.IPv6len), 1024)
		m.free = make([]byte, m.chunk)
	}
	ip := m.free[:size:size]
	m.free = m.free[size:]
	copy(ip, address)
	return ip, nil
}
