//go:build linux

package ipvs

import (
	"math/rand/v2"
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
			want, known := numbers[k]
			if n, found := x.find(k); found != known || known && n != want {
				t.Fatalf("room %d: find(%v): %d, %v; want %d, %v", room, k, n, found, want, known)
			}
			if x.add(k) == known {
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
