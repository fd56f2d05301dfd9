package ipvs

import (
	"bytes"
	"errors"
	"net"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Nothing is lost in either direction.
func TestWriteTable(t *testing.T) {
	table, err := ParseTable(strings.NewReader(savedTable))
	must(t, err)
	var text strings.Builder
	must(t, WriteTable(&text, table))
	if text.String() != savedTable {
		t.Errorf("got\n%swant\n%s", text.String(), savedTable)
	}
	// As the kernel has it.
	for _, e := range table {
		e.Service.Flags |= ServiceFlagHashed
		e.Service.Stats.Connections = 7
		for _, d := range e.Destinations {
			d.ConnectionFlags |= 0x100
			d.ActiveConnections = 7
		}
	}
	text.Reset()
	must(t, WriteTable(&text, table))
	if text.String() != savedTable {
		t.Errorf("got\n%swant\n%s", text.String(), savedTable)
	}
	must(t, WriteTable(failingWriter{}, nil))
	if err := WriteTable(failingWriter{}, table); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("%v, want the error of writing", err)
	}
}

// savedTable is what ipvsadm -Sn writes, each line as WriteTable writes it.
const savedTable = `-A -t 10.0.0.1:80 -s wrr -p 300 -M 255.255.255.0
-a -t 10.0.0.1:80 -r 10.1.0.1:8080 -m -w 1
-a -t 10.0.0.1:80 -r 10.1.0.2:8080 -m -w 0 -x 2147483647 -y 10
-a -t 10.0.0.1:80 -r [2001:db8::2]:80 -i -w 1 --tun-type gue --tun-port 6080 --tun-remcsum
-A -u [2001:db8::1]:5060 -s mh -p 2678400 -M 64 --pe sip -o -b mh-fallback,mh-port,flag-3
-a -u [2001:db8::1]:5060 -r [2001:db8::3]:5060 -g -w 2147483647
-A --sctp-service 10.0.0.1:0 -s sh -p 1 -b sh-port
-A -f 4294967295 -6 -s rr
-a -f 4294967295 -6 -r [::ffff:10.0.0.1]:0 -i -w 1 --tun-type gre --tun-csum
-A -f 1 -s rr -M 255.0.0.0
-a -f 1 -r 10.1.0.1:0 -i -w 1 --tun-type ipip
`

type failingWriter struct{}

func (failingWriter) Write(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	return 0, errors.ErrUnsupported
}

// An entry that ipvsadm cannot express is an error that names it, and nothing is
// written.
func TestWriteTableErrors(t *testing.T) {
	udp := func(s *Service) { s.Protocol = unix.IPPROTO_UDP }
	for want, e := range map[string]TableEntry{
		"the service is nil (entry 1 of the table)":                                                                    {},
		"the service has no address (entry 1 of the table)":                                                            {Service: &Service{}},
		"service (protocol 47) 10.0.0.1:80: ipvsadm has no option for protocol 47":                                     {Service: tcp(func(s *Service) { s.Protocol = 47 })},
		"service -t 10.0.0.1:0: ipvsadm takes port 0 with persistence only":                                            {Service: tcp(func(s *Service) { s.Port = 0 })},
		"has no name for the flags 0xc0":                                                                               {Service: tcp(func(s *Service) { s.Flags = 0xc0 | ServiceFlagHashed })},
		"takes one-packet scheduling of UDP only":                                                                      {Service: tcp(func(s *Service) { s.Flags = ServiceFlagOnePacket })},
		"takes a persistence of 1 to 2678400 seconds, not 0":                                                           {Service: tcp(func(s *Service) { s.Flags = ServiceFlagPersistent })},
		"takes a persistence of 1 to 2678400 seconds, not 2678401":                                                     {Service: tcp(func(s *Service) { s.Flags, s.Timeout = ServiceFlagPersistent, 2678401 })},
		"no option for a timeout, here 7, without persistence":                                                         {Service: tcp(func(s *Service) { s.Timeout = 7 })},
		"a prefix of 129 bits is not in 1..128":                                                                        {Service: &Service{FWMark: 1, AddressFamily: unix.AF_INET6, Netmask: 129, SchedName: "rr"}},
		"there is no scheduler":                                                                                        {Service: tcp(func(s *Service) { s.SchedName = "" })},
		`scheduler "r r" is not a word`:                                                                                {Service: tcp(func(s *Service) { s.SchedName = "r r" })},
		`persistence engine "-p" is not a word`:                                                                        {Service: tcp(func(s *Service) { s.PEName = "-p" })},
		"-t 10.0.0.2:80 occurs twice":                                                                                  {Service: tcp(func(s *Service) { s.Address = net.IPv4(10, 0, 0, 2) })},
		"the destination is nil (of service -u 10.0.0.1:80)":                                                           {tcp(udp), []*Destination{nil}},
		"destination -r 10.1.0.1:80 of service -u 10.0.0.1:80 occurs twice":                                            {tcp(udp), []*Destination{real8080(func(d *Destination) { d.Port = 80 }), real8080(func(d *Destination) { d.Port = 80 })}},
		"-r 10.1.0.1:8080 of service -u 10.0.0.1:80: without masquerading ipvsadm takes no port but the service's, 80": {tcp(udp), []*Destination{real8080()}},
		"no option for forwarding method 1":                                                                            {tcp(udp), []*Destination{real8080(func(d *Destination) { d.ConnectionFlags = ConnectionFlagLocalNode })}},
		"no option for forwarding method 4":                                                                            {tcp(udp), []*Destination{real8080(func(d *Destination) { d.ConnectionFlags = ConnFwdBypass })}},
		"weight -1 is not in 0..2147483647":                                                                            {tcp(udp), []*Destination{real8080(func(d *Destination) { d.ConnectionFlags, d.Weight = 0, -1 })}},
		"thresholds up to 2147483647, not 2147483648 and 0":                                                            {tcp(udp), []*Destination{real8080(func(d *Destination) { d.ConnectionFlags, d.UpperThreshold = 0, 1<<31 })}},
		"tunnel type 0 with port 1 and flags 0x0, forwarding method 0":                                                 {tcp(udp), []*Destination{real8080(func(d *Destination) { d.ConnectionFlags, d.TunnelPort = 0, 1 })}},
		"tunnel type 0 with port 80 and flags 0x0, forwarding method 2": {tcp(udp), []*Destination{real8080(func(d *Destination) {
			d.Port, d.ConnectionFlags, d.TunnelPort = 80, ConnectionFlagTunnel, 80
		})}},
		"tunnel type 1 with port 0": {tcp(udp), []*Destination{real8080(func(d *Destination) { d.Port, d.ConnectionFlags, d.TunnelType = 80, ConnectionFlagTunnel, TunnelGUE })}},
		"tunnel type 1 with port 1 and flags 0x3": {tcp(udp), []*Destination{real8080(func(d *Destination) {
			d.Port, d.ConnectionFlags, d.TunnelType, d.TunnelPort, d.TunnelFlags = 80, ConnectionFlagTunnel, TunnelGUE, 1, 3
		})}},
		"tunnel type 2 with port 0 and flags 0x2": {tcp(udp), []*Destination{real8080(func(d *Destination) {
			d.Port, d.ConnectionFlags, d.TunnelType, d.TunnelFlags = 80, ConnectionFlagTunnel, TunnelGRE, TunnelFlagRemoteChecksum
		})}},
		"the lower threshold 3 is above the upper one, 2": {tcp(udp), []*Destination{real8080(func(d *Destination) {
			d.ConnectionFlags, d.UpperThreshold, d.LowerThreshold = 0, 2, 3
		})}},
		"-r 224.0.0.1:8080 of service -u 10.0.0.1:80: the kernel takes no address that is not unicast": {tcp(udp), []*Destination{real8080(func(d *Destination) {
			d.ConnectionFlags, d.Address = 0, net.IPv4(224, 0, 0, 1)
		})}},
		"-r 0.0.0.0:8080 of service -u 10.0.0.1:80: the kernel takes no address that is not unicast": {tcp(udp), []*Destination{real8080(func(d *Destination) {
			d.ConnectionFlags, d.Address = 0, net.IPv4zero
		})}},
		"only a tunnel reaches a destination of another address family": {tcp(udp), []*Destination{real8080(func(d *Destination) {
			d.ConnectionFlags, d.AddressFamily, d.Address = 0, unix.AF_INET6, net.ParseIP("2001:db8::1")
		})}},
		"tunnel type 9": {tcp(udp), []*Destination{real8080(func(d *Destination) { d.Port, d.ConnectionFlags, d.TunnelType = 80, ConnectionFlagTunnel, 9 })}},
	} {
		good := tcp(func(s *Service) { s.Address = net.IP{10, 0, 0, 2} })
		var text bytes.Buffer
		// With another that cannot be expressed: both are named.
		bad := tcp(func(s *Service) { s.FWMark, s.Timeout = 99, 1 })
		err := WriteTable(&text, []TableEntry{{Service: good}, e, {Service: bad}})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "ipvs: service -f 99: ") || text.Len() > 0 {
			t.Errorf("%v, want %s\n%s", err, want, &text)
		}
	}
}
