package ipvs

import (
	"slices"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Entries that are sent again in a later part of a dump, because the table changed in
// between, are in the result once.
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

// Linux 7 and later can list a destination twice in one part.
func TestReconcileDestinationListedTwice(t *testing.T) {
	d := ipv4Destination(1)
	i, _ := newFake(t, listing(ipv4Service(1), func() []*Destination { return []*Destination{d, d} }, func([]byte) []fakeReply { return nil }))
	if got := mustGet(i.GetDestinations(ipv4Service(1)))(t); len(got) != 1 {
		t.Errorf("%d destinations", len(got))
	}
	// A caller may have made a table of two lists.
	b := mustGet(Diff([]TableEntry{{ipv4Service(1), []*Destination{d, d}}}, []TableEntry{{ipv4Service(1), nil}}))(t)
	if b.Len() != 1 {
		t.Errorf("the difference is\n%s", b)
	}
}

// The error number in the message that ends a dump is returned.
func TestDumpEndsWithError(t *testing.T) {
	i, _ := newFake(t, func(r []byte) []fakeReply { return one(doneReply(r, syscall.ENOMEM)) })
	if got, err := i.GetServices(); err != syscall.ENOMEM || got != nil {
		t.Errorf("got %v, %v", got, err)
	}
}

// A dump with a part that is larger than the buffer is requested again.
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

// Keeping one entry of a long list keeps no more memory alive than a slab.
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
	// Without a hint the slab has as many entries as the datagram.
	l = list[Service]{}
	if err := l.add(&message{body: body, left: 2 * (msgHdrLen + len(body))}, parseService); err != nil {
		t.Fatal(err)
	}
	if got := len(l.slab) + 1; got != 3 {
		t.Errorf("memory for %d services, want 3", got)
	}
}

// If the second socket could not be opened, the next long list tries again.
func TestBulkSocketTriedAgain(t *testing.T) {
	i := new(Handle)
	s := netlinkSocket(t)
	i.socket = s
	defer i.Close()
	var limit, none unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	none = unix.Rlimit{Cur: 0, Max: limit.Max}
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &none))
	refused := i.bulkSocket()
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	if refused != s {
		t.Fatal("a second socket without a descriptor for it")
	}
	if bulk := i.bulkSocket(); bulk == s {
		t.Skip("SKIP: SIOCGSKNS or setns is not permitted here")
	} else if len(bulk.in) != largeBuffer || i.bulkSocket() != bulk {
		t.Errorf("the second socket has a buffer of %d bytes", len(bulk.in))
	}
}
