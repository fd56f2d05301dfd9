package main

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/moby/ipvs"
)

// round is one series of requests to one virtual service.
type round struct {
	service  *virtualService
	requests int                   // how many; a multiple of the sum of the weights, so that shares are whole numbers
	answers  []int                 // which real server answered each request
	expected [len(realServers)]int // by the scheduler's promise
	answered [len(realServers)]int // by the client's count
	before   [len(realServers)]int // connections that the kernel had counted before
	counted  [len(realServers)]int // connections that the kernel counted in this round

	unaccounted int // connections that the kernel counted for the service, but for no real server
}

// measure sends each service a number of requests, and prints and checks who answered them.
func (d *demo) measure(requests int, services ...*virtualService) ([]*round, error) {
	rounds := make([]*round, len(services))
	for i, v := range services {
		r := &round{service: v, requests: requests}
		rounds[i] = r
		var err error
		if _, r.before, err = v.connections(d.handle); err != nil {
			return nil, err
		}
		if err := d.network.client.enter(func() error { return r.send(&d.client) }); err != nil {
			d.check(false, "%v", err)
		}
		r.judge()
	}
	if err := waitForCounters(d.handle, rounds); err != nil {
		return nil, err
	}
	printSharesHead()
	for _, r := range rounds {
		d.checkRound(r)
	}
	return rounds, nil
}

// send sends the round's requests one after the other, since the scheduler's promise is about their order.
// The first failure ends the round, so that timeouts do not add up.
func (r *round) send(c *client) error {
	v := r.service
	for n := range r.requests {
		from, to := v.clients[n%len(v.clients)], v.targets[n%len(v.targets)]
		real, err := c.ask(v.network, from, to)
		if err != nil {
			return fmt.Errorf("%s: connection %d of %d failed: %w", serviceName(&v.Service), n+1, r.requests, err)
		}
		r.answers = append(r.answers, real)
	}
	return nil
}

// judge counts the answers and computes the expected ones.
func (r *round) judge() {
	v := r.service
	r.answered = count(r.answers)
	if v.homes != nil {
		for n, real := range r.answers {
			from := v.clients[n%len(v.clients)]
			if _, known := v.homes[from]; !known {
				v.homes[from] = real
			}
			r.expected[v.homes[from]]++
		}
		return
	}
	for real, weight := range v.weights {
		r.expected[real] = r.requests * weight / sum(v.weights)
	}
}

// waitForCounters reads the kernel's counters until they have caught up with the requests.
func waitForCounters(handle *ipvs.Handle, rounds []*round) error {
	for deadline := time.Now().Add(counterDelay); ; time.Sleep(100 * time.Millisecond) {
		behind := false
		for _, r := range rounds {
			total, now, err := r.service.connections(handle)
			if err != nil {
				return err
			}
			for real := range now {
				r.counted[real] = now[real] - r.before[real]
			}
			r.unaccounted = total - sum(now)
			behind = behind || sum(r.counted) < len(r.answers) || r.unaccounted != 0
		}
		if !behind || time.Now().After(deadline) {
			return nil
		}
	}
}

// checkRound prints a round, one line for each real server, and checks it.
func (d *demo) checkRound(r *round) {
	name := serviceName(&r.service.Service)
	for i, real := range realServers {
		outcome := d.check(r.answered[i] == r.expected[i] && r.counted[i] == r.expected[i],
			"%s: %s: %d connections expected, %d answered, the kernel counted %d",
			name, real.name, r.expected[i], r.answered[i], r.counted[i])
		printShare(r, i, outcome)
	}
	d.check(r.unaccounted == 0, "%s: the kernel counted %d connections more for it than for its real servers",
		name, r.unaccounted)
	if r.service.homes != nil {
		d.checkPersistence(r)
	} else {
		d.checkTurns(r)
	}
}

// checkTurns checks that the promise of rr and wrr holds not only in sum but in every turn, that is, for as many
// connections in a row as the sum of the weights. For a firewall mark this shows that both ports share one turn.
func (d *demo) checkTurns(r *round) {
	turn, wrong := sum(r.service.weights), ""
	for n := 0; n+turn <= len(r.answers) && wrong == ""; n += turn {
		answered := count(r.answers[n : n+turn])
		if answered != r.service.weights {
			wrong = fmt.Sprintf("connections %d to %d: the real servers answered %v times, want %v",
				n+1, n+turn, answered, r.service.weights)
		}
	}
	d.check(wrong == "", "%s: %s", serviceName(&r.service.Service), wrong)
}

// checkPersistence checks that each client had the same real server every time.
func (d *demo) checkPersistence(r *round) {
	v := r.service
	strayed := map[netip.Addr]int{}
	for n, real := range r.answers {
		if from := v.clients[n%len(v.clients)]; real != v.homes[from] {
			strayed[from]++
		}
	}
	for _, address := range v.clients {
		d.check(strayed[address] == 0, "%s: %d connections of client %s went to another real server than its first",
			serviceName(&v.Service), strayed[address], address)
	}
}

// count counts how often each real server is among answers.
func count(answers []int) (answered [len(realServers)]int) {
	for _, real := range answers {
		answered[real]++
	}
	return answered
}

func sum(numbers [len(realServers)]int) int {
	total := 0
	for _, n := range numbers {
		total += n
	}
	return total
}
