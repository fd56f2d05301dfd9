//go:build linux

package compat

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	original "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	checkout "ipvs.test/checkout"
)

// library is the interface through which the tests call both, in the original's types.
type library interface {
	Close()
	NewService(*original.Service) error
	IsServicePresent(*original.Service) bool
	UpdateService(*original.Service) error
	DelService(*original.Service) error
	Flush() error
	NewDestination(*original.Service, *original.Destination) error
	UpdateDestination(*original.Service, *original.Destination) error
	DelDestination(*original.Service, *original.Destination) error
	GetServices() ([]*original.Service, error)
	GetDestinations(*original.Service) ([]*original.Destination, error)
	GetService(*original.Service) (*original.Service, error)
	GetConfig() (*original.Config, error)
	SetConfig(*original.Config) error

	// Open opens another handle, closes it, and reports whether there was one.
	Open(path string) (bool, error)

	// RewriteService reads a service, changes its timeout, and writes it back.
	// RewriteDestination does so with the upper threshold of a destination. Both
	// in the library's own types.
	RewriteService(*original.Service) error
	RewriteDestination(*original.Service, *original.Destination) error
}

// direct is a handle of the original.
type direct struct{ *original.Handle }

func (h direct) Open(path string) (bool, error) {
	opened, err := original.New(path)
	if opened != nil {
		opened.Close()
	}
	return opened != nil, err
}

func (h direct) RewriteService(s *original.Service) error {
	got, err := h.GetService(identityOf(s))
	if err != nil {
		return err
	}
	got.Timeout = s.Timeout
	return h.UpdateService(got)
}

func (h direct) RewriteDestination(s *original.Service, d *original.Destination) error {
	all, err := h.GetDestinations(identityOf(s))
	if err != nil {
		return err
	}
	for _, got := range all {
		if got.Address.Equal(d.Address) && got.Port == d.Port {
			got.UpperThreshold = d.UpperThreshold
			return h.UpdateDestination(s, got)
		}
	}
	return errNotListed
}

// errNotListed is the error of RewriteDestination if there is no such destination.
var errNotListed = errors.New("not listed")

// converted wraps a handle of the checkout in the original's types.
type converted struct{ h *checkout.Handle }

// convert copies the fields that the original's type has. They are the first of
// the checkout's, see TestExportedAPI.
func convert[To, From any](from *From) *To {
	if from == nil {
		return nil
	}
	to := new(To)
	f, t := reflect.ValueOf(from).Elem(), reflect.ValueOf(to).Elem()
	for i := range min(f.NumField(), t.NumField()) {
		field := t.Field(i)
		field.Set(f.Field(i).Convert(field.Type()))
	}
	return to
}

// convertAll leaves a nil slice nil, and an empty one empty.
func convertAll[To, From any](from []*From) []*To {
	if from == nil {
		return nil
	}
	to := make([]*To, len(from))
	for i, f := range from {
		to[i] = convert[To](f)
	}
	return to
}

func service(s *original.Service) *checkout.Service { return convert[checkout.Service](s) }

func destination(d *original.Destination) *checkout.Destination {
	return convert[checkout.Destination](d)
}

func (c converted) Close()                               { c.h.Close() }
func (c converted) Flush() error                         { return c.h.Flush() }
func (c converted) NewService(s *original.Service) error { return c.h.NewService(service(s)) }
func (c converted) IsServicePresent(s *original.Service) bool {
	return c.h.IsServicePresent(service(s))
}
func (c converted) UpdateService(s *original.Service) error { return c.h.UpdateService(service(s)) }
func (c converted) DelService(s *original.Service) error    { return c.h.DelService(service(s)) }

func (c converted) NewDestination(s *original.Service, d *original.Destination) error {
	return c.h.NewDestination(service(s), destination(d))
}

func (c converted) UpdateDestination(s *original.Service, d *original.Destination) error {
	return c.h.UpdateDestination(service(s), destination(d))
}

func (c converted) DelDestination(s *original.Service, d *original.Destination) error {
	return c.h.DelDestination(service(s), destination(d))
}

func (c converted) GetServices() ([]*original.Service, error) {
	all, err := c.h.GetServices()
	return convertAll[original.Service](all), err
}

func (c converted) GetDestinations(s *original.Service) ([]*original.Destination, error) {
	all, err := c.h.GetDestinations(service(s))
	return convertAll[original.Destination](all), err
}

func (c converted) GetService(s *original.Service) (*original.Service, error) {
	got, err := c.h.GetService(service(s))
	return convert[original.Service](got), err
}

func (c converted) GetConfig() (*original.Config, error) {
	got, err := c.h.GetConfig()
	return convert[original.Config](got), err
}

func (c converted) SetConfig(config *original.Config) error {
	return c.h.SetConfig(convert[checkout.Config](config))
}

func (c converted) Open(path string) (bool, error) {
	opened, err := checkout.New(path)
	if opened != nil {
		opened.Close()
	}
	return opened != nil, err
}

// SetTunnel has what the original's types cannot carry set: the tunnel of a
// destination.
func (c converted) SetTunnel(s *original.Service, d *original.Destination, port uint16) error {
	tunnel := destination(d)
	tunnel.ConnectionFlags, tunnel.TunnelType, tunnel.TunnelPort = checkout.ConnectionFlagTunnel, checkout.TunnelGUE, port
	return c.h.UpdateDestination(service(s), tunnel)
}

func (c converted) RewriteService(s *original.Service) error {
	got, err := c.h.GetService(service(identityOf(s)))
	if err != nil {
		return err
	}
	got.Timeout = s.Timeout
	return c.h.UpdateService(got)
}

func (c converted) RewriteDestination(s *original.Service, d *original.Destination) error {
	all, err := c.h.GetDestinations(service(identityOf(s)))
	if err != nil {
		return err
	}
	for _, got := range all {
		if got.Address.Equal(d.Address) && got.Port == d.Port {
			got.UpperThreshold = d.UpperThreshold
			return c.h.UpdateDestination(service(s), got)
		}
	}
	return errNotListed
}

// needKernel skips a test where there is no IPVS to test with. In the
// project's virtual machine that is a failure.
func needKernel(t *testing.T) {
	t.Helper()
	skip := t.Skip
	if os.Getenv("IPVS_TEST_VM") != "" {
		skip = t.Fatal
	}
	if os.Geteuid() != 0 {
		skip("SKIP: needs root")
	}
	h, err := checkout.New("")
	if err != nil {
		skip("SKIP: needs a kernel with IPVS: ", err)
	}
	h.Close()
}

// namespace is a network namespace of a test's own. Its loopback device is
// up: before a first device is, the kernel has no routing tables there, and
// IPVS takes no IPv4 destination.
type namespace netns.NsHandle

func newNamespace(t *testing.T) namespace {
	t.Helper()
	runtime.LockOSThread() // not unlocked if the test ends in between
	here, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	ns, err := netns.New()
	if err != nil {
		t.Fatal("a new network namespace: ", err)
	}
	t.Cleanup(func() { ns.Close() })
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		t.Fatal("the loopback device: ", err)
	}
	if err := netns.Set(here); err != nil {
		t.Fatal("back from the new network namespace: ", err)
	}
	runtime.UnlockOSThread()
	return namespace(ns)
}

// path names the namespace for New, as long as the test runs.
func (ns namespace) path() string { return fmt.Sprintf("/proc/self/fd/%d", int(ns)) }

// do runs f on a thread that is in the namespace.
func (ns namespace) do(t *testing.T, f func()) {
	t.Helper()
	runtime.LockOSThread()
	here, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	if err := netns.Set(netns.NsHandle(ns)); err != nil {
		t.Fatal(err)
	}
	f()
	if err := netns.Set(here); err != nil {
		t.Fatal(err)
	}
	runtime.UnlockOSThread()
}

func (ns namespace) original(t *testing.T) *original.Handle {
	t.Helper()
	h, err := original.New(ns.path())
	if err != nil {
		t.Fatal("original: ", err)
	}
	t.Cleanup(h.Close)
	return h
}

func (ns namespace) checkout(t *testing.T) *checkout.Handle {
	t.Helper()
	h, err := checkout.New(ns.path())
	if err != nil {
		t.Fatal("checkout: ", err)
	}
	t.Cleanup(h.Close)
	return h
}

// pair is a handle of each for the same namespace.
type pair struct{ original, checkout library }

func (ns namespace) pair(t *testing.T) pair {
	t.Helper()
	return pair{direct{ns.original(t)}, converted{ns.checkout(t)}}
}

func newPair(t *testing.T) pair {
	t.Helper()
	return newNamespace(t).pair(t)
}

// line writes every field of a service or destination that is not zero, but the
// counters. It tells a nil address from an empty one, and 4 bytes from 16.
func line(v any) string {
	value := reflect.ValueOf(v).Elem()
	var text []string
	for i := range value.NumField() {
		name, field := value.Type().Field(i).Name, value.Field(i)
		switch {
		case name == "Stats" || name == "Stats64" || field.IsZero():
		case name == "Address":
			text = append(text, fmt.Sprintf("%v (%d bytes)", field.Interface(), field.Len()))
		case field.Kind() == reflect.String:
			text = append(text, fmt.Sprintf("%s:%.40q", name, field.String()))
		case name == "Flags" || name == "Netmask" || name == "ConnectionFlags":
			text = append(text, fmt.Sprintf("%s:%#x", name, field.Interface()))
		default:
			text = append(text, fmt.Sprintf("%s:%v", name, field.Interface()))
		}
	}
	return value.Type().Name() + "{" + strings.Join(text, " ") + "}"
}

// read lists the table, a line for each service and destination, sorted.
func read(l library) ([]string, error) {
	services, err := l.GetServices()
	if err != nil {
		return nil, fmt.Errorf("services: %w", err)
	}
	var lines []string
	for _, s := range services {
		lines = append(lines, line(s))
		destinations, err := l.GetDestinations(s)
		if err != nil {
			return nil, fmt.Errorf("destinations of %s: %w", line(s), err)
		}
		for _, d := range destinations {
			lines = append(lines, line(s)+" -> "+line(d))
		}
	}
	slices.Sort(lines)
	return lines, nil
}

// read lists the table through both, and fails where they read it
// differently.
func (p pair) read(t *testing.T) []string {
	t.Helper()
	o, err := read(p.original)
	if err != nil {
		t.Fatal("original: ", err)
	}
	c, err := read(p.checkout)
	if err != nil {
		t.Fatal("checkout: ", err)
	}
	compare(t, "read by the original", o, "read by the checkout", c)
	return o
}

// compare reports the lines that only one of two sorted readings has.
func compare(t *testing.T, aName string, a []string, bName string, b []string) {
	t.Helper()
	const most = 10
	only := func(name string, x, y []string) {
		count := map[string]int{}
		for _, l := range y {
			count[l]++
		}
		shown := 0
		for _, l := range x {
			if count[l]--; count[l] >= 0 {
				continue
			}
			if shown++; shown <= most {
				t.Errorf("only %s: %s", name, l)
			}
		}
		if shown > most {
			t.Errorf("only %s: and %d more", name, shown-most)
		}
	}
	only(aName, a, b)
	only(bName, b, a)
}

func describe(err error) string {
	var errno syscall.Errno
	switch {
	case err == nil:
		return "no error"
	case errors.As(err, &errno):
		return fmt.Sprintf("%T %d (%v)", err, int(errno), err)
	}
	return fmt.Sprintf("%T (%v)", err, err)
}
