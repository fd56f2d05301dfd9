package ipvs

import (
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// The list of services from getsockopt need not have the order of netlink's.
func TestQuickReadOrder(t *testing.T) {
	i, k := newOptFake(t, wantedTable(100, 1))
	orders := map[string]func(){
		"reversed":    func() { slices.Reverse(k.table) },
		"one is gone": func() { k.table = k.table[1:] },
		"one is new":  func() { k.table = append(wantedTable(101, 1)[100:], k.table...) },
	}
	for name, change := range orders {
		k.table = wantedTable(100, 1)
		netlink, services := 0, 100
		switch name {
		case "one is gone":
			netlink = 1
		case "one is new":
			services = 101
		}
		k.before = func(option int, _ *refOptRequest) error {
			if option == optGetServices {
				change()
			}
			return nil
		}
		k.netlink = 0
		got := readAll(i.readTable(everyService))(t)
		for n, e := range got {
			if want := 1; len(e.Destinations) != want && (netlink == 0 || n > 0) {
				t.Errorf("%s: service %d has %d destinations", name, n, len(e.Destinations))
			}
		}
		if k.netlink != netlink || len(got) != services {
			t.Errorf("%s: %d lists over netlink, want %d; %d services", name, k.netlink, netlink, len(got))
		}
	}
}

// IPv4 services that netlink's list misses are found, except for one that is deleted
// before it is asked for; and those of other owners are known as such.
func TestQuickReadMissed(t *testing.T) {
	random := rand.New(rand.NewPCG(21, 22))
	keyOf := func(s *Service) serviceKey { return mustGet(sentServiceKey(s))(t) }
	for range 100 {
		table := append(wantedTable(20+random.IntN(60), 1), optTestTable()[7:]...)
		random.Shuffle(len(table), func(a, b int) { table[a], table[b] = table[b], table[a] })
		i, k := newOptFake(t, table)
		services, missed := len(table), map[*Service]bool{}
		for range random.IntN(services) {
			if s := table[random.IntN(len(table))].Service; keyOf(s).family == unix.AF_INET {
				missed[s] = true
			}
		}
		k.misses = func(s *Service) bool { return missed[s] }
		deleted := 0
		k.asked = func(s *Service) {
			if random.IntN(10) == 0 {
				deleted++
				k.table = slices.DeleteFunc(k.table, func(e TableEntry) bool { return keyOf(e.Service) == keyOf(s) })
			}
		}
		asked := 0
		owned := func(s *Service) bool {
			asked++
			return s.FWMark != 0 || s.Address[len(s.Address)-1]%4 != 0
		}
		got := readAll(i.readTable(owned))(t)
		if asked != services-deleted {
			t.Fatalf("the owner of %d services was asked for, there are %d less %d", asked, services, deleted)
		}
		k.misses = nil
		want := mustGet(i.getTable(owned))(t)
		sortServices(got)
		sortServices(want)
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%d of %d missed: read\n%s\nwant\n%s", len(missed), services, tableText(got), tableText(want))
		}
	}
}

// If a missed service cannot be read, neither can the table.
func TestQuickReadMissedFails(t *testing.T) {
	i, k := newOptFake(t, wantedTable(5, 1))
	k.misses = func(s *Service) bool { return s == k.table[3].Service }
	k.asked = func(*Service) { i.Close() }
	if err := third(i.readTable(everyService)); !errors.Is(err, ErrClosed) {
		t.Errorf("%v, want ErrClosed", err)
	}
}
