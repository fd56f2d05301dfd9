package main

import (
	"fmt"

	"github.com/moby/ipvs"
)

const picture = `IPVS demo: a client, a director and three real servers, each in a network namespace of its own

  client             director                 real servers
  192.0.2.11-16 ---- 203.0.113.1   ------+--- real1  198.51.100.11  2001:db8:b::11
  2001:db8:c::11     2001:db8:f::1       +--- real2  198.51.100.12  2001:db8:b::12
                     (virtual)           +--- real3  198.51.100.13  2001:db8:b::13
`

func heading(text string) { fmt.Printf("\n%s\n\n", text) }

const tableRow = "  %-22s  %-9s  %-11s  %-21s  %-10s  %6v\n"

func printTableHead() {
	fmt.Printf(tableRow, "Virtual service", "Scheduler", "Persistence", "Real server", "Forwarding", "Weight")
}

// printTableEntry prints a service as it was read, one line for each of its destinations.
func printTableEntry(s *ipvs.Service, destinations []*ipvs.Destination) {
	name, scheduler, persistence := serviceName(s), s.SchedName, "no"
	if s.Flags&servicePersistent != 0 {
		persistence = fmt.Sprintf("%d s", s.Timeout)
	}
	for _, d := range destinations {
		forwarding := fmt.Sprintf("%#x", d.ConnectionFlags&ipvs.ConnectionFlagFwdMask)
		if d.ConnectionFlags&ipvs.ConnectionFlagFwdMask == ipvs.ConnectionFlagMasq {
			forwarding = "masquerade"
		}
		fmt.Printf(tableRow, name, scheduler, persistence, destinationName(d), forwarding, d.Weight)
		name, scheduler, persistence = "", "", ""
	}
}

const sharesLegend = `  Expected: what the scheduler promises.  Answered: what the client counted.
  Kernel: the connections that the kernel counted, as the library reads them.

`

const sharesRow = "  %-22s  %-9s  %-11s  %6v  %8v  %8v  %6v%s\n"

func printSharesHead() {
	fmt.Printf(sharesRow, "Virtual service", "Scheduler", "Real server", "Weight", "Expected", "Answered", "Kernel", "")
}

// printShare prints one real server's share of a round.
func printShare(r *round, real int, outcome string) {
	name, scheduler := "", ""
	if real == 0 {
		name, scheduler = serviceName(&r.service.Service), r.service.SchedName
	}
	fmt.Printf(sharesRow, name, scheduler, realServers[real].name, r.service.weights[real], r.expected[real],
		r.answered[real], r.counted[real], "  "+outcome)
}
