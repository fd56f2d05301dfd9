// Demo shows the ipvs package balancing real connections on a real kernel, and checks every number it prints.
//
// As root, it builds a small network in network namespaces that vanish with the program: a client, a director
// that runs IPVS, and three real servers. With the library it creates virtual services of several kinds, sends
// connections through them, and compares the answers with the scheduler's promise, with the kernel's counters,
// and with the output of ipvsadm.
//
// It needs a kernel with IPVS, and the programs ipvsadm and iptables.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/moby/ipvs"
)

const (
	timeLimit = 120 * time.Second // for the whole program

	// The kernel sums up its per-CPU counters every two seconds; until then a reader gets the previous sums.
	counterDelay = 10 * time.Second
)

func main() {
	time.AfterFunc(timeLimit, func() {
		fmt.Printf("\ndemo: gave up after %v\n", timeLimit)
		os.Exit(1)
	})
	d := &demo{client: client{lastPort: 20000}}
	if err := d.run(); err != nil {
		d.check(false, "%v", err)
	}
	if len(d.wrong) > 0 {
		fmt.Printf("\ndemo: %d of %d checks failed:\n  - %s\n", len(d.wrong), d.checks, strings.Join(d.wrong, "\n  - "))
		os.Exit(1)
	}
	fmt.Printf("\ndemo: all %d checks passed\n", d.checks)
}

type demo struct {
	network  *testNetwork
	client   client
	handle   *ipvs.Handle
	services []*virtualService

	weighted, persistent *virtualService // two of the services

	checks int
	wrong  []string // the messages of the failed checks
}

// check counts a check and returns how to print its outcome.
func (d *demo) check(ok bool, wrong string, args ...any) string {
	d.checks++
	if ok {
		return "ok"
	}
	d.wrong = append(d.wrong, fmt.Sprintf(wrong, args...))
	return "WRONG"
}

// run is the demo. An error ends it at once; after failed checks it still shows the output of ipvsadm.
func (d *demo) run() error {
	for _, program := range []string{"ipvsadm", "iptables"} {
		if _, err := exec.LookPath(program); err != nil {
			return err
		}
	}
	fmt.Print(picture)
	var err error
	if d.network, err = buildNetwork(); err != nil {
		return err
	}
	if err := startRealServers(d.network); err != nil {
		return err
	}
	if err := setMark(d.network.director); err != nil {
		return err
	}
	if d.handle, err = ipvs.New(d.network.director.path()); err != nil {
		return fmt.Errorf("open IPVS in the director's namespace: %w", err)
	}
	defer d.handle.Close()
	d.weighted, d.persistent = weightedService(virtualAddress4), persistentService()
	d.services = []*virtualService{
		d.weighted, weightedService(virtualAddress6),
		udpService(virtualAddress4), udpService(virtualAddress6),
		d.persistent, firewallMarkService(),
	}
	for _, v := range d.services {
		if err := v.create(d.handle); err != nil {
			return err
		}
	}

	// Each step builds on the previous one.
	for _, step := range []func() error{d.showTable, d.showShares, d.showDraining, d.showRestored} {
		if err := step(); err != nil {
			return err
		}
		if len(d.wrong) > 0 {
			break
		}
	}
	return d.showIpvsadm()
}

// showTable reads the table back and compares it with the one that was written.
func (d *demo) showTable() error {
	heading("1. The table, as the library reads it")
	read, err := d.handle.GetServices()
	if err != nil {
		return fmt.Errorf("read the services: %w", err)
	}
	d.check(len(read) == len(d.services), "%d services read, want %d", len(read), len(d.services))
	printTableHead()
	for _, v := range d.services {
		name := serviceName(&v.Service)
		at := slices.IndexFunc(read, func(s *ipvs.Service) bool { return serviceName(s) == name })
		if at < 0 {
			d.check(false, "%s is not among the services read", name)
			continue
		}
		destinations, err := v.destinations(d.handle)
		if err != nil {
			return err
		}
		printTableEntry(read[at], destinations[:])

		got, want := serviceSettings(read[at]), serviceSettings(&v.Service)
		d.check(got == want, "%s: read %s, written %s", name, got, want)
		for i, destination := range destinations {
			got, want := destinationSettings(destination), destinationSettings(v.destination(i))
			d.check(got == want, "%s: %s: read %s, written %s", name, realServers[i].name, got, want)
		}
	}
	return nil
}

// serviceSettings are the settings of a service, without its identity, in a form to compare.
func serviceSettings(s *ipvs.Service) string {
	return fmt.Sprintf("{family %d, scheduler %s, flags %#x, timeout %d s, netmask %#x, engine %q}", s.AddressFamily,
		s.SchedName, s.Flags&^serviceHashed, s.Timeout, s.Netmask, s.PEName)
}

// destinationSettings are the settings of a destination, without its identity, in a form to compare.
func destinationSettings(d *ipvs.Destination) string {
	return fmt.Sprintf("{family %d, weight %d, forwarding %#x, thresholds %d and %d}", d.AddressFamily, d.Weight,
		d.ConnectionFlags&ipvs.ConnectionFlagFwdMask, d.UpperThreshold, d.LowerThreshold)
}

// showShares sends connections through every virtual service.
func (d *demo) showShares() error {
	heading("2. Who answered: 60 connections to each virtual service")
	fmt.Print(sharesLegend)
	rounds, err := d.measure(60, d.services...)
	if err != nil {
		return err
	}
	fmt.Println("\n  Persistence: the real server that each client stays with")
	used := map[int]bool{}
	for _, address := range d.persistent.clients {
		if home, known := d.persistent.homes[address]; known {
			used[home] = true
			fmt.Printf("    client %-12s  %s\n", address, realServers[home].name)
		}
	}
	d.check(len(used) > 1, "%s: the clients do not have different real servers", serviceName(&d.persistent.Service))

	fmt.Println("\n  Firewall mark: two ports, one virtual service, so one turn; its first connections")
	marked := rounds[slices.IndexFunc(rounds, func(r *round) bool { return r.service.FWMark != 0 })]
	for n, real := range marked.answers[:min(6, len(marked.answers))] {
		fmt.Printf("    port %d  %s\n", marked.service.targets[n%len(marked.service.targets)].Port(), realServers[real].name)
	}
	return nil
}

// showDraining sets weights to 0.
func (d *demo) showDraining() error {
	heading("3. Draining: weight 0 keeps new connections away, but not clients that persistence knows")
	return d.reweigh(0, 0)
}

// showRestored gives the drained real servers their weights back.
func (d *demo) showRestored() error {
	heading("4. The weights restored")
	return d.reweigh(3, 1)
}

// reweigh changes the weight of the first real server of the wrr service, and of the one that the first client
// of the persistent service stays with. Then it sends connections to both.
func (d *demo) reweigh(weighted, persistent int) error {
	if err := d.weighted.setWeight(d.handle, 0, weighted); err != nil {
		return err
	}
	home := d.persistent.homes[d.persistent.clients[0]]
	if err := d.persistent.setWeight(d.handle, home, persistent); err != nil {
		return err
	}
	_, err := d.measure(30, d.weighted, d.persistent)
	return err
}

// showIpvsadm prints the output of ipvsadm, and compares its connection counters with the library's.
func (d *demo) showIpvsadm() error {
	heading("5. The same table, as ipvsadm reads it (ipvsadm -Ln --stats)")
	out, err := d.network.director.run("ipvsadm", "-Ln", "--stats")
	if err != nil {
		return err
	}
	fmt.Print(out)

	read, err := d.handle.GetServices()
	if err != nil {
		return fmt.Errorf("read the services: %w", err)
	}
	counted, entries := ipvsadmConnections(out), 0
	compare := func(name string, connections uint32) {
		entries++
		d.check(counted[name] == fmt.Sprint(connections), "%s: the library reads %d connections, ipvsadm %q",
			name, connections, counted[name])
	}
	for _, s := range read {
		compare(serviceName(s), s.Stats.Connections)
		destinations, err := d.handle.GetDestinations(s)
		if err != nil {
			return fmt.Errorf("read the destinations of %s: %w", serviceName(s), err)
		}
		for _, destination := range destinations {
			compare(serviceName(s)+" -> "+destinationName(destination), destination.Stats.Connections)
		}
	}
	d.check(len(counted) == entries, "ipvsadm reads %d services and real servers, the library %d", len(counted), entries)
	return nil
}

// ipvsadmConnections finds the connection counters in the output of ipvsadm.
func ipvsadmConnections(out string) map[string]string {
	counts, service := map[string]string{}, ""
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		switch {
		case len(fields) < 3:
		case fields[0] == "TCP" || fields[0] == "UDP" || fields[0] == "FWM":
			service = fields[0] + " " + fields[1]
			counts[service] = fields[2]
		case fields[0] == "->" && service != "": // the heading comes before the first service
			counts[service+" -> "+fields[1]] = fields[2]
		}
	}
	return counts
}
