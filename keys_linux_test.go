package ipvs

import (
	"math/rand/v2"
	"testing"
)

// An index has the same results as a map, even if keys share a place, and when it is
// reused.
func TestIndex(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var x index[serviceKey]
	for _, room := range []int{1000, 0, 1, 7, 1000, smallList, smallList + 1, 4096, 3} {
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

// A reused index needs no new memory.
func TestIndexKeepsMemory(t *testing.T) {
	var x index[serviceKey]
	x.reset(1000)
	if n := testing.AllocsPerRun(10, func() {
		for _, room := range []int{1000, 10, 1000} {
			x.reset(room)
			for n := range room {
				x.add(serviceKey{port: uint32(n)})
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
