//go:build linux

package ipvs

import (
	"math/rand/v2"
	"net"
	"testing"
)

// An index says the same as a map, also where keys share a place, and when it is
// used again.
func TestIndex(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var x index[serviceKey]
	for _, room := range []int{1000, 0, 1, 7, 1000, 4096} {
		x.reset(room)
		numbers := map[serviceKey]int{}
		for range 3 * room {
			if len(numbers) == room {
				break
			}
			k := serviceKey{port: uint32(r.IntN(room)), family: 2}
			hash := k.hash()
			if r.IntN(4) == 0 {
				k.fwmark, hash = 1, 0 // many in one place, the first
			}
			want, known := numbers[k]
			if n, found := x.find(k, hash); found != known || known && n != want {
				t.Fatalf("room %d: find(%v): %d, %v; want %d, %v", room, k, n, found, want, known)
			}
			if x.add(k, hash) == known {
				t.Fatalf("room %d: add(%v): %v", room, k, !known)
			}
			if !known {
				numbers[k] = len(numbers)
			}
		}
		if len(x.keys) != len(numbers) || room > 1 && len(numbers) < room/2 {
			t.Errorf("room %d: %d keys, want %d", room, len(x.keys), len(numbers))
		}
	}
}

// Addresses, ports, families and protocols that follow one another spread.
func TestHashSpreads(t *testing.T) {
	sets := map[string]func(n int) serviceKey{
		"IPv4 addresses": func(n int) (k serviceKey) {
			setAddress(&k.address, net.IP{10, 96, byte(n >> 8), byte(n)})
			return k
		},
		"IPv6 addresses": func(n int) (k serviceKey) {
			k.address = [16]byte{0x20, 1, 0xd, 0xb8, 14: byte(n >> 8), 15: byte(n)}
			return k
		},
		"IPv6 networks": func(n int) (k serviceKey) {
			k.address = [16]byte{0x20, 1, 0xd, 0xb8, 6: byte(n >> 8), 7: byte(n)}
			return k
		},
		"IPv4 addresses with two ports": func(n int) (k serviceKey) {
			setAddress(&k.address, net.IP{10, 96, byte(n >> 9), byte(n >> 1)})
			k.port = []uint32{80, 443}[n%2]
			return k
		},
		"ports": func(n int) serviceKey { return serviceKey{port: uint32(n)} },
		"marks": func(n int) serviceKey { return serviceKey{fwmark: uint32(n)} },
	}
	for name, key := range sets {
		t.Run(name, func(t *testing.T) {
			const keys, places = 1024, 2048
			used := map[uint64]bool{}
			for n := range keys {
				k := key(n)
				used[k.hash()>>(64-11)] = true
			}
			// Thrown at random they would use 806.
			if len(used) < 600 {
				t.Errorf("%d keys have %d places of %d", keys, len(used), places)
			}
		})
	}
}

// Lists that were long, and those like the last one, are expected to be long.
func TestLengths(t *testing.T) {
	a, b, c := serviceKey{port: 1}, serviceKey{port: 2}, serviceKey{port: 3}
	var l lengths
	guess := func(cmd uint8, k serviceKey, want int) {
		t.Helper()
		if got := l.guess(cmd, k); got != want {
			t.Errorf("guess %d, want %d", got, want)
		}
	}
	guess(cmdGetService, serviceKey{}, 0)
	l.note(cmdGetService, serviceKey{}, 2000)
	guess(cmdGetService, serviceKey{}, 2000)
	guess(cmdGetDest, a, 0)
	l.note(cmdGetDest, a, longList)
	guess(cmdGetDest, b, 0) // nothing is remembered as long as all are short
	l.note(cmdGetDest, b, longList+1)
	guess(cmdGetDest, b, longList+1)
	guess(cmdGetDest, a, longList+1)
	l.note(cmdGetDest, a, 0)
	guess(cmdGetDest, a, 0)
	guess(cmdGetDest, b, longList+1)
	guess(cmdGetDest, c, 0)
	l.note(cmdGetDest, b, 1<<20)
	guess(cmdGetDest, b, 1<<16-2)
	guess(cmdGetDest, c, 1<<20)
	l.note(cmdGetDaemon, serviceKey{}, 2)
	guess(cmdGetDaemon, serviceKey{}, 0)
	guess(cmdGetService, serviceKey{}, 2000)
	guess(cmdGetDest, c, 1<<20)
}
