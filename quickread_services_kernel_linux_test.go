package ipvs

import (
	"slices"
	"testing"
	"time"
)

// Every plan for services that stay is empty, while others add and delete services in
// the same namespace or, which before Linux 7 makes lists incomplete as well, in another.
func TestKernelQuickReadMissesNoService(t *testing.T) {
	needOpts(t)
	t.Run("the same namespace", func(t *testing.T) { checkMissesNoService(t, false, true) })
	t.Run("another namespace", func(t *testing.T) { checkMissesNoService(t, true, !kernelAtLeast7(t)) })
}

// checkMissesNoService checks the plans; incomplete says whether lists over netlink miss
// services.
func checkMissesNoService(t *testing.T, another, incomplete bool) {
	ns := newNamespace(t)
	i := openIn(t, ns)
	want := wantedTable(150, 1)
	must(t, second((&Reconciler{Handle: i}).Reconcile(want)))
	if another {
		ns = newNamespace(t)
	}
	other := openIn(t, ns)
	repeat(t, func(n int) error { // add 100, delete them, and so on
		s := ipv4Service(1000 + n%100)
		s.Port = 60000
		if n%200 >= 100 {
			return other.DelService(s)
		}
		return other.NewService(s)
	})
	r := &Reconciler{Handle: i, Owned: func(s *Service) bool { return s.Port != 60000 }}
	lists, misses, wrong := 0, 0, 0
	end := time.Now().Add(time.Duration(times(2, 60)) * time.Second)
	for time.Now().Before(end) || incomplete && misses == 0 && time.Now().Before(end.Add(trafficTimeout)) {
		there := map[serviceKey]bool{}
		for _, s := range mustGet(i.GetServices())(t) {
			there[keyOfService(s)] = true
		}
		if lists++; slices.ContainsFunc(want, func(e TableEntry) bool { return !there[mustGet(sentServiceKey(e.Service))(t)] }) {
			misses++
		}
		if plan := mustGet(r.Plan(want))(t); plan.Len() > 0 {
			wrong++
			t.Logf("a plan:\n%s", plan)
		}
	}
	t.Logf("%d of %d lists over netlink miss a service", misses, lists)
	if wrong > 0 {
		t.Errorf("%d of %d plans are wrong", wrong, lists)
	}
	if lists < 20 || incomplete && misses == 0 {
		t.Error("nothing was missed that could be found")
	}
}
