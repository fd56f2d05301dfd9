package ipvs

// This file predicts how long a list will be, which decides on the buffer to read
// it with.

import (
	"hash/maphash"
	"math"
)

// longList is the number of entries above which a list is read with a large buffer.
const longList = 100

// slotBits is the logarithm of the number of services remembered.
const slotBits = 14

// sizeHints remembers the lengths of lists, to predict those of the next ones.
// Destinations are not remembered until a list of them is long.
type sizeHints struct {
	services     int
	destinations *[1 << slotBits]uint16 // length plus 1, by the hash of the service; two services can share a slot
	last         int                    // length of the last list of destinations
}

// predict returns the expected length of a list, or 0 if it may be short. For a service
// whose destinations were not listed before, that is the length of the last list, since
// the services of a table are usually alike.
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

// record remembers the length of a list.
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

// slot returns where the length of a service's list is remembered.
func (k *serviceKey) slot() uint64 { return maphash.Comparable(hashSeed, *k) % (1 << slotBits) }
