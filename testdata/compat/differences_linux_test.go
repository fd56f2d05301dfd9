//go:build linux

package compat

import (
	"fmt"
	"math"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	original "github.com/moby/ipvs"
)

// TestIntendedDifferences does, one by one, what the generated inputs of
// TestSameTable leave out: where the checkout is meant to differ from the
// original, both still do as documented.
func TestIntendedDifferences(t *testing.T) {
	needKernel(t)
	type S = original.Service
	type D = original.Destination

	// own is an error that the library must find before it sends anything.
	own := func(t *testing.T, err error) {
		t.Helper()
		if err == nil || !strings.HasPrefix(err.Error(), "ipvs: ") {
			t.Errorf("checkout: %s, want an error of its own", describe(err))
		}
		if _, ok := err.(syscall.Errno); ok {
			t.Errorf("checkout: %s, want an error of its own", describe(err))
		}
	}
	refuses := func(t *testing.T, err, want error) {
		t.Helper()
		if err != want {
			t.Errorf("original: %s, want %s", describe(err), describe(want))
		}
	}
	takes := func(t *testing.T, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("checkout: %s", describe(err))
		}
	}
	// panics turns a panic into an error.
	panics := func(f func() error) (err error) {
		defer func() {
			if v := recover(); v != nil {
				err = fmt.Errorf("panic: %v", v)
			}
		}()
		return f()
	}

	for _, test := range []struct {
		name string
		run  func(*testing.T, pair)
	}{
		{"no address family", func(t *testing.T, p pair) {
			for _, s := range []*S{v4Service(), v6Service()} {
				family := s.AddressFamily
				s.AddressFamily = 0
				refuses(t, p.original.NewService(s), syscall.EAFNOSUPPORT)
				takes(t, p.checkout.NewService(s))
				d := v4Destination()
				if family == syscall.AF_INET6 {
					d = v6Destination()
				}
				takes(t, p.checkout.NewDestination(s, d))
				got, err := p.checkout.GetService(s)
				takes(t, err)
				if got.AddressFamily != family || !got.Address.Equal(s.Address) {
					t.Errorf("read back: %s", line(got))
				}
				takes(t, p.checkout.DelService(s))
			}
		}},
		{"mark without an address family", func(t *testing.T, p pair) {
			s := with(markService(), func(s *S) { s.AddressFamily = 0 })
			refuses(t, p.original.NewService(s), syscall.EAFNOSUPPORT)
			own(t, p.checkout.NewService(s))
		}},
		{"IPv6 netmask 0", func(t *testing.T, p pair) {
			s := with(v6Service(), func(s *S) { s.Netmask = 0 })
			refuses(t, p.original.NewService(s), syscall.EINVAL)
			takes(t, p.checkout.NewService(s))
			got, err := p.original.GetService(s)
			takes(t, err)
			if got.Netmask != 128 {
				t.Errorf("netmask %d, want 128", got.Netmask)
			}
		}},
		{"weight of more than 16 bits", func(t *testing.T, p pair) {
			s := v4Service()
			takes(t, p.checkout.NewService(s))
			for _, weight := range []int{65537, math.MaxInt32} {
				d := with(v4Destination(), func(d *D) { d.Weight = weight })
				takes(t, p.checkout.NewDestination(s, d))
				o, err := p.original.GetDestinations(s)
				takes(t, err)
				c, err := p.checkout.GetDestinations(s)
				takes(t, err)
				if o[0].Weight != weight&0xffff {
					t.Errorf("original: %d", o[0].Weight)
				}
				if c[0].Weight != weight {
					t.Errorf("checkout: %d, want %d", c[0].Weight, weight)
				}
				takes(t, p.checkout.DelDestination(s, d))
			}
		}},
		{"persistence engine", func(t *testing.T, p pair) {
			s := with(v4Service(), func(s *S) {
				s.Protocol, s.Flags, s.Timeout, s.PEName = syscall.IPPROTO_UDP, persistent, 300, "sip"
			})
			if err := p.original.NewService(s); err == syscall.ENOENT {
				t.Skip("SKIP: no module ip_vs_pe_sip")
			} else if err != nil {
				t.Fatal("original: ", err)
			}
			o, err := p.original.GetService(s)
			takes(t, err)
			c, err := p.checkout.GetService(s)
			takes(t, err)
			if o.PEName != "" || c.PEName != "sip" {
				t.Errorf("original: %q, checkout: %q", o.PEName, c.PEName)
			}
			// What was read is written back: the checkout keeps it.
			takes(t, p.checkout.UpdateService(c))
			c, err = p.checkout.GetService(s)
			takes(t, err)
			if c.PEName != "sip" {
				t.Errorf("written back by the checkout: %q", c.PEName)
			}
			takes(t, p.original.UpdateService(o))
			c, err = p.checkout.GetService(s)
			takes(t, err)
			if c.PEName != "" {
				t.Errorf("written back by the original: %q", c.PEName)
			}
		}},
		{"destinations of the other address family", func(t *testing.T, p pair) {
			for _, pool := range []struct {
				service     *S
				destination *D
				family      uint16
			}{
				{v4Service(), v6Destination(), syscall.AF_INET6},
				{v6Service(), v4Destination(), syscall.AF_INET},
				{v6Service(), with(v4Destination(), func(d *D) { d.Address = d.Address.To4() }), syscall.AF_INET},
			} {
				s, d := pool.service, pool.destination
				d.ConnectionFlags = original.ConnFwdTunnel
				takes(t, p.checkout.NewService(s))
				// The original does not say which family it is: the kernel
				// refuses, or takes the bytes for an address of its own.
				oErr := p.original.NewDestination(s, d)
				if all, err := p.original.GetDestinations(s); oErr == nil && err == nil && len(all) == 1 && all[0].Address.Equal(d.Address) {
					t.Errorf("original: takes %s", line(d))
				}
				takes(t, p.checkout.DelService(s))

				takes(t, p.checkout.NewService(s))
				takes(t, p.checkout.NewDestination(s, d))
				all, err := p.checkout.GetDestinations(s)
				takes(t, err)
				if len(all) != 1 || all[0].AddressFamily != pool.family || !all[0].Address.Equal(d.Address) {
					t.Errorf("read back: %v", all)
				}
				takes(t, p.checkout.UpdateDestination(s, all[0]))
				takes(t, p.checkout.DelDestination(s, d))
				takes(t, p.checkout.DelService(s))
			}
		}},
		{"other bad values", func(t *testing.T, p pair) {
			s, d := v4Service(), v4Destination()
			takes(t, p.checkout.NewService(s))
			refuses(t, p.original.NewDestination(s, with(d, func(d *D) { d.Weight = -1 })), syscall.ERANGE)
			own(t, p.checkout.NewDestination(s, with(d, func(d *D) { d.Weight = -1 })))
			own(t, p.checkout.NewDestination(s, with(d, func(d *D) { d.Address = nil })))
			own(t, p.checkout.NewDestination(s, with(d, func(d *D) { d.AddressFamily = syscall.AF_INET6 })))
			for _, change := range []func(*S){
				func(s *S) { s.Address = nil },
				func(s *S) { s.Address = s.Address[:7] },
				func(s *S) { s.AddressFamily = syscall.AF_INET6 },
				func(s *S) { s.AddressFamily = syscall.AF_INET; s.Address = net.ParseIP("2001:db8::1") },
				func(s *S) { s.SchedName = "sixteen-letters!" },
			} {
				bad := with(s, change)
				bad.Port = 81
				own(t, p.checkout.NewService(bad))
			}
			if all, err := p.checkout.GetDestinations(s); err != nil || len(all) != 0 {
				t.Error("sent all the same: ", all, err)
			}
			if all, err := p.checkout.GetServices(); err != nil || len(all) != 1 {
				t.Error("sent all the same: ", all, err)
			}
		}},
		{"nil", func(t *testing.T, p pair) {
			s := v4Service()
			for name, call := range map[string]func(library) error{
				"NewService":     func(l library) error { return l.NewService(nil) },
				"NewDestination": func(l library) error { return l.NewDestination(s, nil) },
				"DelDestination": func(l library) error { return l.DelDestination(nil, v4Destination()) },
				"SetConfig":      func(l library) error { return l.SetConfig(nil) },
			} {
				// Some of them panic in the original, others send half a request.
				t.Logf("%s: original: %s", name, describe(panics(func() error { return call(p.original) })))
				own(t, panics(func() error { return call(p.checkout) }))
			}
		}},
		{"timeouts", func(t *testing.T, p pair) {
			before, err := p.checkout.GetConfig()
			takes(t, err)
			refuses(t, p.original.SetConfig(&original.Config{TimeoutUDP: time.Millisecond}), nil)
			for _, d := range []time.Duration{time.Millisecond, -time.Second, -1, 1 << 31 * time.Second} {
				own(t, p.checkout.SetConfig(&original.Config{TimeoutTCP: time.Minute, TimeoutUDP: d}))
			}
			after, err := p.checkout.GetConfig()
			takes(t, err)
			if *after != *before {
				t.Errorf("changed all the same: %v, was %v", *after, *before)
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, newPair(t)) })
	}
}
