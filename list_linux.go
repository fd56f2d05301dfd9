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
	part      int // number of the last datagram
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
	l.part = m.part
	return nil
}

// begin forgets the items. So many are to come, 0 if nobody knows.
func (l *list[T]) begin(guess int) { l.items, l.guess = nil, guess }

func (l *list[T]) length() int { return len(l.items) }

type serviceList struct{ list[Service] }

// parse takes a message with a service.
func (l *serviceList) parse(m *message) error { return l.add(m, parseService) }

// end takes out the services that came twice, which kernels from 7 on can send
// even in one part, while their table grows.
func (l *serviceList) end() {
	var seen index[serviceKey]
	seen.reset(len(l.items))
	l.items = slices.DeleteFunc(l.items, func(s *Service) bool {
		key := keyOfService(s)
		return !seen.add(key, key.hash())
	})
}

type destinationList struct {
	list[Destination]
}

// parse takes a message with a destination.
func (l *destinationList) parse(m *message) error { return l.add(m, parseDestination) }

// end takes out the destinations that came twice. What was added to the table
// between two parts of an answer can bring entries of the earlier parts again.
func (l *destinationList) end() {
	if l.part == 0 {
		return
	}
	var seen index[destinationKey]
	seen.reset(len(l.items))
	l.items = slices.DeleteFunc(l.items, func(d *Destination) bool {
		key := keyOfDestination(d)
		return !seen.add(key, key.hash())
	})
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
