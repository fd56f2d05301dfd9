package ipvs

// This file decides which destinations drain, and when they go.

import "time"

type drainKey struct {
	service     serviceKey
	destination destinationKey
}

const (
	// maxRounds is how often Reconcile reads and applies until nothing gets in between.
	maxRounds = 8
	// drainPoll is how often it makes sense to look whether connections have ended.
	drainPoll = time.Second
)

// keepDraining returns want with what has still to drain, at weight 0.
func (r *Reconciler) keepDraining(p *plan, have, want []TableEntry) ([]TableEntry, error) {
	now := time.Now
	if r.now != nil {
		now = r.now
	}
	d := drainer{plan: p, since: r.drains, limit: r.Drain, now: now()}
	p.drains = map[drainKey]time.Time{}

	position := make(map[serviceKey]int, len(want))
	kept := append([]TableEntry(nil), want...)
	for n := range want {
		key, err := sentServiceKey(want[n].Service)
		if err != nil {
			return nil, err
		}
		position[key] = n
	}
	for n := range have {
		key, err := sentServiceKey(have[n].Service)
		if err != nil {
			return nil, err
		}
		if at, wanted := position[key]; wanted {
			still, err := d.still(key, have[n].Destinations, want[at].Destinations)
			if err != nil {
				return nil, err
			}
			if len(still) > 0 {
				kept[at].Destinations = append(append([]*Destination(nil), want[at].Destinations...), still...)
			}
			continue
		}
		still, err := d.still(key, have[n].Destinations, nil)
		if err != nil {
			return nil, err
		}
		if len(still) > 0 {
			kept = append(kept, TableEntry{have[n].Service, still})
		}
	}
	return kept, nil
}

// drainer decides which destinations drain on.
type drainer struct {
	plan  *plan
	since map[drainKey]time.Time // of the calls before
	limit time.Duration
	now   time.Time
}

// still returns those of a service's destinations that are not wanted but have
// still to drain, with weight 0.
func (d *drainer) still(service serviceKey, have, want []*Destination) (still []*Destination, err error) {
	wanted := make(map[destinationKey]struct{}, len(want))
	for _, dest := range want {
		key, err := sentDestinationKey(dest)
		if err != nil {
			return nil, err
		}
		wanted[key] = struct{}{}
	}
	for _, dest := range have {
		key, err := sentDestinationKey(dest)
		if err != nil {
			return nil, err
		}
		if contains(wanted, key) {
			continue
		}
		wanted[key] = struct{}{} // once, if it is there twice
		k := drainKey{service, key}
		since, known := d.since[k]
		if !known {
			since = d.now
		}
		left := d.limit - d.now.Sub(since)
		// As long as it has its weight, a connection can come after the table was read.
		idle := dest.Weight == 0 && dest.ActiveConnections == 0 && dest.InactiveConnections == 0
		if known && (left <= 0 || idle) {
			continue
		}
		d.plan.drains[k] = since
		if again := min(left, drainPoll); d.plan.again == 0 || again < d.plan.again {
			d.plan.again = again
		}
		quiet := *dest
		quiet.Weight = 0
		still = append(still, &quiet)
	}
	return still, nil
}
