package ipvs

import (
	"bufio"
	"errors"
	"math"
	"net"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseTable(t *testing.T) {
	for text, want := range parseTests() {
		got, err := ParseTable(strings.NewReader(text))
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %v", text, err)
			for _, e := range got {
				t.Errorf("got %+v %+v", e.Service, e.Destinations)
			}
		}
	}
}

func tcp(change ...func(*Service)) *Service {
	s := &Service{Address: net.IP{10, 0, 0, 1}, Protocol: unix.IPPROTO_TCP, Port: 80, AddressFamily: unix.AF_INET,
		SchedName: WeightedLeastConnection, Netmask: math.MaxUint32}
	for _, c := range change {
		c(s)
	}
	return s
}

func real8080(change ...func(*Destination)) *Destination {
	d := &Destination{Address: net.IP{10, 1, 0, 1}, Port: 8080, Weight: 1, AddressFamily: unix.AF_INET, ConnectionFlags: ConnectionFlagDirectRoute}
	for _, c := range change {
		c(d)
	}
	return d
}

// parseTests are texts and their tables: every option under its long and short name, in
// all the ways in which ipvsadm reads it; omitted options have ipvsadm's defaults.
func parseTests() map[string][]TableEntry {
	v6 := func(s *Service) {
		s.Address, s.AddressFamily, s.Netmask = net.ParseIP("2001:db8::1"), unix.AF_INET6, 128
	}
	mark := func(s *Service) { s.FWMark, s.Address, s.Protocol, s.Port = 7, nil, 0, 0 }
	persistent := func(s *Service) { s.Flags, s.Timeout = ServiceFlagPersistent, 360 }
	entry := func(s *Service, d ...*Destination) []TableEntry { return []TableEntry{{s, d}} }
	const service = "-A -t 10.0.0.1:80\n"
	return map[string][]TableEntry{
		"":                           {},
		"\n \t\n# -A\n  # text\n":    {},
		"ipvsadm\n":                  {},
		service:                      entry(tcp()),
		"-A -t 10.0.0.1:80":          entry(tcp()),
		"\t-A  -t\t10.0.0.1:80 \r\n": entry(tcp()),
		"ipvsadm -A -t 10.0.0.1:80":  entry(tcp()),
		"-At 10.0.0.1:80":            entry(tcp()),
		"-At10.0.0.1:80":             entry(tcp()),
		"-A -t=10.0.0.1:080":         entry(tcp()),
		"--add-service --tcp-service 10.0.0.1:80 --scheduler rr": entry(tcp(func(s *Service) { s.SchedName = "rr" })),
		"--add-service --tcp-service=10.0.0.1:80 --scheduler=rr": entry(tcp(func(s *Service) { s.SchedName = "rr" })),
		"-As rr -t 10.0.0.1:80":                                  entry(tcp(func(s *Service) { s.SchedName = "rr" })),
		"-A -u 10.0.0.1:80 -o":                                   entry(tcp(func(s *Service) { s.Protocol, s.Flags = unix.IPPROTO_UDP, ServiceFlagOnePacket })),
		"-A --udp-service 10.0.0.1:80 --ops":                     entry(tcp(func(s *Service) { s.Protocol, s.Flags = unix.IPPROTO_UDP, ServiceFlagOnePacket })),
		"-A --sctp-service 10.0.0.1:80":                          entry(tcp(func(s *Service) { s.Protocol = unix.IPPROTO_SCTP })),
		"-A -t [2001:db8::1]:80":                                 entry(tcp(v6)),
		"-A -t 2001:db8::1 -p":                                   entry(tcp(v6, persistent, func(s *Service) { s.Port = 0 })),
		"-A -t [::ffff:10.0.0.1]:80":                             entry(tcp(v6, func(s *Service) { s.Address = net.ParseIP("::ffff:10.0.0.1") })),
		"-A -f 7":                                                entry(tcp(mark)),
		"-A --fwmark-service 07":                                 entry(tcp(mark)),
		"-A -f 7 -6":                                             entry(tcp(v6, mark)),
		"-A -f 7 --ipv6":                                         entry(tcp(v6, mark)),
		"-A -f 4294967295":                                       entry(tcp(mark, func(s *Service) { s.FWMark = math.MaxUint32 })),
		"-A -f -1":                                               entry(tcp(mark, func(s *Service) { s.FWMark = math.MaxUint32 })),
		"-A -f -2147483648":                                      entry(tcp(mark, func(s *Service) { s.FWMark = 1 << 31 })),
		"-A -t 10.0.0.1 -p":                                      entry(tcp(persistent, func(s *Service) { s.Port = 0 })),
		"-A -t 10.0.0.1:0 -p 20":                                 entry(tcp(persistent, func(s *Service) { s.Port, s.Timeout = 0, 20 })),
		"-A -t 10.0.0.1:80 -p -s wlc":                            entry(tcp(persistent)),
		"-A -t 10.0.0.1:80 -p20":                                 entry(tcp(persistent, func(s *Service) { s.Timeout = 20 })),
		"-A -t 10.0.0.1:80 --persistent=20":                      entry(tcp(persistent, func(s *Service) { s.Timeout = 20 })),
		"-A -u 10.0.0.1:80 -op 20": entry(tcp(persistent, func(s *Service) {
			s.Protocol, s.Timeout, s.Flags = unix.IPPROTO_UDP, 20, ServiceFlagPersistent|ServiceFlagOnePacket
		})),
		"-A -t 10.0.0.1:80 -p 360 -M 255.255.0.0":    entry(tcp(persistent, func(s *Service) { s.Netmask = ipv4Mask(16) })),
		"-A -M 255.255.0.0 -p 360 -t 10.0.0.1:80":    entry(tcp(persistent, func(s *Service) { s.Netmask = ipv4Mask(16) })),
		"-A -t [2001:db8::1]:80 -p 360 --netmask 64": entry(tcp(v6, persistent, func(s *Service) { s.Netmask = 64 })),
		"-A -t 10.0.0.1:80 --pe sip":                 entry(tcp(func(s *Service) { s.PEName = "sip" })),
		"-A -t 10.0.0.1:80 -b flag-1,,flag-3":        entry(tcp(func(s *Service) { s.Flags = ServiceFlagSched1 | ServiceFlagSched3 })),
		"-A -t 10.0.0.1:80 -b sh-port -s sh":         entry(tcp(func(s *Service) { s.SchedName, s.Flags = "sh", ServiceFlagSHPort })),
		"-A -t 10.0.0.1:80 -s mh --sched-flags mh-fallback,flag-2,mh-port": entry(tcp(func(s *Service) {
			s.SchedName, s.Flags = "mh", ServiceFlagMHFallback|ServiceFlagMHPort
		})),
		"-A -t 10.0.0.1:80 -s sh -b ":                          entry(tcp(func(s *Service) { s.SchedName, s.Flags = "sh", ServiceFlagSched3 })),
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1:8080":         entry(tcp(), real8080()),
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1":              entry(tcp(), real8080(func(d *Destination) { d.Port = 80 })),
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1:8080 -g -w 0": entry(tcp(), real8080(func(d *Destination) { d.Weight = 0 })),
		service + "--add-server --tcp-service 10.0.0.1:80 --real-server 10.1.0.1:8080 --masquerading --weight 2147483647 --u-threshold 7 --l-threshold 3": entry(tcp(),
			real8080(func(d *Destination) {
				d.ConnectionFlags, d.Weight, d.UpperThreshold, d.LowerThreshold = ConnectionFlagMasq, math.MaxInt32, 7, 3
			})),
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1:8080 -m -x 7 -y 3": entry(tcp(),
			real8080(func(d *Destination) { d.ConnectionFlags, d.UpperThreshold, d.LowerThreshold = ConnectionFlagMasq, 7, 3 })),
		service + "-a -t 10.0.0.1:80 -r [2001:db8::2]:8080 --ipip": entry(tcp(), real8080(func(d *Destination) {
			d.Address, d.AddressFamily, d.ConnectionFlags = net.ParseIP("2001:db8::2"), unix.AF_INET6, ConnectionFlagTunnel
		})),
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1:8080 -i --tun-type gue --tun-port 6080 --tun-remcsum": entry(tcp(), real8080(func(d *Destination) {
			d.ConnectionFlags, d.TunnelType, d.TunnelPort, d.TunnelFlags = ConnectionFlagTunnel, TunnelGUE, 6080, TunnelFlagRemoteChecksum
		})),
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1:8080 -i --tun-csum --tun-type gre": entry(tcp(), real8080(func(d *Destination) {
			d.ConnectionFlags, d.TunnelType, d.TunnelFlags = ConnectionFlagTunnel, TunnelGRE, TunnelFlagChecksum
		})),
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1:8080 -i --tun-type gre --tun-nocsum": entry(tcp(), real8080(func(d *Destination) {
			d.ConnectionFlags, d.TunnelType = ConnectionFlagTunnel, TunnelGRE
		})),
		service + "-E -t 10.0.0.1:80 -s rr -p":                                                entry(tcp(persistent, func(s *Service) { s.SchedName = "rr" })),
		service + "-A -u 10.0.0.1:80\n-D -t 10.0.0.1:80":                                      entry(tcp(func(s *Service) { s.Protocol = unix.IPPROTO_UDP })),
		service + "-D -t 10.0.0.1:80\n" + service:                                             entry(tcp()),
		service + "-C\n-A -f 7":                                                               entry(tcp(mark)),
		service + "--clear\n" + service:                                                       entry(tcp()),
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1:8080\n-e -t 10.0.0.1:80 -r 10.1.0.1:8080 -m": entry(tcp(), real8080(func(d *Destination) { d.ConnectionFlags = 0 })),
		service + "-a -t 10.0.0.1:80 -r 10.1.0.2:8080\n-a -t 10.0.0.1:80 -r 10.1.0.1:8080\n-d -t 10.0.0.1:80 -r 10.1.0.2:8080": entry(tcp(), real8080()),
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1:8080\n-d -t 10.0.0.1:80 -r 10.1.0.1:8080":                                     entry(tcp()),
	}
}

// Each error names the line, the column of the word, and the mistake.
func TestParseTableErrors(t *testing.T) {
	const service = "-A -t 10.0.0.1:80\n"
	for text, want := range map[string]string{
		"-A -t localhost:80":                   `line 1, column 7: "localhost" is not an IP address (names are not looked up: save with ipvsadm -Sn)`,
		"-A -t 10.0.0.1:http":                  `line 1, column 16: "http" is not a port of 0 to 65535 (names are not looked up: save with ipvsadm -Sn)`,
		"-A -t [2001:db8::1]:http":             `line 1, column 21: "http" is not a port of 0 to 65535 (names are not looked up: save with ipvsadm -Sn)`,
		"-A -t 10.0.0.1:65536":                 `line 1, column 16: "65536" is not a port of 0 to 65535`,
		"-A -t 10.0.0.1:":                      `line 1, column 16: "" is not a port of 0 to 65535`,
		"-A -t 10.0.0.01:80":                   `line 1, column 7: "10.0.0.01" is not an IP address`,
		"-A -t :80":                            `line 1, column 7: "" is not an IP address`,
		"-A -t [10.0.0.1]:80":                  `line 1, column 7: "10.0.0.1" is not an IP address`,
		"-A -t [2001:db8::1]":                  `line 1, column 7: "[2001:db8::1]" is not an address such as [2001:db8::1]:80`,
		"-A -t [fe80::1%lo]:80":                `line 1, column 7: "fe80::1%lo" is not an IP address (names`,
		"-A -t 10.0.0.1":                       `line 1, column 7: without -p the service needs a port`,
		"\n#\n  -A  -t":                        `line 3, column 7: -t needs a value`,
		"-A -t 10.0.0.1:80 -s":                 `line 1, column 19: -s needs a value`,
		"-A":                                   `line 1, column 1: -A needs a service: -t, -u, --sctp-service or -f`,
		"-A -s rr":                             `line 1, column 1: -A needs a service`,
		"-t 10.0.0.1:80 -A":                    `line 1, column 1: -t comes before a command such as -A or -a`,
		"-A -a -t 10.0.0.1:80":                 `line 1, column 4: -a is a second command after -A`,
		"A":                                    `line 1, column 1: "A" is not an option`,
		"-":                                    `line 1, column 1: "-" is not an option`,
		"-A -- -t 10.0.0.1:80":                 `line 1, column 4: "--" is not an option`,
		service[:17] + " # no":                 `line 1, column 19: "#" is not an option`,
		service[:17] + " -op -q":               `line 1, column 24: "-q" is no option of a table`,
		service[:17] + " -oq":                  `line 1, column 21: "-q" is no option of a table`,
		service[:17] + " --foo=1":              `line 1, column 19: "--foo" is no option of a table`,
		service[:17] + " --ops=1":              `line 1, column 19: --ops has no value`,
		service[:17] + " -n":                   `line 1, column 20: "-n" is no option of a table`,
		"-Z":                                   `line 1, column 2: "-Z" is no option of a table`,
		"--start-daemon master":                `line 1, column 1: "--start-daemon" is no option of a table`,
		service[:17] + " -t 10.0.0.2:80":       `line 1, column 19: -t is one too many after -t`,
		service[:17] + " -u 10.0.0.2:80":       `line 1, column 19: -u is one too many after -t`,
		service[:17] + " -s rr -s rr":          `line 1, column 25: -s is one too many after -s`,
		service[:17] + " -6":                   `line 1, column 19: -6 goes with -f only`,
		service[:17] + " -w 1":                 `line 1, column 19: -w does not go with -A`,
		"-D -t 10.0.0.1:80 -s rr":              `line 1, column 19: -s does not go with -D`,
		"-C -t 10.0.0.1:80":                    `line 1, column 4: -t does not go with -C`,
		service[:17] + " -p 4294967296":        `line 1, column 22: the value of -p, "4294967296", is not a number of 0 to 4294967295`,
		service[:17] + " -p 0x10":              `line 1, column 22: the value of -p, "0x10"`,
		service[:17] + " -p=":                  `line 1, column 22: the value of -p, ""`,
		service[:17] + " -M 24":                `line 1, column 22: "24" is not a netmask such as 255.255.255.0`,
		service[:17] + " -M ::":                `line 1, column 22: "::" is not a netmask`,
		"-A -t [::1]:80 -M 129":                `line 1, column 19: the value of -M, "129", is not a number of 0 to 128`,
		"-A -t [::1]:80 -M 0":                  `line 1, column 19: the prefix length of -M is not in 1..128`,
		"-A -f 0":                              `line 1, column 7: "0" is not a firewall mark of 1 to 4294967295`,
		"-A -f 4294967296":                     `line 1, column 7: "4294967296" is not a firewall mark`,
		"-A -f -2147483649":                    `line 1, column 7: "-2147483649" is not a firewall mark`,
		"-A -f 0x10":                           `line 1, column 7: "0x10" is not a firewall mark`,
		service[:17] + " -s sixteencharacters": `line 1, column 22: scheduler "sixteencharacters" has 17 bytes, at most 15 are possible`,
		service[:17] + " -s r\x00":             `line 1, column 22: scheduler "r\x00" is not a word for ipvsadm`,
		service[:17] + " --pe -p":              `line 1, column 24: persistence engine "-p" is not a word for ipvsadm`,
		service[:17] + " -b":                   `line 1, column 19: -b needs a value`,
		service[:17] + " -b sh-port":           `line 1, column 22: "sh-port" is not a flag of scheduler wlc`,
		service[:17] + " -b wlc-port":          `line 1, column 22: "wlc-port" is not a flag of scheduler wlc`,
		service[:17] + " -s mh -b flag-1,x":    `line 1, column 28: "x" is not a flag of scheduler mh`,
		service + service:                      `line 2, column 1: service -t 10.0.0.1:80 is there already`,
		"-E -t 10.0.0.1:80":                    `line 1, column 1: there is no service -t 10.0.0.1:80 before`,
		"-a -t 10.0.0.1:80 -r 10.1.0.1":        `line 1, column 1: there is no service -t 10.0.0.1:80 before`,
		service + "-a -t 10.0.0.1:80":          `line 2, column 1: -a needs a destination: -r`,
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1\n-a -t 10.0.0.1:80 -r 10.1.0.1:80":         `line 3, column 1: destination -r 10.1.0.1:80 is there already`,
		service + "-e -t 10.0.0.1:80 -r 10.1.0.1":                                           `line 2, column 1: there is no destination -r 10.1.0.1:80 before`,
		service + "-d -t 10.0.0.1:80 -r 10.1.0.1 -m":                                        `line 2, column 31: -m does not go with -d`,
		service + "-a -t 10.0.0.1:80 -r web:80":                                             `line 2, column 22: "web" is not an IP address (names`,
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1 -m -i":                                     `line 2, column 34: -i is one too many after -m`,
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1 -w -1":                                     `line 2, column 34: the value of -w, "-1", is not a number of 0 to 2147483647`,
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1 -w 2147483648":                             `line 2, column 34: the value of -w`,
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1 -m --tun-type gue":                         `line 2, column 34: --tun-type goes with -i only`,
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1 -m --tun-csum":                             `line 2, column 34: --tun-csum goes with -i only`,
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1 -i --tun-csum":                             `line 2, column 34: --tun-csum goes with --tun-type gue or gre only`,
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1 -i --tun-port 1":                           `line 2, column 34: --tun-port goes with --tun-type gue only`,
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1 -i --tun-type gue":                         `line 2, column 34: --tun-type gue needs --tun-port, 1 to 65535`,
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1 -i --tun-type gue --tun-port 0":            `line 2, column 34: --tun-type gue needs --tun-port`,
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1 -i --tun-type vxlan":                       `line 2, column 45: "vxlan" is not a tunnel type: ipip, gue or gre`,
		service + "-a -t 10.0.0.1:80 -r 10.1.0.1 -i --tun-type gre --tun-csum --tun-nocsum": `line 2, column 60: --tun-nocsum is one too many after --tun-csum`,
		"\n" + strings.Repeat("x", bufio.MaxScanTokenSize+1):                                `line 2, column 1: bufio.Scanner: token too long`,
	} {
		got, err := ParseTable(strings.NewReader(text))
		if err == nil || !strings.HasPrefix(err.Error(), "ipvs: "+want) || got != nil {
			t.Errorf("%.100q\ngot  %v\nwant %s", text, err, want)
		}
	}
	broken := errors.New("broken")
	if _, err := ParseTable(failingReader{broken}); !errors.Is(err, broken) {
		t.Errorf("%v, want the error of reading", err)
	}
}

type failingReader struct{ err error }

func (r failingReader) Read([]byte) (int, error) { return 0, r.err }

func FuzzParseTable(f *testing.F) {
	f.Add(savedTable)
	f.Add("# comment\nipvsadm -At10.0.0.1:80 -p\n--add-server --tcp-service=10.0.0.1:80 -r 10.1.0.1 -gw7\n-E -t 10.0.0.1:80 -s sh -b \n-C\n")
	f.Add("-A -f -1 -6 -M 64 -op 3\n-a -f 4294967295 -6 -r ::1 -i --tun-csum --tun-type gre\n-e -f 4294967295 -6 -r [::1]:0\n-d -f -1 -6 -r ::1\n-D -f -1 -6\n")
	f.Add("-A -t 10.0.0.1:80\n-a -t 10.0.0.1:80 -r 10.1.0.1\n-d -t 10.0.0.1:80 -r 10.1.0.1\n")
	f.Fuzz(func(t *testing.T, text string) {
		table, err := ParseTable(strings.NewReader(text))
		if err != nil {
			if table != nil || !strings.HasPrefix(err.Error(), "ipvs: line ") {
				t.Errorf("%q: %v, %v", text, table, err)
			}
			return
		}
		if changes, err := Diff(table, table); err != nil || changes.Len() > 0 {
			t.Errorf("%q: %v, %v", text, changes, err)
		}
		var written strings.Builder
		if err := WriteTable(&written, table); err != nil {
			return // -Sn writes more than -R reads
		}
		again, err := ParseTable(strings.NewReader(written.String()))
		if err != nil || !reflect.DeepEqual(table, again) {
			t.Errorf("%q\nwritten as\n%s: %v", text, &written, err)
		}
	})
}

// A name is recognized by a letter, including the first and the last one of each case.
func TestNamesHint(t *testing.T) {
	for _, text := range []string{"a", "z", "A", "Z", "10.0.0.1m"} {
		if namesHint(text) == "" {
			t.Errorf("%q is not taken for a name", text)
		}
	}
	for _, text := range []string{"", "10.0.0.256", "[::1]", "`", "{", "@", "99999"} {
		if hint := namesHint(text); hint != "" {
			t.Errorf("%q is taken for a name: %s", text, hint)
		}
	}
}
