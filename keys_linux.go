package ipvs

// This file has what identifies services and destinations, and an index of such
// keys.

import (
	"hash/maphash"
	"math/bits"
	"net"
)

// serviceKey is what identifies a service in its network namespace.
type serviceKey struct {
	fwmark   uint32
	family   uint16
	protocol uint16
	port     uint32 // in 32 bits: keys without gaps are hashed and compared in one go
	address  [net.IPv6len]byte
}

// destinationKey is what identifies a destination in its service.
type destinationKey struct {
	family, port uint16
	address      [net.IPv6len]byte
}

// keyOfService returns what identifies a service that came from the kernel.
func keyOfService(s *Service) serviceKey {
	k := serviceKey{fwmark: s.FWMark, family: s.AddressFamily}
	if s.FWMark == 0 {
		k.protocol, k.port = s.Protocol, uint32(s.Port)
		putAddress(&k.address, s.Address)
	}
	return k
}

// keyOfDestination returns what identifies a destination that came from the kernel.
func keyOfDestination(d *Destination) destinationKey {
	k := destinationKey{family: d.AddressFamily, port: d.Port}
	putAddress(&k.address, d.Address)
	return k
}

// sentServiceKey returns what identifies s to the kernel, as it is sent.
func sentServiceKey(s *Service) (serviceKey, error) {
	if s == nil {
		return serviceKey{}, errNilService
	}
	family, address, err := serviceFamily(s)
	if err != nil {
		return serviceKey{}, err
	}
	k := serviceKey{fwmark: s.FWMark, family: family}
	if s.FWMark == 0 {
		k.protocol, k.port = s.Protocol, uint32(s.Port)
		putAddress(&k.address, address)
	}
	return k, nil
}

// sentDestinationKey returns what identifies d in its service, as it is sent.
func sentDestinationKey(d *Destination) (destinationKey, error) {
	if d == nil {
		return destinationKey{}, errNilDestination
	}
	family, address, err := familyOf(d.AddressFamily, d.Address, "destination")
	if err != nil {
		return destinationKey{}, err
	}
	k := destinationKey{family: family, port: d.Port}
	putAddress(&k.address, address)
	return k, nil
}

// putAddress copies an address of 4 or 16 bytes.
func putAddress(to *[net.IPv6len]byte, address []byte) {
	if len(address) == net.IPv4len {
		native.PutUint32(to[:], native.Uint32(address))
		return
	}
	copy(to[:], address)
}

// index numbers keys, and finds them: a hash table with open addressing, at most
// half full. Unlike a map it keeps its memory from one reset to the next; a table
// of thousands is looked through every few seconds.
type index[K comparable] struct {
	keys   []K
	places []uint32 // numbers of keys, from 1; 0 is a free place
}

// hashSeed makes the places of keys a secret: others may choose the addresses.
var hashSeed = maphash.MakeSeed()

// reset takes all keys out and makes room for so many.
func (x *index[K]) reset(room int) {
	size := 2 << bits.Len(uint(room))
	if cap(x.places) < size {
		x.places = make([]uint32, size)
		x.keys = make([]K, 0, room)
	}
	x.places, x.keys = x.places[:size], x.keys[:0]
	clear(x.places)
}

// place returns where a key is, or is to be.
func (x *index[K]) place(k K) *uint32 {
	for at := maphash.Comparable(hashSeed, k); ; at++ {
		place := &x.places[at&uint64(len(x.places)-1)]
		if *place == 0 || x.keys[*place-1] == k {
			return place
		}
	}
}

// find returns the number of a key.
func (x *index[K]) find(k K) (n int, found bool) {
	n = int(*x.place(k))
	return n - 1, n > 0
}

// add gives a key the next number, from 0, unless it has one.
func (x *index[K]) add(k K) (added bool) {
	place := x.place(k)
	if *place > 0 {
		return false
	}
	x.keys = append(x.keys, k)
	*place = uint32(len(x.keys))
	return true
}
