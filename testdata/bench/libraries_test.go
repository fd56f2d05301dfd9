//go:build linux

package bench

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/cloudflare/ipvs"
	"github.com/cloudflare/ipvs/netmask"
	moby "github.com/moby/ipvs"
	"golang.org/x/sys/unix"
	this "ipvs.test/checkout"
)

// client is a library at work on one namespace. What callers have at hand,
// the services and destinations in the library's own types, is made by prepare.
type client interface {
	prepare(table []service, changes []change)
	apply(n int) error               // change n of the prepared ones, by itself
	services() (n int, err error)    // lists them, and counts
	destinations(n int) (int, error) // of service n of the prepared table
	table() (services, destinations int, err error)
	close()
}

// batcher is a client that can make many changes at once.
type batcher interface {
	client
	collect()        // puts the prepared changes into a new batch
	applyAll() error // makes the collected changes
}

// reconciler is a client that can bring a table, now in the state from, to
// the state to.
type reconciler interface {
	client
	prepareReconcile(from, to []service)
	reconcile() (changes int, err error)
}

// open returns a client for the namespace.
func open(b *testing.B, library string, ns namespace) (c client) {
	b.Helper()
	var err error
	switch library {
	case "this":
		c, err = openThis(ns)
	case "netlink":
		c, err = openNetlink(ns)
	case "moby":
		c, err = openMoby(ns)
	case "cloudflare":
		c, err = openCloudflare(ns)
	case "limit":
		c, err = openLimit(ns)
	default:
		err = fmt.Errorf("no such library")
	}
	if err != nil {
		b.Fatalf("%s: %v", library, err)
	}
	b.Cleanup(c.close)
	return c
}

// handle is the client that this library and the original have in common:
// only the types' names differ.
type handle[S, D any, H interface {
	NewService(*S) error
	UpdateService(*S) error
	DelService(*S) error
	NewDestination(*S, *D) error
	UpdateDestination(*S, *D) error
	DelDestination(*S, *D) error
	GetServices() ([]*S, error)
	GetDestinations(*S) ([]*D, error)
	Close()
}] struct {
	h           H
	service     func(*service) *S
	destination func(*destination) *D

	ids     []*S
	changes []prepared[S, D]
}

// prepared is a change; those of one service share it.
type prepared[S, D any] struct {
	op op
	s  *S
	d  *D
}

// prepareChanges makes the changes in a library's types.
func prepareChanges[S, D any](changes []change, service func(*service) *S, destination func(*destination) *D) []prepared[S, D] {
	all := make([]prepared[S, D], len(changes))
	for n, change := range changes {
		p := &all[n]
		p.op = change.op
		if n > 0 && change.service == changes[n-1].service {
			p.s = all[n-1].s
		} else {
			p.s = service(change.service)
		}
		if change.destination != nil {
			p.d = destination(change.destination)
		}
	}
	return all
}

func (c *handle[S, D, H]) prepare(table []service, changes []change) {
	c.ids = nil
	for n := range table {
		c.ids = append(c.ids, c.service(&table[n]))
	}
	c.changes = prepareChanges(changes, c.service, c.destination)
}

func (c *handle[S, D, H]) apply(n int) error {
	p := &c.changes[n]
	switch p.op {
	case newService:
		return c.h.NewService(p.s)
	case setService:
		return c.h.UpdateService(p.s)
	case delService:
		return c.h.DelService(p.s)
	case newDestination:
		return c.h.NewDestination(p.s, p.d)
	case setDestination:
		return c.h.UpdateDestination(p.s, p.d)
	default:
		return c.h.DelDestination(p.s, p.d)
	}
}

func (c *handle[S, D, H]) services() (int, error) {
	all, err := c.h.GetServices()
	return len(all), err
}

func (c *handle[S, D, H]) destinations(n int) (int, error) {
	all, err := c.h.GetDestinations(c.ids[n])
	return len(all), err
}

func (c *handle[S, D, H]) table() (services, destinations int, err error) {
	all, err := c.h.GetServices()
	for _, s := range all {
		some, err := c.h.GetDestinations(s)
		if err != nil {
			return 0, 0, err
		}
		destinations += len(some)
	}
	return len(all), destinations, err
}

func (c *handle[S, D, H]) close() { c.h.Close() }

type mobyClient struct {
	handle[moby.Service, moby.Destination, *moby.Handle]
}

func openMoby(ns namespace) (client, error) {
	h, err := moby.New(ns.path())
	if err != nil {
		return nil, err
	}
	c := new(mobyClient)
	c.h = h
	c.types()
	return c, nil
}

// types sets how services and destinations are made.
func (c *mobyClient) types() {
	c.service = func(s *service) *moby.Service {
		return &moby.Service{Address: s.address[:], Protocol: unix.IPPROTO_TCP, Port: servicePort, SchedName: scheduler,
			Timeout: s.timeout, Netmask: 0xFFFFFFFF, AddressFamily: unix.AF_INET}
	}
	c.destination = func(d *destination) *moby.Destination {
		return &moby.Destination{Address: d.address[:], Port: destinationPort, Weight: int(d.weight), AddressFamily: unix.AF_INET}
	}
}

type thisClient struct {
	handle[this.Service, this.Destination, *this.Handle]
	batch      this.Batch
	reconciler this.Reconciler
	want       []this.TableEntry
}

func openThis(ns namespace) (client, error) {
	h, err := this.New(ns.path())
	if err != nil {
		return nil, err
	}
	c := new(thisClient)
	c.h, c.reconciler.Handle = h, h
	c.types()
	return c, nil
}

// types sets how services and destinations are made.
func (c *thisClient) types() {
	c.service = func(s *service) *this.Service {
		return &this.Service{Address: s.address[:], Protocol: unix.IPPROTO_TCP, Port: servicePort, SchedName: scheduler,
			Timeout: s.timeout, Netmask: 0xFFFFFFFF, AddressFamily: unix.AF_INET}
	}
	c.destination = func(d *destination) *this.Destination {
		return &this.Destination{Address: d.address[:], Port: destinationPort, Weight: int(d.weight), AddressFamily: unix.AF_INET}
	}
}

func (c *thisClient) collect() {
	c.batch = this.Batch{}
	b := &c.batch
	for n := range c.changes {
		p := &c.changes[n]
		switch p.op {
		case newService:
			b.NewService(p.s)
		case setService:
			b.UpdateService(p.s)
		case delService:
			b.DelService(p.s)
		case newDestination:
			b.NewDestination(p.s, p.d)
		case setDestination:
			b.UpdateDestination(p.s, p.d)
		default:
			b.DelDestination(p.s, p.d)
		}
	}
}

func (c *thisClient) applyAll() error { return c.h.Do(&c.batch) }

func (c *thisClient) table() (services, destinations int, err error) {
	all, err := c.h.GetTable()
	for _, entry := range all {
		destinations += len(entry.Destinations)
	}
	return len(all), destinations, err
}

func (c *thisClient) prepareReconcile(_, to []service) {
	c.want = nil
	for n := range to {
		entry := this.TableEntry{Service: c.service(&to[n])}
		for m := range to[n].destinations {
			entry.Destinations = append(entry.Destinations, c.destination(&to[n].destinations[m]))
		}
		c.want = append(c.want, entry)
	}
}

func (c *thisClient) reconcile() (int, error) {
	changes, err := c.reconciler.Reconcile(c.want)
	return changes.Total(), err
}

type cloudflareClient struct {
	c       ipvs.Client
	ids     []ipvs.Service
	changes []prepared[ipvs.Service, ipvs.Destination]
}

func openCloudflare(ns namespace) (client, error) {
	c := new(cloudflareClient)
	err := ns.do(func() (err error) {
		c.c, err = ipvs.New()
		return err
	})
	return c, err
}

func cloudflareService(s *service) *ipvs.Service {
	return &ipvs.Service{Address: netip.AddrFrom4(s.address), Netmask: netmask.MaskFrom(32, 32), Scheduler: scheduler,
		Timeout: s.timeout, Port: servicePort, Family: ipvs.INET, Protocol: ipvs.TCP}
}

func cloudflareDestination(d *destination) *ipvs.Destination {
	return &ipvs.Destination{Address: netip.AddrFrom4(d.address), Weight: d.weight, Port: destinationPort, Family: ipvs.INET}
}

func (c *cloudflareClient) prepare(table []service, changes []change) {
	c.ids = nil
	for n := range table {
		c.ids = append(c.ids, *cloudflareService(&table[n]))
	}
	c.changes = prepareChanges(changes, cloudflareService, cloudflareDestination)
}

func (c *cloudflareClient) apply(n int) error {
	p := &c.changes[n]
	switch p.op {
	case newService:
		return c.c.CreateService(*p.s)
	case setService:
		return c.c.UpdateService(*p.s)
	case delService:
		return c.c.RemoveService(*p.s)
	case newDestination:
		return c.c.CreateDestination(*p.s, *p.d)
	case setDestination:
		return c.c.UpdateDestination(*p.s, *p.d)
	default:
		return c.c.RemoveDestination(*p.s, *p.d)
	}
}

func (c *cloudflareClient) services() (int, error) {
	all, err := c.c.Services()
	return len(all), err
}

func (c *cloudflareClient) destinations(n int) (int, error) {
	all, err := c.c.Destinations(c.ids[n])
	return len(all), err
}

func (c *cloudflareClient) table() (services, destinations int, err error) {
	all, err := c.c.Services()
	for _, s := range all {
		some, err := c.c.Destinations(s.Service)
		if err != nil {
			return 0, 0, err
		}
		destinations += len(some)
	}
	return len(all), destinations, err
}

func (c *cloudflareClient) close() {} // it has nothing for that

var native = binary.NativeEndian
