//go:build linux

package compat

import (
	"errors"
	"math"
	"net"
	"os"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	original "github.com/moby/ipvs"
	checkout "ipvs.test/checkout"
)

// difference is an intended difference between the checkout and the original.
type difference struct {
	row // of docs/switching.md, with the reason

	// applies reports whether it explains the outcomes with the original and with the
	// checkout.
	applies func(op operation, o, c outcome) bool

	// state reports whether it explains the tables after the operation with the
	// original and with the checkout.
	state func(op operation, a, b snapshot) bool

	// correct, if not nil, changes the operation into the one that the original
	// needs to do what the checkout does: then the outcomes must be the same.
	correct func(op *operation)

	seen int
}

// row has an input, and its result with each of the two.
type row struct{ given, original, checkout string }

func (r row) String() string { return "| " + r.given + " | " + r.original + " | " + r.checkout + " |" }

func knownDifferences() []*difference {
	return []*difference{{
		row: row{"a nil service, destination or configuration", "panics, or sends half a request", "an error"},
		applies: func(op operation, o, c outcome) bool {
			none := takesService(op.method) && op.service == nil || sendsDestination(op.method) && op.destination == nil ||
				op.method == "SetConfig" && op.config == nil
			return none && c.ownError("is nil", 0)
		},
	}, {
		row: row{"a call after `Close`", "`use of closed file`", "an error that matches `ErrClosed` and `net.ErrClosed`"},
		applies: func(op operation, o, c outcome) bool {
			return op.closed && (o.err != nil || o.panicked != nil) && errors.Is(c.err, checkout.ErrClosed) && errors.Is(c.err, net.ErrClosed)
		},
	}, {
		row: row{"an address that is missing, or has neither 4 nor 16 bytes", "is sent", "an error"},
		applies: func(op operation, o, c outcome) bool {
			return slices.ContainsFunc(op.addresses(), address.wrongLength) &&
				(c.ownError("has no address", 0) || c.ownError("bytes, want 4 or 16", 0))
		},
	}, {
		row: row{"an address that is not of its `AddressFamily`", "is sent", "an error"},
		applies: func(op operation, o, c outcome) bool {
			return slices.ContainsFunc(op.addresses(), address.contradicts) && c.ownError("is not of its address family", 0)
		},
	}, {
		row: row{"an `AddressFamily` other than AF_INET and AF_INET6", "is sent, except for a destination", "an error that matches EAFNOSUPPORT"},
		applies: func(op operation, o, c outcome) bool {
			return slices.ContainsFunc(op.families(), func(family uint16) bool {
				return family != 0 && family != syscall.AF_INET && family != syscall.AF_INET6
			}) && c.ownError("is neither AF_INET", syscall.EAFNOSUPPORT)
		},
	}, {
		row: row{"`AddressFamily` 0 of a service with an address", "EAFNOSUPPORT, or no destinations", "is taken from the address"},
		applies: func(op operation, o, c outcome) bool {
			s := op.service
			return takesService(op.method) && s != nil && s.FWMark == 0 && s.AddressFamily == 0 && o.refusesFamily()
		},
		correct: func(op *operation) { op.service.AddressFamily = address{ip: op.service.Address}.own() },
	}, {
		row: row{"`AddressFamily` 0 of a firewall mark", "EAFNOSUPPORT, or no destinations", "an error that says so"},
		applies: func(op operation, o, c outcome) bool {
			s := op.service
			return takesService(op.method) && s != nil && s.FWMark != 0 && s.AddressFamily == 0 && (op.closed || o.refusesFamily()) &&
				c.ownError("has no address family", 0)
		},
	}, {
		row: row{"a `SchedName` or `PEName` of more than 15 bytes, or with a NUL byte", "is sent", "an error"},
		applies: func(op operation, o, c outcome) bool {
			return isSet(op.method) && op.hasBadName() && (c.ownError("at most 15 are possible", 0) || c.ownError("contains a NUL byte", 0))
		},
	}, {
		row:     row{"such a name where the identity of the service is enough", "EINVAL", "is not sent"},
		applies: func(op operation, o, c outcome) bool { return !isSet(op.method) && op.hasBadName() },
		correct: func(op *operation) { op.service = identityOf(op.service) },
	}, {
		row: row{"`Netmask` 0 of an IPv6 service", "EINVAL", "128"},
		applies: func(op operation, o, c outcome) bool {
			return isSet(op.method) && op.service != nil && op.service.AddressFamily == syscall.AF_INET6 && op.service.Netmask == 0 && o.err == syscall.EINVAL
		},
		correct: func(op *operation) { op.service.Netmask = 128 },
	}, {
		row: row{"`Netmask` above 128 of an IPv6 service", "a bare EINVAL", "an error with the value, that matches EINVAL"},
		applies: func(op operation, o, c outcome) bool {
			return isSet(op.method) && op.service != nil && op.service.AddressFamily != syscall.AF_INET && op.service.Netmask > 128 &&
				o.err != nil && c.ownError("netmask", syscall.EINVAL)
		},
	}, {
		row: row{"a weight that is not in 0..2^31-1", "ERANGE, or its lower 32 bits", "an error with the value, that matches ERANGE"},
		applies: func(op operation, o, c outcome) bool {
			d := op.destination
			return setsDestination(op.method) && d != nil && (d.Weight < 0 || d.Weight > math.MaxInt32) && c.ownError("weight", syscall.ERANGE)
		},
	}, {
		row: row{"a timeout under a second, a negative one, or one above 2^31-1 s", "0, or another value", "an error"},
		applies: func(op operation, o, c outcome) bool {
			return op.method == "SetConfig" && op.config != nil && c.ownError("Timeout", 0) &&
				(badTimeout(op.config.TimeoutTCP) || badTimeout(op.config.TimeoutTCPFin) || badTimeout(op.config.TimeoutUDP))
		},
	}, {
		row: row{"a destination of the other address family", "is sent without its family: added with another address, or refused; one that is there cannot be changed", "is added through a tunnel, else EINVAL"},
		applies: func(op operation, o, c outcome) bool {
			return op.otherFamily() && (kernelSaid(c.err) && o.err != c.err || setsDestination(op.method) && c.err == syscall.EINVAL)
		},
		state: func(op operation, a, b snapshot) bool {
			return op.otherFamily() && (b.has(op.destination) || !setsDestination(op.method))
		},
	}, {
		row: row{"a weight of more than 16 bits", "is read without its upper half", "is read"},
		applies: func(op operation, o, c outcome) bool {
			return sameBut(o, c, nil, func(d *original.Destination) { d.Weight &= math.MaxUint16 })
		},
	}, {
		row: row{"the same, read and written back", "loses its upper half", "stays"},
		state: func(op operation, a, b snapshot) bool {
			heavy := false
			return op.method == "RewriteDestination" && b.without(func(d *checkout.Destination) {
				if op.isOf(d) {
					heavy = d.Weight > math.MaxUint16
					d.Weight &= math.MaxUint16
					d.TunnelType, d.TunnelPort, d.TunnelFlags = 0, 0, 0
				}
			}).equal(a) && heavy
		},
	}, {
		row: row{"a tunnel, read and written back", "is lost", "stays"},
		state: func(op operation, a, b snapshot) bool {
			return op.method == "RewriteDestination" && b.without(func(d *checkout.Destination) {
				if op.isOf(d) {
					d.TunnelType, d.TunnelPort, d.TunnelFlags = 0, 0, 0
				}
			}).equal(a)
		},
	}, {
		row: row{"the persistence engine", "is not read", "is read"},
		applies: func(op operation, o, c outcome) bool {
			return sameBut(o, c, func(s *original.Service) { s.PEName = "" }, nil)
		},
	}, {
		row: row{"the same, read and written back", "is lost", "stays"},
		state: func(op operation, a, b snapshot) bool {
			if op.method != "RewriteService" || b.service == nil {
				return false
			}
			b.service = with(b.service, func(s *checkout.Service) { s.PEName = "" })
			return b.equal(a)
		},
	}, {
		row: row{"`New` for a path that is no network namespace", "an error", "an error with the path; it matches the same error number, and `os.IsNotExist` holds for both or for neither"},
		applies: func(op operation, o, c outcome) bool {
			var errno syscall.Errno
			return op.method == "New" && o.value == false && c.value == false && o.err != nil && c.err != nil &&
				strings.HasPrefix(c.err.Error(), "ipvs: ") && strings.Contains(c.err.Error(), op.path) &&
				errors.As(c.err, &errno) && strings.HasSuffix(o.err.Error(), errno.Error()) && os.IsNotExist(c.err) == os.IsNotExist(o.err)
		},
	}}
}

// TestDifferencesAreDocumented checks that docs/switching.md has each difference,
// and no other.
func TestDifferencesAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/switching.md")
	if os.IsNotExist(err) {
		t.Skip("SKIP: the documentation is not here: ", err)
	} else if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "| given | moby/ipvs v1.1.0 | this library |\n|---|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	var want []string
	for _, d := range knownDifferences() {
		want = append(want, d.row.String())
	}
	if table != strings.Join(want, "\n") {
		t.Errorf("the table in docs/switching.md is not\n%s", strings.Join(want, "\n"))
	}
}

// ownError reports whether the checkout found the error before it sent anything:
// then it is one of its own, that contains the text, and matches an error number
// if that is not 0. IsServicePresent has no error to return.
func (o outcome) ownError(text string, errno syscall.Errno) bool {
	if o.panicked != nil || o.err == nil {
		return o.panicked == nil && o.value == false
	}
	var found syscall.Errno
	return !kernelSaid(o.err) && strings.HasPrefix(o.err.Error(), "ipvs: ") && strings.Contains(o.err.Error(), text) &&
		(errno == 0 && !errors.As(o.err, &found) || errno != 0 && errors.Is(o.err, errno))
}

// kernelSaid reports whether an error comes from the kernel, or is nil.
func kernelSaid(err error) bool {
	_, bare := err.(syscall.Errno)
	return bare || err == nil
}

// refusesFamily reports whether the kernel rejected the address family that the
// original sent. It lists no destinations then, without an error.
func (o outcome) refusesFamily() bool {
	destinations, listed := o.value.([]*original.Destination)
	return o.panicked == nil && (o.err == syscall.EAFNOSUPPORT || o.err == errNotListed ||
		o.err == nil && (o.value == false || listed && len(destinations) == 0))
}

// isSet reports whether the method sends the settings of a service.
func isSet(method string) bool { return method == "NewService" || method == "UpdateService" }

// setsDestination does so for a destination.
func setsDestination(method string) bool {
	return method == "NewDestination" || method == "UpdateDestination"
}

func sendsDestination(method string) bool {
	return setsDestination(method) || method == "DelDestination"
}

// address is an address that is sent.
type address struct {
	ip     net.IP
	family uint16 // that the caller names
	new    bool   // by a call that makes something with it
}

func (op operation) addresses() (all []address) {
	if s := op.service; takesService(op.method) && s != nil && s.FWMark == 0 {
		all = append(all, address{s.Address, s.AddressFamily, op.method == "NewService"})
	}
	if d := op.destination; sendsDestination(op.method) && d != nil {
		all = append(all, address{d.Address, d.AddressFamily, op.method == "NewDestination"})
	}
	return all
}

// families lists the address families that the caller names.
func (op operation) families() (all []uint16) {
	if takesService(op.method) && op.service != nil {
		all = append(all, op.service.AddressFamily)
	}
	if sendsDestination(op.method) && op.destination != nil {
		all = append(all, op.destination.AddressFamily)
	}
	return all
}

func (a address) wrongLength() bool { return len(a.ip) != net.IPv4len && len(a.ip) != net.IPv6len }

// own is the family of an address by itself. With family AF_INET6 one that maps an
// IPv4 address is an IPv6 address.
func (a address) own() uint16 {
	if a.ip.To4() == nil || a.family == syscall.AF_INET6 && len(a.ip) == net.IPv6len {
		return syscall.AF_INET6
	}
	return syscall.AF_INET
}

func (a address) contradicts() bool {
	if a.wrongLength() || a.family == 0 {
		return false
	}
	return a.own() != a.family || a.new && a.family == syscall.AF_INET6 && a.ip.To4() != nil
}

// otherFamily reports whether the destination is of another family than its service.
func (op operation) otherFamily() bool {
	if !takesDestination(op.method) || op.service == nil || op.destination == nil {
		return false
	}
	family := op.service.AddressFamily
	if family == 0 {
		family = address{ip: op.service.Address}.own()
	}
	if op.method == "RewriteDestination" { // with the family that was read
		return address{ip: op.destination.Address}.own() != family
	}
	return address{ip: op.destination.Address, family: op.destination.AddressFamily}.own() != family
}

// isOf reports whether the operation is about a destination.
func (op operation) isOf(d *checkout.Destination) bool {
	return d.Address.Equal(op.destination.Address) && d.Port == op.destination.Port
}

// hasBadName reports whether a name is none that the kernel could have.
func (op operation) hasBadName() bool {
	bad := func(name string) bool { return len(name) > 15 || strings.Contains(name, "\x00") }
	return takesService(op.method) && op.service != nil && (bad(op.service.SchedName) || bad(op.service.PEName))
}

func badTimeout(d time.Duration) bool {
	return d < 0 || d > 0 && d < time.Second || d/time.Second > math.MaxInt32
}

// sameBut reports whether the outcomes are the same after a change to what the
// checkout read.
func sameBut(o, c outcome, service func(*original.Service), destination func(*original.Destination)) bool {
	switch v := c.value.(type) {
	case *original.Service:
		if v != nil && service != nil {
			c.value = with(v, service)
		}
	case []*original.Service:
		if service != nil {
			c.value = withAll(v, service)
		}
	case []*original.Destination:
		if destination != nil {
			c.value = withAll(v, destination)
		}
	}
	return same(o, c)
}

func withAll[T any](all []*T, change func(*T)) []*T {
	all = slices.Clone(all)
	for i, v := range all {
		all[i] = with(v, change)
	}
	return all
}

// snapshot is a service with its destinations, as the checkout reads them.
type snapshot struct {
	service      *checkout.Service
	destinations []*checkout.Destination
	errors       string
}

func (e snapshot) equal(other snapshot) bool { return reflect.DeepEqual(e, other) }

// without returns the snapshot after a change to its destinations.
func (e snapshot) without(change func(*checkout.Destination)) snapshot {
	e.destinations = withAll(e.destinations, change)
	return e
}

// has reports whether there is a destination as the original's caller set it.
func (e snapshot) has(want *original.Destination) bool {
	return slices.ContainsFunc(e.destinations, func(d *checkout.Destination) bool {
		return d.Address.Equal(want.Address) && d.Port == want.Port && d.Weight == want.Weight &&
			d.AddressFamily == address{ip: want.Address, family: want.AddressFamily}.own() &&
			d.ConnectionFlags == want.ConnectionFlags&original.ConnFwdMask && d.ConnectionFlags == original.ConnFwdTunnel
	})
}

func (e snapshot) String() string {
	text := e.errors
	if e.service != nil {
		text += " " + line(e.service)
	}
	for _, d := range e.destinations {
		text += "\n\t\t" + line(d)
	}
	return text
}
