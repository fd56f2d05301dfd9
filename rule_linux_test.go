package ipvs

import (
	"net"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A name that is not a word cannot become a second command or another option in printed
// ipvsadm commands.
func TestRuleQuotesNames(t *testing.T) {
	for name, want := range map[string]string{
		"rr":     "rr",
		"":       "",
		"rr\n-C": `"rr\n-C"`,
		"rr -C":  `"rr -C"`,
		"-C":     `"-C"`,
		"ü":      `"ü"`,
		"a\x7f":  `"a\x7f"`,
	} {
		s := Service{Address: net.IPv4(10, 0, 0, 1), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: name}
		if got := s.Rule(); got != "-t 10.0.0.1:80 -s "+want {
			t.Errorf("scheduler %q: %q", name, got)
		}
		s.SchedName, s.PEName = RoundRobin, name
		engine := " --pe " + want
		if name == "" {
			engine = ""
		}
		if got := s.Rule(); got != "-t 10.0.0.1:80 -s rr"+engine {
			t.Errorf("engine %q: %q", name, got)
		}
		var b Batch
		b.NewService(&s)
		if got := b.String(); strings.Count(got, "\n") != 1 {
			t.Errorf("engine %q: %q", name, got)
		}
	}
}
