package ipvs

// This file parses tables in the notation of ipvsadm -Sn and -R.

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ParseTable parses a table in ipvsadm's notation: the output of ipvsadm -Sn, or
// the input of ipvsadm -R, applied to an empty table. Options may have their long or
// short names, and a line may begin with the word ipvsadm. Besides -A and -a, the
// text may contain the commands that edit and delete: -E, -D, -C, -e and -d. Blank
// lines and lines that begin with # are skipped.
//
// Host and port names are errors, since their meaning depends on the machine; use
// ipvsadm -Sn, which writes numbers. Every error of the text names the line and the
// column in bytes, both counted from 1.
//
// Omitted options have ipvsadm's defaults: scheduler wlc, persistence for 360 seconds,
// direct routing, weight 1. ParseTable differs from ipvsadm -R where -R rejects or
// changes what -Sn writes: a destination that is not masqueraded may have another port
// than its service, a firewall mark of 2^31 or more may be written as a negative number,
// and -b without a value at the end of a line is the third flag of the schedulers sh and
// mh.
//
// Some settings are lost because ipvsadm -Sn does not write them: thresholds, the
// timeout and netmask of a service without persistence, and the third flag of sh and mh
// if another one is set. It writes ConnectionFlagLocalNode as direct routing.
func ParseTable(r io.Reader) ([]TableEntry, error) {
	p := tableParser{services: map[serviceKey]*parsedService{}}
	lines := bufio.NewScanner(r)
	line := 0
	for lines.Scan() {
		line++
		if err := p.parseLine(lines.Text()); err != nil {
			return nil, fmt.Errorf("ipvs: line %d, %w", line, err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("ipvs: line %d, column 1: %w", line+1, err)
	}
	table := make([]TableEntry, 0, len(p.order))
	for _, s := range p.order {
		table = append(table, TableEntry{s.service, s.destinations})
	}
	return table, nil
}

// tableParser holds the table parsed so far.
type tableParser struct {
	services map[serviceKey]*parsedService
	order    []*parsedService
}

type parsedService struct {
	service      *Service
	destinations []*Destination
	keys         []destinationKey // of destinations
	places       map[destinationKey]struct{}
}

func (p *tableParser) parseLine(line string) error {
	words := splitWords(line)
	if len(words) > 0 && words[0].text == "ipvsadm" {
		words = words[1:]
	}
	if len(words) == 0 || strings.HasPrefix(words[0].text, "#") {
		return nil
	}
	options, err := parseOptions(words)
	if err != nil {
		return err
	}
	o := optionReader{options: options[1:], command: options[0]}
	p.run(&o)
	return o.err
}

// run applies a command to the table.
func (p *tableParser) run(o *optionReader) {
	command := o.command.id
	if command == optClear {
		o.unused()
		p.order = nil
		clear(p.services)
		return
	}
	s := o.service(command == optAddService || command == optEditService)
	var d *Destination
	if command == optAddServer || command == optEditServer || command == optDeleteServer {
		d = o.destination(s, command != optDeleteServer)
	}
	o.unused()
	if o.err != nil {
		return
	}
	key, err := sentServiceKey(s)
	if err != nil {
		o.fail(o.command.column, err)
		return
	}
	known := p.services[key]
	switch {
	case command == optAddService && known != nil:
		o.failf(o.command.column, "service %s is there already", serviceName(s))
	case command == optAddService:
		known = &parsedService{service: s, places: map[destinationKey]struct{}{}}
		p.services[key] = known
		p.order = append(p.order, known)
	case known == nil:
		o.failf(o.command.column, "there is no service %s before", serviceName(s))
	case command == optEditService:
		known.service = s
	case command == optDeleteService:
		delete(p.services, key)
		p.order = slices.DeleteFunc(p.order, func(other *parsedService) bool { return other == known })
	default:
		known.change(o, d)
	}
}

// change applies a command to a destination of the service.
func (s *parsedService) change(o *optionReader, d *Destination) {
	key, err := sentDestinationKey(d)
	if err != nil {
		o.fail(o.command.column, err)
		return
	}
	known := contains(s.places, key)
	switch {
	case o.command.id == optAddServer && known:
		o.failf(o.command.column, "destination %s is there already", destinationName(d))
	case o.command.id == optAddServer:
		s.places[key] = struct{}{}
		s.destinations, s.keys = append(s.destinations, d), append(s.keys, key)
	case !known:
		o.failf(o.command.column, "there is no destination %s before", destinationName(d))
	case o.command.id == optEditServer:
		s.destinations[slices.Index(s.keys, key)] = d
	default:
		n := slices.Index(s.keys, key)
		s.destinations, s.keys = slices.Delete(s.destinations, n, n+1), slices.Delete(s.keys, n, n+1)
		delete(s.places, key)
		if len(s.destinations) == 0 {
			s.destinations = nil // as of a service that never had any
		}
	}
}

// optionReader interprets the options of a line, removing those it has used; err is
// the first error.
type optionReader struct {
	command parsedOption
	options []parsedOption
	err     error
}

func (o *optionReader) fail(column int, err error) {
	if o.err == nil {
		o.err = &columnError{column, err}
	}
}

func (o *optionReader) failf(column int, format string, args ...any) {
	o.fail(column, fmt.Errorf(format, args...))
}

// take removes and returns the option that has one of the ids. More than one is an
// error.
func (o *optionReader) take(ids ...optionID) (taken parsedOption, ok bool) {
	o.options = slices.DeleteFunc(o.options, func(p parsedOption) bool {
		if !slices.Contains(ids, p.id) {
			return false
		}
		if ok {
			o.failf(p.column, "%s is one too many after %s", p.name, taken.name)
		}
		taken, ok = p, true
		return true
	})
	return taken, ok
}

// unused reports the remaining options as errors: they do not go with the command.
func (o *optionReader) unused() {
	for _, p := range o.options {
		o.failf(p.column, "%s does not go with %s", p.name, o.command.name)
	}
}

// service returns the service that the options identify, with its settings if full.
func (o *optionReader) service(full bool) *Service {
	s := &Service{AddressFamily: unix.AF_INET}
	name, ok := o.take(optTCP, optUDP, optSCTP, optFWMark)
	v6, isV6 := o.take(optIPv6)
	hasPort := true
	switch {
	case !ok:
		o.failf(o.command.column, "%s needs a service: -t, -u, --sctp-service or -f", o.command.name)
	case name.id == optFWMark:
		s.FWMark = o.mark(name)
		if isV6 {
			s.AddressFamily = unix.AF_INET6
		}
	default:
		s.Protocol = map[optionID]uint16{optTCP: unix.IPPROTO_TCP, optUDP: unix.IPPROTO_UDP, optSCTP: unix.IPPROTO_SCTP}[name.id]
		var ip netip.Addr
		ip, s.Port, hasPort = o.endpoint(name)
		s.Address = ip.AsSlice()
		if ip.Is6() {
			s.AddressFamily = unix.AF_INET6
		}
		if isV6 {
			o.failf(v6.column, "%s goes with -f only", v6.name)
		}
	}
	if full {
		o.settings(s)
		if !hasPort && s.Flags&ServiceFlagPersistent == 0 {
			o.failf(name.valueColumn, "without -p the service needs a port")
		}
	}
	return s
}

// settings fills in the settings of a service.
func (o *optionReader) settings(s *Service) {
	s.SchedName = WeightedLeastConnection
	if p, ok := o.take(optScheduler); ok {
		s.SchedName = o.name(p, "scheduler", schedNameMaxLen)
	}
	if p, ok := o.take(optPersistent); ok {
		s.Flags |= ServiceFlagPersistent
		s.Timeout = 360
		if !p.noValue {
			s.Timeout = uint32(o.number(p, math.MaxUint32))
		}
	}
	s.Netmask = math.MaxUint32
	if s.AddressFamily == unix.AF_INET6 {
		s.Netmask = 128
	}
	if p, ok := o.take(optNetmask); ok {
		s.Netmask = o.netmask(p, s.AddressFamily)
	}
	if p, ok := o.take(optPE); ok {
		s.PEName = o.name(p, "persistence engine", peNameMaxLen)
	}
	if _, ok := o.take(optOnePacket); ok {
		s.Flags |= ServiceFlagOnePacket
	}
	if p, ok := o.take(optSchedFlags); ok {
		s.Flags |= o.schedulerFlags(p, s.SchedName)
	}
}

// destination returns the destination of s that the options identify, with its
// settings if full.
func (o *optionReader) destination(s *Service, full bool) *Destination {
	d := &Destination{AddressFamily: unix.AF_INET, Weight: 1, ConnectionFlags: ConnectionFlagDirectRoute}
	p, ok := o.take(optRealServer)
	if !ok {
		o.failf(o.command.column, "%s needs a destination: -r", o.command.name)
		return d
	}
	ip, port, hasPort := o.endpoint(p)
	if !hasPort {
		port = s.Port
	}
	d.Address, d.Port = ip.AsSlice(), port
	if ip.Is6() {
		d.AddressFamily = unix.AF_INET6
	}
	if !full {
		return d
	}
	if p, ok := o.take(optGatewaying, optIPIP, optMasquerading); ok {
		d.ConnectionFlags = map[optionID]uint32{optGatewaying: ConnectionFlagDirectRoute, optIPIP: ConnectionFlagTunnel, optMasquerading: ConnectionFlagMasq}[p.id]
	}
	if p, ok := o.take(optWeight); ok {
		d.Weight = int(o.number(p, math.MaxInt32))
	}
	if p, ok := o.take(optUpperThreshold); ok {
		d.UpperThreshold = uint32(o.number(p, math.MaxUint32))
	}
	if p, ok := o.take(optLowerThreshold); ok {
		d.LowerThreshold = uint32(o.number(p, math.MaxUint32))
	}
	o.tunnel(d)
	return d
}

// tunnel fills in the tunnel settings of a destination.
func (o *optionReader) tunnel(d *Destination) {
	kind, hasKind := o.take(optTunType)
	port, hasPort := o.take(optTunPort)
	checksum, hasChecksum := o.take(optTunNoCsum, optTunCsum, optTunRemCsum)
	for _, p := range []parsedOption{kind, port, checksum} {
		if p.name != "" && d.ConnectionFlags != ConnectionFlagTunnel {
			o.failf(p.column, "%s goes with -i only", p.name)
		}
	}
	if hasKind {
		kinds := map[string]uint8{"ipip": TunnelIPIP, "gue": TunnelGUE, "gre": TunnelGRE}
		typ, ok := kinds[kind.value]
		if !ok {
			o.failf(kind.valueColumn, "%q is not a tunnel type: ipip, gue or gre", kind.value)
		}
		d.TunnelType = typ
	}
	switch {
	case hasPort && d.TunnelType != TunnelGUE:
		o.failf(port.column, "%s goes with --tun-type gue only", port.name)
	case hasPort:
		d.TunnelPort = uint16(o.number(port, math.MaxUint16))
	}
	switch {
	case d.TunnelType == TunnelGUE && d.TunnelPort == 0:
		o.failf(kind.column, "--tun-type gue needs --tun-port, 1 to 65535")
	case hasChecksum && d.TunnelType == TunnelIPIP:
		o.failf(checksum.column, "%s goes with --tun-type gue or gre only", checksum.name)
	}
	d.TunnelFlags = map[optionID]uint16{optTunCsum: TunnelFlagChecksum, optTunRemCsum: TunnelFlagRemoteChecksum}[checksum.id]
}

// number parses a decimal number from 0 to max.
func (o *optionReader) number(p parsedOption, max uint64) uint64 {
	n, err := strconv.ParseUint(p.value, 10, 64)
	if err != nil || n > max {
		o.failf(p.valueColumn, "the value of %s, %q, is not a number of 0 to %d", p.name, p.value, max)
		return 0
	}
	return n
}

// mark parses a firewall mark. ipvsadm -S writes marks of 2^31 or more as negative
// numbers.
func (o *optionReader) mark(p parsedOption) uint32 {
	n, err := strconv.ParseInt(p.value, 10, 64)
	if err != nil || n < math.MinInt32 || n > math.MaxUint32 || n == 0 {
		o.failf(p.valueColumn, "%q is not a firewall mark of 1 to %d", p.value, uint32(math.MaxUint32))
	}
	return uint32(n)
}

// name parses the name of a scheduler or a persistence engine.
func (o *optionReader) name(p parsedOption, what string, maxLen int) string {
	if err := checkSavedName(what, p.value, maxLen); err != nil {
		o.failf(p.valueColumn, "%s", strings.TrimPrefix(err.Error(), "ipvs: "))
	}
	return p.value
}

func (o *optionReader) netmask(p parsedOption, family uint16) uint32 {
	if family == unix.AF_INET6 {
		n := o.number(p, 128)
		if n == 0 {
			o.failf(p.valueColumn, "the prefix length of %s is not in 1..128", p.name)
		}
		return uint32(n)
	}
	mask, err := netip.ParseAddr(p.value)
	if err != nil || !mask.Is4() {
		o.failf(p.valueColumn, "%q is not a netmask such as 255.255.255.0", p.value)
		return 0
	}
	b := mask.As4()
	return native.Uint32(b[:])
}

// schedulerFlags parses the names of scheduler flags. ipvsadm -S has no name for the
// third flag of sh and mh: if it is the only one, -b has no value.
func (o *optionReader) schedulerFlags(p parsedOption, scheduler string) (flags uint32) {
	hashing := scheduler == SourceHashing || scheduler == MaglevHashing
	if p.noValue {
		if !hashing {
			o.failf(p.column, "%s needs a value", p.name)
		}
		return ServiceFlagSched3
	}
	for name := range strings.SplitSeq(p.value, ",") {
		own, isOwn := strings.CutPrefix(name, scheduler+"-")
		switch {
		case name == "": // ipvsadm skips it
		case name == "flag-1", hashing && isOwn && own == "fallback":
			flags |= ServiceFlagSched1
		case name == "flag-2", hashing && isOwn && own == "port":
			flags |= ServiceFlagSched2
		case name == "flag-3":
			flags |= ServiceFlagSched3
		default:
			o.failf(p.valueColumn, "%q is not a flag of scheduler %s", name, scheduler)
		}
	}
	return flags
}

// endpoint parses an address with an optional port: 10.0.0.1:80, 10.0.0.1,
// [2001:db8::1]:80, 2001:db8::1.
func (o *optionReader) endpoint(p parsedOption) (ip netip.Addr, port uint16, hasPort bool) {
	host, portText := p.value, ""
	portColumn := p.valueColumn
	bracketed := strings.HasPrefix(host, "[")
	if n := strings.LastIndexByte(host, ':'); n >= 0 && (bracketed || strings.IndexByte(host, ':') == n) {
		host, portText, hasPort = host[:n], host[n+1:], true
		portColumn += n + 1
	}
	if bracketed {
		var closed bool
		host, closed = strings.CutSuffix(host[1:], "]")
		if !closed || !hasPort {
			o.failf(p.valueColumn, "%q is not an address such as [2001:db8::1]:80", p.value)
			return ip, 0, false
		}
	}
	ip, err := netip.ParseAddr(host)
	if err != nil || ip.Zone() != "" || bracketed && ip.Is4() {
		o.fail(p.valueColumn, fmt.Errorf("%q is not an IP address%s", host, namesHint(host)))
	}
	if hasPort {
		n, err := strconv.ParseUint(portText, 10, 16)
		if err != nil {
			o.fail(portColumn, fmt.Errorf("%q is not a port of 0 to 65535%s", portText, namesHint(portText)))
		}
		port = uint16(n)
	}
	return ip, port, hasPort
}

// namesHint explains that names are not resolved, if text looks like one.
func namesHint(text string) string {
	if strings.ContainsFunc(text, func(r rune) bool { return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' }) {
		return " (names are not looked up: save with ipvsadm -Sn)"
	}
	return ""
}
