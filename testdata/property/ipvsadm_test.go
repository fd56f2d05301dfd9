//go:build linux

package property

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os/exec"
	"strconv"
	"strings"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// ipvsadm runs the independent reader and writer in the thread's namespace.
func ipvsadm(t rapid.TB, stdin string, args ...string) string {
	t.Helper()
	var stdout, stderr strings.Builder
	cmd := exec.Command("ipvsadm", args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	if err := cmd.Run(); err != nil || stderr.Len() > 0 {
		t.Fatalf("ipvsadm %s: %v: %s\n%s", strings.Join(args, " "), err, stderr.String(), stdin)
	}
	return stdout.String()
}

// ipvsadmTable is the table as ipvsadm lists it: -Sn has all but the thresholds,
// which come from -Ln.
func ipvsadmTable(t rapid.TB) table {
	t.Helper()
	saved, listed := ipvsadm(t, "", "-Sn"), ipvsadm(t, "", "-Ln", "--thresholds")
	tab, err := parseSaved(saved)
	if err != nil {
		t.Fatalf("%v in:\n%s", err, saved)
	}
	if err := addThresholds(tab, listed); err != nil {
		t.Fatalf("%v in:\n%s", err, listed)
	}
	tab.sort()
	return tab
}

// visible returns t without the settings that ipvsadm -Sn does not print.
func visible(t table) table {
	t = normalised(t)
	for i := range t {
		s := &t[i].service
		if s.Flags&ipvs.ServiceFlagPersistent == 0 {
			s.Timeout, s.Netmask = 0, noMask(s.AddressFamily)
		}
		if hashes(*s) {
			s.Flags &^= ipvs.ServiceFlagSched3
		}
		for j := range t[i].destinations {
			d := &t[i].destinations[j]
			if d.ConnectionFlags == ipvs.ConnectionFlagLocalNode {
				d.ConnectionFlags = ipvs.ConnectionFlagDirectRoute
			}
			if d.ConnectionFlags != ipvs.ConnectionFlagTunnel {
				d.TunnelType = 0
			}
			if d.TunnelType != ipvs.TunnelGUE {
				d.TunnelPort = 0
			}
			if d.TunnelType == ipvs.TunnelIPIP {
				d.TunnelFlags = 0
			}
		}
	}
	return t
}

// noMask is the netmask that keeps clients apart.
func noMask(family uint16) uint32 {
	if family == unix.AF_INET6 {
		return 128
	}
	return math.MaxUint32
}

var flagNames = map[string]uint32{
	"flag-1": ipvs.ServiceFlagSched1, "flag-2": ipvs.ServiceFlagSched2, "flag-3": ipvs.ServiceFlagSched3,
	"sh-fallback": ipvs.ServiceFlagSHFallback, "sh-port": ipvs.ServiceFlagSHPort,
	"mh-fallback": ipvs.ServiceFlagMHFallback, "mh-port": ipvs.ServiceFlagMHPort,
}

// rule is one line of ipvsadm -Sn.
type rule struct {
	command     string // -A or -a
	service     ipvs.Service
	destination ipvs.Destination
}

// parseSaved parses the output of ipvsadm -Sn.
func parseSaved(text string) (table, error) {
	var t table
	for line := range strings.Lines(text) {
		r, err := parseRule(strings.Fields(line))
		if err != nil {
			return nil, fmt.Errorf("%q: %w", line, err)
		}
		if r.command == "-A" {
			t = append(t, entry{service: r.service})
			continue
		}
		if len(t) == 0 || serviceID(t[len(t)-1].service) != serviceID(r.service) {
			return nil, fmt.Errorf("%q: not after its service", line)
		}
		last := &t[len(t)-1]
		last.destinations = append(last.destinations, r.destination)
	}
	return t, nil
}

func parseRule(words []string) (rule, error) {
	r := rule{service: ipvs.Service{Flags: ipvs.ServiceFlagHashed}}
	s, d := &r.service, &r.destination
	var err error // the first
	note := func(e error) {
		if err == nil {
			err = e
		}
	}
	next := func() string {
		if len(words) == 0 {
			note(errors.New("a value is missing"))
			return ""
		}
		word := words[0]
		words = words[1:]
		return word
	}
	number := func() int64 {
		n, e := strconv.ParseInt(next(), 10, 64)
		note(e)
		return n
	}
	endpoint := func() (family uint16, ip net.IP, port uint16) {
		a, e := netip.ParseAddrPort(next())
		note(e)
		family = unix.AF_INET
		if a.Addr().Is6() {
			family = unix.AF_INET6
		}
		return family, a.Addr().AsSlice(), a.Port()
	}
	server := func(protocol uint16) {
		s.Protocol = protocol
		s.AddressFamily, s.Address, s.Port = endpoint()
		s.Netmask = noMask(s.AddressFamily)
	}
	r.command = next()
	if r.command != "-A" && r.command != "-a" {
		note(errors.New("unknown command"))
	}
	for len(words) > 0 && err == nil {
		switch option := next(); option {
		case "-t":
			server(unix.IPPROTO_TCP)
		case "-u":
			server(unix.IPPROTO_UDP)
		case "--sctp-service":
			server(unix.IPPROTO_SCTP)
		case "-f":
			s.FWMark = uint32(number()) // from 2^31 on it is printed as negative
			s.AddressFamily, s.Netmask = unix.AF_INET, math.MaxUint32
		case "-6":
			s.AddressFamily, s.Netmask = unix.AF_INET6, 128
		case "-s":
			s.SchedName = next()
		case "-p":
			s.Flags |= ipvs.ServiceFlagPersistent
			s.Timeout = uint32(number())
		case "-M":
			if s.AddressFamily == unix.AF_INET6 {
				s.Netmask = uint32(number())
				break
			}
			mask, e := netip.ParseAddr(next())
			note(e)
			s.Netmask = binary.NativeEndian.Uint32(mask.AsSlice())
		case "--pe":
			s.PEName = next()
		case "-o":
			s.Flags |= ipvs.ServiceFlagOnePacket
		case "-b":
			if len(words) == 0 || strings.HasPrefix(words[0], "-") {
				break // only the third flag of sh or mh, which has no name
			}
			for name := range strings.SplitSeq(next(), ",") {
				if flagNames[name] == 0 {
					note(fmt.Errorf("unknown flag %q", name))
				}
				s.Flags |= flagNames[name]
			}
		case "-r":
			d.AddressFamily, d.Address, d.Port = endpoint()
		case "-m":
			d.ConnectionFlags = ipvs.ConnectionFlagMasq
		case "-i":
			d.ConnectionFlags = ipvs.ConnectionFlagTunnel
		case "-g":
			d.ConnectionFlags = ipvs.ConnectionFlagDirectRoute
		case "-w":
			d.Weight = int(number())
		case "--tun-type":
			types := map[string]uint8{"ipip": ipvs.TunnelIPIP, "gue": ipvs.TunnelGUE, "gre": ipvs.TunnelGRE}
			name := next()
			typ, ok := types[name]
			if !ok {
				note(fmt.Errorf("unknown tunnel %q", name))
			}
			d.TunnelType = typ
		case "--tun-port":
			d.TunnelPort = uint16(number())
		case "--tun-nocsum":
			d.TunnelFlags = ipvs.TunnelFlagNoChecksum
		case "--tun-csum":
			d.TunnelFlags = ipvs.TunnelFlagChecksum
		case "--tun-remcsum":
			d.TunnelFlags = ipvs.TunnelFlagRemoteChecksum
		default:
			note(fmt.Errorf("unknown option %q", option))
		}
	}
	return r, err
}

// addThresholds fills in the thresholds from the output of ipvsadm -Ln --thresholds.
func addThresholds(t table, text string) error {
	protocols := map[string]string{"TCP": "-t", "UDP": "-u", "SCTP": "--sctp-service", "FWM": "-f"}
	thresholds := map[string][2]uint32{}
	service := ""
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		switch {
		case len(words) == 6 && words[0] == "->":
			r, err := parseRule([]string{"-a", "-r", words[1]})
			if err != nil {
				return fmt.Errorf("%q: %w", line, err)
			}
			upper, err1 := strconv.ParseUint(words[2], 10, 32)
			lower, err2 := strconv.ParseUint(words[3], 10, 32)
			if err := errors.Join(err1, err2); err != nil {
				return fmt.Errorf("%q: %w", line, err)
			}
			thresholds[service+destinationID(r.destination)] = [2]uint32{uint32(upper), uint32(lower)}
		case len(words) > 2 && protocols[words[0]] != "":
			rule := []string{"-A", protocols[words[0]], words[1]}
			if words[2] == "IPv6" {
				rule = append(rule, "-6")
			}
			r, err := parseRule(rule)
			if err != nil {
				return fmt.Errorf("%q: %w", line, err)
			}
			service = serviceID(r.service)
		}
	}
	for _, e := range t {
		for i := range e.destinations {
			d := &e.destinations[i]
			pair, ok := thresholds[serviceID(e.service)+destinationID(*d)]
			if !ok {
				return fmt.Errorf("%s of %s has no line", destinationID(*d), serviceID(e.service))
			}
			d.UpperThreshold, d.LowerThreshold = pair[0], pair[1]
		}
	}
	return nil
}

// restoreText writes t for ipvsadm -R, with the long names of the options, which
// -Sn does not use.
func restoreText(t table) string {
	var b strings.Builder
	for _, e := range normalised(t) {
		s := e.service
		name := map[uint16]string{unix.IPPROTO_TCP: "--tcp-service ", unix.IPPROTO_UDP: "--udp-service ", unix.IPPROTO_SCTP: "--sctp-service "}[s.Protocol] +
			endpointText(s.Address, s.Port)
		if s.FWMark != 0 {
			name = fmt.Sprintf("--fwmark-service %d", s.FWMark)
			if s.AddressFamily == unix.AF_INET6 {
				name += " --ipv6"
			}
		}
		fmt.Fprintf(&b, "--add-service %s --scheduler %s", name, s.SchedName)
		if s.Flags&ipvs.ServiceFlagPersistent != 0 {
			fmt.Fprintf(&b, " --persistent %d", s.Timeout)
			if s.AddressFamily == unix.AF_INET6 {
				fmt.Fprintf(&b, " --netmask %d", s.Netmask)
			} else {
				mask := binary.NativeEndian.AppendUint32(nil, s.Netmask)
				fmt.Fprintf(&b, " --netmask %d.%d.%d.%d", mask[0], mask[1], mask[2], mask[3])
			}
		}
		if s.PEName != "" {
			b.WriteString(" --pe " + s.PEName)
		}
		var flags []string
		for _, name := range []string{"flag-1", "flag-2", "flag-3"} {
			if s.Flags&flagNames[name] != 0 {
				flags = append(flags, name)
			}
		}
		if flags != nil {
			b.WriteString(" --sched-flags " + strings.Join(flags, ","))
		}
		if s.Flags&ipvs.ServiceFlagOnePacket != 0 {
			b.WriteString(" --ops")
		}
		b.WriteByte('\n')
		for _, d := range e.destinations {
			fmt.Fprintf(&b, "--add-server %s --real-server %s --weight %d --u-threshold %d --l-threshold %d",
				name, endpointText(d.Address, d.Port), d.Weight, d.UpperThreshold, d.LowerThreshold)
			switch d.ConnectionFlags {
			case ipvs.ConnectionFlagMasq:
				b.WriteString(" --masquerading")
			case ipvs.ConnectionFlagDirectRoute:
				b.WriteString(" --gatewaying")
			case ipvs.ConnectionFlagTunnel:
				b.WriteString(" --ipip --tun-type " + []string{"ipip", "gue", "gre"}[d.TunnelType])
				if d.TunnelType == ipvs.TunnelGUE {
					fmt.Fprintf(&b, " --tun-port %d", d.TunnelPort)
				}
				if d.TunnelType != ipvs.TunnelIPIP {
					b.WriteString([]string{" --tun-nocsum", " --tun-csum", " --tun-remcsum"}[d.TunnelFlags])
				}
			}
			b.WriteByte('\n')
		}
	}
	return b.String()
}

func endpointText(ip net.IP, port uint16) string {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a, port).String()
}
