package ipvs

// This file decides which destinations drain, and when they are deleted.

import (
	"time"

	"golang.org/x/sys/unix"
)

type drainKey struct {
	service     serviceKey
	destination destinationKey
}

const (
	// drainPoll is the shortest time after which it makes sense to look whether
	// connections have ended.
	drainPoll = time.Second
	// A drain is looked at again after 1/drainPollShare of the time that it has lasted:
	// about 30 times in ten minutes.
	drainPollShare = 5
)

// drainer decides, for one plan, which of the unwanted destinations drain.
type drainer struct {
	reconciler *Reconciler
	now        time.Time
	since      map[drainKey]time.Time  // since when each is known to have weight 0
	begun      map[drainKey]struct{}   // destinations that got weight 0 in the current call
	wildcards  map[serviceKey]struct{} // wanted services with port 0

	goesOn  map[drainKey]time.Time  // destinations that continue to drain, and since when
	begins  []drainKey              // destinations that the plan gives weight 0
	ends    map[drainKey]time.Time  // destinations that the plan deletes
	held    map[serviceKey]struct{} // services that the plan does not touch
	count   int                     // number of destinations that drain
	requeue time.Duration           // when to look at them again

	counted     bool           // destinations have counters
	countedKey  serviceKey     // if not: the service whose destinations were read again,
	countedList []*Destination // and these destinations
	err         error          // the error of reading them
}

// newDrainer returns the drainer of a plan.
func (r *Reconciler) newDrainer(begun map[drainKey]struct{}) *drainer {
	return &drainer{reconciler: r, now: r.time(), since: r.drains, begun: begun,
		wildcards: map[serviceKey]struct{}{}, held: map[serviceKey]struct{}{},
		goesOn: map[drainKey]time.Time{}, ends: map[drainKey]time.Time{}}
}

// time returns the current time.
func (r *Reconciler) time() time.Time {
	if r.now != nil {
		return r.now()
	}
	return time.Now()
}

// takesOver records a wanted service. One with port 0 takes over the clients of deleted
// services with the same address and protocol.
func (d *drainer) takesOver(key serviceKey) {
	if key.port == 0 && key.fwmark == 0 {
		d.wildcards[key] = struct{}{}
	}
}

// isTakenOver reports whether an unwanted service would, if it stayed, keep its clients
// from a wanted one with port 0.
func (d *drainer) isTakenOver(key serviceKey) bool {
	key.port = 0
	return contains(d.wildcards, key)
}

// hold records a service whose destinations stay as they are.
func (d *drainer) hold(key serviceKey) { d.held[key] = struct{}{} }

// keeps reports whether an unwanted destination is to drain. s is its service as the
// kernel has it, and scheduler the one that the service will have.
func (d *drainer) keeps(s *Service, scheduler string, dest *Destination, k drainKey) bool {
	limit := d.limit(s, scheduler, dest, k)
	if limit <= 0 {
		return false
	}
	if dest.Weight != 0 {
		// Even if it drained before: it can have new connections.
		d.begins = append(d.begins, k)
		d.keep(0, limit)
		return true
	}
	since, known := d.since[k]
	if !known {
		since = d.now
	}
	elapsed := d.now.Sub(since)
	idle := dest.ActiveConnections == 0 && dest.InactiveConnections == 0
	if elapsed >= limit || idle && !contains(d.begun, k) {
		d.ends[k] = since
		return false
	}
	d.goesOn[k] = since
	d.keep(elapsed, limit)
	return true
}

// limit returns how long a destination may drain, or 0 if it must not.
func (d *drainer) limit(s *Service, scheduler string, dest *Destination, k drainKey) time.Duration {
	if scheduler == DestinationHashing {
		return 0 // a destination of weight 0 would keep its share of the clients
	}
	switch r := d.reconciler; {
	case r.DrainFor != nil:
		return r.DrainFor(cloneService(s), cloneDestination(d.withCounters(s, dest, k)))
	case k.service.fwmark != 0, k.service.protocol == unix.IPPROTO_TCP:
		return r.Drain
	}
	return 0
}

// withCounters returns a destination with all its fields, including the counters.
func (d *drainer) withCounters(s *Service, dest *Destination, k drainKey) *Destination {
	if d.counted {
		return dest
	}
	if d.countedKey != k.service {
		d.countedKey = k.service
		if d.countedList, d.err = d.reconciler.Handle.GetDestinations(s); d.err != nil {
			d.counted = true // the plan fails
		}
	}
	for _, full := range d.countedList {
		if keyOfDestination(full) == k.destination {
			return full
		}
	}
	return dest // deleted meanwhile
}

// keep counts a destination that drains, and determines when to look again.
func (d *drainer) keep(elapsed, limit time.Duration) {
	d.count++
	requeue := min(max(drainPoll, elapsed/drainPollShare), limit-elapsed)
	if d.requeue == 0 || requeue < d.requeue {
		d.requeue = requeue
	}
}

// after returns the drains after the plan was carried out, except for the changes that
// failed. The time to drain begins when the kernel has confirmed weight 0.
func (d *drainer) after(failed []*OpError, now time.Time) map[drainKey]time.Time {
	destinations, services := map[drainKey]struct{}{}, map[serviceKey]struct{}{}
	for _, op := range failed {
		service, err := sentServiceKey(op.Service)
		if err != nil {
			continue
		}
		if op.Op == opName(cmdDelService) {
			services[service] = struct{}{}
		} else if destination, err := sentDestinationKey(op.Destination); err == nil {
			destinations[drainKey{service, destination}] = struct{}{}
		}
	}
	drains := d.goesOn
	for _, k := range d.begins {
		if !contains(destinations, k) {
			drains[k] = now
		}
	}
	for k, since := range d.ends { // those that could not be deleted have no time left
		if contains(destinations, k) || contains(services, k.service) {
			drains[k] = since
		}
	}
	if len(d.held) > 0 {
		for k, since := range d.since {
			if contains(d.held, k.service) {
				drains[k] = since
			}
		}
	}
	return drains
}

// hasFallback reports whether a scheduler has a fallback flag, which is
// ServiceFlagSched1. Without the flag, a destination of weight 0 keeps its share of the
// clients, which are refused.
func hasFallback(scheduler string) bool {
	return scheduler == SourceHashing || scheduler == MaglevHashing
}

// withFallback returns a service with the settings to use while its destinations drain.
func withFallback(s *Service) *Service {
	if !hasFallback(s.SchedName) || s.Flags&ServiceFlagSched1 != 0 {
		return s
	}
	fallback := *s
	fallback.Flags |= ServiceFlagSched1
	return &fallback
}

// losesFallback reports whether a service is to lose the fallback flag, which it needs
// until its last draining destination is deleted.
func losesFallback(have, want *Service) bool {
	return have.SchedName == want.SchedName && hasFallback(want.SchedName) &&
		have.Flags&^want.Flags&ServiceFlagSched1 != 0
}
