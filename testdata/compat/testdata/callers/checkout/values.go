//go:build linux

package callers

import (
	ipvs "ipvs.test/checkout"
)

// EmbeddedService and the types after it are what programs make of the types:
// fields of their own structs, embedded ones, entries of lists and maps.
type EmbeddedService struct {
	ipvs.Service
	Note string
}

type EmbeddedServicePointer struct {
	*ipvs.Service
	Note string
}

type EmbeddedDestination struct {
	ipvs.Destination
	Note string
}

type EmbeddedDestinationPointer struct {
	*ipvs.Destination
	Note string
}

type Counted struct {
	ipvs.SvcStats
	Each map[string]ipvs.DstStats
}

type Timed struct {
	ipvs.Config
	Pointer *ipvs.Config
}

type Backend struct {
	Name         string
	Service      ipvs.Service
	Pointer      *ipvs.Service
	None         *ipvs.Service
	List         []ipvs.Service
	NoList       []*ipvs.Service
	Named        map[string]ipvs.Service
	Destinations struct {
		First ipvs.Destination
		None  *ipvs.Destination
		List  []ipvs.Destination
		Named map[string]ipvs.Destination
	}
}

// Pointers has what prints as an address.
type Pointers struct {
	Service      *ipvs.Service
	Destinations []*ipvs.Destination
	Named        map[string]*ipvs.Service
	Any          any
}

// Anything holds values of any type.
type Anything struct {
	Any  any
	List []any
	Same SameService
}

// SameService has the fields of a Service, and no method of it.
type SameService ipvs.Service

// Values has each value that a test prints and encodes, by name.
func Values(s *ipvs.Service, d *ipvs.Destination, c *ipvs.Config) map[string]any {
	backend := Backend{Name: "backend", Service: *s, Pointer: s, List: []ipvs.Service{*s, *s}, Named: map[string]ipvs.Service{"b": *s, "a": {}}}
	backend.Destinations.First = *d
	backend.Destinations.List = []ipvs.Destination{*d, {}, *d}
	backend.Destinations.Named = map[string]ipvs.Destination{"x": *d}
	pointers := Pointers{s, []*ipvs.Destination{d, nil, d}, map[string]*ipvs.Service{"s": s, "none": nil}, d}
	var noService *ipvs.Service
	var noDestination *ipvs.Destination
	return map[string]any{
		"service":                         *s,
		"pointer to a service":            s,
		"no service":                      noService,
		"zero service":                    ipvs.Service{},
		"destination":                     *d,
		"pointer to a destination":        d,
		"no destination":                  noDestination,
		"zero destination":                ipvs.Destination{},
		"service counters":                s.Stats,
		"destination counters":            &d.Stats,
		"config":                          *c,
		"pointer to a config":             c,
		"services":                        []ipvs.Service{*s, {}, *s},
		"pointers to services":            []*ipvs.Service{s, nil},
		"array":                           [1]ipvs.Destination{*d},
		"map":                             map[string]ipvs.Destination{"d": *d, "zero": {}},
		"map of pointers":                 map[uint16]*ipvs.Service{80: s, 81: nil},
		"embedded service":                EmbeddedService{*s, "note"},
		"pointer to an embedded service":  &EmbeddedService{*s, "note"},
		"embedded pointer to a service":   EmbeddedServicePointer{s, "note"},
		"embedded no service":             EmbeddedServicePointer{nil, "note"},
		"pointer to embedded no service":  &EmbeddedServicePointer{nil, "note"},
		"embedded destination":            EmbeddedDestination{*d, "note"},
		"embedded pointer to destination": &EmbeddedDestinationPointer{d, "note"},
		"embedded no destination":         EmbeddedDestinationPointer{nil, "note"},
		"list of embedded":                []EmbeddedServicePointer{{s, "a"}, {nil, "b"}},
		"counted":                         Counted{s.Stats, map[string]ipvs.DstStats{"a": d.Stats}},
		"timed":                           Timed{*c, nil},
		"backend":                         backend,
		"pointer to a backend":            &backend,
		"pointers":                        pointers,
		"anything":                        Anything{*s, []any{*d, s, nil, "text"}, SameService(*s)},
		"same":                            SameService(*s),
	}
}
