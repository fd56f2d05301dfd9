package ipvs

import (
	"net"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// ipvsadm -R makes the table of each text that ParseTable returns, except for the
// differences in its doc comment.
func TestKernelParseTableAsRestored(t *testing.T) {
	i, ns := newKernelHandle(t)
	ipvsadm(t, ns, "-Ln")
	differs := func(text string) bool {
		return strings.Contains(text, "#") || // a comment ends ipvsadm -R
			strings.Contains(text, "-f -") || strings.HasSuffix(text, "-b ") || // only -Sn writes these
			strings.HasPrefix(text, "-A -M") || // forgotten where it comes before -t, of IPv6
			text == "ipvsadm\n" || strings.TrimSpace(text) == "" // lists the table
	}
	portOfItsOwn := func(table []TableEntry) bool {
		for _, e := range table {
			for _, d := range e.Destinations {
				if d.ConnectionFlags != ConnectionFlagMasq && d.Port != e.Service.Port {
					return true
				}
			}
		}
		return false
	}
	compared := 0
	for text, want := range parseTests() {
		if differs(text) || portOfItsOwn(want) || strings.Contains(text, "\n-e ") || strings.Contains(text, "\n-d ") { // of such a port, too
			continue
		}
		compared++
		must(t, i.Flush())
		var out []byte
		var err error
		within(t, ns, func() {
			c := exec.Command("ipvsadm", "-R")
			c.Stdin = strings.NewReader(text)
			out, err = c.CombinedOutput()
		})
		if err != nil || len(out) > 0 {
			t.Errorf("%q: ipvsadm -R: %v: %s", text, err, out)
			continue
		}
		var changes *Batch
		if !eventually(func() bool { // kernels from 7 on list a growing table incompletely
			changes, err = Diff(mustGet(i.GetTable())(t), want)
			return err == nil && changes.Len() == 0
		}) {
			t.Errorf("%q: to be what ParseTable reads, what ipvsadm -R made needs\n%v%v", text, changes, err)
		}
	}
	if compared < 35 {
		t.Errorf("only %d texts were compared", compared)
	}
}

// Restoring a saved table with Reconcile does not cut the connections of destinations
// that stay, and deletes those that were added since.
func TestKernelRestore(t *testing.T) {
	n := newNetwork(t)
	web := &Service{Address: net.ParseIP(virtual4), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin, Netmask: 0xFFFFFFFF}
	must(t, n.ipvs.NewService(web))
	must(t, n.ipvs.NewDestination(web, &Destination{Address: net.ParseIP(real4), Port: 8080, Weight: 1}))
	serveTCP(t, n.real, net.JoinHostPort(real4, "8080"), "answer")
	c := dial(t, n.client, "tcp", client4, net.JoinHostPort(virtual4, "80"))
	ask(t, c, "question\n", "answer\n")
	saved := ipvsadm(t, n.director, "-Sn")

	web.SchedName = WeightedRoundRobin
	must(t, n.ipvs.UpdateService(web))
	must(t, n.ipvs.NewDestination(web, &Destination{Address: net.ParseIP(client4), Port: 8080, Weight: 1}))
	must(t, n.ipvs.NewService(&someService))
	table := mustGet(ParseTable(strings.NewReader(saved)))(t)
	eventually(func() bool { return len(mustGet(n.ipvs.GetServices())(t)) == 2 }) // as above
	changes, err := (&Reconciler{Handle: n.ipvs}).Reconcile(table)
	if err != nil || changes.Total() != 3 {
		t.Errorf("%+v, %v, want 3 changes", changes, err)
	}
	if restored := ipvsadm(t, n.director, "-Sn"); restored != saved {
		t.Errorf("restored\n%swant\n%s", restored, saved)
	}
	ask(t, c, "question\n", "answer\n")
}
