package ipvs

// This file reads the table for Reconcile: destinations through getsockopt, the kernel's
// older interface, wherever that gives the same result as netlink.

import (
	"encoding/binary"
	"errors"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// getsockopt returns the destinations of an IPv4 service in a single system call,
// without attributes, for less than a tenth of the cost of netlink's list. It does not
// return everything. It lacks
//
//   - IPv6 services, and settings of IPv4 ones, so the list of services is read over
//     netlink;
//   - destinations of another family than their service's. That some are missing shows
//     in the number of destinations of the service, which includes them;
//   - the settings of tunnels, so such destinations are read over netlink;
//   - 64-bit counters, on which no decision depends.
//
// Where the result is incomplete, netlink is used, and so it is for everything if the
// kernel, a sandbox or missing privileges make the call fail. 32-bit programs, in which
// the structures have another layout, do not use getsockopt.

// Options of getsockopt, from the kernel's linux/ip_vs.h.
const (
	optBase        = 64 + 1024 + 64 // IP_VS_BASE_CTL
	optGetServices = optBase + 2    // IP_VS_SO_GET_SERVICES
	optGetDests    = optBase + 4    // IP_VS_SO_GET_DESTS
)

// Sizes of the structures in bytes, as 64-bit programs have them.
const (
	optServicesHdrLen = 8   // struct ip_vs_get_services
	optServiceSize    = 104 // struct ip_vs_service_entry
	optDestsHdrLen    = 24  // struct ip_vs_get_dests
	optDestSize       = 96  // struct ip_vs_dest_entry

	// optIdentitySize is the size of the service's identity, at the start of a service
	// entry and of the header of a request for destinations.
	optIdentitySize = 16
)

const (
	// maxKeptBuffer is the size of the largest buffer that is kept for the next table.
	maxKeptBuffer = 256 << 10
	// maxOptDests is the largest number of destinations that are read through getsockopt
	// for one service.
	maxOptDests = 1 << 16
	// spareServices is the number of services, more than netlink listed, for which there
	// is room at first.
	spareServices = 16
	// If there are fewOwned times as many services as wanted ones, listing all of them
	// through getsockopt costs more than it saves.
	fewOwned = 50
)

// optReader reads through getsockopt. A handle on the real kernel gets one when it first
// reads a table for Reconcile.
type optReader struct {
	// getsockopt fills b; tests replace it to provoke faults.
	getsockopt func(fd, option int, b []byte) error

	socket atomic.Pointer[socket] // nil until it is needed

	mu      sync.Mutex                  // held while a table is read; guards the fields below
	refused bool                        // the socket cannot be opened
	slow    *[1 << slotBits / 64]uint64 // services to read over netlink, by slot

	serviceBuffer, destBuffer []byte // kept for the next table
}

// optTable is one reading of the table through getsockopt.
type optTable struct {
	reader   *optReader
	socket   *socket
	fd       int // -1 after a call failed
	services optServices

	// Memory for destinations, shared by many services.
	slab      []Destination
	pointers  []*Destination
	addresses []byte
}

// readTable is like getTable. If counted is false, some destinations lack fields on
// which no decision depends: Stats, Stats64, and tunnel settings without
// ConnectionFlagTunnel.
//
// As with getTable, the table is read one service after the other. If a service has a
// destination of the other family, and another destination is added between the
// kernel's count and its list, the former can be missing this time.
func (i *Handle) readTable(wanted func(*Service) bool) (table []TableEntry, counted bool, err error) {
	services, err := i.GetServices()
	if err != nil {
		return nil, false, err
	}
	table = make([]TableEntry, 0, len(services))
	there, eligible := 0, 0
	for _, s := range services {
		ours := wanted(s)
		if ours {
			table = append(table, TableEntry{Service: s})
		}
		if s.AddressFamily == unix.AF_INET {
			there++
			if ours {
				eligible++
			}
		}
	}
	r := i.optReader()
	if r != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
	}
	var t *optTable
	if r != nil && eligible*fewOwned > there {
		t = r.open(i, there+spareServices)
		defer t.close()
	}
	for _, identity := range t.missedIn(services) {
		s, err := i.GetService(identity)
		if err == syscall.ESRCH { // deleted meanwhile
			continue
		}
		if err != nil {
			return nil, false, err
		}
		if wanted(s) {
			table = append(table, TableEntry{Service: s})
		}
	}
	counted = true
	for n := range table {
		if i.closed.Load() {
			return nil, false, ErrClosed
		}
		e := &table[n]
		var ok bool
		if e.Destinations, ok = t.destinations(e.Service); ok {
			counted = false
			continue
		}
		if e.Destinations, err = i.GetDestinations(e.Service); err != nil {
			return nil, false, err
		}
		if t != nil && e.Service.AddressFamily == unix.AF_INET {
			r.note(e)
		}
	}
	return table, counted, nil
}

// optReader returns the handle's optReader, or nil if the handle or the program cannot
// have one.
func (i *Handle) optReader() *optReader {
	if !i.kernel || math.MaxUint == math.MaxUint32 {
		return nil
	}
	if r := i.opt.Load(); r != nil {
		return r
	}
	i.opt.CompareAndSwap(nil, &optReader{getsockopt: getsockopt})
	return i.opt.Load()
}

// open begins to read a table that probably has less than the given number of IPv4
// services. It returns nil if that is not possible.
func (r *optReader) open(i *Handle, services int) *optTable {
	s := r.socket.Load()
	if s == nil {
		if r.refused {
			return nil
		}
		err := inNamespaceOf(i.socket, func() (err error) {
			s, err = openOptSocket()
			return err
		})
		if err != nil {
			// These errors may be temporary.
			r.refused = !errors.Is(err, unix.EMFILE) && !errors.Is(err, unix.ENFILE) && !errors.Is(err, unix.ENOMEM) && !errors.Is(err, unix.ENOBUFS)
			return nil
		}
		i.closeWithHandle(s)
		r.socket.Store(s)
		if i.closed.Load() { // Close may have run before the Store
			s.close()
		}
	}
	fd, err := s.acquire()
	if err != nil {
		return nil
	}
	t := &optTable{reader: r, socket: s, fd: fd}
	if !t.readServices(services) {
		t.close()
		return nil
	}
	return t
}

// openOptSocket opens a socket for getsockopt in the network namespace of the
// calling thread. Nothing is sent with it.
func openOptSocket() (*socket, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return newSocket(fd, 0), nil
}

// close ends the reading.
func (t *optTable) close() {
	if t == nil {
		return
	}
	r := t.reader
	r.serviceBuffer, r.destBuffer = keep(r.serviceBuffer), keep(r.destBuffer)
	t.socket.release()
}

// keep returns the buffer if it is small enough to be kept.
func keep(b []byte) []byte {
	if cap(b) > maxKeptBuffer {
		return nil
	}
	return b
}

// sized returns a buffer of n bytes in the memory of b if it fits.
func sized(b []byte, n int) []byte {
	if cap(b) < n {
		return make([]byte, n+n/4)[:n]
	}
	return b[:n]
}

// getsockopt calls the kernel. It is an error if the kernel did not fill all of b.
func getsockopt(fd, option int, b []byte) error {
	size := uint32(len(b))
	_, _, errno := syscall.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.IPPROTO_IP, uintptr(option),
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0)
	switch {
	case errno != 0:
		return errno
	case int64(size) != int64(len(b)):
		return unix.EMSGSIZE
	}
	return nil
}

// readServices reads the list of IPv4 services, and reports whether it succeeded. It
// begins with room for the given number of services, and goes on until there is some
// left.
func (t *optTable) readServices(room int) bool {
	r := t.reader
	for ; ; room *= 2 {
		r.serviceBuffer = sized(r.serviceBuffer, optServicesHdrLen+room*optServiceSize)
		b := r.serviceBuffer
		clear(b) // the kernel leaves entries alone for which it has no service
		native.PutUint32(b, uint32(room))
		if r.getsockopt(t.fd, optGetServices, b) != nil {
			return false
		}
		t.services = optServices{entries: b[optServicesHdrLen:]}
		if t.services.entry(room - 1).isEmpty() {
			return true
		}
	}
}

// destinations reads the destinations of s. ok is false if they have to be read
// over netlink.
func (t *optTable) destinations(s *Service) (_ []*Destination, ok bool) {
	if t == nil || t.fd < 0 || s.AddressFamily != unix.AF_INET || t.reader.isSlow(s) {
		return nil, false
	}
	entry := t.services.find(s)
	if entry == nil {
		return nil, false
	}
	n := entry.destinations()
	switch {
	case n == 0:
		return nil, true
	case n > maxOptDests:
		return nil, false
	}
	count := int(n)
	r := t.reader
	r.destBuffer = sized(r.destBuffer, optDestsHdrLen+(count+1)*optDestSize)
	b := r.destBuffer
	fillDestsRequest(b, entry, count)
	switch r.getsockopt(t.fd, optGetDests, b) {
	case nil:
	case unix.ESRCH: // deleted meanwhile
		return nil, false
	default: // the call would fail for the other services, too
		t.fd = -1
		return nil, false
	}
	return t.decode(b, count)
}

// fillDestsRequest fills in the header of a request for count destinations, with room
// for one more, and marks the two last entries, which show how many the kernel filled.
func fillDestsRequest(b []byte, service optService, count int) {
	copy(b[:optIdentitySize], service)
	native.PutUint64(b[optIdentitySize:], 0)
	native.PutUint32(b[optIdentitySize:], uint32(count+1))
	for _, n := range [2]int{count - 1, count} {
		native.PutUint64(b[optDestsHdrLen+n*optDestSize:], noDestination)
	}
}

// noDestination is the start of a destination entry that the kernel did not fill:
// 255.255.255.255 cannot be a destination.
const noDestination = math.MaxUint64

// decode decodes count destinations in a reply. ok is false if the reply has another
// number of them, or lacks settings of one.
func (t *optTable) decode(b []byte, count int) (_ []*Destination, ok bool) {
	entries := b[optDestsHdrLen:]
	if len(entries) != (count+1)*optDestSize ||
		native.Uint64(entries[(count-1)*optDestSize:]) == noDestination ||
		native.Uint64(entries[count*optDestSize:]) != noDestination {
		return nil, false
	}
	if len(t.pointers) < count {
		t.pointers = make([]*Destination, max(count, maxSlab/8))
	}
	if len(t.addresses) < count*net.IPv4len {
		t.addresses = make([]byte, max(count*net.IPv4len, maxSlab/4))
	}
	list := t.pointers[:count:count]
	for n := range list {
		if len(t.slab) == 0 {
			t.slab = make([]Destination, maxSlab/int(unsafe.Sizeof(Destination{})))
		}
		d := &t.slab[0]
		d.Address = t.addresses[n*net.IPv4len : (n+1)*net.IPv4len : (n+1)*net.IPv4len]
		if d.decodeOpt((*[optDestSize]byte)(entries[n*optDestSize:])); d.ConnectionFlags == ConnectionFlagTunnel {
			return nil, false
		}
		t.slab = t.slab[1:]
		list[n] = d
	}
	t.pointers, t.addresses = t.pointers[count:], t.addresses[count*net.IPv4len:]
	return list, true
}

// decodeOpt decodes a struct ip_vs_dest_entry into d, whose Address has four bytes.
func (d *Destination) decodeOpt(b *[optDestSize]byte) {
	native.PutUint32(d.Address, native.Uint32(b[:]))
	d.AddressFamily = unix.AF_INET
	d.Port = binary.BigEndian.Uint16(b[4:])
	d.ConnectionFlags = native.Uint32(b[8:]) & ConnectionFlagFwdMask // netlink does not return the others
	d.Weight = int(native.Uint32(b[12:]))
	d.UpperThreshold = native.Uint32(b[16:])
	d.LowerThreshold = native.Uint32(b[20:])
	d.ActiveConnections = int(native.Uint32(b[24:]))
	d.InactiveConnections = int(native.Uint32(b[28:]))
	d.PersistentConnections = int(native.Uint32(b[32:]))
}

// isSlow reports whether the destinations of s had to be read over netlink the last
// time: trying getsockopt first would cost more.
func (r *optReader) isSlow(s *Service) bool {
	if r.slow == nil {
		return false
	}
	key := keyOfService(s)
	slot := key.slot()
	return r.slow[slot/64]&(1<<(slot%64)) != 0
}

// note records whether the destinations of an IPv4 service, which were read over
// netlink, had to be.
func (r *optReader) note(e *TableEntry) {
	slow := false
	for _, d := range e.Destinations {
		if d.AddressFamily != unix.AF_INET || d.ConnectionFlags&ConnectionFlagFwdMask == ConnectionFlagTunnel {
			slow = true
			break
		}
	}
	if r.slow == nil {
		if !slow {
			return
		}
		r.slow = new([1 << slotBits / 64]uint64)
	}
	key := keyOfService(e.Service)
	slot := key.slot()
	if slow {
		r.slow[slot/64] |= 1 << (slot % 64)
	} else {
		r.slow[slot/64] &^= 1 << (slot % 64)
	}
}
