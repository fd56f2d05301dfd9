package ipvs

// This file has lists: asking again, memory for many entries, entries that come
// twice.

import (
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// collector is a parser of an answer with any number of entries.
type collector interface {
	parser
	reset(guess int) // with so many entries, maybe; before an answer is asked for again, too
	finish()         // after the whole answer
	length() int
}

// dump sends a request for a list. If the kernel calls the answer inconsistent,
// or a part was larger than the buffer, it is asked again, a few times. The key
// is that of the service whose destinations are listed, and else zero.
func (i *Handle) dump(cmd uint8, fill filler, c collector, key serviceKey) error {
	if err := i.lock(); err != nil {
		return err
	}
	defer i.mu.Unlock()
	s, guess := i.socket, i.hints.predict(cmd, key)
	if guess > longList {
		s = i.bulkSocket()
	}
	msg, err := i.newRequest(cmd, unix.NLM_F_DUMP, fill)
	if err != nil {
		return err
	}
	for range dumpAttempts {
		c.reset(guess)
		err = i.execute(s, msg, i.answerTo(msg, c))
		if err != errInterrupted && err != errTruncated {
			break
		}
	}
	if err == nil {
		c.finish()
		i.hints.record(cmd, key, c.length())
	}
	return err
}

// bulkSocket returns the socket for long lists. The kernel makes the parts of a
// dump as large as the largest buffer a socket ever read with, and clears them
// first. Large buffers speed up long lists but slow down short ones, so each kind
// has a socket of its own.
func (i *Handle) bulkSocket() *socket {
	if bulk := i.bulk.Load(); bulk != nil {
		return bulk
	}
	bulk, err := openSocketLike(i.socket)
	if err != nil {
		return i.socket // slower; the next long list tries again
	}
	bulk.in = make([]byte, largeBuffer)
	i.closeWithHandle(bulk)
	i.bulk.Store(bulk)
	if i.closed.Load() { // Close may have looked before
		bulk.close()
	}
	return bulk
}

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

// reset forgets the items. So many are to come, 0 if nobody knows.
func (l *list[T]) reset(guess int) { l.items, l.guess = nil, guess }

func (l *list[T]) length() int { return len(l.items) }

type serviceList struct{ list[Service] }

// parse takes a message with a service.
func (l *serviceList) parse(m *message) error { return l.add(m, parseService) }

// finish takes out the services that came twice.
func (l *serviceList) finish() { l.items = dropDuplicates(l.items, keyOfService) }

type destinationList struct {
	list[Destination]
}

// parse takes a message with a destination.
func (l *destinationList) parse(m *message) error { return l.add(m, parseDestination) }

// finish takes out the destinations that came twice.
func (l *destinationList) finish() { l.items = dropDuplicates(l.items, keyOfDestination) }

// smallList is how many items are compared with each other in less time than an index
// takes.
const smallList = 12

// dropDuplicates takes out the items that came before. What is added to the table between
// two parts of a list can bring entries of the earlier parts again. Kernels from 7
// on can send an entry twice even in one part: services while their table grows,
// destinations that are deleted and come again.
func dropDuplicates[T any, K comparable](items []*T, keyOf func(*T) K) []*T {
	if len(items) <= smallList && !hasDuplicates(items, keyOf) {
		return items
	}
	var seen index[K]
	seen.reset(len(items))
	return slices.DeleteFunc(items, func(item *T) bool { return !seen.add(keyOf(item)) })
}

// hasDuplicates tells whether one of a few items comes hasDuplicates.
func hasDuplicates[T any, K comparable](items []*T, keyOf func(*T) K) bool {
	var keys [smallList]K
	for n, item := range items {
		keys[n] = keyOf(item)
		if slices.Contains(keys[:n], keys[n]) {
			return true
		}
	}
	return false
}
