package ipvs

// This file has the keys of services and destinations, and an index of keys.

import (
	"hash/maphash"
	"math/bits"
	"net"
)

// serviceKey identifies a service in its network namespace.
type serviceKey struct {
	fwmark   uint32
	family   uint16
	protocol uint16
	port     uint32 // 32 bits, since keys without padding are hashed and compared as a whole
	address  [net.IPv6len]byte
}

// destinationKey identifies a destination in its service.
type destinationKey struct {
	family, port uint16
	address      [net.IPv6len]byte
}

// serviceKeyWith returns the key of s with the given family and address.
func serviceKeyWith(s *Service, family uint16, address []byte) serviceKey {
	k := serviceKey{fwmark: s.FWMark, family: family}
	if s.FWMark == 0 {
		k.protocol, k.port = s.Protocol, uint32(s.Port)
		putAddress(&k.address, address)
	}
	return k
}

func destinationKeyWith(d *Destination, family uint16, address []byte) destinationKey {
	k := destinationKey{family: family, port: d.Port}
	putAddress(&k.address, address)
	return k
}

// keyOfService returns the key of a service as the kernel returned it.
func keyOfService(s *Service) serviceKey { return serviceKeyWith(s, s.AddressFamily, s.Address) }

// keyOfDestination returns the key of a destination as the kernel returned it.
func keyOfDestination(d *Destination) destinationKey {
	return destinationKeyWith(d, d.AddressFamily, d.Address)
}

// sentServiceKey returns the key of s as it would be sent, or why it cannot be sent.
func sentServiceKey(s *Service) (serviceKey, error) {
	if s == nil {
		return serviceKey{}, errNilService
	}
	family, address, err := serviceFamily(s)
	if err != nil {
		return serviceKey{}, err
	}
	return serviceKeyWith(s, family, address), nil
}

// sentDestinationKey returns the key of d as it would be sent, or why it cannot be sent.
func sentDestinationKey(d *Destination) (destinationKey, error) {
	if d == nil {
		return destinationKey{}, errNilDestination
	}
	family, address, err := familyOf(d.AddressFamily, d.Address, "destination")
	if err != nil {
		return destinationKey{}, err
	}
	return destinationKeyWith(d, family, address), nil
}

// putAddress copies an address of 4 or 16 bytes.
func putAddress(to *[net.IPv6len]byte, address []byte) {
	if len(address) == net.IPv4len {
		native.PutUint32(to[:], native.Uint32(address))
		return
	}
	copy(to[:], address)
}

// index numbers keys and finds them. It is a hash table with open addressing, at most
// half full: for the keys of a whole table, rebuilt every few seconds, it costs less
// than a map. A few keys are only a list: comparing them costs less than hashing.
type index[K comparable] struct {
	keys   []K
	places []uint32 // numbers of keys, starting at 1; 0 marks a free place; empty for a few keys
}

// hashSeed seeds the hash so that chosen addresses cannot force collisions.
var hashSeed = maphash.MakeSeed()

// reset removes all keys and makes room for others.
func (x *index[K]) reset(room int) {
	if cap(x.keys) < room {
		x.keys = make([]K, 0, max(room, smallList))
	}
	x.keys = x.keys[:0]
	if room <= smallList {
		x.places = x.places[:0]
		return
	}
	size := 2 << bits.Len(uint(room))
	if cap(x.places) < size {
		x.places = make([]uint32, size)
	}
	x.places = x.places[:size]
	clear(x.places)
}

// place returns the place of a key, or the free place for it.
func (x *index[K]) place(k K) *uint32 {
	for at := maphash.Comparable(hashSeed, k); ; at++ {
		place := &x.places[at&uint64(len(x.places)-1)]
		if *place == 0 || x.keys[*place-1] == k {
			return place
		}
	}
}

// find returns the number of a key, if it was added.
func (x *index[K]) find(k K) (n int, found bool) {
	if len(x.places) == 0 {
		for n := range x.keys {
			if x.keys[n] == k {
				return n, true
			}
		}
		return -1, false
	}
	n = int(*x.place(k))
	return n - 1, n > 0
}

// add gives a key the next number, starting at 0, unless it was added before.
func (x *index[K]) add(k K) (added bool) {
	if len(x.places) == 0 {
		if _, found := x.find(k); found {
			return false
		}
		x.keys = append(x.keys, k)
		return true
	}
	place := x.place(k)
	if *place > 0 {
		return false
	}
	x.keys = append(x.keys, k)
	*place = uint32(len(x.keys))
	return true
}
