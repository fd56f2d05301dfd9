//go:build linux

package bench

import "encoding/binary"

// What every library programs, in no library's types. TCP, round robin,
// masquerading.

type service struct {
	address      [4]byte
	timeout      uint32
	destinations []destination
}

type destination struct {
	address [4]byte
	weight  uint32
}

const (
	scheduler       = "rr"
	servicePort     = 80
	destinationPort = 8080
)

func newTable(services, destinations int) []service {
	table := make([]service, services)
	for n := range table {
		s := &table[n]
		binary.BigEndian.PutUint32(s.address[:], 10<<24+96<<16+1+uint32(n))
		s.destinations = make([]destination, destinations)
		for m := range s.destinations {
			binary.BigEndian.PutUint32(s.destinations[m].address[:], 10<<24+128<<16+1+uint32(n*destinations+m))
			s.destinations[m].weight = 1
		}
	}
	return table
}

// standard is the table of all workloads that have no other.
func standard() []service { return newTable(2000, 5) }

// changed returns the table with another weight for each destination whose
// number is divisible by every; if services, with another timeout for each
// service too.
func changed(table []service, every int, services bool) []service {
	other := make([]service, len(table))
	number := 0
	for n, s := range table {
		other[n] = s
		if services {
			other[n].timeout++
		}
		other[n].destinations = append([]destination(nil), s.destinations...)
		for m := range other[n].destinations {
			if number%every == 0 {
				other[n].destinations[m].weight++
			}
			number++
		}
	}
	return other
}

type op int

const (
	newService op = iota
	setService
	delService
	newDestination
	setDestination
	delDestination
)

// change is one change; its destination is nil if it is one of a service.
type change struct {
	op          op
	service     *service
	destination *destination
}

// creates makes the table: each service, and then its destinations.
func creates(table []service) (all []change) {
	for n := range table {
		s := &table[n]
		all = append(all, change{newService, s, nil})
		for m := range s.destinations {
			all = append(all, change{newDestination, s, &s.destinations[m]})
		}
	}
	return all
}

// deletes takes it away: the destinations of each service, and then it.
func deletes(table []service) (all []change) {
	for n := range table {
		s := &table[n]
		for m := range s.destinations {
			all = append(all, change{delDestination, s, &s.destinations[m]})
		}
		all = append(all, change{delService, s, nil})
	}
	return all
}

// updates brings the table from to the table to, which has the same services
// and destinations.
func updates(from, to []service) (all []change) {
	for n := range to {
		s := &to[n]
		if s.timeout != from[n].timeout {
			all = append(all, change{setService, s, nil})
		}
		for m := range s.destinations {
			if s.destinations[m].weight != from[n].destinations[m].weight {
				all = append(all, change{setDestination, s, &s.destinations[m]})
			}
		}
	}
	return all
}
