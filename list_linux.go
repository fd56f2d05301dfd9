package ipvs

import (
	"fmt"
	"math/bits"
	"net"
	"slices"

	"golang.org/x/sys/unix"
)

// list collects the services or destinations of an answer. They lie in memory
// many together: a table of thousands would else be as many allocations.
//
// A dump comes in parts, and what was added to the table between two of them
// (for kernels before 7, in any network namespace) can bring entries of the
// earlier parts again. Kernels from 7 on can bring a service twice in one part,
// while their table grows. K is what identifies an entry.
type list[T any, K key] struct {
	items     []*T
	slab      []T
	addresses addresses

	// seen finds items by their keys, once there is a second part: a hash table with
	// the numbers of the items, from 1, and 0 for a free place.
	seen []uint32
}

// key is what identifies an entry.
type key interface {
	comparable
	hash() uint32
}

// maxSlab bounds what a caller keeps who keeps one item.
const maxSlab = 64

// add adds the item in a message, unless it came before; that is looked up only
// where it is possible.
func (l *list[T, K]) add(m message, again bool, parse func([]byte, *T, *addresses) error, keyOf func(*T) K) error {
	if len(l.slab) == 0 {
		// The messages of one answer are about as long: so many are in the datagram.
		n := min(1+m.left/(msgHdrLen+len(m.body)), maxSlab)
		l.slab = make([]T, n)
		l.items = slices.Grow(l.items, n)
	}
	item := &l.slab[0]
	if err := parse(m.attrs(), item, &l.addresses); err != nil {
		return err
	}
	if again && l.again(item, keyOf) {
		*item = *new(T)
		return nil
	}
	l.slab = l.slab[1:]
	l.items = append(l.items, item)
	return nil
}

// again tells whether an item came before, and remembers it as the next one.
func (l *list[T, K]) again(item *T, keyOf func(*T) K) bool {
	if 2*len(l.items) >= len(l.seen) {
		l.seen = make([]uint32, max(64, 4*roundUp(len(l.items))))
		for n, earlier := range l.items {
			l.place(n, keyOf(earlier), keyOf)
		}
	}
	return !l.place(len(l.items), keyOf(item), keyOf)
}

// place notes that item n has the key k, unless another has it.
func (l *list[T, K]) place(n int, k K, keyOf func(*T) K) bool {
	at := int(k.hash()) & (len(l.seen) - 1)
	for l.seen[at] != 0 {
		if keyOf(l.items[l.seen[at]-1]) == k {
			return false
		}
		at = (at + 1) & (len(l.seen) - 1)
	}
	l.seen[at] = uint32(n + 1)
	return true
}

// roundUp returns the next power of two.
func roundUp(n int) int { return 1 << bits.Len(uint(n)) }

// reset forgets the items, for an answer that is asked for again.
func (l *list[T, K]) reset() { l.items, l.seen = nil, nil }

func (l *list[T, K]) length() int { return len(l.items) }

type serviceList struct{ list[Service, serviceKey] }

// parse takes a message with a service.
func (l *serviceList) parse(m message) error {
	return l.add(m, m.flags&unix.NLM_F_MULTI != 0, parseService, keyOfService)
}

type destinationList struct {
	list[Destination, destinationKey]
}

// parse takes a message with a destination.
func (l *destinationList) parse(m message) error {
	return l.add(m, m.part > 0, parseDestination, keyOfDestination)
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

func (k serviceKey) hash() uint32 {
	return mix(k.fwmark ^ uint32(k.family)<<16 ^ uint32(k.protocol)<<24 ^ k.port ^ hashAddress(&k.address))
}

func hashAddress(address *[net.IPv6len]byte) uint32 {
	low, high := native.Uint64(address[:]), native.Uint64(address[8:])
	sum := low ^ bits.RotateLeft64(high, 29)
	return mix(uint32(sum) ^ mix(uint32(sum>>32)))
}

// mix spreads the bits of x: multiplication carries them up, the shift down again.
func mix(x uint32) uint32 {
	x *= 0x9E3779B1 // the golden ratio, in 32 bits
	return x ^ x>>15
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

func (k destinationKey) hash() uint32 {
	return mix(uint32(k.family)<<16 ^ uint32(k.port) ^ hashAddress(&k.address))
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
		m.chunk = min(max(2*m.chunk, 8*net.IPv4len), 1024)
		m.free = make([]byte, m.chunk)
	}
	ip := m.free[:size:size]
	m.free = m.free[size:]
	copy(ip, address)
	return ip, nil
}
