package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The chart and the table in the tree show the results in the tree.
func TestPagesShowTheResults(t *testing.T) {
	const checkout = "../../.."
	files, err := generate(checkout)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != 2 {
		t.Fatalf("%d files, want 2", len(files))
	}
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join(checkout, name))
		if err != nil {
			t.Error(err)
		} else if string(got) != want {
			t.Errorf("%s does not show what %s has: cd testdata/bench && go run ./chart ../..", name, resultsFile)
		}
	}
}

func TestParseRefusesOtherFormats(t *testing.T) {
	const good = "- Kernel: 6.12.1\n- Libraries: github.com/moby/ipvs v1.1.0; github.com/cloudflare/ipvs v0.12.0\n" +
		"## Instructions per op\n\n| workload | op | this | moby |\n|---|---|---:|---:|\n| create | change | 24,252 |  |\n"
	r, err := parse(good)
	if err != nil {
		t.Fatal(err)
	}
	if got := r.instructions["create"]["this"]; got != 24252 {
		t.Errorf("create costs %v, want 24252", got)
	}
	if _, ok := r.instructions["create"]["moby"]; ok {
		t.Error("an empty cell has a figure")
	}
	if r.versions["cloudflare"] != "0.12.0" || r.kernel != "6.12" {
		t.Errorf("version %q, kernel %q", r.versions["cloudflare"], r.kernel)
	}
	for what, text := range map[string]string{
		"no kernel":            strings.Replace(good, "Kernel", "Machine", 1),
		"no version":           strings.Replace(good, "v0.12.0", "", 1),
		"no table":             strings.Replace(good, "Instructions", "Costs", 1),
		"a column missing":     strings.Replace(good, " 24,252 |", "", 1),
		"a figure of no digit": strings.Replace(good, "24,252", "many", 1),
	} {
		if _, err := parse(text); err == nil {
			t.Errorf("%s: no error", what)
		}
	}
	if _, err := r.table(); err == nil {
		t.Error("a table of workloads that were not measured")
	}
	if _, err := draw(r); err == nil {
		t.Error("a chart of workloads that were not measured")
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{24252: "24,300", 3750: "3,750", 999: "999", 109724774: "110 million", 3378302: "3.38 million", 1604100098: "1.6 billion"} {
		if got := number(v); got != want {
			t.Errorf("number(%v) = %q, want %q", v, got, want)
		}
	}
}
