package ipvs

import (
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The error number in the message that ends a dump counts.
func TestDumpEndsWithError(t *testing.T) {
	i, _ := newFake(t, func(r []byte) []fakeReply { return one(doneReply(r, syscall.ENOMEM)) })
	if got, err := i.GetServices(); err != syscall.ENOMEM || got != nil {
		t.Errorf("got %v, %v", got, err)
	}
}

// A part of a dump that is larger than the buffer is asked for again.
func TestDumpLargerThanBuffer(t *testing.T) {
	const n = 100
	i, _ := newFake(t, func(r []byte) []fakeReply {
		var part []byte
		for n := range n {
			part = append(part, dataReply(r, unix.NLM_F_MULTI, cmdNewService, fill(fillService(nil, ipv4Service(n), true)))...)
		}
		return []fakeReply{{data: part}, {data: doneReply(r, 0)}}
	})
	if services, err := i.GetServices(); err != nil || len(services) != n {
		t.Errorf("%d services, %v", len(services), err)
	}
}

// Entries that come again in a later part of a dump, because the table changed
// between the two, are in the result once.
func TestDumpRepeatsEntries(t *testing.T) {
	services := func(r []byte, ports ...uint16) (b []byte) {
		for _, port := range ports {
			s := someService
			s.Port = port
			attrs, err := fillService(nil, &s, true)
			if err != nil {
				t.Fatal(err)
			}
			b = append(b, dataReply(r, unix.NLM_F_MULTI, cmdNewService, attrs)...)
		}
		return b
	}
	i, _ := newFake(t, func(r []byte) []fakeReply {
		return []fakeReply{{data: services(r, 1, 2, 1, 3)}, {data: services(r, 3, 4)}, {data: services(r, 4, 2, 5)}, {data: doneReply(r, 0)}}
	})
	got, err := i.GetServices()
	if err != nil {
		t.Fatal(err)
	}
	var ports []uint16
	for _, s := range got {
		ports = append(ports, s.Port)
	}
	if want := []uint16{1, 2, 3, 4, 5}; !slices.Equal(ports, want) {
		t.Errorf("ports %v, want %v", ports, want)
	}
}
