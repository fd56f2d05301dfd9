package ipvs

import (
	"encoding/binary"
	"math"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The fake kernel of quickread_linux_test.go, which has both interfaces: generic
// netlink and getsockopt.

// The structures of linux/ip_vs.h as 64-bit programs have them, with their padding.

type refOptIdentity struct {
	Protocol uint16
	_        [2]byte
	Address  [4]byte
	Port     [2]byte
	_        [2]byte
	FWMark   uint32
}

type refOptService struct {
	Identity                                refOptIdentity
	Scheduler                               [16]byte
	Flags, Timeout, Netmask, NumDestination uint32
	Stats                                   [56]byte
}

type refOptRequest struct {
	Identity       refOptIdentity
	NumDestination uint32
	_              uint32
}

type refOptDestination struct {
	Address                   [4]byte
	Port                      [2]byte
	_                         [2]byte
	ConnectionFlags           uint32
	Weight                    int32
	Upper, Lower              uint32
	Active, Inactive, Persist uint32
	_                         uint32
	Stats                     [56]byte
}

// optKernel answers netlink's lists and getsockopt from the same table.
type optKernel struct {
	t       *testing.T
	table   []TableEntry
	before  func(option int, r *refOptRequest) error // what happens before a call of getsockopt
	misses  func(*Service) bool                      // what netlink's list of services misses
	asked   func(*Service)                           // a service is about to be asked for
	netlink int                                      // lists of destinations over netlink
	opts    int                                      // calls of getsockopt
}

// newOptFake returns a handle whose kernel is fake, and has both interfaces.
func newOptFake(t *testing.T, table []TableEntry) (*Handle, *optKernel) {
	t.Helper()
	if math.MaxUint == math.MaxUint32 {
		t.Skip("SKIP: 32-bit programs do not read through getsockopt (TestQuickRead32)")
	}
	k := &optKernel{t: t, table: table}
	i, _ := newFake(t, k.respond)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	r := &optReader{getsockopt: k.getsockopt}
	r.socket.Store(newSocket(fd, 0))
	i.opt.Store(r)
	i.kernel = true
	return i, k
}

func (k *optKernel) respond(r []byte) []fakeReply {
	var answer []byte
	switch cmdOf(r) {
	case cmdGetService:
		if native.Uint16(r[6:])&unix.NLM_F_DUMP == 0 {
			return k.service(r)
		}
		for _, e := range k.table {
			if k.misses != nil && k.misses(e.Service) {
				continue
			}
			answer = append(answer, dataReply(r, unix.NLM_F_MULTI, cmdNewService, fill(fillService(nil, e.Service, true)))...)
		}
	case cmdGetDest:
		k.netlink++
		asked, _ := decode(r)
		for _, e := range k.table {
			if mustGet(sentServiceKey(e.Service))(k.t) != mustGet(sentServiceKey(asked))(k.t) {
				continue
			}
			for _, d := range e.Destinations {
				attrs := fill(fillDestination(nil, d, true))
				attrs = appendUint32(attrs, destAttrActiveConnections, uint32(d.ActiveConnections))
				attrs = appendUint32(attrs, destAttrInactiveConnections, uint32(d.InactiveConnections))
				attrs = appendUint32(attrs, destAttrPersistentConnections, uint32(d.PersistentConnections))
				closeNest(attrs, 0)
				answer = append(answer, dataReply(r, unix.NLM_F_MULTI, cmdNewDest, attrs)...)
			}
		}
	}
	return one(append(answer, doneReply(r, 0)...))
}

// service answers with a single service.
func (k *optKernel) service(r []byte) []fakeReply {
	s, _ := decode(r)
	if k.asked != nil {
		k.asked(s)
	}
	for _, e := range k.table {
		if mustGet(sentServiceKey(e.Service))(k.t) == mustGet(sentServiceKey(s))(k.t) {
			return one(dataReply(r, 0, cmdNewService, fill(fillService(nil, e.Service, true))))
		}
	}
	return one(errorReply(r, syscall.ESRCH))
}

// getsockopt answers as the kernel does.
func (k *optKernel) getsockopt(_, option int, b []byte) error {
	k.opts++
	var request refOptRequest
	if option == 1152+4 {
		second(binary.Decode(b, binary.NativeEndian, &request))
	}
	if k.before != nil {
		if err := k.before(option, &request); err != nil {
			return err
		}
	}
	put := func(at int, v any) {
		second(binary.Encode(b[at:], binary.NativeEndian, v))
	}
	switch option {
	case 1152 + 2:
		n := int(binary.NativeEndian.Uint32(b))
		if len(b) != 8+n*104 {
			return syscall.EINVAL
		}
		count := 0
		for _, e := range k.table {
			if mustGet(sentServiceKey(e.Service))(k.t).family != unix.AF_INET || count == n {
				continue
			}
			put(8+count*104, refOptService{Identity: optIdentity(e.Service), NumDestination: uint32(len(e.Destinations)), Flags: ServiceFlagHashed})
			count++
		}
		return nil
	case 1152 + 4:
		n := int(request.NumDestination)
		if len(b) != 24+n*96 {
			return syscall.EINVAL
		}
		for _, e := range k.table {
			if mustGet(sentServiceKey(e.Service))(k.t).family != unix.AF_INET || optIdentity(e.Service) != request.Identity {
				continue
			}
			count := 0
			for _, d := range e.Destinations {
				if mustGet(sentDestinationKey(d))(k.t).family != unix.AF_INET || count == n {
					continue
				}
				entry := refOptDestination{ConnectionFlags: d.ConnectionFlags | 0x100, Weight: int32(d.Weight), Upper: d.UpperThreshold, Lower: d.LowerThreshold,
					Active: uint32(d.ActiveConnections), Inactive: uint32(d.InactiveConnections), Persist: uint32(d.PersistentConnections)}
				copy(entry.Address[:], d.Address.To4())
				copy(entry.Port[:], be16(d.Port))
				put(24+count*96, entry)
				count++
			}
			return nil
		}
		return syscall.ESRCH
	}
	return syscall.ENOPROTOOPT
}

func optIdentity(s *Service) (id refOptIdentity) {
	if s.FWMark != 0 {
		return refOptIdentity{FWMark: s.FWMark, Protocol: 6} // so has the kernel those that netlink made
	}
	id.Protocol = s.Protocol
	copy(id.Address[:], s.Address.To4())
	copy(id.Port[:], be16(s.Port))
	return id
}
