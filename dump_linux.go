package ipvs

import (
	"hash/maphash"
	"math"

	"golang.org/x/sys/unix"
)

// collector is a parser of an answer with any number of entries.
type collector interface {
	parser
	begin(guess int) // with so many entries, maybe; before an answer is asked for again, too
	end()            // after the whole answer
	length() int
}

// dump sends a request for a list. If the kernel calls the answer inconsistent,
// or a part was larger than the buffer, it is asked again, a few times. The key
// is that of the service whose destinations are listed, and else zero.
func (i *Handle) dump(cmd uint8, fill filler, c collector, key serviceKey) error {
	if err := i.begin(); err != nil {
		return err
	}
	defer i.mu.Unlock()
	s, guess := i.socket, i.lengths.guess(cmd, key)
	if guess > longList {
		s = i.bulkSocket()
	}
	var err error
	for range dumpAttempts {
		c.begin(guess)
		err = i.request(s, cmd, unix.NLM_F_DUMP, fill, c)
		if err != errInterrupted && err != errTruncated {
			break
		}
	}
	if err == nil {
		c.end()
		i.lengths.note(cmd, key, c.length())
	}
	return err
}

// bulkSocket returns the socket for long lists. The kernel makes the parts of a
// dump as large as the largest buffer a socket ever read with, and clears them
// first. Large parts make a long list cheap, and the many short ones dear: each
// kind has a socket of its own.
func (i *Handle) bulkSocket() *socket {
	if bulk := i.bulk.Load(); bulk != nil {
		return bulk
	}
	if i.bulkRefused {
		return i.socket
	}
	bulk, err := openSocketLike(i.socket)
	if err != nil {
		i.bulkRefused = true // it is cheaper with, but goes without
		return i.socket
	}
	bulk.in = make([]byte, largeBuffer)
	i.bulk.Store(bulk)
	if i.closed.Load() { // Close may have looked before
		bulk.close()
	}
	return bulk
}

// longList is the number of entries from which on a list is read with large buffers.
const longList = 100

// placeBits makes room for the services of a large table.
const placeBits = 14

// lengths remembers how long lists were, to guess how long they are going to be.
// Nothing is remembered of destinations until one list of them is long.
type lengths struct {
	services     int
	destinations *[1 << placeBits]uint16 // by the hash of the service, plus 1: a guess is wrong where two share a place
	last         int                     // of the destinations that were listed last
}

// guess returns how long a list will be, 0 if it may be short. Destinations that
// were not listed before will be as many as those listed last: mostly the
// services of a table are alike.
func (l *lengths) guess(cmd uint8, key serviceKey) int {
	switch {
	case cmd == cmdGetService:
		return l.services
	case cmd != cmdGetDest || l.destinations == nil:
		return 0
	}
	if was := l.destinations[key.place()]; was > 0 {
		return int(was - 1)
	}
	return l.last
}

// note remembers how long a list was.
func (l *lengths) note(cmd uint8, key serviceKey, n int) {
	switch cmd {
	case cmdGetService:
		l.services = n
	case cmdGetDest:
		if l.destinations == nil && n > longList {
			l.destinations = new([1 << placeBits]uint16)
		}
		if l.destinations != nil {
			l.destinations[key.place()] = uint16(min(n+1, math.MaxUint16))
			l.last = n
		}
	}
}

// place is where the length of a service's list is remembered.
func (k *serviceKey) place() uint64 { return maphash.Comparable(hashSeed, *k) % (1 << placeBits) }
