//go:build linux

// Package callers uses the API as programs out there do. It is here twice,
// once for the original and once for the checkout; the two files differ in
// the import only, and a test keeps it so.
package callers

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"time"

	ipvs "github.com/moby/ipvs"
)

// Proxiers hide the handle behind an interface, to replace it in their tests.
type handle interface {
	Close()
	NewService(*ipvs.Service) error
	IsServicePresent(*ipvs.Service) bool
	UpdateService(*ipvs.Service) error
	DelService(*ipvs.Service) error
	Flush() error
	NewDestination(*ipvs.Service, *ipvs.Destination) error
	UpdateDestination(*ipvs.Service, *ipvs.Destination) error
	DelDestination(*ipvs.Service, *ipvs.Destination) error
	GetServices() ([]*ipvs.Service, error)
	GetDestinations(*ipvs.Service) ([]*ipvs.Destination, error)
	GetService(*ipvs.Service) (*ipvs.Service, error)
	GetConfig() (*ipvs.Config, error)
	SetConfig(*ipvs.Config) error
}

var (
	_ handle                                  = (*ipvs.Handle)(nil)
	_ func(string) (*ipvs.Handle, error)      = ipvs.New
	_ func(*ipvs.Handle)                      = (*ipvs.Handle).Close
	_ func(*ipvs.Handle, *ipvs.Service) error = (*ipvs.Handle).NewService
)

// Constants go wherever an untyped one can.
type scheduler string

var (
	_ int       = ipvs.ConnectionFlagMasq
	_ uint32    = ipvs.ConnectionFlagTunnel
	_ uint8     = ipvs.ConnFwdBypass
	_ int64     = ipvs.ConnFwdDirectRoute
	_ float64   = ipvs.ConnFwdLocalNode
	_ scheduler = ipvs.RoundRobin
	_ string    = ipvs.WeightedLeastConnection
	_           = [ipvs.ConnFwdMask + 1]bool{}
	_           = map[scheduler]bool{
		ipvs.RoundRobin: true, ipvs.LeastConnection: true, ipvs.DestinationHashing: true,
		ipvs.SourceHashing: true, ipvs.WeightedRoundRobin: true, ipvs.WeightedLeastConnection: true,
	}
)

// Configs of the three timeouts, built without field names.
func timeouts(tcp, fin, udp time.Duration) *ipvs.Config {
	return &ipvs.Config{tcp, fin, udp}
}

func isTCPFinLast(c ipvs.Config) bool {
	return c == ipvs.Config{0, 0, c.TimeoutUDP} // comparable, so it can be a map's key too
}

func counters(s *ipvs.Service, destinations ...*ipvs.Destination) (sum ipvs.SvcStats) {
	all := []ipvs.SvcStats{s.Stats}
	for _, d := range destinations {
		if d.Stats != (ipvs.DstStats{}) {
			all = append(all, ipvs.SvcStats(d.Stats))
		}
	}
	for _, c := range all {
		sum.Connections += c.Connections
		sum.PacketsIn += c.PacketsIn
		sum.PacketsOut += c.PacketsOut
		sum.BytesIn += c.BytesIn
		sum.BytesOut += c.BytesOut
	}
	return sum
}

func kindOf(stats any) string {
	switch stats.(type) {
	case ipvs.SvcStats:
		return "service"
	case ipvs.DstStats:
		return "destination"
	}
	return "neither"
}

func method(d *ipvs.Destination) string {
	switch d.ConnectionFlags & ipvs.ConnectionFlagFwdMask {
	case ipvs.ConnectionFlagMasq:
		return "masq"
	case ipvs.ConnectionFlagLocalNode:
		return "local"
	case ipvs.ConnectionFlagTunnel:
		return "tunnel"
	case ipvs.ConnectionFlagDirectRoute:
		return "route"
	}
	return "other"
}

// Plain does what needs no kernel, and says what came of it.
func Plain() string {
	d := &ipvs.Destination{ConnectionFlags: 0x100 | ipvs.ConnectionFlagDirectRoute, Stats: ipvs.DstStats{Connections: 2}}
	s := &ipvs.Service{Stats: ipvs.SvcStats{Connections: 1}}
	c := timeouts(time.Second, 2*time.Second, 3*time.Second)
	return fmt.Sprintln(method(d), counters(s, d, d).Connections, kindOf(s.Stats), kindOf(d.Stats),
		c.TimeoutTCP, c.TimeoutTCPFin, c.TimeoutUDP, isTCPFinLast(*c), isTCPFinLast(ipvs.Config{}))
}

// Sync programs a table as proxiers do, twice, and says what came of it.
func Sync(path string) (string, error) {
	var h handle
	h, err := ipvs.New(path)
	if err != nil {
		return "", err
	}
	defer h.Close()

	var log strings.Builder
	service := &ipvs.Service{
		Address:       net.ParseIP("10.96.0.1"),
		Protocol:      syscall.IPPROTO_TCP,
		Port:          443,
		SchedName:     ipvs.RoundRobin,
		Flags:         0x0001, // persistent
		Timeout:       10800,
		Netmask:       0xffffffff,
		AddressFamily: syscall.AF_INET,
	}
	for range 2 {
		current, err := h.GetService(service)
		switch {
		case errors.Is(err, syscall.ESRCH):
			fmt.Fprintln(&log, "no such service:", err)
			if err := h.NewService(service); err != nil {
				return "", err
			}
		case err != nil:
			return "", err
		case current.SchedName != service.SchedName || current.Flags&^0x2 != service.Flags:
			return "", fmt.Errorf("unexpected: %+v", current)
		}
		if err := h.NewService(service); !errors.Is(err, syscall.EEXIST) {
			return "", fmt.Errorf("again: %w", err)
		}
		for i := range byte(3) {
			d := &ipvs.Destination{Address: net.IPv4(10, 0, 0, i+1), Port: 6443, Weight: 1}
			err := h.NewDestination(service, d)
			if err == syscall.EEXIST {
				d.Weight++
				err = h.UpdateDestination(service, d)
			}
			if err != nil {
				return "", err
			}
		}
	}

	gone := &ipvs.Destination{Address: net.IPv4(10, 0, 0, 99), Port: 6443}
	if err := h.DelDestination(service, gone); err == syscall.ENOENT {
		fmt.Fprintln(&log, "no such destination:", err.Error())
	} else {
		return "", fmt.Errorf("missing destination: %w", err)
	}
	var errno syscall.Errno
	if err := h.UpdateDestination(service, gone); !errors.As(err, &errno) || errno != syscall.ENOENT {
		return "", fmt.Errorf("missing destination: %w", err)
	}

	if err := h.SetConfig(timeouts(0, 0, 42*time.Second)); err != nil {
		return "", err
	}
	c, err := h.GetConfig()
	if err != nil {
		return "", err
	}
	fmt.Fprintln(&log, c.TimeoutTCP, c.TimeoutTCPFin, c.TimeoutUDP)

	services, err := h.GetServices()
	if err != nil {
		return "", err
	}
	for _, s := range services {
		destinations, err := h.GetDestinations(s)
		if err != nil {
			return "", err
		}
		fmt.Fprintln(&log, s.Address, s.Protocol, s.Port, s.SchedName, s.Flags, s.Timeout, s.Netmask, len(destinations), counters(s, destinations...))
		for _, d := range destinations {
			fmt.Fprintln(&log, d.Address, d.Port, d.Weight, method(d), d.ActiveConnections+d.InactiveConnections)
			if err := h.DelDestination(s, d); err != nil {
				return "", err
			}
		}
		if err := h.DelService(s); err != nil {
			return "", err
		}
	}
	fmt.Fprintln(&log, h.IsServicePresent(service), h.Flush())
	return log.String(), nil
}
