package ipvs

import (
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// memoryKernel is a fake kernel with a table, as far as the Reconciler's tests need
// one: connections are set by the test.
type memoryKernel struct {
	t        *testing.T
	services []*memoryService

	schedulers []string // nil: all there are
	// before is called before each change; an errno refuses it.
	before func(cmd uint8, s *Service, d *Destination) syscall.Errno
	// lose reports whether the reply to a request gets lost.
	lose func(request []byte) bool

	changes []string // made or refused, as ipvsadm's options
	listed  int      // lists of destinations
}

type memoryService struct {
	key          serviceKey
	service      Service
	destinations []*Destination
}

// newMemory returns a handle whose kernel has an empty table.
func newMemory(t *testing.T) (*Handle, *memoryKernel) {
	m := &memoryKernel{t: t}
	return m.open(), m
}

// open returns one more handle of the same kernel.
func (m *memoryKernel) open() *Handle {
	i, _ := newFake(m.t, m.respond)
	i.socket.another = func() *socket { return i.socket } // a second one would be a real one
	return i
}

func (m *memoryKernel) find(s *Service) (n int, key serviceKey) {
	key, err := sentServiceKey(s)
	if err != nil {
		m.t.Errorf("the kernel got a bad service: %v", err)
	}
	return slices.IndexFunc(m.services, func(s *memoryService) bool { return s.key == key }), key
}

func (s *memoryService) find(d *Destination) int {
	key, _ := sentDestinationKey(d)
	return slices.IndexFunc(s.destinations, func(d *Destination) bool {
		other, _ := sentDestinationKey(d)
		return other == key
	})
}

// destination returns a destination of the table, nil if it is not there.
func (m *memoryKernel) destination(s *Service, d *Destination) *Destination {
	if n, _ := m.find(s); n >= 0 {
		if at := m.services[n].find(d); at >= 0 {
			return m.services[n].destinations[at]
		}
	}
	return nil
}

// put makes a table of what the kernel is given, whatever was there.
func (m *memoryKernel) put(table ...TableEntry) {
	m.services = nil
	for _, e := range table {
		m.apply(cmdNewService, e.Service, nil)
		for _, d := range e.Destinations {
			m.apply(cmdNewDest, e.Service, d)
			*m.destination(e.Service, d) = *cloneDestination(d) // with connections
		}
	}
}

// table returns a copy of the table.
func (m *memoryKernel) table() (table []TableEntry) {
	for _, s := range m.services {
		e := TableEntry{Service: cloneService(&s.service)}
		for _, d := range s.destinations {
			e.Destinations = append(e.Destinations, cloneDestination(d))
		}
		table = append(table, e)
	}
	return table
}

// apply makes a change, as the kernel does.
func (m *memoryKernel) apply(cmd uint8, s *Service, d *Destination) syscall.Errno {
	n, key := m.find(s)
	if cmd == cmdNewService || cmd == cmdSetService {
		if m.schedulers != nil && !slices.Contains(m.schedulers, s.SchedName) {
			return syscall.ENOENT
		}
	}
	switch {
	case n < 0 && cmd == cmdNewService:
		m.services = append(m.services, &memoryService{key: key, service: *cloneService(s)})
		return 0
	case n < 0:
		return syscall.ESRCH
	}
	service := m.services[n]
	switch cmd {
	case cmdNewService:
		return syscall.EEXIST
	case cmdSetService:
		service.service = *cloneService(s)
		return 0
	case cmdDelService:
		m.services = slices.Delete(m.services, n, n+1)
		return 0
	}
	at := service.find(d)
	switch {
	case at < 0 && cmd == cmdNewDest:
		service.destinations = append(service.destinations, cloneDestination(d))
	case at < 0:
		return syscall.ENOENT
	case cmd == cmdNewDest:
		return syscall.EEXIST
	case cmd == cmdSetDest:
		was := service.destinations[at]
		service.destinations[at] = cloneDestination(d)
		service.destinations[at].ActiveConnections, service.destinations[at].InactiveConnections = was.ActiveConnections, was.InactiveConnections
	case cmd == cmdDelDest:
		service.destinations = slices.Delete(service.destinations, at, at+1)
	}
	return 0
}

func (m *memoryKernel) respond(r []byte) []fakeReply {
	if isFamilyRequest(r) {
		return one(familyReply(r, fakeFamily))
	}
	var replies []fakeReply
	switch cmd := cmdOf(r); cmd {
	case cmdGetService:
		for _, s := range m.services {
			attrs, err := fillService(nil, &s.service, true)
			must(m.t, err)
			replies = append(replies, fakeReply{data: dataReply(r, unix.NLM_F_MULTI, cmdNewService, attrs)})
		}
		replies = append(replies, fakeReply{data: doneReply(r, 0)})
	case cmdGetDest:
		m.listed++
		s, _ := decode(r)
		if n, _ := m.find(s); n >= 0 {
			for _, d := range m.services[n].destinations {
				attrs, err := fillDestination(nil, d, true)
				must(m.t, err)
				attrs = appendUint32(attrs, destAttrActiveConnections, uint32(d.ActiveConnections))
				attrs = appendUint32(attrs, destAttrInactiveConnections, uint32(d.InactiveConnections))
				closeNest(attrs, 0)
				replies = append(replies, fakeReply{data: dataReply(r, unix.NLM_F_MULTI, cmdNewDest, attrs)})
			}
		}
		replies = append(replies, fakeReply{data: doneReply(r, 0)})
	case cmdUnspec:
		return acknowledge(r)
	default:
		s, d := decode(r)
		if cmd == cmdNewService || cmd == cmdSetService || cmd == cmdDelService {
			d = nil
		}
		m.changes = append(m.changes, notation(opName(cmd), s, d))
		var errno syscall.Errno
		if m.before != nil {
			errno = m.before(cmd, s, d)
		}
		if errno == 0 {
			errno = m.apply(cmd, s, d)
		}
		if errno != 0 || native.Uint16(r[6:])&unix.NLM_F_ACK != 0 {
			replies = one(errorReply(r, errno))
		}
	}
	if m.lose != nil && m.lose(r) {
		return nil
	}
	return replies
}
