package ipvs

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
// cannot be sent, is an error.
//
// The order of the changes keeps traffic served: what is new comes first, then
// what changes, then destinations that go, and last the services that go.
func Diff(have, want []TableEntry) (*Batch, error) {
	d := differ{
		services:     make(map[serviceKey]*TableEntry, len(have)),
		destinations: make(map[destinationKey]*Destination),
	}
	for n := range have {
		key, err := sentServiceKey(have[n].Service)
		if err != nil {
			return nil, err
		}
		d.services[key] = &have[n]
	}
	wanted := make(map[serviceKey]struct{}, len(want))
	for n := range want {
		key, err := sentServiceKey(want[n].Service)
		if err != nil {
			return nil, err
		}
		if _, twice := wanted[key]; twice {
			return nil, fmt.Errorf("ipvs: service %s is wanted twice", serviceName(want[n].Service))
		}
		wanted[key] = struct{}{}
		if err := d.compare(d.services[key], &want[n]); err != nil {
			return nil, err
		}
	}
	for n := range have {
		// What is twice in have goes once.
		if key, _ := sentServiceKey(have[n].Service); !contains(wanted, key) && d.services[key] == &have[n] {
			d.leaving.DelService(have[n].Service)
		}
	}
	all := &d.arriving
	for _, b := range []*Batch{&d.changing, &d.parting, &d.leaving} {
		all.join(b)
	}
	if len(all.bad) > 0 {
		return nil, fmt.Errorf("ipvs: the wanted table: %w", all.bad[0])
	}
	return all, nil
}

// differ collects the changes between two tables, in the order they are made.
type differ struct {
	services     map[serviceKey]*TableEntry
	destinations map[destinationKey]*Destination // of the service under way

	arriving Batch // new services and destinations
	changing Batch // other settings
	parting  Batch // destinations that go
	leaving  Batch // services that go
}

// compare adds the changes to one wanted service; have is nil if it is new.
func (d *differ) compare(have, want *TableEntry) error {
	clear(d.destinations)
	switch {
	case have == nil:
		d.arriving.NewService(want.Service)
	default:
		if settingsOfService(have.Service) != settingsOfService(want.Service) {
			d.changing.UpdateService(want.Service)
		}
		for _, dest := range have.Destinations {
			key, err := sentDestinationKey(dest)
			if err != nil {
				return err
			}
			d.destinations[key] = dest
		}
	}
	// What is wanted is taken out of the map, or marked so that twice is noticed.
	for _, dest := range want.Destinations {
		key, err := sentDestinationKey(dest)
		if err != nil {
			return fmt.Errorf("%w (of service %s)", err, serviceName(want.Service))
		}
		there, known := d.destinations[key]
		d.destinations[key] = nil
		switch {
		case known && there == nil:
			return fmt.Errorf("ipvs: destination %s of service %s is wanted twice", destinationName(dest), serviceName(want.Service))
		case !known:
			d.arriving.NewDestination(want.Service, dest)
		case settingsOfDestination(there) != settingsOfDestination(dest):
			d.changing.UpdateDestination(want.Service, dest)
		}
	}
	if have == nil {
		return nil
	}
	for _, dest := range have.Destinations { // in their order, which a map has not
		if key, _ := sentDestinationKey(dest); d.destinations[key] == dest {
			d.parting.DelDestination(want.Service, dest)
		}
	}
	return nil
}

func contains[K comparable](set map[K]struct{}, key K) bool {
	_, ok := set[key]
	return ok
}

// sentServiceKey returns what identifies s to the kernel, as it is sent.
func sentServiceKey(s *Service) (serviceKey, error) {
	if s == nil {
		return serviceKey{}, errNilService
	}
	family, address, err := serviceFamily(s)
	if err != nil {
		return serviceKey{}, err
	}
	k := serviceKey{fwmark: s.FWMark, family: family}
	if s.FWMark == 0 {
		k.protocol, k.port = s.Protocol, uint32(s.Port)
		copy(k.address[:], address)
	}
	return k, nil
}

// sentDestinationKey returns what identifies d in its service, as it is sent.
func sentDestinationKey(d *Destination) (destinationKey, error) {
	if d == nil {
		return destinationKey{}, errNilDestination
	}
	family, address, err := familyOf(d.AddressFamily, d.Address, "destination")
	if err != nil {
		return destinationKey{}, err
	}
	k := destinationKey{family: family, port: d.Port}
	copy(k.address[:], address)
	return k, nil
}

// serviceSettings is what can be set of a service, as it is sent.
type serviceSettings struct {
	scheduler, engine       string
	flags, timeout, netmask uint32
}

func settingsOfService(s *Service) serviceSettings {
	family, _, _ := serviceFamily(s)
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
