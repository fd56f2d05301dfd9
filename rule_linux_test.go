package ipvs

import (
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

// Services in ipvsadm's notation.
func TestServiceRules(t *testing.T) {
	v4 := Service{AddressFamily: unix.AF_INET, Address: net.IP{10, 0, 0, 1}, Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: "rr", Netmask: 0xFFFFFFFF}
	v6 := Service{AddressFamily: unix.AF_INET6, Address: net.ParseIP("2001:db8::1"), Protocol: unix.IPPROTO_UDP, Port: 53, SchedName: "wlc", Netmask: 128}
	with := func(s Service, change func(s *Service)) *Service {
		change(&s)
		return &s
	}
	persistent := func(netmask uint32) func(s *Service) {
		return func(s *Service) { s.Flags, s.Timeout, s.Netmask = ServiceFlagPersistent, 300, netmask }
	}
	at := func(address string) func(s *Service) { return func(s *Service) { s.Address = net.ParseIP(address) } }
	for _, c := range []struct {
		s    *Service
		want string
	}{
		{&v4, "-t 10.0.0.1:80 -s rr"},
		{&v6, "-u [2001:db8::1]:53 -s wlc"},
		{with(v4, func(s *Service) { s.Protocol = unix.IPPROTO_SCTP }), "--sctp-service 10.0.0.1:80 -s rr"},
		{with(v4, func(s *Service) { s.Protocol = unix.IPPROTO_AH }), "(protocol 51) 10.0.0.1:80 -s rr"},
		{&Service{FWMark: 7, AddressFamily: unix.AF_INET, SchedName: "rr"}, "-f 7 -s rr"},
		{&Service{FWMark: 7, AddressFamily: unix.AF_INET6, SchedName: "rr"}, "-f 7 -6 -s rr"},

		{with(v4, persistent(0xFFFFFFFF)), "-t 10.0.0.1:80 -s rr -p 300"},
		{with(v4, persistent(ipv4Mask(24))), "-t 10.0.0.1:80 -s rr -p 300 -M 255.255.255.0"},
		{with(v4, persistent(0)), "-t 10.0.0.1:80 -s rr -p 300 -M 0.0.0.0"},
		{with(v4, persistent(128)), "-t 10.0.0.1:80 -s rr -p 300 -M " + net.IP(native.AppendUint32(nil, 128)).String()},
		{with(v6, persistent(128)), "-u [2001:db8::1]:53 -s wlc -p 300"},
		{with(v6, persistent(0)), "-u [2001:db8::1]:53 -s wlc -p 300"},
		{with(v6, persistent(64)), "-u [2001:db8::1]:53 -s wlc -p 300 -M 64"},
		// Where no family is given the address says it.
		{with(v6, func(s *Service) { persistent(64)(s); s.AddressFamily = 0 }), "-u [2001:db8::1]:53 -s wlc -p 300 -M 64"},
		{with(v4, func(s *Service) { persistent(ipv4Mask(8))(s); s.AddressFamily = 0 }), "-t 10.0.0.1:80 -s rr -p 300 -M 255.0.0.0"},
		{with(Service{FWMark: 7, SchedName: "rr"}, persistent(ipv4Mask(8))), "-f 7 -s rr -p 300 -M 255.0.0.0"},

		{with(v4, func(s *Service) { s.PEName, s.Flags = "sip", ServiceFlagOnePacket }), "-t 10.0.0.1:80 -s rr --pe sip -o"},
		{with(v4, func(s *Service) { s.Flags = ServiceFlagSched1 | ServiceFlagSched2 | ServiceFlagSched3 }), "-t 10.0.0.1:80 -s rr -b flag-1,flag-2,flag-3"},
		{with(v4, func(s *Service) { s.SchedName, s.Flags = SourceHashing, ServiceFlagSched1 }), "-t 10.0.0.1:80 -s sh -b sh-fallback"},
		{with(v4, func(s *Service) { s.SchedName, s.Flags = MaglevHashing, ServiceFlagSched2|ServiceFlagSched3 }), "-t 10.0.0.1:80 -s mh -b mh-port,flag-3"},

		// As inet_ntop writes them.
		{with(v6, at("::ffff:10.0.0.1")), "-u [::ffff:10.0.0.1]:53 -s wlc"},
		{with(v6, at("::10.0.0.1")), "-u [::10.0.0.1]:53 -s wlc"},
		{with(v6, at("::1.0.0.0")), "-u [::1.0.0.0]:53 -s wlc"},
		{with(v6, at("::0.1.0.0")), "-u [::0.1.0.0]:53 -s wlc"},
		{with(v6, at("::0.0.1.2")), "-u [::102]:53 -s wlc"},
		{with(v6, at("::1")), "-u [::1]:53 -s wlc"},
		{with(v6, at("::")), "-u [::]:53 -s wlc"},
		{with(v6, at("0:0:0:0:0:1:a00:1")), "-u [::1:a00:1]:53 -s wlc"},
		{with(v6, at("1::a00:1")), "-u [1::a00:1]:53 -s wlc"},
		// A 16-byte IPv4 address is one.
		{with(v4, at("10.0.0.1")), "-t 10.0.0.1:80 -s rr"},
	} {
		if got := c.s.Rule(); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}

// Destinations in ipvsadm's notation.
func TestDestinationRules(t *testing.T) {
	for _, c := range []struct {
		d    Destination
		want string
	}{
		{Destination{ConnectionFlags: ConnectionFlagMasq, Weight: 3}, " -m -w 3"},
		{Destination{ConnectionFlags: ConnectionFlagDirectRoute | 0x100, Weight: 3}, " -g -w 3"},
		{Destination{ConnectionFlags: ConnectionFlagLocalNode}, " (forwarding method 1) -w 0"},
		{Destination{ConnectionFlags: ConnFwdBypass}, " (forwarding method 4) -w 0"},
		{Destination{ConnectionFlags: ConnectionFlagMasq, TunnelType: TunnelGUE, TunnelPort: 6080}, " -m -w 0"},
		{Destination{ConnectionFlags: ConnectionFlagTunnel}, " -i -w 0 --tun-type ipip"},
		{Destination{ConnectionFlags: ConnectionFlagTunnel, TunnelFlags: TunnelFlagChecksum}, " -i -w 0 --tun-type ipip"},
		{Destination{ConnectionFlags: ConnectionFlagTunnel, TunnelType: TunnelGUE, TunnelPort: 6080}, " -i -w 0 --tun-type gue --tun-port 6080 --tun-nocsum"},
		{Destination{ConnectionFlags: ConnectionFlagTunnel, TunnelType: TunnelGUE, TunnelPort: 6080, TunnelFlags: TunnelFlagChecksum}, " -i -w 0 --tun-type gue --tun-port 6080 --tun-csum"},
		{Destination{ConnectionFlags: ConnectionFlagTunnel, TunnelType: TunnelGUE, TunnelPort: 6080, TunnelFlags: TunnelFlagRemoteChecksum}, " -i -w 0 --tun-type gue --tun-port 6080 --tun-remcsum"},
		{Destination{ConnectionFlags: ConnectionFlagTunnel, TunnelType: TunnelGRE}, " -i -w 0 --tun-type gre --tun-nocsum"},
		{Destination{ConnectionFlags: ConnectionFlagTunnel, TunnelType: TunnelGRE, TunnelFlags: TunnelFlagChecksum}, " -i -w 0 --tun-type gre --tun-csum"},
		{Destination{ConnectionFlags: ConnectionFlagTunnel, TunnelType: 9}, " -i -w 0 (tunnel type 9)"},
		{Destination{Weight: 1, UpperThreshold: 1}, " -m -w 1 -x 1"},
		{Destination{Weight: 1, UpperThreshold: 20, LowerThreshold: 10}, " -m -w 1 -x 20 -y 10"},
		{Destination{Weight: 1, LowerThreshold: 1}, " -m -w 1 -y 1"},
	} {
		c.d.AddressFamily, c.d.Address, c.d.Port = unix.AF_INET, net.IP{10, 1, 0, 1}, 8080
		if got, want := c.d.Rule(), "-r 10.1.0.1:8080"+c.want; got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}
