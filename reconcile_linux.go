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
// It needs no memory of earlier calls: a new process continues where the last one
// stopped, except that the time of each draining destination begins anew.
type Reconciler struct {
	// Handle gives access to the table.
	Handle *Handle

	// Owned reports whether a service belongs to the caller. Services that are not owned
	// are never touched, and wanting one is an error. Owned is called with services as
	// the kernel returns them, with their family, and IPv4 addresses of 4 bytes.
	//
	// If Owned is nil, all services of the network namespace belong to the caller:
	// Reconcile deletes every service that is not wanted, whoever made it.
	//
	// Owned must not change the service that it is given, nor use the Reconciler.
	//
	// If Owned no longer covers a service whose destinations drain, they are left at
	// weight 0.
	Owned func(*Service) bool

	// Drain is how long a destination that is no longer wanted may finish its
	// connections. It applies to TCP services and firewall marks. Destinations of others
	// are deleted at once, since clients of UDP and SCTP then reach another destination
	// sooner. If Drain is 0 or negative, all are deleted at once.
	//
	// A destination that drains gets weight 0, and its time begins when the kernel has
	// confirmed that. A later call deletes it as soon as it has no connection, active or
	// inactive, or its time is up. One that is found with a weight again gets weight 0
	// again, and its time begins anew. One that is wanted again gets its weight back. One
	// that has weight 0 and no connection when it is first seen is deleted at once. A
	// service that is no longer wanted stays while one of its destinations drains.
	//
	// A TCP connection that both sides closed counts as inactive for two more minutes.
	// With a shorter Drain, the time limit ends it.
	//
	// The kernel sends no new clients to a destination of weight 0, with exceptions:
	//   - A client that is bound by persistence comes back, unless the sysctl
	//     net.ipv4.vs.expire_quiescent_template is 1.
	//   - With the schedulers "sh" and "mh", the clients of a destination of weight 0 are
	//     refused, unless the service has the fallback flag (ServiceFlagSHFallback,
	//     ServiceFlagMHFallback). Reconcile sets it while a destination drains.
	//   - With "dh" there is no such flag, so destinations of its services never drain.
	//   - A service that drains still gets the clients of a more general one that is to
	//     replace it, and refuses them. So a service does not drain if one of the same
	//     address and protocol with port 0 is wanted. Nor should a firewall mark drain
	//     that is replaced by an address: use DrainFor to delete it at once.
	Drain time.Duration

	// DrainFor, if not nil, returns how long a destination may drain, in place of Drain
	// and for all protocols. It is called for each destination that is not wanted,
	// whenever the table is read, with the service and the destination as the kernel
	// has them, including counters. It must not use the Reconciler.
	DrainFor func(*Service, *Destination) time.Duration

	mu     sync.Mutex
	drains map[drainKey]time.Time // since when each is known to have weight 0
	now    func() time.Time       // for tests; time.Now if nil
}

// maxRounds limits how often Reconcile reads and writes if others change the table in
// between.
const maxRounds = 8

// Changes reports the changes that Reconcile made.
type Changes struct {
	ServicesAdded       int
	ServicesUpdated     int
	ServicesDeleted     int
	DestinationsAdded   int
	DestinationsUpdated int // including those that began to drain
	DestinationsDeleted int // without those that were deleted with their service

	// Draining is the number of destinations that are finishing their connections.
	Draining int

	// RequeueAfter is the time after which to call again, at the latest, because of
	// them; 0 if none drains. It is a second at first, grows with the time that they have
	// drained, and never goes beyond the end of their time.
	RequeueAfter time.Duration
}

// Total returns the number of changes that were made.
func (c Changes) Total() int {
	return c.ServicesAdded + c.ServicesUpdated + c.ServicesDeleted +
		c.DestinationsAdded + c.DestinationsUpdated + c.DestinationsDeleted
}

// Plan returns the changes that Reconcile would make now, and makes none. The batch
// prints in ipvsadm's notation. Entries that Reconcile would report as errors are
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
// want. If nothing differs, it makes none. If others change the table at the same time,
// it reads again, a bounded number of times. The kernel's lists can miss an entry, see
// GetServices: Reconcile finds missed IPv4 services if the program has 64 bits and more
// than one in fifty services is owned; what else is missed, the next call finds.
//
// A change that fails does not stop the others. The error is then a *BatchError of the
// changes that failed or were not sent; Index is the position in the last plan. A change
// that fails only because another one did, such as a destination of a service that could
// not be made, is not in it.
//
// An entry of want that cannot be sent, is wanted twice or is not owned is in the error,
// too, and affects nothing else: the kernel's entry in its place stays as it is, see
// Diff. However, an entry that is nil or has no address cannot be matched with the
// kernel's: the service or destination that it was meant to be counts as not wanted.
//
// While the kernel changes the scheduler of a service, the service has none for some
// milliseconds and refuses new clients; nothing can be done about that.
//
// The Changes are valid even with an error: they count the changes known to be made.
func (r *Reconciler) Reconcile(want []TableEntry) (Changes, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var done Changes
	begun := map[drainKey]struct{}{} // destinations that got weight 0: this call does not delete them
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

// plan has the changes to make, and which destinations drain.
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

// read returns the owned part of the table, and the keys of the other services; counted
// is as in readTable.
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

// notOwned returns the error of a wanted service that is not owned, or nil if it is.
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
	// Others may have made a new service themselves since the table was read. So new
	// services are sent first, and destinations of those that failed are left out.
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

// renumber gives the changes of a part of a batch their numbers in the whole batch.
func renumber(ops []*OpError, numbers []int) {
	for _, op := range ops {
		op.Index = numbers[op.Index]
	}
}

// do makes the changes of a batch with one Handle.do, and counts them. It returns those
// that failed, and lost is not nil if the kernel could no longer be reached.
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

// count counts the changes of a batch except those that failed, which are in order.
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

// withoutConsequences returns the changes that did not fail only because another one
// did: it drops new destinations of services that could not be made.
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
		case syscall.ENOENT: // for a service it means that there is no such scheduler
			if op.Destination != nil {
				return true
			}
		}
	}
	return false
}

// asReturned returns s, which has the given key, as the kernel would return it, except
// for the counters.
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
