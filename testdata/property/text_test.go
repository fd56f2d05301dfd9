//go:build linux

package property

import (
	"math"
	"strings"
	"testing"

	"github.com/moby/ipvs"
	"pgregory.net/rapid"
)

// text returns the output of WriteTable.
func text(t rapid.TB, tab []ipvs.TableEntry) string {
	t.Helper()
	var b strings.Builder
	must(t, ipvs.WriteTable(&b, tab))
	return b.String()
}

// same fails the test if Diff finds a difference between two tables.
func same(t rapid.TB, what string, have, want []ipvs.TableEntry) {
	t.Helper()
	changes, err := ipvs.Diff(have, want)
	must(t, err)
	if changes.Len() > 0 {
		t.Fatalf("%s: to be the same it takes\n%v", what, changes)
	}
}

// Every table that ipvsadm can say is written, read back by ParseTable as it was,
// and made by ipvsadm -R as it was.
func TestWriteTable(t *testing.T) {
	h := open(t)
	rapid.Check(t, func(t *rapid.T) {
		g := generator{t, restored}
		tab := g.table()
		if g.bool("heavy") { // ipvsadm takes it, though the kernel's schedulers do not need it
			for i := range tab {
				for j := range tab[i].destinations {
					tab[i].destinations[j].Weight = math.MaxInt32 - j
				}
			}
		}
		for i := range tab { // flag-3 alone is said, too, though -Sn loses it
			if hashes(tab[i].service) && g.bool("third flag") {
				tab[i].service.Flags |= ipvs.ServiceFlagSched3
			}
		}
		create(t, h, tab)
		before, err := h.GetTable()
		must(t, err)
		saved := text(t, before)
		parsed, err := ipvs.ParseTable(strings.NewReader(saved))
		must(t, err)
		same(t, "written and parsed", before, parsed)
		must(t, h.Flush())
		ipvsadm(t, saved, "-R")
		equal(t, "restored from\n"+saved, read(t, h), normalised(tab))
	})
}

// Of all that the kernel takes, each service with its destinations is either
// refused by WriteTable, or ipvsadm -R makes the same of it.
func TestWriteTableRefuses(t *testing.T) {
	h := open(t)
	written, refused := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		tab := generator{t, pick(generator{T: t}, "domain", taken, readable)}.table()
		create(t, h, tab)
		all, err := h.GetTable()
		must(t, err)
		var can []ipvs.TableEntry
		for _, e := range all {
			one := ipvs.TableEntry{Service: e.Service}
			if err := ipvs.WriteTable(new(strings.Builder), []ipvs.TableEntry{one}); err != nil {
				refused++
				continue
			}
			for _, d := range e.Destinations {
				alone := ipvs.TableEntry{Service: e.Service, Destinations: []*ipvs.Destination{d}}
				if err := ipvs.WriteTable(new(strings.Builder), []ipvs.TableEntry{alone}); err != nil {
					refused++
					continue
				}
				one.Destinations = append(one.Destinations, d)
				written++
			}
			can = append(can, one)
		}
		saved := text(t, can)
		must(t, h.Flush())
		ipvsadm(t, saved, "-R")
		got, err := h.GetTable()
		must(t, err)
		same(t, "restored from\n"+saved, got, can)
	})
	if written == 0 || refused == 0 {
		t.Errorf("%d destinations written, %d entries refused: nothing is shown", written, refused)
	}
}

// The output of ipvsadm -Sn is the kernel's table: Reconcile has nothing to do.
func TestParseSaved(t *testing.T) {
	h := open(t)
	rapid.Check(t, func(t *rapid.T) {
		g := generator{t, written}
		tab := g.table()
		for i := range tab {
			s := &tab[i].service
			if s.FWMark != 0 && g.bool("large mark") {
				s.FWMark |= 1 << 31 // written as negative
			}
			if hashes(*s) {
				s.Flags &^= ipvs.ServiceFlagSched3 // not written beside others,
				if s.Flags&(ipvs.ServiceFlagSched1|ipvs.ServiceFlagSched2) == 0 && g.bool("third flag") {
					s.Flags |= ipvs.ServiceFlagSched3 // and alone as "-b "
				}
			}
			for j := range tab[i].destinations {
				d := &tab[i].destinations[j]
				d.UpperThreshold, d.LowerThreshold = 0, 0 // not written
			}
		}
		create(t, h, tab)
		saved := ipvsadm(t, "", "-Sn")
		parsed, err := ipvs.ParseTable(strings.NewReader(saved))
		if err != nil {
			t.Fatalf("%v in\n%s", err, saved)
		}
		r := ipvs.Reconciler{Handle: h}
		plan, err := r.Plan(parsed)
		must(t, err)
		if plan.Len() > 0 {
			t.Fatalf("of\n%sReconcile would make\n%v", saved, plan)
		}
		equal(t, "unchanged", read(t, h), normalised(tab))
	})
}

// ParseTable reads the same from the long names of the options as ipvsadm -R.
func TestParseLongOptions(t *testing.T) {
	h := open(t)
	rapid.Check(t, func(t *rapid.T) {
		saved := restoreText(generator{t, restored}.table())
		must(t, h.Flush())
		ipvsadm(t, saved, "-R")
		parsed, err := ipvs.ParseTable(strings.NewReader(saved))
		must(t, err)
		got, err := h.GetTable()
		must(t, err)
		same(t, "restored by ipvsadm from\n"+saved, got, parsed)
	})
}
