package ipvs

// This file predicts how long a list will be, which decides on the buffer to read
// it with.

import (
	"hash/maphash"
	"math"
)

// longList is the number of entries from which on a list is read with large buffers.
const longList = 100

// slotBits makes room for the services of a large table.
const slotBits = 14

// sizeHints remembers how long lists were, to guess how long they are going to be.
// Nothing is remembered of destinations until one list of them is long.
type sizeHints struct {
	services     int
	destinations *[1 << slotBits]uint16 // by the hash of the service, plus 1: a guess is wrong where two share a place
	last         int                    // of the destinations that were listed last
}

// predict returns how long a list will be, 0 if it may be short. Destinations that
// were not listed before will be as many as those listed last: mostly the
// services of a table are alike.
func (l *sizeHints) predict(cmd uint8, key serviceKey) int {
	switch {
	case cmd == cmdGetService:
		return l.services
	case cmd != cmdGetDest || l.destinations == nil:
		return 0
	}
	if was := l.destinations[key.slot()]; was > 0 {
		return int(was - 1)
	}
	return l.last
}

// record remembers how long a list was.
func (l *sizeHints) record(cmd uint8, key serviceKey, n int) {
	switch cmd {
	case cmdGetService:
		l.services = n
	case cmdGetDest:
		if l.destinations == nil && n > longList {
			l.destinations = new([1 << slotBits]uint16)
		}
		if l.destinations != nil {
			l.destinations[key.slot()] = uint16(min(n+1, math.MaxUint16))
			l.last = n
		}
	}
}

// slot is where the length of a service's list is remembered.
func (k *serviceKey) slot() uint64 { return maphash.Comparable(hashSeed, *k) % (1 << slotBits) }
