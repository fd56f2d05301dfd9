//go:build linux

package main

import (
	"errors"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/moby/ipvs"
)

// The steps of docs/from-calls-to-reconcile.md, on 100 services with 6 destinations each.

// counting counts the calls of a handle: each is a request to the kernel, and each batch
// as many as it has changes.
type counting struct {
	*ipvs.Handle
	calls int
}

// step1 makes calls: at every sync it lists, and sends every endpoint to the kernel.
func step1(h *counting, want []ipvs.TableEntry) error {
	services, err := h.GetServices()
	h.calls++
	if err != nil {
		return err
	}
	there := map[string]bool{}
	for _, s := range services {
		there[s.Address.String()] = true
	}
	for _, e := range want {
		if !there[e.Service.Address.String()] {
			h.calls++
			if err := h.NewService(e.Service); err != nil {
				return err
			}
		}
		for _, d := range e.Destinations {
			err := h.NewDestination(e.Service, d)
			h.calls++
			if errors.Is(err, syscall.EEXIST) {
				err = h.UpdateDestination(e.Service, d)
				h.calls++
			}
			if err != nil {
				return err
			}
		}
		destinations, err := h.GetDestinations(e.Service) // to find those to delete
		h.calls++
		if err != nil {
			return err
		}
		wanted := map[string]bool{}
		for _, d := range e.Destinations {
			wanted[d.Address.String()] = true
		}
		for _, d := range destinations {
			if !wanted[d.Address.String()] {
				h.calls++
				if err := h.DelDestination(e.Service, d); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// step2 reads first, and makes calls only for differences.
func step2(h *counting, want []ipvs.TableEntry) error {
	changes, err := difference(h, want)
	if err != nil {
		return err
	}
	for _, c := range changes.All() {
		h.calls++
		switch c.Op {
		case "NewService":
			err = h.NewService(c.Service)
		case "NewDestination":
			err = h.NewDestination(c.Service, c.Destination)
		case "UpdateDestination":
			err = h.UpdateDestination(c.Service, c.Destination)
		case "DelDestination":
			err = h.DelDestination(c.Service, c.Destination)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func difference(h *counting, want []ipvs.TableEntry) (*ipvs.Batch, error) {
	have, err := h.GetTable()
	h.calls += 1 + len(have)
	if err != nil {
		return nil, err
	}
	return ipvs.Diff(have, want)
}

// step3 sends the differences in a batch.
func step3(h *counting, want []ipvs.TableEntry) error {
	changes, err := difference(h, want)
	if err != nil || changes.Len() == 0 {
		return err
	}
	h.calls += changes.Len()
	return h.Do(changes)
}

// step4 leaves it to the Reconciler.
func step4(h *counting, want []ipvs.TableEntry) error {
	changes, err := (&ipvs.Reconciler{Handle: h.Handle}).Reconcile(want)
	h.calls += 1 + len(want) + changes.Total()
	return err
}

// steps are the ways to bring the kernel's table to a wanted one.
var steps = []struct {
	name string
	sync func(*counting, []ipvs.TableEntry) error
}{{"1-calls", step1}, {"2-compare", step2}, {"3-batch", step3}, {"4-reconcile", step4}}

// syncs are the changes before a sync, and the requests that each step then makes.
var syncs = []struct {
	name     string
	change   func(table []ipvs.TableEntry, n int)
	requests [4]int
}{
	{"nothing", func([]ipvs.TableEntry, int) {}, [4]int{1301, 101, 101, 101}},
	{"1%", func(table []ipvs.TableEntry, n int) {
		for k := range 6 {
			table[k*16].Destinations[k].Weight = 2 + n%2
		}
	}, [4]int{1301, 107, 107, 107}},
	{"all", func(table []ipvs.TableEntry, n int) {
		for _, e := range table {
			for _, d := range e.Destinations {
				d.Weight = 4 + n%2
			}
		}
	}, [4]int{1301, 701, 701, 701}},
}

func stepsTable() (table []ipvs.TableEntry) {
	for n := range 100 {
		e := ipvs.TableEntry{Service: &ipvs.Service{Address: net.IPv4(10, 96, 0, byte(n)), Protocol: syscall.IPPROTO_TCP, Port: 80, SchedName: "rr"}}
		for m := range 6 {
			e.Destinations = append(e.Destinations, &ipvs.Destination{Address: net.IPv4(10, 1, byte(n), byte(m)), Port: 8080, Weight: 1})
		}
		table = append(table, e)
	}
	return table
}

// Every step leads to the wanted table, with the number of requests on the page.
func TestSteps(t *testing.T) {
	for n, step := range steps {
		table := stepsTable()
		h := &counting{Handle: ipvs.NewFake().Handle()}
		sync := func(name string) (requests int) {
			t.Helper()
			before := h.calls
			must(t, step.sync(h, table))
			requests = h.calls - before
			if rest, err := difference(h, table); err != nil || rest.Len() > 0 {
				t.Errorf("%s, %s: %v is left to do, %v", step.name, name, rest, err)
			}
			return requests
		}
		sync("the first")
		for _, test := range syncs {
			test.change(table, 1)
			if got := sync(test.name); got != test.requests[n] {
				t.Errorf("%s, %s: %d requests, want %d", step.name, test.name, got, test.requests[n])
			}
		}
		table[7].Destinations = table[7].Destinations[:5]
		sync("one goes")
	}
}

func BenchmarkSteps(b *testing.B) {
	if os.Getenv("IPVS_TEST_VM") == "" {
		b.Skip("SKIP: changes this machine's own IPVS table (docs/from-calls-to-reconcile.md says how)")
	}
	handle, err := ipvs.New("")
	if err != nil {
		b.Fatal(err)
	}
	defer handle.Close()
	table := stepsTable()
	turn := 0
	for _, test := range syncs {
		for _, step := range steps {
			b.Run(test.name+"/"+step.name, func(b *testing.B) {
				h := &counting{Handle: handle}
				if err := step.sync(h, table); err != nil {
					b.Fatal(err)
				}
				h.calls = 0
				b.ResetTimer()
				for n := 0; n < b.N; n++ {
					turn++
					test.change(table, turn)
					if err := step.sync(h, table); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(h.calls)/float64(b.N), "requests/op")
			})
		}
	}
}
