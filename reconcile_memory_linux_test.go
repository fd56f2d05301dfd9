package ipvs

import (
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// memoryKernel is a Fake that the Reconciler's tests look into: they see and refuse
// each change, and lose replies.
type memoryKernel struct {
	t    *testing.T
	fake *Fake
	own  *Handle // of the kernel itself

	// before is called before each change; an errno refuses it.
	before func(cmd uint8, s *Service, d *Destination) syscall.Errno
	// lose reports whether the reply to a request gets lost.
	lose func(request []byte) bool

	changes []string // made or refused, as ipvsadm's options
	listed  int      // lists of destinations
}

// newMemory returns a handle whose kernel has an empty table.
func newMemory(t *testing.T) (*Handle, *memoryKernel) {
	m := &memoryKernel{t: t, fake: NewFake()}
	m.fake.table.salt = uint8(ipv4Service(0).Protocol) ^ uint8(ipv4Service(0).Port) // ipv4Services come in order
	m.own = m.fake.Handle()
	return m.open(), m
}

// open returns one more handle of the same kernel.
func (m *memoryKernel) open() *Handle {
	i, _ := newFake(m.t, m.respond)
	i.socket.another = func() *socket { return i.socket } // a second one would be a real one
	return i
}

// destination returns a destination of the table, nil if it is not there.
func (m *memoryKernel) destination(s *Service, d *Destination) *Destination {
	key, err := sentDestinationKey(d)
	must(m.t, err)
	for _, d := range mustGet(m.own.GetDestinations(s))(m.t) {
		if keyOfDestination(d) == key {
			return d
		}
	}
	return nil
}

// put makes a table of what the kernel is given, in its order, with its
// connections, whatever was there.
func (m *memoryKernel) put(table ...TableEntry) {
	before := m.fake.table
	m.fake.table = newFakeTable()
	m.fake.table.fakeVariant = before.fakeVariant
	for _, e := range table {
		must(m.t, m.own.NewService(e.Service))
		for _, d := range slices.Backward(e.Destinations) {
			must(m.t, m.own.NewDestination(e.Service, d))
			m.connect(e.Service, d, d.ActiveConnections, d.InactiveConnections)
		}
	}
}

// connect sets the connections of a destination.
func (m *memoryKernel) connect(s *Service, d *Destination, active, inactive int) {
	must(m.t, m.fake.SetConnections(s, d, active, inactive, 0))
}

// table returns a copy of the table.
func (m *memoryKernel) table() []TableEntry { return mustGet(m.own.GetTable())(m.t) }

// apply makes a change by other means than the handle.
func (m *memoryKernel) apply(cmd uint8, s *Service, d *Destination) syscall.Errno {
	switch err := m.own.call(cmd, unix.NLM_F_ACK, change(cmd, s, d), nil).(type) {
	case nil:
		return 0
	case syscall.Errno:
		return err
	default:
		m.t.Error(err)
		return 0
	}
}

func (m *memoryKernel) respond(r []byte) []fakeReply {
	switch cmd := cmdOf(r); {
	case isFamilyRequest(r):
	case cmd == cmdGetDest:
		m.listed++
	case cmd >= cmdNewService && cmd <= cmdDelDest && cmd != cmdGetService:
		s, d := decode(r)
		if cmd == cmdNewService || cmd == cmdSetService || cmd == cmdDelService {
			d = nil
		}
		m.changes = append(m.changes, notation(opName(cmd), s, d))
		if m.before != nil {
			if errno := m.before(cmd, s, d); errno != 0 {
				return m.unlessLost(r, one(errorReply(r, errno)))
			}
		}
	}
	return m.unlessLost(r, fakeReplies(m.fake, r))
}

func (m *memoryKernel) unlessLost(r []byte, replies []fakeReply) []fakeReply {
	if m.lose != nil && m.lose(r) {
		return nil
	}
	return replies
}

// fakeReplies returns what a Fake replies to a request.
func fakeReplies(f *Fake, request []byte) (replies []fakeReply) {
	s := &fakeSocket{fake: f, portID: fakePortID}
	s.sendmsg(noFD, request)
	for {
		b := make([]byte, smallBuffer)
		n, _, err := s.recvmsg(noFD, b)
		if err == unix.EAGAIN {
			return replies
		}
		replies = append(replies, fakeReply{data: b[:n]})
	}
}
