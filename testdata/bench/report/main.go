// Command report makes a Markdown report of the benchmarks' outputs: files
// KIND.WORKLOAD.LIBRARY in a folder, where the kind is icount (the clock counted
// instructions) or wall.
package main

import (
	"bufio"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// workloads in the order of the report, with their ops.
var workloads = []struct{ name, op string }{
	{"create", "change"}, {"create-batch", "change"},
	{"update", "change"}, {"update-batch", "change"}, {"send-batch", "change"},
	{"delete", "change"}, {"delete-batch", "change"},
	{"list-services", "service"}, {"list-5", "list"}, {"list-50", "list"}, {"list-500", "list"},
	{"table", "table"},
	{"reconcile-nothing", "table"}, {"reconcile-1%", "table"}, {"reconcile-all", "table"},
	{"reconcile-500", "table"}, {"reconcile-half-ipv6", "table"}, {"reconcile-half-tunnels", "table"}, {"reconcile-all-tunnels", "table"},
	{"new-close", "handle"}, {"daemon", "change"},
	{"tool-restore", "table"}, {"tool-save", "table"}, {"tool-keepalived", "table"},
}

var libraries = []string{"this", "netlink", "moby", "cloudflare", "limit", "tool"}

// Units of the outputs.
const (
	cost    = "ns/op"
	mallocs = "mallocs/op"
	bytes   = "B/op"
	user    = "user-ns/op"
	system  = "sys-ns/op"
)

// results[kind][workload][library][unit]
type results map[string]map[string]map[string]map[string]float64

func main() {
	log.SetFlags(0)
	if len(os.Args) != 2 {
		log.Fatal("usage: report FOLDER")
	}
	r, err := read(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	r.targets()
	r.faster()
	r.table("Instructions per op", "icount", cost)
	fmt.Print("\nRatios of the instructions:\n\n")
	r.ratios()
	r.table("Allocations per op", "icount", mallocs)
	r.table("Bytes allocated per op", "icount", bytes)
	if r["wall"] != nil {
		r.table("Wall clock: nanoseconds per op, NOT repeatable", "wall", cost)
		r.table("User and system time of the process: nanoseconds per op, NOT repeatable", "wall", user, system)
	}
}

func read(folder string) (results, error) {
	r := results{}
	files, err := filepath.Glob(folder + "/*.*.*")
	if err != nil {
		return nil, err
	}
	for _, name := range files {
		part := strings.Split(filepath.Base(name), ".")
		figures, err := readFile(name)
		if err != nil {
			return nil, err
		}
		if r[part[0]] == nil {
			r[part[0]] = map[string]map[string]map[string]float64{}
		}
		if r[part[0]][part[1]] == nil {
			r[part[0]][part[1]] = map[string]map[string]float64{}
		}
		r[part[0]][part[1]][part[2]] = figures
	}
	return r, nil
}

// readFile reads lines "BenchmarkName N value unit value unit ...", and returns
// the median of each unit.
func readFile(name string) (figures map[string]float64, err error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	samples := map[string][]float64{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		field := strings.Fields(lines.Text())
		if len(field) < 4 || !strings.HasPrefix(field[0], "Benchmark") {
			continue
		}
		for n := 2; n+1 < len(field); n += 2 {
			v, err := strconv.ParseFloat(field[n], 64)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			samples[field[n+1]] = append(samples[field[n+1]], v)
		}
	}
	figures = map[string]float64{}
	for unit, all := range samples {
		slices.Sort(all)
		figures[unit] = (all[(len(all)-1)/2] + all[len(all)/2]) / 2
	}
	return figures, lines.Err()
}

// get returns a figure; ok is false if it was not measured.
func (r results) get(kind, workload, library, unit string) (v float64, ok bool) {
	v, ok = r[kind][workload][library][unit]
	return v, ok
}

// table prints the figures of all libraries.
func (r results) table(title, kind string, units ...string) {
	fmt.Printf("\n## %s\n\n| workload | op | %s |\n|---|---|%s\n", title, strings.Join(libraries, " | "), strings.Repeat("---:|", len(libraries)))
	for _, w := range workloads {
		if r[kind][w.name] == nil {
			continue
		}
		fmt.Printf("| %s | %s |", w.name, w.op)
		for _, library := range libraries {
			var cell []string
			for _, unit := range units {
				if v, ok := r.get(kind, w.name, library, unit); ok {
					cell = append(cell, number(v))
				}
			}
			fmt.Printf(" %s |", strings.Join(cell, " + "))
		}
		fmt.Println()
	}
}

// number prints large numbers with commas, small ones with two decimals.
func number(v float64) string {
	if v < 100 {
		return strings.TrimSuffix(strconv.FormatFloat(v, 'f', 2, 64), ".00")
	}
	s := strconv.FormatFloat(v, 'f', 0, 64)
	for n := len(s) - 3; n > 0; n -= 3 {
		s = s[:n] + "," + s[n:]
	}
	return s
}

// ratio returns how many times as much one library needs as another.
func (r results) ratio(workload, library, base string) (float64, bool) {
	v, ok := r.get("icount", workload, library, cost)
	b, baseOK := r.get("icount", workload, base, cost)
	return v / b, ok && baseOK
}

func (r results) ratios() {
	pairs := [][2]string{{"this", "limit"}, {"moby", "limit"}, {"cloudflare", "limit"}, {"this", "moby"}, {"this", "cloudflare"}}
	head := ""
	for _, p := range pairs {
		head += fmt.Sprintf(" %s / %s |", p[0], p[1])
	}
	fmt.Printf("| workload |%s\n|---|%s\n", head, strings.Repeat("---:|", len(pairs)))
	for _, w := range workloads {
		if r["icount"][w.name] == nil {
			continue
		}
		fmt.Printf("| %s |", w.name)
		for _, p := range pairs {
			if v, ok := r.ratio(w.name, p[0], p[1]); ok {
				fmt.Printf(" %.2f |", v)
			} else {
				fmt.Print(" |")
			}
		}
		fmt.Println()
	}
}

// targets prints what was to be reached, and what was.
func (r results) targets() {
	fmt.Print("\n## Targets\n\n| workload | at most | measured | |\n|---|---|---:|---|\n")
	line := func(what, bound string, most, v float64, ok bool) {
		if !ok {
			return
		}
		verdict := "met"
		if v > most {
			verdict = "**missed**"
		}
		fmt.Printf("| %s | %s | %.2f | %s |\n", what, bound, v, verdict)
	}
	limits := func(what, workload string, most float64) {
		v, ok := r.ratio(workload, "this", "limit")
		line(what, fmt.Sprintf("%.2f × limit", most), most, v, ok)
	}
	allocations := func(what, workload string, most float64) {
		v, ok := r.get("icount", workload, "this", mallocs)
		line(what, fmt.Sprintf("%g allocations", most), most, v, ok)
	}
	limits("create in a batch", "create-batch", 1.10)
	limits("update in a batch", "update-batch", 1.15)
	limits("create one at a time", "create", 1.15)
	limits("update one at a time", "update", 1.15)
	limits("list services", "list-services", 1.35)
	allocations("list services, per service", "list-services", 0.5)
	limits("list destinations of one service (5)", "list-5", 1.25)
	allocations("list destinations of one service (5), per call", "list-5", 10)
	limits("list destinations (500), limit with the best buffer", "list-500", 1.25)

	// The standard table's services, and a list of destinations for each.
	services, ok1 := r.get("icount", "list-services", "this", cost)
	list, ok2 := r.get("icount", "list-5", "this", cost)
	table, ok3 := r.get("icount", "table", "this", cost)
	line("whole table", "1.10 × its lists added up", 1.1, table/(2000*services+2000*list), ok1 && ok2 && ok3)
	v, ok := r.get("icount", "reconcile-nothing", "this", cost)
	line("reconcile, nothing to change, per service", "15,000 instructions", 15000, v/2000, ok)
	overNetlink := func(what, workload string, most float64) {
		v, ok := r.ratio(workload, "this", "netlink")
		line(what, fmt.Sprintf("%.2f × reading over netlink", most), most, v, ok)
	}
	overNetlink("reconcile, nothing to change, 500 destinations a service", "reconcile-500", 0.1)
	overNetlink("reconcile, nothing to change, half of it IPv6", "reconcile-half-ipv6", 1)
	overNetlink("reconcile, nothing to change, half of it tunnels", "reconcile-half-tunnels", 1)
	overNetlink("reconcile, nothing to change, all of it tunnels", "reconcile-all-tunnels", 1.05)
	limits("a handle for one change", "daemon", 1.25)
	v, ok = r.get("icount", "daemon", "this", bytes)
	moby, mobyOK := r.get("icount", "daemon", "moby", bytes)
	line("a handle for one change, bytes allocated", "those of moby/ipvs", moby, v, ok && mobyOK)
}

// faster prints where another library needs fewer instructions.
func (r results) faster() {
	none := true
	for _, w := range workloads {
		for _, other := range []string{"moby", "cloudflare"} {
			if v, ok := r.ratio(w.name, "this", other); ok && v > 1 {
				fmt.Printf("\n**%s is faster in %s**: this library needs %.2f times as much.\n", other, w.name, v)
				none = false
			}
		}
	}
	if none {
		fmt.Print("\nIn no workload measured is another library faster.\n")
	}
}
