package ipvs

// This file has whole tables, and the difference between two of them.

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// TableEntry is a service with its destinations.
type TableEntry struct {
	Service      *Service
	Destinations []*Destination
}

// GetTable returns every service with its destinations.
//
// It reads one service after the other, so the table is not a snapshot: as with
// GetServices, others may change it meanwhile. A service that is deleted before its
// destinations are read is listed without destinations.
func (i *Handle) GetTable() ([]TableEntry, error) {
	return i.getTable(func(*Service) bool { return true })
}

// getTable reads the services for which wanted returns true, and their destinations.
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

// Diff returns the fewest changes that lead from the table have to the table want. It
// compares settings, not counters. Addresses, families and netmasks are equal if they
// are sent as the same bytes, and tunnel settings matter only with
// ConnectionFlagTunnel.
//
// An entry of want that cannot be sent (it is nil, has no address or one that
// contradicts its family, or has a weight or a name out of range) or that is wanted
// twice becomes a change with an Err, see Batch.All. Handle.Do reports such a change
// and does not send it. Nothing else is affected: the entry of have in its place stays
// as it is (a service with its destinations), and of duplicates the first one counts.
//
// Diff returns an error only if have is not a table that a kernel can have. Of
// duplicates in have, the first one counts.
//
// The order of the changes keeps traffic served: new services and destinations come
// first, then changed settings, then deleted destinations, and last deleted services.
func Diff(have, want []TableEntry) (*Batch, error) {
	var d differ
	return d.diff(have, want)
}

// differ collects the changes between two tables, in the order they are made.
type differ struct {
	services     matcher[serviceKey]
	destinations matcher[destinationKey] // of the current service

	refuse func(*Service, serviceKey) error // returns why a wanted service must not be touched; nil if all may be
	drains *drainer                         // decides which destinations drain; nil if none do
	listed bool                             // the existing table was read from the kernel and has no duplicates

	arriving Batch // new services and destinations
	updating Batch // services with other settings
	changing Batch // destinations with other settings
	parting  Batch // destinations to delete
	settling Batch // services that lose a setting after their destinations are deleted
	leaving  Batch // services to delete

	scratch []byte // for messages that are encoded only to validate them
}

// matcher matches wanted entries with existing ones.
type matcher[K comparable] struct {
	there index[K] // the existing entries
	at    []int    // the position of each in its list
	state []uint8  // why each stays; 0 if it does not
	new   index[K] // the wanted entries that do not exist
}

// Why an entry stays.
const (
	isWanted = 1 << iota
	isProtected
)

// reset prepares for the next list.
func (m *matcher[K]) reset(have, want int) {
	m.there.reset(have)
	m.new.reset(want)
	m.at, m.state = m.at[:0], m.state[:0]
}

// have adds existing entry n. A duplicate is ignored.
func (m *matcher[K]) have(n int, k K) {
	if m.there.add(k) {
		m.at, m.state = append(m.at, n), append(m.state, 0)
	}
}

// want returns the existing entry with a wanted key, or -1 if there is none, and reports
// whether the key is wanted for the first time.
func (m *matcher[K]) want(k K) (n int, first bool) {
	found, ok := m.there.find(k)
	if !ok {
		return -1, m.new.add(k)
	}
	first = m.state[found]&isWanted == 0
	m.state[found] |= isWanted
	return m.at[found], first
}

// protect makes an existing entry stay even if it is not wanted.
func (m *matcher[K]) protect(k K) {
	if found, ok := m.there.find(k); ok {
		m.state[found] |= isProtected
	}
}

// unwanted yields the existing entries that are neither wanted nor protected, in the
// order of the list, with their keys.
func (m *matcher[K]) unwanted(yield func(n int, k K) bool) {
	for at, n := range m.at {
		if m.state[at] == 0 && !yield(n, m.there.keys[at]) {
			return
		}
	}
}

var errWantedTwice = errors.New("ipvs: wanted twice; the first one counts")

func (d *differ) diff(have, want []TableEntry) (*Batch, error) {
	d.services.reset(len(have), len(want))
	for n := range have {
		key, err := sentServiceKey(have[n].Service)
		if err != nil {
			return nil, fmt.Errorf("%w (entry %d of the existing table)", err, n)
		}
		d.services.have(n, key)
	}
	for n := range want {
		if err := d.wanted(have, want[n]); err != nil {
			return nil, err
		}
	}
	for n, key := range d.services.unwanted {
		if err := d.unwanted(have[n], key); err != nil {
			return nil, err
		}
	}
	all := &d.arriving
	for _, b := range []*Batch{&d.updating, &d.changing, &d.parting, &d.settling, &d.leaving} {
		all.appendBatch(b)
	}
	return all, nil
}

// wanted adds the changes to one wanted service.
func (d *differ) wanted(have []TableEntry, want TableEntry) error {
	key, err := sentServiceKey(want.Service)
	if err != nil {
		d.arriving.refuse(cmdNewService, want.Service, nil, err)
		d.protectMistaken(want.Service)
		return d.compareDestinations(nil, want, false)
	}
	at, first := d.services.want(key)
	if at < 0 {
		return d.newService(want, key, first)
	}
	there := have[at]
	err = d.checkWanted(want.Service, key, first)
	changed := settingsOfService(there.Service, key.family) != settingsOfService(want.Service, key.family)
	if err == nil && changed {
		d.scratch, err = fillService(d.scratch[:0], want.Service, true)
	}
	if err != nil {
		d.updating.refuse(cmdSetService, want.Service, nil, err)
		if err := d.compareDestinations(there.Destinations, want, false); err != nil {
			return err
		}
		if first && d.drains != nil {
			d.drains.hold(key)
		}
		return nil
	}
	if err := d.compareDestinations(there.Destinations, want, true); err != nil {
		return err
	}
	return d.existingService(there, want.Service, key)
}

// checkWanted returns why a wanted service must not be touched, or nil if it may be.
func (d *differ) checkWanted(s *Service, key serviceKey, first bool) error {
	switch {
	case !first:
		return errWantedTwice
	case d.refuse != nil:
		return d.refuse(s, key)
	}
	return nil
}

// newService adds a wanted service that does not exist, and its destinations.
func (d *differ) newService(want TableEntry, key serviceKey, first bool) error {
	err := d.checkWanted(want.Service, key, first)
	if err != nil {
		d.arriving.refuse(cmdNewService, want.Service, nil, err)
	} else if err = d.arriving.add(cmdNewService, want.Service, nil); err != nil && key.fwmark == 0 {
		d.protectMistaken(want.Service)
	}
	if err == nil && d.drains != nil {
		d.drains.takesOver(key)
	}
	return d.compareDestinations(nil, want, err == nil)
}

// existingService adds the changes to an existing service that is wanted, after its
// destinations were compared.
func (d *differ) existingService(there TableEntry, want *Service, key serviceKey) error {
	draining, ended := 0, false
	for n, k := range d.destinations.unwanted {
		dest := there.Destinations[n]
		if d.drains != nil && d.drains.keeps(there.Service, want.SchedName, dest, drainKey{key, k}) {
			draining++
			d.quiet(want, dest)
			continue
		}
		ended = ended || dest.Weight == 0
		d.parting.DelDestination(want, dest)
	}
	if d.drains != nil {
		d.drains.takesOver(key)
	}
	if draining > 0 {
		want = withFallback(want)
	}
	if settingsOfService(there.Service, key.family) == settingsOfService(want, key.family) {
		return nil
	}
	if ended && losesFallback(there.Service, want) {
		d.settling.UpdateService(want)
	} else {
		d.updating.UpdateService(want)
	}
	return nil
}

// compareDestinations adds the changes to the wanted destinations of a service. If the
// service is not usable, it only reports destinations that are invalid themselves.
func (d *differ) compareDestinations(have []*Destination, want TableEntry, usable bool) error {
	if d.listed && usable && sameDestinations(have, want.Destinations) {
		d.destinations.reset(0, 0)
		return nil
	}
	d.destinations.reset(len(have), len(want.Destinations))
	for n, dest := range have {
		key, err := sentDestinationKey(dest)
		if err != nil {
			return fmt.Errorf("%w (of the existing service %s)", err, serviceName(want.Service))
		}
		d.destinations.have(n, key)
	}
	for _, dest := range want.Destinations {
		key, err := sentDestinationKey(dest)
		if err != nil {
			d.arriving.refuse(cmdNewDest, want.Service, dest, err)
			d.protectMistakenDestination(dest)
			continue
		}
		at, first := d.destinations.want(key)
		changes, cmd := &d.changing, uint8(cmdSetDest)
		if at < 0 {
			changes, cmd = &d.arriving, cmdNewDest
		}
		switch {
		case !first:
			changes.refuse(cmd, want.Service, dest, errWantedTwice)
		case !usable:
			if err := checkDestination(cmd, dest); err != nil {
				changes.refuse(cmd, want.Service, dest, err)
			}
		case at < 0:
			if err := changes.add(cmd, want.Service, dest); err != nil {
				d.protectMistakenDestination(dest)
			}
		case settingsOfDestination(have[at]) != settingsOfDestination(dest):
			changes.add(cmd, want.Service, dest)
		}
	}
	return nil
}

// sameDestinations reports whether the existing destinations, as the kernel lists them,
// are the wanted ones, in the same order or in reverse: the kernel lists the newest
// first. Most services are like that, and this check costs less than matching.
func sameDestinations(have, want []*Destination) bool {
	last := len(have) - 1
	switch {
	case len(have) != len(want):
		return false
	case last < 0:
		return true
	}
	reverse := last > 0 && !sameDestination(have[0], want[0])
	for n := range have {
		m := n
		if reverse {
			m = last - n
		}
		if !sameDestination(have[n], want[m]) {
			return false
		}
	}
	return true
}

// sameDestination reports whether an existing destination is a wanted one, with
// the same settings.
func sameDestination(have, want *Destination) bool {
	if want == nil || have.Port != want.Port {
		return false
	}
	family, address, err := familyOf(want.AddressFamily, want.Address, "destination")
	return err == nil && family == have.AddressFamily && string(address) == string(have.Address) &&
		settingsOfDestination(have) == settingsOfDestination(want)
}

// unwanted adds the changes to a service that is not wanted.
func (d *differ) unwanted(have TableEntry, key serviceKey) error {
	if d.drains == nil || d.drains.isTakenOver(key) {
		d.leaving.DelService(have.Service)
		return nil
	}
	if err := d.compareDestinations(have.Destinations, TableEntry{Service: have.Service}, true); err != nil {
		return err
	}
	draining := 0
	var parting []*Destination
	for n, k := range d.destinations.unwanted {
		dest := have.Destinations[n]
		if d.drains.keeps(have.Service, have.Service.SchedName, dest, drainKey{key, k}) {
			draining++
			d.quiet(have.Service, dest)
		} else {
			parting = append(parting, dest)
		}
	}
	if draining == 0 {
		d.leaving.DelService(have.Service) // and its destinations with it
		return nil
	}
	for _, dest := range parting {
		d.parting.DelDestination(have.Service, dest)
	}
	return nil
}

// quiet sets the weight of a draining destination to 0.
func (d *differ) quiet(s *Service, dest *Destination) {
	if dest.Weight == 0 {
		return
	}
	quiet := *dest
	quiet.Weight = 0
	d.changing.UpdateDestination(s, &quiet)
}

// protectMistaken protects the existing services that s may be meant for, if its family
// is missing or contradicts its address.
func (d *differ) protectMistaken(s *Service) {
	if s == nil {
		return
	}
	for _, family := range []uint16{0, unix.AF_INET, unix.AF_INET6} {
		meant := *s
		meant.AddressFamily = family
		if key, err := sentServiceKey(&meant); err == nil {
			d.services.protect(key)
			if d.drains != nil {
				d.drains.hold(key)
			}
		}
	}
}

// protectMistakenDestination does the same for the destinations of the current service.
func (d *differ) protectMistakenDestination(dest *Destination) {
	if dest == nil {
		return
	}
	for _, family := range []uint16{0, unix.AF_INET, unix.AF_INET6} {
		meant := *dest
		meant.AddressFamily = family
		if key, err := sentDestinationKey(&meant); err == nil {
			d.destinations.protect(key)
		}
	}
}

// checkDestination returns why a destination cannot be sent, or nil if it can.
func checkDestination(cmd uint8, d *Destination) error {
	_, err := fillDestination(nil, d, true)
	if err == nil && cmd == cmdNewDest {
		err = checkNew(d.AddressFamily, d.Address, "destination")
	}
	return err
}

func contains[K comparable](set map[K]struct{}, key K) bool {
	_, ok := set[key]
	return ok
}

// serviceSettings are the settings of a service, as they are sent.
type serviceSettings struct {
	scheduler, engine       string
	flags, timeout, netmask uint32
}

func settingsOfService(s *Service, family uint16) serviceSettings {
	return serviceSettings{s.SchedName, s.PEName, s.Flags &^ ServiceFlagHashed, s.Timeout, netmaskOf(s, family)}
}

// destinationSettings are the settings of a destination, as they are sent.
type destinationSettings struct {
	weight                  int
	forwarding              uint32
	upper, lower            uint32
	tunnelType              uint8
	tunnelPort, tunnelFlags uint16
}

func settingsOfDestination(d *Destination) destinationSettings {
	s := destinationSettings{weight: d.Weight, forwarding: d.ConnectionFlags & ConnectionFlagFwdMask,
		upper: d.UpperThreshold, lower: d.LowerThreshold}
	if s.forwarding == ConnectionFlagTunnel { // with other methods the kernel stores them, but never uses them
		s.tunnelType, s.tunnelPort, s.tunnelFlags = d.TunnelType, d.TunnelPort, d.TunnelFlags
	}
	return s
}
