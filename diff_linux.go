package ipvs

// This file has whole tables, and the difference between two of them.

import (
	"fmt"
)

// TableEntry is a service with its destinations.
type TableEntry struct {
	Service      *Service
	Destinations []*Destination
}

// GetTable returns every service with its destinations.
//
// It is read one service after the other: as with GetServices, others may change
// the table meanwhile. A service that is deleted before its destinations are read
// comes with none.
func (i *Handle) GetTable() ([]TableEntry, error) {
	return i.getTable(func(*Service) bool { return true })
}

// getTable reads the services that are wanted, and their destinations.
func (i *Handle) getTable(wanted func(*Service) bool) ([]TableEntry, error) {
	services, err := i.GetServices()
	if err != nil {
		return nil, err
	}
	table := make([]TableEntry, 0, len(services))
	for _, s := range services {
		if !wanted(s) {
			continue
		}
		destinations, err := i.GetDestinations(s)
		if err != nil {
			return nil, err
		}
		table = append(table, TableEntry{s, destinations})
	}
	return table, nil
}

// Diff returns the fewest changes that make the table want of the table have. It
// looks at what a caller can set, not at counters; addresses, families and
// netmasks are the same if they are sent the same. What is twice in want, or
// cannot be sent, is an error; of what is twice in have the first counts.
//
// The order of the changes keeps traffic served: what is new comes first, then
// what changes, then destinations that go, and last the services that go.
func Diff(have, want []TableEntry) (*Batch, error) {
	var d differ
	if err := d.diff(have, want); err != nil {
		return nil, err
	}
	all := &d.arriving
	for _, b := range []*Batch{&d.changing, &d.parting, &d.leaving} {
		all.appendBatch(b)
	}
	if len(all.bad) > 0 {
		return nil, fmt.Errorf("ipvs: the wanted table: %w", all.bad[0])
	}
	return all, nil
}

// differ collects the changes between two tables, in the order they are made.
type differ struct {
	services     matcher[serviceKey]
	destinations matcher[destinationKey] // of the service under way

	arriving Batch // new services and destinations
	changing Batch // other settings
	parting  Batch // destinations that go
	leaving  Batch // services that go
}

// matcher finds what is there for what is wanted.
type matcher[K comparable] struct {
	there   index[K]
	at      []int  // where in the list each key is
	matched []bool // those that are wanted
	new     index[K]
}

// reset begins with the next list.
func (m *matcher[K]) reset(have, want int) {
	m.there.reset(have)
	m.new.reset(want)
	m.at, m.matched = m.at[:0], m.matched[:0]
}

// have notes entry n of what is there. What is there twice counts once.
func (m *matcher[K]) have(n int, k K) {
	if m.there.add(k) {
		m.at, m.matched = append(m.at, n), append(m.matched, false)
	}
}

// want returns the entry that is there for what is wanted, -1 for none, and
// whether it is wanted for the first time.
func (m *matcher[K]) want(k K) (n int, first bool) {
	found, ok := m.there.find(k)
	if !ok {
		return -1, m.new.add(k)
	}
	first = !m.matched[found]
	m.matched[found] = true
	return m.at[found], first
}

// unwanted yields the entries that are not wanted, in the order of the list.
func (m *matcher[K]) unwanted(yield func(n int) bool) {
	for k, n := range m.at {
		if !m.matched[k] && !yield(n) {
			return
		}
	}
}

func (d *differ) diff(have, want []TableEntry) error {
	d.services.reset(len(have), len(want))
	for n := range have {
		key, err := sentServiceKey(have[n].Service)
		if err != nil {
			return fmt.Errorf("%w (entry %d of the table there is)", err, n)
		}
		d.services.have(n, key)
	}
	for n := range want {
		key, err := sentServiceKey(want[n].Service)
		if err != nil {
			return fmt.Errorf("%w (entry %d of the wanted table)", err, n)
		}
		var there TableEntry
		at, first := d.services.want(key)
		if !first {
			return fmt.Errorf("ipvs: service %s is wanted twice", serviceName(want[n].Service))
		}
		if at >= 0 {
			there = have[at]
		}
		if err := d.compare(there, want[n], key.family); err != nil {
			return fmt.Errorf("%w (of service %s)", err, serviceName(want[n].Service))
		}
	}
	for n := range d.services.unwanted {
		d.leaving.DelService(have[n].Service)
	}
	return nil
}

// compare adds the changes to one wanted service; have is empty if it is new.
func (d *differ) compare(have, want TableEntry, family uint16) error {
	if have.Service == nil {
		d.arriving.NewService(want.Service)
	} else if settingsOfService(have.Service, family) != settingsOfService(want.Service, family) {
		d.changing.UpdateService(want.Service)
	}
	d.destinations.reset(len(have.Destinations), len(want.Destinations))
	for n, dest := range have.Destinations {
		key, err := sentDestinationKey(dest)
		if err != nil {
			return err
		}
		d.destinations.have(n, key)
	}
	for _, dest := range want.Destinations {
		key, err := sentDestinationKey(dest)
		if err != nil {
			return err
		}
		at, first := d.destinations.want(key)
		switch {
		case !first:
			return fmt.Errorf("ipvs: destination %s is wanted twice", destinationName(dest))
		case at < 0:
			d.arriving.NewDestination(want.Service, dest)
		case settingsOfDestination(have.Destinations[at]) != settingsOfDestination(dest):
			d.changing.UpdateDestination(want.Service, dest)
		}
	}
	for n := range d.destinations.unwanted {
		d.parting.DelDestination(want.Service, have.Destinations[n])
	}
	return nil
}

func contains[K comparable](set map[K]struct{}, key K) bool {
	_, ok := set[key]
	return ok
}

// serviceSettings is what can be set of a service, as it is sent.
type serviceSettings struct {
	scheduler, engine       string
	flags, timeout, netmask uint32
}

func settingsOfService(s *Service, family uint16) serviceSettings {
	return serviceSettings{s.SchedName, s.PEName, s.Flags &^ ServiceFlagHashed, s.Timeout, netmaskOf(s, family)}
}

// destinationSettings is what can be set of a destination, as it is sent.
type destinationSettings struct {
	weight                  int
	forwarding              uint32
	upper, lower            uint32
	tunnelType              uint8
	tunnelPort, tunnelFlags uint16
}

func settingsOfDestination(d *Destination) destinationSettings {
	return destinationSettings{d.Weight, d.ConnectionFlags & ConnectionFlagFwdMask,
		d.UpperThreshold, d.LowerThreshold, d.TunnelType, d.TunnelPort, d.TunnelFlags}
}
