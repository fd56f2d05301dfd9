package ipvs

// This file has batches: many changes in one system call.

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Batch collects changes for Handle.Do; the zero value is ready. Its methods copy
// what they are given, so the caller may change it afterwards. A Batch is not
// safe for concurrent use.
type Batch struct {
	blocks []block    // the changes as messages
	n      int        // number of changes
	bad    []*OpError // those that cannot be sent, which have no message
}

// block is so many messages as travel at once, one behind the other, for
// consecutive changes.
type block struct {
	first, count int
	messages     []byte
}

// Sizes of what is sent at once.
const (
	maxSend      = 128       // changes; more cost as much each
	maxSendBytes = 64 * 1024 // well below the send buffer
	// What an error reply is charged in the receive queue, and more than that. So
	// many fit into it as are sent at once, even if all changes fail.
	replyCharge = 1536
	// What the kernel wants to be left of the send buffer.
	sendOverhead = 32
)

// NewService adds what Handle.NewService does to the batch.
func (b *Batch) NewService(s *Service) { b.add(cmdNewService, s, nil) }

// UpdateService adds what Handle.UpdateService does to the batch.
func (b *Batch) UpdateService(s *Service) { b.add(cmdSetService, s, nil) }

// DelService adds what Handle.DelService does to the batch.
func (b *Batch) DelService(s *Service) { b.add(cmdDelService, s, nil) }

// NewDestination adds what Handle.NewDestination does to the batch.
func (b *Batch) NewDestination(s *Service, d *Destination) { b.add(cmdNewDest, s, d) }

// UpdateDestination adds what Handle.UpdateDestination does to the batch.
func (b *Batch) UpdateDestination(s *Service, d *Destination) { b.add(cmdSetDest, s, d) }

// DelDestination adds what Handle.DelDestination does to the batch.
func (b *Batch) DelDestination(s *Service, d *Destination) { b.add(cmdDelDest, s, d) }

// Len returns the number of changes.
func (b *Batch) Len() int { return b.n }

// Reset takes all changes out, and keeps the memory for the next ones.
func (b *Batch) Reset() { b.blocks, b.n, b.bad = b.blocks[:0], 0, nil }

// String returns the changes in ipvsadm's notation, one a line, such as
// "-A -t 10.0.0.1:80 -s rr".
func (b *Batch) String() string {
	lines := make([]string, b.n)
	for _, bad := range b.bad {
		lines[bad.Index] = fmt.Sprintf("# not possible: %v\n", bad)
	}
	for n, msg := range b.messages {
		s, d := decode(msg)
		lines[n] = notation(commandOf(msg), s, d) + "\n"
	}
	return strings.Join(lines, "")
}

// add appends a change. What is wrong with it is kept for Do to report.
func (b *Batch) add(cmd uint8, s *Service, d *Destination) {
	last := b.lastBlock()
	begin := len(last.messages)
	msg := newGenlRequest(last.messages, 0, cmd, genlVersion, 0)
	msg, err := fillChange(msg, cmd, s, d)
	last.messages = msg
	if err != nil {
		last.messages = msg[:begin]
		b.bad = append(b.bad, &OpError{Index: b.n, Op: opName(cmd), Service: cloneService(s), Destination: cloneDestination(d), Err: err})
	} else {
		setLength(msg[begin:])
		last.count++
	}
	b.n++
}

// lastBlock returns the block for the next change.
func (b *Batch) lastBlock() *block {
	size := 0
	if n := len(b.blocks); n > 0 {
		last := &b.blocks[n-1]
		if last.first+last.count == b.n && last.count < maxSend && len(last.messages) < maxSendBytes {
			return last
		}
		size = len(last.messages) // the next one will be as large
	}
	if n := len(b.blocks); n < cap(b.blocks) { // memory from before Reset
		b.blocks = b.blocks[:n+1]
	} else {
		b.blocks = append(b.blocks, block{})
	}
	next := &b.blocks[len(b.blocks)-1]
	if cap(next.messages) < size {
		next.messages = make([]byte, 0, size)
	}
	*next = block{first: b.n, messages: next.messages[:0]}
	return next
}

// messages yields the number and the message of messages change that can be sent.
func (b *Batch) messages(yield func(n int, msg []byte) bool) {
	for k := range b.blocks {
		n, rest := b.blocks[k].first, b.blocks[k].messages
		for len(rest) > 0 {
			size := native.Uint32(rest)
			if !yield(n, rest[:size]) {
				return
			}
			n, rest = n+1, rest[size:]
		}
	}
}

// filter returns a batch of those changes that are to be kept.
func (b *Batch) filter(keep func(msg []byte) bool) *Batch {
	var kept Batch
	for _, msg := range b.messages {
		if keep(msg) {
			last := kept.lastBlock()
			last.messages = append(last.messages, msg...)
			last.count++
			kept.n++
		}
	}
	return &kept
}

// appendBatch appends the changes of c, whose memory is b's from then on.
func (b *Batch) appendBatch(c *Batch) {
	for _, block := range c.blocks {
		block.first += b.n
		b.blocks = append(b.blocks, block)
	}
	for _, bad := range c.bad {
		bad.Index += b.n
		b.bad = append(b.bad, bad)
	}
	b.n += c.n
}

func cloneService(s *Service) *Service {
	if s == nil {
		return nil
	}
	clone := *s
	clone.Address = bytes.Clone(s.Address)
	return &clone
}

func cloneDestination(d *Destination) *Destination {
	if d == nil {
		return nil
	}
	clone := *d
	clone.Address = bytes.Clone(d.Address)
	return &clone
}

// decode reads a change back from its message; the destination is nil for a
// change of a service.
func decode(msg []byte) (*Service, *Destination) {
	var memory addresses
	body := msg[msgHdrLen+genlHdrLen:]
	s, d := new(Service), new(Destination)
	if err := parseService(body, s, &memory); err != nil {
		s = nil
	}
	if err := parseDestination(body, d, &memory); err != nil {
		d = nil
	}
	return s, d
}

// opName returns the name of the method that does what the command does.
func opName(cmd uint8) string {
	switch cmd {
	case cmdNewService:
		return "NewService"
	case cmdSetService:
		return "UpdateService"
	case cmdDelService:
		return "DelService"
	case cmdNewDest:
		return "NewDestination"
	case cmdSetDest:
		return "UpdateDestination"
	case cmdDelDest:
		return "DelDestination"
	}
	return fmt.Sprintf("command %d", cmd)
}

// notation returns a change as an ipvsadm command line without the program's name.
func notation(cmd uint8, s *Service, d *Destination) string {
	switch cmd {
	case cmdNewService:
		return "-A " + s.Rule()
	case cmdSetService:
		return "-E " + s.Rule()
	case cmdDelService:
		return "-D " + serviceName(s)
	case cmdNewDest:
		return "-a " + serviceName(s) + " " + d.Rule()
	case cmdSetDest:
		return "-e " + serviceName(s) + " " + d.Rule()
	}
	return "-d " + serviceName(s) + " " + destinationName(d)
}

// Do makes the changes of the batch, in order; a change that fails does not stop
// the rest. They travel many at a time. The result is nil only if the kernel
// confirmed them all; else it is a *BatchError, or ErrClosed if the handle was
// closed before.
//
// Where the confirmation was lost, the error of a change matches ErrUnknown, and
// what comes after it is not sent: its error is the reason.
//
// Other calls on the handle wait until the batch is through.
func (i *Handle) Do(b *Batch) error {
	if b == nil {
		return errors.New("ipvs: the batch is nil")
	}
	if err := i.lock(); err != nil {
		return err
	}
	defer i.mu.Unlock()
	if i.closed.Load() {
		return ErrClosed
	}
	if err := i.socket.wantErrorText(); err != nil {
		return err
	}
	r := batchRun{handle: i, batch: b}
	receive, send := i.socket.buffers()
	atOnce, bytesAtOnce := max(1, min(maxSend, receive/replyCharge)), send-sendOverhead
	for n := range b.blocks {
		first, rest := b.blocks[n].first, b.blocks[n].messages
		for len(rest) > 0 {
			size, count := nextChunk(rest, atOnce, bytesAtOnce)
			if err := r.send(first, count, rest[:size]); err != nil {
				r.fail(first+count, b.n, fmt.Errorf("ipvs: not sent, after: %w", err))
				return r.result()
			}
			first, rest = first+count, rest[size:]
		}
	}
	return r.result()
}

// nextChunk returns the size of the first messages, which are at most so many and
// so large, but at least one.
func nextChunk(messages []byte, atMost, bytes int) (size, count int) {
	for size < len(messages) && count < atMost {
		next := size + int(native.Uint32(messages[size:]))
		if count > 0 && next > bytes {
			break
		}
		size = next
		count++
	}
	return size, count
}

// batchRun is a batch on its way.
type batchRun struct {
	handle   *Handle
	batch    *Batch
	outcomes []outcome // for each change; nil until one is refused
	replies  replies   // to the send under way
}

// outcome is why a change was not made; err is nil if it was.
type outcome struct {
	err     error
	message string
}

// fail records that the changes first to end-1 were not made, but for those
// of which that is known already.
func (r *batchRun) fail(first, end int, err error) {
	if r.outcomes == nil {
		r.outcomes = make([]outcome, r.batch.n)
	}
	for n := first; n < end; n++ {
		if r.outcomes[n].err == nil {
			r.outcomes[n].err = err
		}
	}
}

// send sends count changes from first on, which are in messages, and reads how
// they ended. Its error says that the kernel cannot be reached.
func (r *batchRun) send(first, count int, messages []byte) error {
	i, s := r.handle, r.handle.socket
	base := i.seq + 1
	last := i.seq + uint32(count)
	i.seq = last
	var msg []byte
	for rest, seq := messages, base; len(rest) > 0; seq++ {
		msg = rest[:native.Uint32(rest)]
		rest = rest[len(msg):]
		setFamily(msg, i.family)
		setFlags(msg, unix.NLM_F_REQUEST)
		setSequence(msg, seq)
	}
	// Requests are worked off in order, and refusals come unasked: what was not
	// refused when the last is acknowledged is done.
	setFlags(msg, unix.NLM_F_REQUEST|unix.NLM_F_ACK)

	if err := s.send(messages, i.receiveTimeout()); err != nil {
		err = i.transportError("sending a batch", err)
		r.fail(first, first+count, err)
		return err
	}
	t := &r.replies
	*t = replies{run: r, first: first, base: base, last: last}
	if err := i.receive(s, base, last, t); err != nil {
		r.fail(first, first+count, fmt.Errorf("%w: %w", ErrOutcomeUnknown, err))
		return err
	}
	if t.stale {
		return r.sendAgain(first, messages)
	}
	return nil
}

// replies takes the replies to changes that were sent at once.
type replies struct {
	run        *batchRun
	first      int    // the number of the first change
	base, last uint32 // sequence numbers of the first and the last change
	stale      bool   // the family id may be an old one
}

func (t *replies) take(m *message) (done bool, err error) {
	if m.typ != unix.NLMSG_ERROR {
		return false, nil
	}
	errno, err := m.errno()
	if errno != nil && err == nil {
		n := t.first + int(m.seq-t.base)
		t.run.fail(n, n+1, errno)
		t.run.outcomes[n].message = m.errorText()
		t.stale = t.stale || errno == syscall.ENOENT
	}
	return m.seq == t.last, err
}

// sendAgain makes the changes again that were refused because the family id was
// an old one. As in execute, ENOENT can as well be what IPVS says. Its error says
// that the kernel cannot be reached.
func (r *batchRun) sendAgain(first int, messages []byte) (lost error) {
	i, s := r.handle, r.handle.socket
	family := i.family
	err := i.setup(s)
	if err == nil && i.family == family {
		return nil
	}
	for n, rest := first, messages; len(rest) > 0; n++ {
		msg := rest[:native.Uint32(rest)]
		rest = rest[len(msg):]
		if r.outcomes[n].err != syscall.ENOENT {
			continue
		}
		r.outcomes[n] = outcome{err: err}
		if err != nil {
			continue // not made: IPVS is gone, or what came before was lost
		}
		setFamily(msg, i.family)
		setFlags(msg, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
		outcome := i.exchange(s, msg, i.answerTo(msg, nil))
		if _, refused := outcome.(syscall.Errno); outcome != nil && !refused {
			lost = outcome
			err = fmt.Errorf("ipvs: not sent, after: %w", lost)
			outcome = fmt.Errorf("%w: %w", ErrOutcomeUnknown, lost)
		}
		r.outcomes[n].err = outcome
	}
	return lost
}

// result returns what was refused, and what could not be sent at all.
func (r *batchRun) result() error {
	bad := r.batch.bad
	if r.outcomes == nil && len(bad) == 0 {
		return nil
	}
	failed := &BatchError{total: r.batch.n}
	for n, msg := range r.batch.messages {
		for len(bad) > 0 && bad[0].Index < n {
			failed.Errors = append(failed.Errors, bad[0])
			bad = bad[1:]
		}
		if r.outcomes == nil || r.outcomes[n].err == nil {
			continue
		}
		s, d := decode(msg)
		failed.Errors = append(failed.Errors, &OpError{Index: n, Op: opName(commandOf(msg)), Service: s, Destination: d,
			Err: r.outcomes[n].err, Message: r.outcomes[n].message})
	}
	failed.Errors = append(failed.Errors, bad...)
	if len(failed.Errors) == 0 {
		return nil
	}
	return failed
}
