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

// Reconciler brings the kernel's table to a wanted one, again and again. Its zero
// value with a Handle is ready. It is safe for concurrent use.
//
// It needs no memory of before: a new process goes on where the old one stopped.
type Reconciler struct {
	// Handle is the table to work on.
	Handle *Handle

	// Owned tells which services are the caller's; nil: all. Others are never
	// touched: to want one is an error. It is given services as the kernel returns
	// them, with their family, and IPv4 addresses of 4 bytes.
	Owned func(*Service) bool

	// Drain is how long a destination that is no longer wanted may finish its
	// connections. It gets weight 0, and a later call deletes it once it has no
	// connection, active or inactive, or its time is up. A service that is no longer
	// wanted stays meanwhile, and goes with the last of its destinations. With 0, or
	// less, all goes at once.
	//
	// A TCP connection that both sides closed counts as inactive for two minutes more:
	// with a shorter Drain its destination goes by the time limit.
	//
	// With weight 0 the kernel sends no new clients; one that is bound by persistence
	// comes back, unless the sysctl net.ipv4.vs.expire_quiescent_template is 1.
	Drain time.Duration

	mu     sync.Mutex
	drains map[drainKey]time.Time // since when each drains
	now    func() time.Time       // for tests; nil: time.Now
}

// Changes says what Reconcile did.
type Changes struct {
	ServicesAdded       int
	ServicesUpdated     int
	ServicesDeleted     int
	DestinationsAdded   int
	DestinationsUpdated int // those that began to drain, too
	DestinationsDeleted int // not those that went with their service

	// Draining is the number of destinations that still finish their connections.
	Draining int

	// RequeueAfter is when to call again because of them, at the latest; 0 if none drains.
	RequeueAfter time.Duration
}

// Total returns the number of changes that were made.
func (c Changes) Total() int {
	return c.ServicesAdded + c.ServicesUpdated + c.ServicesDeleted +
		c.DestinationsAdded + c.DestinationsUpdated + c.DestinationsDeleted
}

// Plan returns what Reconcile would do now, and does nothing. Printed, it is a
// list of ipvsadm's commands.
func (r *Reconciler) Plan(want []TableEntry) (*Batch, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, err := r.plan(want)
	if err != nil {
		return nil, err
	}
	return p.batch, nil
}

// Reconcile reads the table, and makes the changes that bring what is owned of it
// to want; none if that is so already. If others change the table at the same
// time, it reads again, a bounded number of times. It goes by what the kernel
// lists, see GetServices: what is missing from that, the next call puts right.
//
// The Changes count with an error too what is known to be done. The error is a
// *BatchError where changes failed.
func (r *Reconciler) Reconcile(want []TableEntry) (Changes, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var done Changes
	drains := r.drains
	defer func() { r.drains = drains }() // not before: a call does not delete what it gave weight 0
	for round := 1; ; round++ {
		p, err := r.plan(want)
		if err != nil {
			return done, err
		}
		drains, done.Draining, done.RequeueAfter = p.drains, len(p.drains), p.again
		if p.batch.Len() == 0 {
			return done, nil
		}
		err = r.apply(p.batch, &done)
		var failed *BatchError
		if !errors.As(err, &failed) {
			return done, err
		}
		failed.restart(drains)
		if round == maxRounds || !failed.onlyRaces() {
			return done, err
		}
	}
}

// apply makes the changes, and counts them.
func (r *Reconciler) apply(b *Batch, done *Changes) error {
	if r.Owned == nil {
		return r.do(b, done)
	}
	// Others may have made a service in place of a new one since the table was read.
	// So new services go first, and what was to go to those that failed is left out.
	isNew := func(msg []byte) bool { return commandOf(msg) == cmdNewService }
	newServices, _ := b.filter(isNew)
	if newServices.Len() == 0 {
		return r.do(b, done)
	}
	err := r.do(newServices, done)
	failed := map[serviceKey]struct{}{}
	var first, second *BatchError
	if errors.As(err, &first) {
		for _, op := range first.Errors {
			if _, refused := op.Err.(syscall.Errno); !refused {
				return first // the kernel was lost
			}
			key, _ := sentServiceKey(op.Service) // it was sent
			failed[key] = struct{}{}
		}
	} else if err != nil {
		return err
	}
	rest, _ := b.filter(func(msg []byte) bool {
		if len(failed) == 0 || commandOf(msg) != cmdNewDest {
			return !isNew(msg)
		}
		s, _ := decode(msg)
		key, _ := sentServiceKey(s)
		return !contains(failed, key)
	})
	err = r.do(rest, done)
	if errors.As(err, &second) {
		for _, op := range second.Errors {
			op.Index += newServices.Len()
		}
		second.total += newServices.Len()
	}
	switch {
	case first == nil || err != nil && second == nil:
		return err
	case second != nil:
		first.Errors = append(first.Errors, second.Errors...)
		first.total = second.total
	}
	return first
}

// do makes the changes of a batch at once, and counts them.
func (r *Reconciler) do(b *Batch, done *Changes) error {
	err := r.Handle.Do(b)
	var failed *BatchError
	if err == nil || errors.As(err, &failed) {
		done.count(b, failed)
	}
	return err
}

// restart takes out the drains of destinations that were to get weight 0 and did
// not: their time begins when they do.
func (e *BatchError) restart(drains map[drainKey]time.Time) {
	for _, op := range e.Errors {
		service, err := sentServiceKey(op.Service)
		destination, destErr := sentDestinationKey(op.Destination)
		if err == nil && destErr == nil {
			delete(drains, drainKey{service, destination})
		}
	}
}

// count adds the changes of a batch that did not fail.
func (c *Changes) count(b *Batch, failed *BatchError) {
	var errs []*OpError
	if failed != nil {
		errs = failed.Errors
	}
	for n, msg := range b.messages {
		if len(errs) > 0 && errs[0].Index == n {
			errs = errs[1:]
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

// onlyRaces tells whether reading again can help: whether some failures come
// from others who changed the table, and the rest of them does not follow from
// something else.
func (e *BatchError) onlyRaces() bool {
	broken := map[string]bool{} // services that could not be made for another reason
	races := false
	for _, op := range e.Errors {
		switch {
		case op.Service == nil:
		case op.Err == syscall.ESRCH && broken[serviceName(op.Service)]:
		case op.Err == syscall.EEXIST, op.Err == syscall.ESRCH, op.Err == syscall.ENOENT && op.Destination != nil:
			races = true
		case op.Destination == nil:
			broken[serviceName(op.Service)] = true
		}
	}
	return races
}

// plan is what to do, and what is left to do later.
type plan struct {
	batch  *Batch
	drains map[drainKey]time.Time
	again  time.Duration
}

// plan reads the table and compares. The caller holds r.mu.
func (r *Reconciler) plan(want []TableEntry) (*plan, error) {
	if r.Handle == nil {
		return nil, errors.New("ipvs: the reconciler has no handle")
	}
	have, err := r.read(want)
	if err != nil {
		return nil, err
	}
	p := new(plan)
	if r.Drain > 0 {
		if want, err = r.keepDraining(p, have, want); err != nil {
			return nil, err
		}
	}
	p.batch, err = Diff(have, want)
	return p, err
}

// read returns what is owned of the table. It is an error if that is not all that
// is wanted.
func (r *Reconciler) read(want []TableEntry) ([]TableEntry, error) {
	if r.Owned == nil {
		return r.Handle.GetTable()
	}
	foreign := map[serviceKey]struct{}{}
	have, err := r.Handle.getTable(func(s *Service) bool {
		if r.Owned(s) {
			return true
		}
		foreign[keyOfService(s)] = struct{}{}
		return false
	})
	if err != nil {
		return nil, err
	}
	for n := range want {
		s, key, err := asReturned(want[n].Service)
		if err != nil {
			return nil, err
		}
		if !r.Owned(s) || contains(foreign, key) {
			return nil, fmt.Errorf("ipvs: service %s is wanted, but not owned", serviceName(s))
		}
	}
	return have, nil
}

// asReturned returns s as the kernel would return it but for counters, and what
// identifies it.
func asReturned(s *Service) (*Service, serviceKey, error) {
	key, err := sentServiceKey(s)
	if err != nil {
		return nil, key, err
	}
	returned := *s
	returned.AddressFamily, returned.Netmask = key.family, netmaskOf(s, key.family)
	returned.Flags |= ServiceFlagHashed
	switch {
	case s.FWMark != 0:
		returned.Address, returned.Protocol, returned.Port = nil, 0, 0
	case key.family == unix.AF_INET:
		returned.Address = key.address[:net.IPv4len]
	}
	return &returned, key, nil
}
