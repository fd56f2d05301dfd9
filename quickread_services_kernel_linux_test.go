package ipvs

import (
	"slices"
	"sync"
	"testing"
	"time"
)

// Every plan for services that stay is empty, while others add and delete services in
// the same namespace or, which before Linux 7 makes lists incomplete as well, in another.
func TestKernelQuickReadMissesNoService(t *testing.T) {
	needOpts(t)
	for _, where := range []string{"the same", "another"} {
		ns := newNamespace(t)
		i := openIn(t, ns)
		want := wantedTable(150, 1)
		must(t, second((&Reconciler{Handle: i}).Reconcile(want)))
		if where == "another" {
			ns = newNamespace(t)
		}
		other := openIn(t, ns)
		done := make(chan bool)
		var wg sync.WaitGroup
		wg.Add(1)
		go func() {
			defer wg.Done()
			for {
				for n := range 2 * 100 {
					s := ipv4Service(1000 + n%100)
					s.Port = 60000
					change := other.NewService
					if n >= 100 {
						change = other.DelService
					}
					if err := change(s); err != nil {
						t.Error(err)
						return
					}
				}
				select {
				case <-done:
					return
				default:
				}
			}
		}()
		r := &Reconciler{Handle: i, Owned: func(s *Service) bool { return s.Port != 60000 }}
		lists, plans, misses, wrong := 0, 0, 0, 0
		incomplete := where == "the same" || !kernelAtLeast7(t)
		end := time.Now().Add(time.Duration(times(2, 60)) * time.Second)
		for time.Now().Before(end) || incomplete && misses == 0 && time.Now().Before(end.Add(trafficTimeout)) {
			there := map[serviceKey]bool{}
			for _, s := range mustGet(i.GetServices())(t) {
				there[keyOfService(s)] = true
			}
			if lists++; slices.ContainsFunc(want, func(e TableEntry) bool { return !there[mustGet(sentServiceKey(e.Service))(t)] }) {
				misses++
			}
			plan := mustGet(r.Plan(want))(t)
			if plans++; plan.Len() > 0 {
				wrong++
				t.Logf("a plan:\n%s", plan)
			}
		}
		close(done)
		wg.Wait()
		t.Logf("another writer in %s namespace: %d of %d lists over netlink miss a service", where, misses, lists)
		if wrong > 0 {
			t.Errorf("%d of %d plans are wrong", wrong, plans)
		}
		if lists < 20 || incomplete && misses == 0 {
			t.Error("nothing was missed that could be found")
		}
	}
}
