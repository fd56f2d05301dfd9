package ipvs

import (
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
	requests []byte   // the changes as messages, one behind the other
	changes  []change // what and where they are
}

// change is one change of a batch.
type change struct {
	cmd uint8
	end int      // where its message ends in requests; it begins where the one before ends
	bad *OpError // why it cannot be sent; its message is empty then
}

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
func (b *Batch) Len() int { return len(b.changes) }

// Reset takes all changes out, and keeps the memory for the next ones.
func (b *Batch) Reset() {
	b.requests = b.requests[:0]
	clear(b.changes)
	b.changes = b.changes[:0]
}

// String returns the changes in ipvsadm's notation, one a line, such as
// "-A -t 10.0.0.1:80 -s rr".
func (b *Batch) String() string {
	var lines strings.Builder
	for n := range b.changes {
		if bad := b.changes[n].bad; bad != nil {
			fmt.Fprintf(&lines, "# not possible: %v\n", bad)
			continue
		}
		s, d := b.decode(n)
		lines.WriteString(notation(b.changes[n].cmd, s, d))
		lines.WriteByte('\n')
	}
	return lines.String()
}

// add appends a change. What is wrong with it is kept for Do to report.
func (b *Batch) add(cmd uint8, s *Service, d *Destination) {
	begin := len(b.requests)
	msg := newGenlRequest(b.requests, 0, cmd, genlVersion, 0)
	msg, err := fillChange(msg, cmd, s, d)
	if err != nil {
		bad := &OpError{Index: len(b.changes), Op: opName(cmd), Service: cloneOf(s), Destination: cloneOf(d), Err: err}
		b.requests = msg[:begin]
		b.changes = append(b.changes, change{cmd: cmd, end: begin, bad: bad})
		return
	}
	setLength(msg[begin:])
	b.requests = msg
	b.changes = append(b.changes, change{cmd: cmd, end: len(msg)})
}

func cloneOf[T any](v *T) *T {
	if v == nil {
		return nil
	}
	clone := *v
	return &clone
}

// message returns the message of change n, empty if it cannot be sent.
func (b *Batch) message(n int) []byte {
	begin := 0
	if n > 0 {
		begin = b.changes[n-1].end
	}
	return b.requests[begin:b.changes[n].end]
}

// decode reads change n back from its message.
func (b *Batch) decode(n int) (*Service, *Destination) {
	if bad := b.changes[n].bad; bad != nil {
		return bad.Service, bad.Destination
	}
	var memory addresses
	body := b.message(n)[msgHdrLen+genlHdrLen:]
	s, d := new(Service), new(Destination)
	if err := parseService(body, s, &memory); err != nil {
		s = nil
	}
	if err := parseDestination(body, d, &memory); err != nil {
		d = nil // the change is one of a service
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
		return "-A " + s.String()
	case cmdSetService:
		return "-E " + s.String()
	case cmdDelService:
		return "-D " + serviceName(s)
	case cmdNewDest:
		return "-a " + serviceName(s) + " " + d.String()
	case cmdSetDest:
		return "-e " + serviceName(s) + " " + d.String()
	}
	return "-d " + serviceName(s) + " " + destinationName(d)
}

// ErrUnknown says of a change that the kernel did not tell how it ended: it may
// have been carried out or not.
var ErrUnknown = errors.New("ipvs: it is not known whether this was done")

// BatchError says which changes of a batch failed. errors.Is and errors.As reach
// each of them.
type BatchError struct {
	Errors []*OpError // in the order of the batch
	total  int
}

// Error names the first few changes that failed.
func (e *BatchError) Error() string {
	const shown = 3
	var b strings.Builder
	fmt.Fprintf(&b, "ipvs: %d of %d changes failed", len(e.Errors), e.total)
	for n, op := range e.Errors {
		if n == shown {
			fmt.Fprintf(&b, "; and %d more", len(e.Errors)-shown)
			break
		}
		b.WriteString("; ")
		b.WriteString(op.Error())
	}
	return b.String()
}

// Unwrap returns the errors of the single changes.
func (e *BatchError) Unwrap() []error {
	errs := make([]error, len(e.Errors))
	for n, op := range e.Errors {
		errs[n] = op
	}
	return errs
}

// OpError is the error of one change of a batch.
type OpError struct {
	Index       int          // its number in the batch, from 0
	Op          string       // the method, such as "NewService"
	Service     *Service     // what was sent of the service
	Destination *Destination // what was sent of the destination; nil for a change of a service
	Err         error        // a syscall.Errno where the kernel refused
	Message     string       // the kernel's own words (extended acknowledgement), if it sent any
}

// Error says which change it was, to what, and why it failed.
func (e *OpError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "change %d, %s", e.Index, e.Op)
	if e.Service != nil {
		b.WriteByte(' ')
		b.WriteString(serviceName(e.Service))
	}
	if e.Destination != nil {
		b.WriteByte(' ')
		b.WriteString(destinationName(e.Destination))
	}
	fmt.Fprintf(&b, ": %v", e.Err)
	if e.Message != "" {
		fmt.Fprintf(&b, ": %s", e.Message)
	}
	if hint := e.hint(); hint != "" {
		fmt.Fprintf(&b, " (%s)", hint)
	}
	return b.String()
}

// Unwrap returns the error of the change.
func (e *OpError) Unwrap() error { return e.Err }

// hint explains error numbers whose text misleads.
func (e *OpError) hint() string {
	switch onDestination := e.Destination != nil; {
	case e.Service == nil:
		return ""
	case e.Err == syscall.ENOENT && onDestination:
		return "no such destination"
	case e.Err == syscall.ENOENT && e.Service.PEName != "":
		return fmt.Sprintf("the kernel has no scheduler %q or no persistence engine %q", e.Service.SchedName, e.Service.PEName)
	case e.Err == syscall.ENOENT:
		return fmt.Sprintf("the kernel has no scheduler %q: module ip_vs_%s", e.Service.SchedName, e.Service.SchedName)
	case e.Err == syscall.ESRCH:
		return "no such service"
	case e.Err == syscall.EINVAL && onDestination && e.Destination.AddressFamily != e.Service.AddressFamily:
		return "only a tunnel reaches a destination of another address family, and none while a synchronisation daemon runs"
	case e.Err == syscall.EINVAL && onDestination:
		return "the address must be a unicast one in this network namespace, which needs an interface that is up"
	}
	return ""
}

// Sizes of what is sent at once.
const (
	maxSend      = 128       // changes; more cost as much each
	maxSendBytes = 64 * 1024 // well below the send buffer
	// What an error reply is charged in the receive queue, and more than that. So
	// many fit into it as are sent at once, even if all changes fail.
	replyCharge = 1536
)

// Do makes the changes of the batch, in order; a change that fails does not stop
// the rest. They travel many at a time. The result is nil only if the kernel
// confirmed them all, else a *BatchError.
//
// Where the confirmation was lost, the error of a change matches ErrUnknown, and
// what comes after it is not sent: its error is the reason.
//
// Other calls on the handle wait until the batch is through.
func (i *Handle) Do(b *Batch) error {
	if i == nil || i.socket == nil {
		return ErrClosed
	}
	if b == nil {
		return errors.New("ipvs: the batch is nil")
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	r := run{handle: i, batch: b}
	atOnce := min(maxSend, i.socket.receiveQueue()/replyCharge)
	for first := 0; first < len(b.changes); {
		end := b.window(first, atOnce)
		if err := r.send(first, end); err != nil {
			r.refuse(end, len(b.changes), fmt.Errorf("ipvs: not sent, after: %w", err))
			break
		}
		first = end
	}
	return r.result()
}

// window returns the end of what is sent at once from change first on.
func (b *Batch) window(first, atOnce int) (end int) {
	begin := b.changes[first].end - len(b.message(first))
	end = first + 1
	for end < len(b.changes) && end-first < atOnce && b.changes[end].end-begin <= maxSendBytes {
		end++
	}
	return end
}

// run is a batch on its way.
type run struct {
	handle   *Handle
	batch    *Batch
	refusals []refusal // for each change; nil until one is refused
}

// refusal is why a change was not made; err is nil if it was.
type refusal struct {
	err     error
	message string
}

// refuse records that the changes first to end-1 were not made, but for those
// of which that is known already.
func (r *run) refuse(first, end int, err error) {
	if r.refusals == nil {
		r.refusals = make([]refusal, len(r.batch.changes))
	}
	for n := first; n < end; n++ {
		if r.refusals[n].err == nil {
			r.refusals[n].err = err
		}
	}
}

// send sends the changes first to end-1 and reads how they ended. Its error says
// that the kernel cannot be reached.
func (r *run) send(first, end int) error {
	i, s := r.handle, r.handle.socket
	base := i.seq + 1
	last := base - 1 + uint32(end-first)
	i.seq = last
	var lastMsg []byte
	for n := first; n < end; n++ {
		if msg := r.batch.message(n); len(msg) > 0 {
			setFamily(msg, i.family)
			setSequence(msg, base+uint32(n-first))
			setFlags(msg, unix.NLM_F_REQUEST)
			lastMsg = msg
		}
	}
	if lastMsg == nil {
		return nil // nothing of it can be sent
	}
	// Requests are worked off in order, and refusals come unasked: what was not
	// refused when the last is acknowledged is done.
	setFlags(lastMsg, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	last = native.Uint32(lastMsg[8:])

	begin := r.batch.changes[first].end - len(r.batch.message(first))
	if err := i.send(s, r.batch.requests[begin:r.batch.changes[end-1].end]); err != nil {
		err = i.lost("sending a batch", err)
		r.refuse(first, end, err)
		return err
	}
	stale := false
	err := i.receive(s, base, last, func(m message) (done bool, err error) {
		if m.typ != unix.NLMSG_ERROR {
			return false, nil
		}
		errno, err := m.errno()
		if errno != nil && err == nil {
			n := first + int(m.seq-base)
			r.refuse(n, n+1, errno)
			r.refusals[n].message = m.errorText()
			stale = stale || errno == syscall.ENOENT
		}
		return m.seq == last, err
	})
	if err != nil {
		r.refuse(first, end, fmt.Errorf("%w: %w", ErrUnknown, err))
		return err
	}
	if stale {
		r.sendAgain(first, end)
	}
	return nil
}

// sendAgain makes the changes again that were refused because the family id was
// an old one. As in execute, ENOENT can as well be what IPVS says.
func (r *run) sendAgain(first, end int) {
	i, s := r.handle, r.handle.socket
	family := i.family
	err := i.setup(s)
	if err == nil && i.family == family {
		return
	}
	for n := first; n < end; n++ {
		if r.refusals[n].err != syscall.ENOENT {
			continue
		}
		r.refusals[n] = refusal{err: err}
		if err == nil {
			msg := r.batch.message(n)
			setFamily(msg, i.family)
			setFlags(msg, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
			r.refusals[n].err = i.exchange(s, msg, nil)
		}
	}
}

// result returns what was refused, and what could not be sent at all.
func (r *run) result() error {
	var errs []*OpError
	for n := range r.batch.changes {
		c := &r.batch.changes[n]
		if c.bad != nil {
			errs = append(errs, c.bad)
			continue
		}
		if r.refusals == nil || r.refusals[n].err == nil {
			continue
		}
		s, d := r.batch.decode(n)
		errs = append(errs, &OpError{Index: n, Op: opName(c.cmd), Service: s, Destination: d,
			Err: r.refusals[n].err, Message: r.refusals[n].message})
	}
	if len(errs) == 0 {
		return nil
	}
	return &BatchError{Errors: errs, total: len(r.batch.changes)}
}
