package ipvs

import (
	"fmt"
	"net"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// list collects the services or destinations of an answer. They lie in memory
// many together: a table of thousands would else be as many allocations.
type list[T any] struct {
	items     []*T
	slab      []T
	guess     int // how many items there will be; 0 if nobody knows
	addresses addresses
}

// maxSlab is the size of the largest slab, in bytes. It bounds what a caller keeps
// who keeps one item; Go's allocator fills such blocks without a rest.
const maxSlab = 16 << 10

// add adds the item in a message.
func (l *list[T]) add(m *message, parse func([]byte, *T, *addresses) error) error {
	if len(l.slab) == 0 {
		// The messages of one answer are about as long: so many are in the datagram.
		n := max(1+m.left/(msgHdrLen+len(m.body)), l.guess-len(l.items))
		l.items = slices.Grow(l.items, n)
		l.slab = make([]T, min(n, maxSlab/int(unsafe.Sizeof(*new(T)))))
	}
	item := &l.slab[0]
	if err := parse(m.attrs(), item, &l.addresses); err != nil {
		return err
	}
	l.slab = l.slab[1:]
	l.items = append(l.items, item)
	return nil
}

// begin forgets the items. So many are to come, 0 if nobody knows.
func (l *list[T]) begin(guess int) { l.items, l.guess = nil, guess }

func (l *list[T]) length() int { return len(l.items) }

type serviceList struct{ list[Service] }

// parse takes a message with a service.
func (l *serviceList) parse(m *message) error { return l.add(m, parseService) }

// end takes out the services that came twice.
func (l *serviceList) end() { l.items = unique(l.items, keyOfService) }

type destinationList struct {
	list[Destination]
}

// parse takes a message with a destination.
func (l *destinationList) parse(m *message) error { return l.add(m, parseDestination) }

// end takes out the destinations that came twice.
func (l *destinationList) end() { l.items = unique(l.items, keyOfDestination) }

// few is how many items are compared with each other in less time than an index
// takes.
const few = 12

// unique takes out the items that came before. What is added to the table between
// two parts of a list can bring entries of the earlier parts again. Kernels from 7
// on can send an entry twice even in one part: services while their table grows,
// destinations that are deleted and come again.
func unique[T any, K comparable](items []*T, keyOf func(*T) K) []*T {
	if len(items) <= few && !twice(items, keyOf) {
		return items
	}
	var seen index[K]
	seen.reset(len(items))
	return slices.DeleteFunc(items, func(item *T) bool { return !seen.add(keyOf(item)) })
}

// twice tells whether one of a few items comes twice.
func twice[T any, K comparable](items []*T, keyOf func(*T) K) bool {
	var keys [few]K
	for n, item := range items {
		keys[n] = keyOf(item)
		if slices.Contains(keys[:n], keys[n]) {
			return true
		}
	}
	return false
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
	if size == net.IPv4len { // copy is a call, which costs more
		native.PutUint32(ip, native.Uint32(address))
	} else {
		copy(ip, address)
	}
	return ip, nil
}
