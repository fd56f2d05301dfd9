package ipvs

// This file has the Reconciler, which brings the kernel's table to a desired state.

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Reconciler repeatedly brings the kernel's table to a desired state. Its zero value
// with a Handle is ready to use. It is safe for concurrent use; calls are serialized.
//
// It needs no memory of earlier calls: a new process goes on where the last one stopped,
// except that the time of each destination that drains begins anew.
type Reconciler struct {
	// Handle gives access to the table.
	Handle *Handle

	// Owned reports whether a service is the caller's. Services that are not owned are
	// never touched, and it is an error to want one. Owned is called with services as
	// the kernel returns them, with their family, and IPv4 addresses of 4 bytes.
	//
	// If Owned is nil, all services of the network namespace are the caller's: Reconcile
	// deletes every service that is not wanted, whoever made it.
	//
	// Owned must not change the service that it is given, nor use the Reconciler.
	//
	// Destinations that drain when Owned no longer covers their service are left at
	// weight 0.
	Owned func(*Service) bool

	// Drain is how long a destination that is no longer wanted may finish its
	// connections, if its service is a TCP one or a firewall mark; others go at once,
	// since clients of UDP and SCTP are served by another destination sooner without it.
	// With 0, or less, all go at once.
	//
	// A destination that drains gets weight 0, and its time begins when the kernel has
	// confirmed that. A later call deletes it as soon as it has no connection, active or
	// inactive, or its time is up. One that is found with a weight again gets weight 0
	// again, and its time begins anew. One that is wanted again gets its weight back. A
	// service that is no longer wanted stays while a destination of it drains. What has
	// weight 0 and no connection when it is first seen goes at once.
	//
	// A TCP connection that both sides closed counts as inactive for two minutes more:
	// with a shorter Drain its destination goes by the time limit.
	//
	// With weight 0 the kernel sends no new clients. There are exceptions:
	//   - A client that is bound by persistence comes back, unless the sysctl
	//     net.ipv4.vs.expire_quiescent_template is 1.
	//   - With the schedulers "sh" and "mh" the clients of a destination of weight 0 are
	//     refused, unless the service has the fallback flag (ServiceFlagSHFallback,
	//     ServiceFlagMHFallback). Reconcile sets it while a destination drains.
	//   - With "dh" there is no such flag, so destinations of its services never drain.
	//   - A service that drains still gets the clients of a more general one that is to
	//     replace it, and refuses them. So a service does not drain if one of the same
	//     address and protocol with port 0 is wanted. Nor should it drain if it is a
	//     firewall mark that is replaced by an address: DrainFor can say so.
	Drain time.Duration

	// DrainFor, if not nil, returns how long a destination may drain, in place of Drain
	// and for all protocols. It is called for each destination that is not wanted,
	// whenever the table is read, with the service and the destination as the kernel
	// has them, counters included. It must not use the Reconciler.
	DrainFor func(*Service, *Destination) time.Duration

	mu     sync.Mutex
	drains map[drainKey]time.Time // since when each is known to have weight 0
	now    func() time.Time       // for tests; nil: time.Now
}

// maxRounds is how often Reconcile reads and writes at most, if others change the table
// in between.
const maxRounds = 8

// Changes says what Reconcile did.
type Changes struct {
	ServicesAdded       int
	ServicesUpdated     int
	ServicesDeleted     int
	DestinationsAdded   int
	DestinationsUpdated int // including those that began to drain
	DestinationsDeleted int // not those that went with their service

	// Draining is the number of destinations that still finish their connections.
	Draining int

	// RequeueAfter is when to call again because of them, at the latest; 0 if none
	// drains. It grows with the time that they have drained, from a second on, and is
	// never later than the end of their time.
	RequeueAfter time.Duration
}

// Total returns the number of changes that were made.
func (c Changes) Total() int {
	return c.ServicesAdded + c.ServicesUpdated + c.ServicesDeleted +
		c.DestinationsAdded + c.DestinationsUpdated + c.DestinationsDeleted
}

// Plan returns the changes that Reconcile would make now, and makes none. Printed, it
// is in ipvsadm's notation. Entries that Reconcile would report as errors are
// changes with an Err, see Batch.All.
func (r *Reconciler) Plan(want []TableEntry) (*Batch, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, err := r.makePlan(want, nil)
	if err != nil {
		return nil, err
	}
	return p.batch, nil
}

// Reconcile reads the table and makes the changes that bring the owned part of it to
// want; none if it is so already. If others change the table at the same time, it reads
// again, a bounded number of times. It relies on the kernel's lists, see GetServices:
// an entry that is missing from them is dealt with by the next call.
//
// If changes fail, the others are made all the same, and the error is a *BatchError of
// those that failed or were not sent; Index is its position in the last plan. A
// change that fails only because another did, such as a destination of a service that
// could not be made, is not in it. An entry of want that cannot be sent, is wanted
// twice or is not owned is in it too, see Diff: it harms only itself, and what the
// kernel has in its place stays as it is. An entry that is nil or has no address cannot
// be matched with what the kernel has: the service or destination that it was meant to
// be counts as not wanted.
//
// While the kernel changes a service's scheduler it has none for some milliseconds, in
// which it refuses new clients; nothing can be done about that.
//
// The Changes are valid with an error too: they count the changes known to be made.
func (r *Reconciler) Reconcile(want []TableEntry) (Changes, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var done Changes
	begun := map[drainKey]struct{}{} // this call does not delete what it gave weight 0
	for round := 1; ; round++ {
		p, err := r.makePlan(want, begun)
		if err != nil {
			return done, err
		}
		done.Draining, done.RequeueAfter = p.drains.count, p.drains.requeue
		failed, lost := r.apply(p.batch, &done)
		r.drains = p.drains.after(failed, r.time())
		for _, k := range p.drains.begins {
			begun[k] = struct{}{}
		}
		failed = withoutConsequences(failed)
		if len(failed) == 0 {
			return done, nil
		}
		if round == maxRounds || lost || !anyRace(failed) {
			return done, newBatchError(failed, p.batch.Len())
		}
	}
}

// plan is what to do now, and what drains.
type plan struct {
	batch  *Batch
	drains *drainer
}

// makePlan reads the table and compares. The caller holds r.mu.
func (r *Reconciler) makePlan(want []TableEntry, begun map[drainKey]struct{}) (*plan, error) {
	if r.Handle == nil {
		return nil, errors.New("ipvs: the reconciler has no handle")
	}
	have, counted, foreign, err := r.read()
	if err != nil {
		return nil, fmt.Errorf("ipvs: reading the table: %w", err)
	}
	p := &plan{drains: r.newDrainer(begun)}
	p.drains.counted = counted
	d := differ{listed: true}
	if r.Drain > 0 || r.DrainFor != nil {
		d.drains = p.drains
	}
	if r.Owned != nil {
		d.refuse = func(s *Service, key serviceKey) error { return r.notOwned(s, key, foreign) }
	}
	p.batch, err = d.diff(have, want)
	if err == nil && p.drains.err != nil {
		err = fmt.Errorf("ipvs: reading the table: %w", p.drains.err)
	}
	return p, err
}

// read returns the owned part of the table, and what identifies the other services;
// counted is as in readTable.
func (r *Reconciler) read() (have []TableEntry, counted bool, foreign map[serviceKey]struct{}, err error) {
	if r.Owned == nil {
		have, counted, err = r.Handle.readTable(func(*Service) bool { return true })
		return have, counted, nil, err
	}
	foreign = map[serviceKey]struct{}{}
	have, counted, err = r.Handle.readTable(func(s *Service) bool {
		if r.Owned(s) {
			return true
		}
		foreign[keyOfService(s)] = struct{}{}
		return false
	})
	return have, counted, foreign, err
}

// notOwned returns the error of a wanted service that is not the caller's, nil if it is.
func (r *Reconciler) notOwned(s *Service, key serviceKey, foreign map[serviceKey]struct{}) error {
	switch {
	case contains(foreign, key):
		return errors.New("ipvs: wanted, but not owned: it is another owner's")
	case !r.Owned(asReturned(s, key)):
		return errors.New("ipvs: wanted, but not owned")
	}
	return nil
}

// apply makes the changes of a plan and counts them. It returns those that failed, with
// their numbers, and reports whether the kernel could no longer be reached.
func (r *Reconciler) apply(b *Batch, done *Changes) (failed []*OpError, lost bool) {
	if b.Len() == 0 {
		return nil, false
	}
	isNew := func(msg []byte) bool { return commandOf(msg) == cmdNewService }
	var newServices *Batch
	var numbers []int
	if r.Owned != nil {
		newServices, numbers = b.filter(isNew)
	}
	if len(numbers) == 0 {
		failed, err := r.do(b, done)
		return failed, err != nil
	}
	// Others may have made a service in place of a new one since the table was read.
	// So new services go first, and destinations of those that failed are left out.
	failed, err := r.do(newServices, done)
	renumber(failed, numbers)
	refused := map[serviceKey]struct{}{}
	for _, op := range failed {
		if _, ok := op.Err.(syscall.Errno); ok {
			key, _ := sentServiceKey(op.Service) // it was sent
			refused[key] = struct{}{}
		}
	}
	rest, numbers := b.filter(func(msg []byte) bool {
		if len(refused) == 0 || commandOf(msg) != cmdNewDest {
			return !isNew(msg)
		}
		s, _ := decode(msg)
		key, _ := sentServiceKey(s)
		return !contains(refused, key)
	})
	var failedRest []*OpError
	if err != nil {
		failedRest = rest.unsent(err)
	} else {
		failedRest, err = r.do(rest, done)
	}
	renumber(failedRest, numbers)
	return append(append(failed, failedRest...), b.bad...), err != nil
}

// renumber gives changes of a part of a batch their numbers in the whole.
func renumber(ops []*OpError, numbers []int) {
	for _, op := range ops {
		op.Index = numbers[op.Index]
	}
}

// do makes the changes of a batch in one go, and counts them. It returns those that
// failed, and why the kernel could no longer be reached.
func (r *Reconciler) do(b *Batch, done *Changes) (failed []*OpError, lost error) {
	lost, err := r.Handle.do(b)
	var batchErr *BatchError
	switch {
	case errors.As(err, &batchErr):
		failed = batchErr.Errors
	case err != nil: // nothing was sent
		return append(b.unsent(err), b.bad...), err
	}
	done.count(b, failed)
	return failed, lost
}

// unsent returns the errors of the changes of a batch that is not sent.
func (b *Batch) unsent(lost error) (failed []*OpError) {
	for n, msg := range b.messages {
		s, d := decode(msg)
		failed = append(failed, &OpError{Index: n, Op: opName(commandOf(msg)), Service: s, Destination: d, Err: notSent(lost)})
	}
	return failed
}

// count adds the changes of a batch that did not fail; those that did are in order.
func (c *Changes) count(b *Batch, failed []*OpError) {
	for n, msg := range b.messages {
		for len(failed) > 0 && failed[0].Index < n {
			failed = failed[1:]
		}
		if len(failed) > 0 && failed[0].Index == n {
			continue
		}
		switch commandOf(msg) {
		case cmdNewService:
			c.ServicesAdded++
		case cmdSetService:
			c.ServicesUpdated++
		case cmdDelService:
			c.ServicesDeleted++
		case cmdNewDest:
			c.DestinationsAdded++
		case cmdSetDest:
			c.DestinationsUpdated++
		case cmdDelDest:
			c.DestinationsDeleted++
		}
	}
}

// withoutConsequences returns the changes that failed by themselves: not those to
// destinations of a service that could not be made.
func withoutConsequences(failed []*OpError) []*OpError {
	broken := map[serviceKey]struct{}{}
	own := failed[:0:0]
	for _, op := range failed {
		key, err := sentServiceKey(op.Service)
		if err == nil && op.Op == opName(cmdNewService) && op.Err != syscall.EEXIST {
			broken[key] = struct{}{}
		}
		if err == nil && op.Op == opName(cmdNewDest) && op.Err == syscall.ESRCH && contains(broken, key) {
			continue
		}
		own = append(own, op)
	}
	return own
}

// anyRace reports whether a change failed because others changed the table, so that
// reading again can help.
func anyRace(failed []*OpError) bool {
	for _, op := range failed {
		switch op.Err {
		case syscall.EEXIST, syscall.ESRCH:
			return true
		case syscall.ENOENT: // of a service: no such scheduler
			if op.Destination != nil {
				return true
			}
		}
	}
	return false
}

// asReturned returns s as the kernel would return it, apart from counters; key is what
// identifies it.
func asReturned(s *Service, key serviceKey) *Service {
	returned := *s
	returned.AddressFamily, returned.Netmask = key.family, netmaskOf(s, key.family)
	returned.Flags |= ServiceFlagHashed
	switch {
	case s.FWMark != 0:
		returned.Address, returned.Protocol, returned.Port = nil, 0, 0
	case key.family == unix.AF_INET:
		returned.Address = key.address[:net.IPv4len]
	}
	return &returned
}
