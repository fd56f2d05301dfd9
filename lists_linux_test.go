package ipvs

import (
	"testing"
	"unsafe"
)

// A list that had no entries is expected to have none, whatever others had.
func TestPredictEmptyList(t *testing.T) {
	var l sizeHints
	a, b := serviceKey{port: 1}, serviceKey{port: 2}
	l.record(cmdGetDest, a, longList+1)
	l.record(cmdGetDest, b, 0)
	l.record(cmdGetDest, a, longList+1)
	if got := l.predict(cmdGetDest, b); got != 0 {
		t.Errorf("got %d", got)
	}
}

// Whoever keeps one entry of a long list keeps no more memory than a slab.
func TestSlabsAreBounded(t *testing.T) {
	var l list[Service]
	l.reset(100000)
	body := append([]byte{cmdNewService, genlVersion, 0, 0}, fill(fillService(nil, ipv4Service(1), true))...)
	if err := l.add(&message{body: body}, parseService); err != nil {
		t.Fatal(err)
	}
	if size := uintptr(len(l.slab)+1) * unsafe.Sizeof(Service{}); size > maxSlab || size < maxSlab/2 {
		t.Errorf("a slab has %d bytes", size)
	}
	// With no idea of the length it is as many as the datagram has.
	l = list[Service]{}
	if err := l.add(&message{body: body, left: 2 * (msgHdrLen + len(body))}, parseService); err != nil {
		t.Fatal(err)
	}
	if got := len(l.slab) + 1; got != 3 {
		t.Errorf("memory for %d services, want 3", got)
	}
}

// An index that is used again needs no new memory.
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
