package ipvs

// This file has the Fake's sockets: requests, acknowledgements, lists in parts.

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// fakeFamilyID is the Fake's family id of IPVS.
	fakeFamilyID = 33

	// fakeLargestPart is the size of a list's parts on a socket that reads with
	// large buffers: 32 KiB less what the kernel needs for itself.
	fakeLargestPart = largeBuffer - 320

	// fakeMaxErrno is the largest error number (MAX_ERRNO).
	fakeMaxErrno = 4095

	// fakeNoReply is the result of a request that is not acknowledged, since it is
	// answered in another way. It is no error number that Fail takes.
	fakeNoReply = syscall.Errno(fakeMaxErrno + 1)
)

// fakeSocket is the kernel's side of one socket. It is guarded by Fake.mu.
type fakeSocket struct {
	fake    *Fake
	portID  uint32
	largest int      // size of the largest buffer read with
	queue   [][]byte // datagrams to be read
	spare   []byte   // memory of a datagram that was read
	dump    *fakeDump
	lost    bool // replies to the rest of the current datagram are lost
}

// fakeDump is a list that is being sent. As in the kernel, each part is made when the
// previous one is read, from the table as it is then.
type fakeDump struct {
	request message
	cursor  int // entries sent
}

// sendmsg carries out the requests in a datagram.
func (s *fakeSocket) sendmsg(_ int, b []byte) error {
	s.fake.mu.Lock()
	defer s.fake.mu.Unlock()
	s.lost = false
	for len(b) > 0 {
		var m message
		rest, err := parseMessage(b, &m)
		if err != nil {
			break // the kernel ignores the rest
		}
		b = rest
		errno := s.handle(&m)
		if errno == fakeNoReply || errno == 0 && m.flags&unix.NLM_F_ACK == 0 {
			continue
		}
		s.acknowledge(&m, errno)
	}
	return nil
}

// recvmsg returns the next datagram.
func (s *fakeSocket) recvmsg(_ int, b []byte) (n int, from uint32, err error) {
	s.fake.mu.Lock()
	defer s.fake.mu.Unlock()
	if len(s.queue) == 0 {
		return 0, 0, unix.EAGAIN
	}
	datagram := s.queue[0]
	s.queue[0], s.queue = nil, s.queue[1:]
	copy(b, datagram)
	s.largest = max(s.largest, len(b))
	s.spare = datagram
	s.nextPart()
	return len(datagram), 0, nil
}

// buffer returns memory for a datagram.
func (s *fakeSocket) buffer() []byte {
	b := s.spare[:0]
	s.spare = nil
	return b
}

func (s *fakeSocket) push(datagram []byte) {
	if !s.lost {
		s.queue = append(s.queue, datagram)
	}
}

// acknowledge queues the reply that reports how a request ended.
func (s *fakeSocket) acknowledge(m *message, errno syscall.Errno) {
	b, start := s.begin(s.buffer(), unix.NLMSG_ERROR, unix.NLM_F_CAPPED, m.seq)
	b = native.AppendUint32(b, uint32(-int32(errno)))
	// The reply echoes the header of the request.
	b = native.AppendUint32(b, uint32(msgHdrLen+len(m.body)))
	b = native.AppendUint16(b, m.typ)
	b = native.AppendUint16(b, m.flags)
	b = native.AppendUint32(b, m.seq)
	b = native.AppendUint32(b, m.portID)
	setLength(b[start:])
	s.push(b)
}

// begin appends the header of a message to the socket's user, without its length.
func (s *fakeSocket) begin(b []byte, typ, flags uint16, seq uint32) (_ []byte, start int) {
	start = len(b)
	b = native.AppendUint32(b, 0)
	b = native.AppendUint16(b, typ)
	b = native.AppendUint16(b, flags)
	b = native.AppendUint32(b, seq)
	return native.AppendUint32(b, s.portID), start
}

// beginReply is like begin for a message of IPVS.
func (s *fakeSocket) beginReply(b []byte, flags uint16, seq uint32, cmd uint8) (_ []byte, start int) {
	b, start = s.begin(b, fakeFamilyID, flags, seq)
	return append(b, cmd, genlVersion, 0, 0), start
}

// handle carries out a request.
func (s *fakeSocket) handle(m *message) syscall.Errno {
	switch {
	case m.flags&unix.NLM_F_REQUEST == 0, m.typ < unix.NLMSG_MIN_TYPE:
		return 0 // the kernel does nothing
	case m.typ != fakeFamilyID && m.typ != unix.GENL_ID_CTRL:
		return syscall.ENOENT
	case len(m.body) < genlHdrLen:
		return syscall.EINVAL
	case m.typ == unix.GENL_ID_CTRL:
		return s.control(m)
	}
	cmd, dump := m.body[0], m.flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP
	if !fakeHasCommand(cmd, dump) {
		return syscall.EOPNOTSUPP
	}
	if len(s.fake.faults) > 0 {
		attrs, _ := fakeCommandPolicy.parse(m.attrs())
		switch err := s.fake.fault(fakeMethod(cmd, dump, attrs[cmdAttrService] != nil)); {
		case errors.Is(err, os.ErrDeadlineExceeded):
			s.lost = true
		case err != nil:
			var errno syscall.Errno
			errors.As(err, &errno)
			return errno
		}
	}
	if dump {
		return s.startDump(m)
	}
	attrs, errno := fakeCommandPolicy.parse(m.attrs())
	if errno != 0 {
		return errno
	}
	switch cmd {
	case cmdGetService, cmdGetConfig, cmdGetInfo:
		return s.get(m, attrs)
	}
	return s.fake.table.change(cmd, attrs)
}

// fakeHasCommand reports whether IPVS has a command, either as a dump or as another request.
func fakeHasCommand(cmd uint8, dump bool) bool {
	switch cmd {
	case cmdGetService:
		return true
	case cmdGetDest, cmdGetDaemon:
		return dump
	case cmdUnspec, cmdSetInfo:
		return false
	}
	return !dump && cmd <= cmdFlush
}

// control answers a request for the family id, which goes to generic netlink itself.
func (s *fakeSocket) control(m *message) syscall.Errno {
	if m.body[0] != unix.CTRL_CMD_GETFAMILY || m.flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP {
		return syscall.EOPNOTSUPP
	}
	attrs, errno := fakeControlPolicy.parse(m.attrs())
	switch name := attrs[unix.CTRL_ATTR_FAMILY_NAME]; {
	case errno != 0:
		return errno
	case name == nil:
		return syscall.EINVAL
	case string(text(name)) != genlName:
		return syscall.ENOENT
	}
	b, start := s.begin(s.buffer(), unix.GENL_ID_CTRL, 0, m.seq)
	b = append(b, unix.CTRL_CMD_NEWFAMILY, 2, 0, 0)
	b = appendString(b, unix.CTRL_ATTR_FAMILY_NAME, genlName)
	b = appendUint16(b, unix.CTRL_ATTR_FAMILY_ID, fakeFamilyID)
	b = appendUint32(b, unix.CTRL_ATTR_VERSION, genlVersion)
	b = appendUint32(b, unix.CTRL_ATTR_HDRSIZE, 0)
	b = appendUint32(b, unix.CTRL_ATTR_MAXATTR, uint32(cmdAttrTimeoutUDP))
	setLength(b[start:])
	s.push(b)
	return 0
}

// get answers a request for a single object.
func (s *fakeSocket) get(m *message, attrs fakeAttrs) syscall.Errno {
	t := &s.fake.table
	var b []byte
	var start int
	switch m.body[0] {
	case cmdGetService:
		parsed, errno := parseFakeService(attrs[cmdAttrService], false)
		if errno != 0 {
			return errno
		}
		service := t.services[parsed.key]
		if service == nil {
			return syscall.ESRCH
		}
		b, start = s.beginReply(s.buffer(), 0, m.seq, cmdNewService)
		b = service.append(b)
	case cmdGetConfig:
		b, start = s.beginReply(s.buffer(), 0, m.seq, cmdSetConfig)
		b = t.appendConfig(b)
	case cmdGetInfo:
		b, start = s.beginReply(s.buffer(), 0, m.seq, cmdSetInfo)
		b = appendUint32(b, infoAttrVersion, fakeVersion)
		b = appendUint32(b, infoAttrConnectionTableSize, t.connectionTableSize)
	}
	setLength(b[start:])
	s.push(b)
	return 0
}

// startDump begins a list. There can be only one on a socket.
func (s *fakeSocket) startDump(m *message) syscall.Errno {
	if s.dump != nil {
		return syscall.EBUSY
	}
	if s.lost {
		return fakeNoReply
	}
	s.dump = &fakeDump{request: *m}
	s.dump.request.body = append([]byte(nil), m.body...) // the sender reuses its buffer
	s.nextPart()
	return fakeNoReply
}

// nextPart queues the next part of the current list.
func (s *fakeSocket) nextPart() {
	if s.dump == nil {
		return
	}
	m := &s.dump.request
	limit := max(smallBuffer, min(s.largest, fakeLargestPart))
	part := s.buffer()
	n := 0
	add := func(cmd uint8, entry func([]byte) []byte) (more bool) {
		if n++; n <= s.dump.cursor {
			return true
		}
		b, start := s.beginReply(part, unix.NLM_F_MULTI, m.seq, cmd)
		b = entry(b)
		if len(b) > limit {
			return false
		}
		setLength(b[start:])
		part, s.dump.cursor = b, n
		return true
	}
	t := &s.fake.table
	switch m.body[0] {
	case cmdGetService:
		t.eachService(func(service *fakeService) bool { return add(cmdNewService, service.append) })
	case cmdGetDest:
		t.eachDestination(m.attrs(), func(d *fakeDestination) bool { return add(cmdNewDest, d.append) })
	case cmdGetDaemon:
		for state := range t.daemons {
			if d := t.daemons[state]; d != nil {
				add(cmdNewDaemon, d.append)
			}
		}
	}
	if len(part) == 0 {
		b, start := s.begin(part, unix.NLMSG_DONE, unix.NLM_F_MULTI, m.seq)
		part = native.AppendUint32(b, 0)
		setLength(part[start:])
		s.dump = nil
	}
	s.queue = append(s.queue, part)
}
