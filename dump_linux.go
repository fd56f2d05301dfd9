package ipvs

// This file has lists: repeating an interrupted one, memory for many entries, dropping
// duplicates.

import (
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A collector is a parser of a list.
type collector interface {
	parser
	reset(guess int) // before each request; guess is the expected number of entries
	finish()         // after the whole answer
	length() int
}

// dump requests a list. If the kernel marks the answer as inconsistent, or a part
// was larger than the buffer, it requests the list again, a few times. key is the key
// of the service whose destinations are listed, and zero for other lists.
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
	s.prepareDump()
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
	if i.closed.Load() { // Close may have run before the Store
		bulk.close()
	}
	return bulk
}

// list collects the services or destinations of an answer. Items are allocated in
// slabs to avoid one allocation per entry.
type list[T any] struct {
	items     []*T
	slab      []T
	guess     int // expected number of items, or 0
	addresses addresses
}

// maxSlab is the size of the largest slab, in bytes. It bounds how much memory a
// single item keeps alive.
const maxSlab = 16 << 10

// add adds the item in a message.
func (l *list[T]) add(m *message, parse func([]byte, *T, *addresses) error) error {
	if len(l.slab) == 0 {
		// The messages of one answer have about the same length.
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

// reset drops the items. guess is the expected number of new ones, or 0.
func (l *list[T]) reset(guess int) { l.items, l.guess = nil, guess }

func (l *list[T]) length() int { return len(l.items) }

type serviceList struct{ list[Service] }

// parse adds the service in a message.
func (l *serviceList) parse(m *message) error { return l.add(m, parseService) }

// finish drops services that were listed before.
func (l *serviceList) finish() { l.items = dropDuplicates(l.items, keyOfService) }

type destinationList struct {
	list[Destination]
}

// parse adds the destination in a message.
func (l *destinationList) parse(m *message) error { return l.add(m, parseDestination) }

// finish drops destinations that were listed before.
func (l *destinationList) finish() { l.items = dropDuplicates(l.items, keyOfDestination) }

// smallList is the number of items up to which comparing all pairs is faster than
// an index.
const smallList = 12

// dropDuplicates removes items that were listed before. Changes to the table
// between two parts of a list can make the kernel send entries again. Linux 7 and later
// can send an entry twice even in one part: services while their table grows, and
// destinations that are deleted and added again.
func dropDuplicates[T any, K comparable](items []*T, keyOf func(*T) K) []*T {
	if len(items) <= smallList && !hasDuplicates(items, keyOf) {
		return items
	}
	var seen index[K]
	seen.reset(len(items))
	return slices.DeleteFunc(items, func(item *T) bool { return !seen.add(keyOf(item)) })
}

// hasDuplicates reports whether one of at most smallList items is listed twice.
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
