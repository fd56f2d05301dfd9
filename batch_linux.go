package ipvs

// This file has batches: many changes in one system call.

import (
	"bytes"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Batch collects changes for Handle.Do. The zero value is ready to use. Its methods
// copy their arguments, which the caller may change afterwards. A Batch is not safe
// for concurrent use.
type Batch struct {
	blocks []block    // the changes as messages
	n      int        // number of changes
	bad    []*OpError // those that cannot be sent, which have no message; by Index
}

// block holds the messages of consecutive changes, one after the other; it is sent
// in one piece if the socket's buffers allow it.
type block struct {
	first, count int
	messages     []byte
}

// Limits of one send.
const (
	maxSend      = 128       // changes; a longer block costs as much for each
	maxSendBytes = 64 * 1024 // well below the send buffer
	// replyCharge is an upper bound for the share of the receive queue that one error
	// reply takes. The queue has to hold the replies to one send even if all changes fail.
	replyCharge = 1536
	// sendOverhead is the part of the send buffer that a datagram must leave free.
	sendOverhead = 32
)

// Change is one change of a batch, as data.
type Change struct {
	Op          string       // the method, such as "NewService"
	Service     *Service     // the service as it is sent
	Destination *Destination // the destination as it is sent; nil for a change of a service
	Err         error        // why the change cannot be sent; nil if it can
}

// String returns the change in ipvsadm's notation, such as
// "-A -t 10.0.0.1:80 -s rr", or a comment with the reason if it cannot be sent.
func (c Change) String() string {
	if c.Err != nil || c.Service == nil || c.Destination == nil && !isServiceOp(c.Op) {
		return "# not possible: " + describe(c.Op, c.Service, c.Destination) + fmt.Sprintf(": %v", c.Err)
	}
	return notation(c.Op, c.Service, c.Destination)
}

// NewService adds a call of Handle.NewService to the batch.
func (b *Batch) NewService(s *Service) { b.add(cmdNewService, s, nil) }

// UpdateService adds a call of Handle.UpdateService to the batch.
func (b *Batch) UpdateService(s *Service) { b.add(cmdSetService, s, nil) }

// DelService adds a call of Handle.DelService to the batch.
func (b *Batch) DelService(s *Service) { b.add(cmdDelService, s, nil) }

// NewDestination adds a call of Handle.NewDestination to the batch.
func (b *Batch) NewDestination(s *Service, d *Destination) { b.add(cmdNewDest, s, d) }

// UpdateDestination adds a call of Handle.UpdateDestination to the batch.
func (b *Batch) UpdateDestination(s *Service, d *Destination) { b.add(cmdSetDest, s, d) }

// DelDestination adds a call of Handle.DelDestination to the batch.
func (b *Batch) DelDestination(s *Service, d *Destination) { b.add(cmdDelDest, s, d) }

// Len returns the number of changes, including those that cannot be sent.
func (b *Batch) Len() int { return b.n }

// Reset removes all changes, but keeps their memory for new ones.
func (b *Batch) Reset() { b.blocks, b.n, b.bad = b.blocks[:0], 0, nil }

// All returns an iterator over the changes and their numbers, from 0, in order. It is
// meant for checking a plan before it is carried out. The changes are copies; the batch
// must not be changed during the iteration.
//
// Destinations that are deleted with their service are not listed.
func (b *Batch) All() iter.Seq2[int, Change] {
	return func(yield func(int, Change) bool) {
		bad := b.bad
		badBefore := func(n int) bool { // yields the bad ones before change n
			for ; len(bad) > 0 && bad[0].Index < n; bad = bad[1:] {
				op := bad[0]
				if !yield(op.Index, Change{op.Op, cloneService(op.Service), cloneDestination(op.Destination), op.Err}) {
					return false
				}
			}
			return true
		}
		for n, msg := range b.messages {
			if !badBefore(n) {
				return
			}
			s, d := decode(msg)
			if !yield(n, Change{Op: opName(commandOf(msg)), Service: s, Destination: d}) {
				return
			}
		}
		badBefore(b.n)
	}
}

// String returns the changes in ipvsadm's notation, one per line, such as
// "-A -t 10.0.0.1:80 -s rr". A change that cannot be sent is a comment.
func (b *Batch) String() string {
	var text strings.Builder
	for n, c := range b.All() {
		if c.Err != nil {
			fmt.Fprintf(&text, "# not possible: change %d, %s: %v\n", n, describe(c.Op, c.Service, c.Destination), c.Err)
			continue
		}
		text.WriteString(c.String())
		text.WriteByte('\n')
	}
	return text.String()
}

// add appends a change. The error says why it cannot be sent; Do reports it.
func (b *Batch) add(cmd uint8, s *Service, d *Destination) error {
	last := b.lastBlock()
	begin := len(last.messages)
	msg := newGenlRequest(last.messages, 0, cmd, genlVersion, 0)
	msg, err := fillChange(msg, cmd, s, d)
	last.messages = msg
	if err != nil {
		last.messages = msg[:begin]
		b.refuse(cmd, s, d, err)
		return err
	}
	setLength(msg[begin:])
	last.count++
	b.n++
	return nil
}

// refuse appends a change that is not sent, with the reason err.
func (b *Batch) refuse(cmd uint8, s *Service, d *Destination, err error) {
	b.bad = append(b.bad, &OpError{Index: b.n, Op: opName(cmd), Service: cloneService(s), Destination: cloneDestination(d), Err: err})
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
	if n := len(b.blocks); n < cap(b.blocks) { // memory kept by Reset
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

// cutRequest returns the first request of a block and the rest of the block.
func cutRequest(messages []byte) (msg, rest []byte) {
	size := native.Uint32(messages)
	return messages[:size], messages[size:]
}

// messages yields the number and the message of each change that can be sent.
func (b *Batch) messages(yield func(n int, msg []byte) bool) {
	for k := range b.blocks {
		n, rest := b.blocks[k].first, b.blocks[k].messages
		for len(rest) > 0 {
			var msg []byte
			msg, rest = cutRequest(rest)
			if !yield(n, msg) {
				return
			}
			n++
		}
	}
}

// filter returns a batch of the changes for which keep returns true, and their
// numbers in b. Those that cannot be sent are left out.
func (b *Batch) filter(keep func(msg []byte) bool) (kept *Batch, numbers []int) {
	kept = new(Batch)
	for n, msg := range b.messages {
		if keep(msg) {
			last := kept.lastBlock()
			last.messages = append(last.messages, msg...)
			last.count++
			kept.n++
			numbers = append(numbers, n)
		}
	}
	return kept, numbers
}

// appendBatch appends the changes of c, and takes over its memory.
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

// isServiceOp reports whether op is the name of a method that takes no destination.
func isServiceOp(op string) bool {
	return op == opName(cmdNewService) || op == opName(cmdSetService) || op == opName(cmdDelService)
}

// opName returns the name of the method for a command.
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

// Do makes the changes of the batch in order, many in one system call. A change that
// fails does not stop the rest. Do returns nil only if the kernel confirmed all of them;
// otherwise the error is a *BatchError, or ErrClosed if the handle was already closed.
//
// If the confirmation of a change was lost, its error matches ErrOutcomeUnknown. Later
// changes are then not sent; their errors give the reason.
//
// Other calls on the handle wait until Do returns.
func (i *Handle) Do(b *Batch) error {
	if b == nil {
		return errors.New("ipvs: the batch is nil")
	}
	_, err := i.do(b)
	return err
}

// do is Do; lost is not nil if the kernel could no longer be reached.
func (i *Handle) do(b *Batch) (lost, err error) {
	if err := i.lock(); err != nil {
		return err, err
	}
	defer i.mu.Unlock()
	if i.closed.Load() {
		return ErrClosed, ErrClosed
	}
	if err := i.socket.wantErrorText(); err != nil {
		return err, err
	}
	r := batchRun{handle: i, batch: b}
	receive, send := i.socket.buffers()
	atOnce, bytesAtOnce := max(1, min(maxSend, receive/replyCharge)), send-sendOverhead
	for n := range b.blocks {
		first, rest := b.blocks[n].first, b.blocks[n].messages
		for len(rest) > 0 {
			size, count := nextChunk(rest, atOnce, bytesAtOnce)
			if lost := r.send(first, count, rest[:size]); lost != nil {
				r.fail(first+count, b.n, notSent(lost))
				return lost, r.result()
			}
			first, rest = first+count, rest[size:]
		}
	}
	return nil, r.result()
}

// nextChunk returns the size and the number of the first messages that may be sent at
// once: at least one, and otherwise at most atMost messages and the given bytes.
func nextChunk(messages []byte, atMost, bytes int) (size, count int) {
	for rest := messages; len(rest) > 0 && count < atMost; count++ {
		var msg []byte
		msg, rest = cutRequest(rest)
		if count > 0 && size+len(msg) > bytes {
			break
		}
		size += len(msg)
	}
	return size, count
}

// batchRun is the state of one Do.
type batchRun struct {
	handle   *Handle
	batch    *Batch
	outcomes []outcome // for each change; nil until one fails
	replies  replies   // to the current send
}

// outcome is how a change ended; err is nil if it was made.
type outcome struct {
	err     error
	message string
}

// fail records why the changes first to end-1 were not made, except for those that
// are known to have failed already.
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

// send sends the count changes in messages, of which first is the number of the first
// one, and reads how they ended. An error means that the kernel cannot be reached.
func (r *batchRun) send(first, count int, messages []byte) error {
	i, s := r.handle, r.handle.socket
	base := i.seq + 1
	last := i.seq + uint32(count)
	i.seq = last
	var msg []byte
	for rest, seq := messages, base; len(rest) > 0; seq++ {
		msg, rest = cutRequest(rest)
		setFamily(msg, i.family)
		setFlags(msg, unix.NLM_F_REQUEST)
		setSequence(msg, seq)
	}
	// Requests are handled in order, and errors are sent without an ACK request, so
	// anything not rejected by the final ACK has succeeded.
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

// replies processes the replies to one send.
type replies struct {
	run        *batchRun
	first      int    // the number of the first change
	base, last uint32 // sequence numbers of the first and the last change
	stale      bool   // the family id may be outdated
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

// sendAgain repeats the changes that were rejected because the family id was outdated.
// As in execute, ENOENT can also come from IPVS itself. An error means that the kernel
// cannot be reached.
func (r *batchRun) sendAgain(first int, messages []byte) (lost error) {
	i, s := r.handle, r.handle.socket
	family := i.family
	err := i.setup(s)
	if err == nil && i.family == family {
		return nil
	}
	for n, rest := first, messages; len(rest) > 0; n++ {
		var msg []byte
		msg, rest = cutRequest(rest)
		if r.outcomes[n].err != syscall.ENOENT {
			continue
		}
		r.outcomes[n] = outcome{err: err}
		if err != nil {
			continue // not made: IPVS is unloaded, or an earlier reply was lost
		}
		setFamily(msg, i.family)
		setFlags(msg, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
		outcome := i.exchange(s, msg, i.answerTo(msg, nil))
		if _, refused := outcome.(syscall.Errno); outcome != nil && !refused {
			lost = outcome
			err = notSent(lost)
			outcome = fmt.Errorf("%w: %w", ErrOutcomeUnknown, lost)
		}
		r.outcomes[n].err = outcome
	}
	return lost
}

// result returns a *BatchError of the changes that were not made, nil if all were.
func (r *batchRun) result() error {
	if r.outcomes == nil && len(r.batch.bad) == 0 {
		return nil
	}
	failed := slices.Clone(r.batch.bad)
	for n, msg := range r.batch.messages {
		if r.outcomes == nil {
			break
		}
		if end := r.outcomes[n]; end.err != nil {
			s, d := decode(msg)
			failed = append(failed, &OpError{n, opName(commandOf(msg)), s, d, end.err, end.message})
		}
	}
	if len(failed) == 0 {
		return nil
	}
	return newBatchError(failed, r.batch.n)
}
