package ipvs

// This file has the list of IPv4 services as getsockopt returns it. It says how many
// destinations a service has, and which services the list over netlink misses.

import (
	"encoding/binary"
	"net"

	"golang.org/x/sys/unix"
)

// optLookAhead is how many entries are compared with a service before all of them are
// indexed. It allows for services between them that are not wanted.
const optLookAhead = 16

// optServices is the list of services.
type optServices struct {
	entries []byte
	next    int // where the next one is expected: netlink's list has the same order
	index   index[serviceKey]
	at      []int // where each key of the index is; nil until the order differs
}

// optService is a struct ip_vs_service_entry.
type optService []byte

func (x *optServices) entry(n int) optService {
	return x.entries[n*optServiceSize : (n+1)*optServiceSize : (n+1)*optServiceSize]
}

func (x *optServices) length() int { return len(x.entries) / optServiceSize }

// missedIn returns the IPv4 services, without their settings, that the list over
// netlink misses.
//
// The kernel sends that list in parts, and skips services if others are added or
// deleted between the parts; before Linux 7, also in other network namespaces. Through
// getsockopt all services are listed at once, and none is skipped.
func (t *optTable) missedIn(listed []*Service) (missed []*Service) {
	if t == nil || t.services.equal(listed) {
		return nil
	}
	var known index[serviceKey]
	known.reset(len(listed) + t.services.length())
	for _, s := range listed {
		known.add(keyOfService(s))
	}
	for n := range t.services.length() {
		if e := t.services.entry(n); !e.isEmpty() && known.add(e.key()) {
			missed = append(missed, e.service())
		}
	}
	return missed
}

// equal reports whether these are the IPv4 services that were listed over netlink, in
// the same order.
func (x *optServices) equal(listed []*Service) bool {
	n := 0
	for _, s := range listed {
		if s.AddressFamily != unix.AF_INET {
			continue
		}
		if n == x.length() || !x.entry(n).is(s) {
			return false
		}
		n++
	}
	return n == x.length() || x.entry(n).isEmpty()
}

// find returns the entry of s, or nil if there is none.
func (x *optServices) find(s *Service) optService {
	look := optLookAhead
	if x.at != nil {
		look = 1
	}
	for n := x.next; n < min(x.next+look, x.length()); n++ {
		if e := x.entry(n); e.is(s) {
			x.next = n + 1
			return e
		}
	}
	if x.at == nil {
		x.makeIndex()
	}
	n, found := x.index.find(keyOfService(s))
	if !found {
		return nil
	}
	x.next = x.at[n] + 1
	return x.entry(x.at[n])
}

func (x *optServices) makeIndex() {
	x.index.reset(x.length())
	x.at = make([]int, 0, x.length())
	for n := range x.length() {
		if e := x.entry(n); !e.isEmpty() && x.index.add(e.key()) {
			x.at = append(x.at, n)
		}
	}
}

func (e optService) protocol() uint16     { return native.Uint16(e) }
func (e optService) address() []byte      { return e[4:8] }
func (e optService) port() uint16         { return binary.BigEndian.Uint16(e[8:]) }
func (e optService) fwmark() uint32       { return native.Uint32(e[12:]) }
func (e optService) destinations() uint32 { return native.Uint32(e[44:]) }

// isEmpty reports whether the kernel did not fill the entry.
func (e optService) isEmpty() bool { return e.protocol() == 0 && e.fwmark() == 0 }

// is reports whether e is the entry of s, an IPv4 service.
func (e optService) is(s *Service) bool {
	if s.FWMark != 0 || e.fwmark() != 0 {
		return e.fwmark() == s.FWMark
	}
	return e.protocol() == s.Protocol && e.port() == s.Port &&
		len(s.Address) == net.IPv4len && native.Uint32(e.address()) == native.Uint32(s.Address)
}

// service returns a service that is only identified.
func (e optService) service() *Service {
	s := &Service{FWMark: e.fwmark(), AddressFamily: unix.AF_INET}
	if s.FWMark == 0 {
		s.Protocol, s.Address, s.Port = e.protocol(), e.address(), e.port()
	}
	return s
}

func (e optService) key() serviceKey {
	k := serviceKey{fwmark: e.fwmark(), family: unix.AF_INET}
	if k.fwmark == 0 {
		k.protocol, k.port = e.protocol(), uint32(e.port())
		putAddress(&k.address, e.address())
	}
	return k
}
