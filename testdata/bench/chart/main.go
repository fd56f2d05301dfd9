// Command chart puts the figures of testdata/bench/RESULTS.md where readers look:
// it draws docs/performance.svg, and writes the table in docs/performance.md, which
// stands between two marks.
//
//	cd testdata/bench && go run ./chart ../..
package main

import (
	"fmt"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 2 {
		log.Fatal("usage: chart CHECKOUT")
	}
	files, err := generate(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(os.Args[1], name), []byte(text), 0o644); err != nil {
			log.Fatal(err)
		}
	}
}

const (
	resultsFile = "testdata/bench/RESULTS.md"
	chartFile   = "docs/performance.svg"
	pageFile    = "docs/performance.md"
)

// generate returns the contents of the files that show the results.
func generate(checkout string) (map[string]string, error) {
	text, err := os.ReadFile(filepath.Join(checkout, resultsFile))
	if err != nil {
		return nil, err
	}
	r, err := parse(string(text))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", resultsFile, err)
	}
	svg, err := draw(r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", resultsFile, err)
	}
	page, err := os.ReadFile(filepath.Join(checkout, pageFile))
	if err != nil {
		return nil, err
	}
	table, err := r.table()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", resultsFile, err)
	}
	tools, err := r.toolTable()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", resultsFile, err)
	}
	withTable, err := between(string(page), table+"\n"+tools)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", pageFile, err)
	}
	return map[string]string{chartFile: svg, pageFile: withTable}, nil
}

// Marks around a table in a page.
const (
	beginMark = "<!-- costs: written by make bench -->\n"
	endMark   = "<!-- end of costs -->\n"
)

// between returns the page with the table between the marks.
func between(page, table string) (string, error) {
	before, rest, ok := strings.Cut(page, beginMark)
	_, after, ok2 := strings.Cut(rest, endMark)
	if !ok || !ok2 {
		return "", fmt.Errorf("no line %q with a line %q after it", strings.TrimSpace(beginMark), strings.TrimSpace(endMark))
	}
	return before + beginMark + "\n" + table + "\n" + endMark + after, nil
}

// results holds the instructions of each workload with each library; what was
// not measured is missing.
type results struct {
	instructions map[string]map[string]float64
	versions     map[string]string // of the other libraries
	kernel       string
}

// libraries are the columns of the results, in the order of the tables here.
var libraries = []string{"this", "moby", "cloudflare", "limit"}

// parse reads RESULTS.md.
func parse(text string) (*results, error) {
	r := &results{instructions: map[string]map[string]float64{}, versions: map[string]string{}}
	for _, m := range regexp.MustCompile(`github\.com/(\w+)/ipvs v([0-9.]+)`).FindAllStringSubmatch(text, -1) {
		r.versions[m[1]] = m[2]
	}
	if m := regexp.MustCompile(`- Kernel: (\d+\.\d+)`).FindStringSubmatch(text); m != nil {
		r.kernel = m[1]
	}
	if r.versions["moby"] == "" || r.versions["cloudflare"] == "" || r.kernel == "" {
		return nil, fmt.Errorf("the kernel or the libraries' versions are missing")
	}
	_, section, ok := strings.Cut(text, "## Instructions per op\n")
	if !ok {
		return nil, fmt.Errorf("no section of instructions")
	}
	section, _, _ = strings.Cut(section, "\nRatios")
	var columns []string
	for _, line := range strings.Split(section, "\n") {
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "|--") {
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for n := range cells {
			cells[n] = strings.TrimSpace(cells[n])
		}
		if columns == nil {
			columns = cells
			continue
		}
		if len(cells) != len(columns) {
			return nil, fmt.Errorf("%d columns in %q", len(cells), line)
		}
		figures := map[string]float64{}
		for n, cell := range cells[2:] { // after the workload and its op
			if cell == "" {
				continue
			}
			v, err := strconv.ParseFloat(strings.ReplaceAll(cell, ",", ""), 64)
			if err != nil {
				return nil, err
			}
			figures[columns[n+2]] = v
		}
		r.instructions[cells[0]] = figures
	}
	return r, nil
}

// rows are the workloads of the table, and their descriptions.
var rows = []struct{ workload, text string }{
	{"create", "create a service or destination, one at a time"},
	{"create-batch", "create, in a batch"},
	{"update", "update a destination, one at a time"},
	{"update-batch", "update, in a batch"},
	{"delete", "delete a service or destination, one at a time"},
	{"delete-batch", "delete, in a batch"},
	{"list-services", "list services, per service"},
	{"list-5", "list the 5 destinations of a service"},
	{"list-50", "list 50 destinations"},
	{"list-500", "list 500 destinations"},
	{"table", "read the whole table"},
	{"reconcile-nothing", "reconcile, nothing to change"},
	{"reconcile-1%", "reconcile, 1 % of the destinations to change"},
	{"reconcile-all", "reconcile, every destination to change"},
	{"reconcile-500", "reconcile 20 services with 500 destinations each, nothing to change"},
	{"new-close", "open and close a handle"},
	{"daemon", "open a handle, look for a service, add a destination, close"},
}

// table returns a Markdown table of the instructions.
func (r *results) table() (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "| instructions, kernel %s | this library | moby/ipvs %s | cloudflare/ipvs %s | limit |\n|---|---:|---:|---:|---:|\n",
		r.kernel, r.versions["moby"], r.versions["cloudflare"])
	for _, row := range rows {
		if _, ok := r.instructions[row.workload]["this"]; !ok {
			return "", fmt.Errorf("workload %q is missing", row.workload)
		}
		fmt.Fprintf(&b, "| %s |", row.text)
		for _, library := range libraries {
			if v, ok := r.instructions[row.workload][library]; ok {
				fmt.Fprintf(&b, " %s |", number(v))
			} else {
				b.WriteString(" |")
			}
		}
		b.WriteByte('\n')
	}
	return b.String(), nil
}

// changes is the number of services and destinations in the table.
const changes = 2000 * (1 + 5)

// toolTable returns a Markdown table of the cost of the same work with the C programs.
func (r *results) toolTable() (string, error) {
	create, table := r.instructions["create-batch"]["this"], r.instructions["table"]["this"]
	restore, save, start := r.instructions["tool-restore"]["tool"], r.instructions["tool-save"]["tool"], r.instructions["tool-keepalived"]["tool"]
	if create*table*restore*save*start == 0 {
		return "", fmt.Errorf("a program was not measured")
	}
	return fmt.Sprintf("| instructions, the whole table | this library | ipvsadm | keepalived |\n|---|---:|---:|---:|\n"+
		"| program it | %s (a batch) | %s (`-R`) | %s (its start) |\n"+
		"| read it | %s (`GetTable`) | %s (`-Sn`) | |\n",
		number(changes*create), number(restore), number(start), number(table), number(save)), nil
}

// number rounds to three digits: 24,300, 110 million or 1.6 billion.
func number(v float64) string {
	rounded, _ := strconv.ParseFloat(strconv.FormatFloat(v, 'g', 3, 64), 64)
	switch {
	case rounded >= 1e9:
		return strconv.FormatFloat(rounded/1e9, 'f', -1, 64) + " billion"
	case rounded >= 1e6:
		return strconv.FormatFloat(rounded/1e6, 'f', -1, 64) + " million"
	}
	s := strconv.FormatFloat(rounded, 'f', 0, 64)
	for n := len(s) - 3; n > 0; n -= 3 {
		s = s[:n] + "," + s[n:]
	}
	return s
}
