package ipvs

// This file writes services, destinations and changes in ipvsadm's notation.

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Rule returns the service as ipvsadm -Sn writes it after -A, such as
// "-t 10.0.0.1:80 -s wrr -p 300".
func (s *Service) Rule() string {
	var b strings.Builder
	b.WriteString(serviceName(s))
	b.WriteString(" -s ")
	b.WriteString(oneWord(s.SchedName))
	if s.Flags&ServiceFlagPersistent != 0 {
		fmt.Fprintf(&b, " -p %d", s.Timeout)
		b.WriteString(netmaskOption(s))
	}
	if s.PEName != "" {
		b.WriteString(" --pe " + oneWord(s.PEName))
	}
	if s.Flags&ServiceFlagOnePacket != 0 {
		b.WriteString(" -o")
	}
	if flags := schedulerFlags(s); len(flags) > 0 {
		b.WriteString(" -b " + strings.Join(flags, ","))
	}
	return b.String()
}

// oneWord returns a name as it is if it is a single word of printable ASCII, and quoted
// otherwise, so that no name looks like an option or ends the line.
func oneWord(name string) string {
	if strings.HasPrefix(name, "-") || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		return strconv.Quote(name)
	}
	return name
}

// serviceName returns the options that identify the service, such as
// "-t 10.0.0.1:80".
func serviceName(s *Service) string {
	switch {
	case s.FWMark != 0 && s.AddressFamily == unix.AF_INET6:
		return fmt.Sprintf("-f %d -6", s.FWMark)
	case s.FWMark != 0:
		return fmt.Sprintf("-f %d", s.FWMark)
	}
	return protocolOption(s.Protocol) + " " + addressPort(s.AddressFamily, s.Address, s.Port)
}

func protocolOption(protocol uint16) string {
	switch protocol {
	case unix.IPPROTO_TCP:
		return "-t"
	case unix.IPPROTO_UDP:
		return "-u"
	case unix.IPPROTO_SCTP:
		return "--sctp-service"
	}
	return fmt.Sprintf("(protocol %d)", protocol) // ipvsadm has no word for it
}

// addressPort returns an address as inet_ntop writes it, which ipvsadm uses, and
// the port.
func addressPort(family uint16, address net.IP, port uint16) string {
	host := address.String()
	if ip, ok := netip.AddrFromSlice(address); ok && family == unix.AF_INET6 && len(address) == net.IPv6len {
		host = ip.String() // where net.IP would print ::ffff:10.0.0.1 as 10.0.0.1
		if isZero(address[:12]) && !isZero(address[12:14]) {
			host = "::" + net.IP(address[12:]).String()
		}
	}
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}

// isIPv6Service reports whether the service is an IPv6 service.
func isIPv6Service(s *Service) bool {
	return s.AddressFamily == unix.AF_INET6 || s.AddressFamily == 0 && s.FWMark == 0 && s.Address.To4() == nil
}

// netmaskOption returns the option for a netmask, or "" for the default, which groups no
// clients.
func netmaskOption(s *Service) string {
	if isIPv6Service(s) {
		if s.Netmask == 0 || s.Netmask == 128 {
			return ""
		}
		return fmt.Sprintf(" -M %d", s.Netmask)
	}
	if s.Netmask == 0xFFFFFFFF {
		return ""
	}
	var mask [net.IPv4len]byte
	native.PutUint32(mask[:], s.Netmask)
	return " -M " + netip.AddrFrom4(mask).String()
}

// schedulerFlags returns the names that the scheduler flags have for the scheduler.
// ipvsadm reads flag-3 for "sh" and "mh", but does not write it.
func schedulerFlags(s *Service) (names []string) {
	flag1, flag2 := "flag-1", "flag-2"
	if s.SchedName == SourceHashing || s.SchedName == MaglevHashing {
		flag1, flag2 = s.SchedName+"-fallback", s.SchedName+"-port"
	}
	for _, flag := range []struct {
		bit  uint32
		name string
	}{{ServiceFlagSched1, flag1}, {ServiceFlagSched2, flag2}, {ServiceFlagSched3, "flag-3"}} {
		if s.Flags&flag.bit != 0 {
			names = append(names, flag.name)
		}
	}
	return names
}

// Rule returns the destination as ipvsadm -Sn writes it after -a and the service, such
// as "-r 10.1.0.1:8080 -m -w 1". Thresholds other than 0, which ipvsadm reads but does
// not write, follow as -x and -y.
func (d *Destination) Rule() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s -w %d", destinationName(d), forwardingOption(d.ConnectionFlags), d.Weight)
	if d.ConnectionFlags&ConnectionFlagFwdMask == ConnectionFlagTunnel {
		b.WriteString(tunnelOptions(d))
	}
	if d.UpperThreshold != 0 {
		fmt.Fprintf(&b, " -x %d", d.UpperThreshold)
	}
	if d.LowerThreshold != 0 {
		fmt.Fprintf(&b, " -y %d", d.LowerThreshold)
	}
	return b.String()
}

// destinationName returns the option that identifies the destination in its service.
func destinationName(d *Destination) string {
	return "-r " + addressPort(d.AddressFamily, d.Address, d.Port)
}

func forwardingOption(flags uint32) string {
	switch flags & ConnectionFlagFwdMask {
	case ConnectionFlagMasq:
		return "-m"
	case ConnectionFlagTunnel:
		return "-i"
	case ConnectionFlagDirectRoute:
		return "-g"
	}
	// ipvsadm has no options for the methods that are for the kernel's own use.
	return fmt.Sprintf("(forwarding method %d)", flags&ConnectionFlagFwdMask)
}

func tunnelOptions(d *Destination) string {
	checksum := " --tun-nocsum"
	switch {
	case d.TunnelFlags&TunnelFlagChecksum != 0:
		checksum = " --tun-csum"
	case d.TunnelFlags&TunnelFlagRemoteChecksum != 0:
		checksum = " --tun-remcsum"
	}
	switch d.TunnelType {
	case TunnelIPIP:
		return " --tun-type ipip"
	case TunnelGUE:
		return fmt.Sprintf(" --tun-type gue --tun-port %d%s", d.TunnelPort, checksum)
	case TunnelGRE:
		return " --tun-type gre" + checksum
	}
	return fmt.Sprintf(" (tunnel type %d)", d.TunnelType)
}

// notation returns a change as an ipvsadm command line without the program's name.
func notation(op string, s *Service, d *Destination) string {
	switch op {
	case opName(cmdNewService):
		return "-A " + s.Rule()
	case opName(cmdSetService):
		return "-E " + s.Rule()
	case opName(cmdDelService):
		return "-D " + serviceName(s)
	case opName(cmdNewDest):
		return "-a " + serviceName(s) + " " + d.Rule()
	case opName(cmdSetDest):
		return "-e " + serviceName(s) + " " + d.Rule()
	}
	return "-d " + serviceName(s) + " " + destinationName(d)
}
