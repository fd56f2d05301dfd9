package ipvs

// This file writes tables in the notation of ipvsadm -R.

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"golang.org/x/sys/unix"
)

// maxSavedTimeout is the longest persistence that ipvsadm -R reads: 31 days.
const maxSavedTimeout = 31 * 24 * 60 * 60

// WriteTable writes a table as input for ipvsadm -R and ParseTable: a line for each
// service, followed by a line for each of its destinations. Counters are left out.
//
// If ipvsadm -R could not restore the table as it is, WriteTable writes nothing and
// returns an error that names every entry at fault and the reason. ipvsadm cannot
// express
//
//   - protocols other than TCP, UDP and SCTP
//   - service flags other than those that have a constant in this package
//   - one-packet scheduling of TCP and SCTP
//   - port 0 without persistence
//   - persistence for 0 or more than 2,678,400 seconds (31 days), or a timeout without
//     persistence
//   - forwarding methods other than masquerading, tunnel and direct routing
//   - a destination that is not masqueraded and has another port than its service,
//     unless that is a firewall-mark service
//   - a destination of another address family than its service without a tunnel
//   - a destination whose address is not a unicast one
//   - thresholds above 2^31-1, or a lower one above the upper one
//   - tunnel settings that the tunnel's type does not use, or tunnel settings without a
//     tunnel
//
// Services and destinations that occur twice are errors too.
func WriteTable(w io.Writer, table []TableEntry) error {
	var text bytes.Buffer
	var errs []error
	services := map[serviceKey]struct{}{}
	for n, e := range table {
		key, err := sentServiceKey(e.Service)
		if err != nil {
			errs = append(errs, fmt.Errorf("%w (entry %d of the table)", err, n))
			continue
		}
		errs = append(errs, writeEntry(&text, e)...)
		if contains(services, key) {
			errs = append(errs, fmt.Errorf("ipvs: service %s occurs twice", serviceName(e.Service)))
		}
		services[key] = struct{}{}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	_, err := text.WriteTo(w)
	return err
}

// writeEntry writes the lines of a service and returns all its errors.
func writeEntry(text *bytes.Buffer, e TableEntry) (errs []error) {
	service := serviceName(e.Service)
	if err := checkSavedService(e.Service); err != nil {
		errs = append(errs, fmt.Errorf("ipvs: service %s: %w", service, err))
	}
	text.WriteString("-A " + e.Service.Rule())
	if e.Service.Flags&ServiceFlagPersistent == 0 {
		text.WriteString(netmaskOption(e.Service)) // has no effect, but the kernel keeps it
	}
	text.WriteByte('\n')
	destinations := map[destinationKey]struct{}{}
	for _, d := range e.Destinations {
		key, err := sentDestinationKey(d)
		if err != nil {
			errs = append(errs, fmt.Errorf("%w (of service %s)", err, service))
			continue
		}
		if err := checkSavedDestination(e.Service, d); err != nil {
			errs = append(errs, fmt.Errorf("ipvs: destination %s of service %s: %w", destinationName(d), service, err))
		}
		if contains(destinations, key) {
			errs = append(errs, fmt.Errorf("ipvs: destination %s of service %s occurs twice", destinationName(d), service))
		}
		destinations[key] = struct{}{}
		fmt.Fprintf(text, "-a %s %s\n", service, d.Rule())
	}
	return errs
}

// checkSavedService returns why ipvsadm -R cannot restore s, or nil if it can.
func checkSavedService(s *Service) error {
	persistent := s.Flags&ServiceFlagPersistent != 0
	const named = ServiceFlagPersistent | ServiceFlagHashed | ServiceFlagOnePacket | ServiceFlagSched1 | ServiceFlagSched2 | ServiceFlagSched3
	byAddress := s.FWMark == 0
	switch {
	case byAddress && !slices.Contains([]uint16{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP}, s.Protocol):
		return fmt.Errorf("ipvsadm has no option for protocol %d", s.Protocol)
	case byAddress && s.Port == 0 && !persistent:
		return errors.New("ipvsadm takes port 0 with persistence only")
	case s.Flags&^named != 0:
		return fmt.Errorf("ipvsadm has no name for the flags %#x", s.Flags&^named)
	case byAddress && s.Flags&ServiceFlagOnePacket != 0 && s.Protocol != unix.IPPROTO_UDP:
		return errors.New("ipvsadm takes one-packet scheduling of UDP only")
	case persistent && (s.Timeout == 0 || s.Timeout > maxSavedTimeout):
		return fmt.Errorf("ipvsadm takes a persistence of 1 to %d seconds, not %d", maxSavedTimeout, s.Timeout)
	case !persistent && s.Timeout != 0:
		return fmt.Errorf("ipvsadm has no option for a timeout, here %d, without persistence", s.Timeout)
	case netmaskOption(s) != "" && isIPv6Service(s) && s.Netmask > 128:
		return fmt.Errorf("a prefix of %d bits is not in 1..128", s.Netmask)
	case s.SchedName == "":
		return errors.New("there is no scheduler")
	}
	if err := checkSavedName("scheduler", s.SchedName, schedNameMaxLen); err != nil {
		return err
	}
	return checkSavedName("persistence engine", s.PEName, peNameMaxLen)
}

// checkSavedName returns an error for a name that ipvsadm -R would not read as one word.
func checkSavedName(what, name string, maxLen int) error {
	if oneWord(name) != name {
		return fmt.Errorf("%s %q is not a word for ipvsadm", what, name)
	}
	return checkName(what, name, maxLen)
}

func isIPv6Destination(d *Destination) bool {
	family, _, err := familyOf(d.AddressFamily, d.Address, "destination")
	return err == nil && family == unix.AF_INET6
}

// checkSavedDestination returns why ipvsadm -R cannot restore d, or nil if it can.
func checkSavedDestination(s *Service, d *Destination) error {
	method := d.ConnectionFlags & ConnectionFlagFwdMask
	switch {
	case method != ConnectionFlagMasq && method != ConnectionFlagTunnel && method != ConnectionFlagDirectRoute:
		return fmt.Errorf("ipvsadm has no option for forwarding method %d", method)
	case method != ConnectionFlagMasq && s.FWMark == 0 && d.Port != s.Port:
		return fmt.Errorf("without masquerading ipvsadm takes no port but the service's, %d", s.Port)
	case d.Weight < 0 || d.Weight > math.MaxInt32:
		return fmt.Errorf("weight %d is not in 0..%d", d.Weight, math.MaxInt32)
	case d.UpperThreshold > math.MaxInt32 || d.LowerThreshold > math.MaxInt32:
		return fmt.Errorf("ipvsadm takes thresholds up to %d, not %d and %d", math.MaxInt32, d.UpperThreshold, d.LowerThreshold)
	case d.LowerThreshold > d.UpperThreshold:
		return fmt.Errorf("the lower threshold %d is above the upper one, %d", d.LowerThreshold, d.UpperThreshold)
	case !d.Address.IsGlobalUnicast() && !d.Address.IsLoopback() && !d.Address.IsLinkLocalUnicast():
		return fmt.Errorf("the kernel takes no address that is not unicast")
	case method != ConnectionFlagTunnel && isIPv6Service(s) != isIPv6Destination(d):
		return errors.New("only a tunnel reaches a destination of another address family")
	}
	flags := d.TunnelFlags
	var fits bool
	switch {
	case method != ConnectionFlagTunnel || d.TunnelType == TunnelIPIP:
		fits = d.TunnelType == 0 && d.TunnelPort == 0 && flags == 0
	case d.TunnelType == TunnelGUE:
		fits = d.TunnelPort != 0 && flags <= TunnelFlagRemoteChecksum
	case d.TunnelType == TunnelGRE:
		fits = d.TunnelPort == 0 && flags <= TunnelFlagChecksum
	}
	if !fits {
		return fmt.Errorf("ipvsadm has no options for tunnel type %d with port %d and flags %#x, forwarding method %d", d.TunnelType, d.TunnelPort, flags, method)
	}
	return nil
}
