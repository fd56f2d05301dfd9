// Command consumers compares two runs of the same tests, one with
// github.com/moby/ipvs v1.1.0 and one with the checkout in its place. It is run
// by testdata/scripts/consumers.
//
//	consumers ORIGINAL.json CHECKOUT.json
//
// Each file has the output of go test -json.
package main

import (
	"fmt"
	"io"
	"log"
	"os"
)

// suite is a package under test. At least atLeast of its tests must pass with either
// library, so that a run of fewer tests does not go unnoticed.
type suite struct {
	path    string
	atLeast int
}

var suites = []suite{
	{"k8s.io/kubernetes/pkg/proxy/ipvs", 105},
	{"k8s.io/kubernetes/pkg/proxy/ipvs/ipset", 31},
	{"k8s.io/kubernetes/pkg/proxy/ipvs/ipset/testing", 1},
	{"k8s.io/kubernetes/pkg/proxy/ipvs/testing", 1},
	{"k8s.io/kubernetes/pkg/proxy/ipvs/util", 10},
	{"k8s.io/kubernetes/pkg/proxy/ipvs/util/testing", 2},
	{"github.com/cloudnativelabs/kube-router/v2/pkg/controllers/proxy", 27},
}

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal("usage: consumers ORIGINAL.json CHECKOUT.json")
	}
	original, err := readFile(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	checkout, err := readFile(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	if !report(os.Stdout, suites, original, checkout) {
		os.Exit(1)
	}
}

func readFile(name string) (results, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return read(file)
}

// report writes a line for each suite and library, the differences, and the sum.
// It reports whether the checkout does as well as the original.
func report(w io.Writer, suites []suite, original, checkout results) bool {
	var sum tally
	enough := true
	for _, s := range suites {
		before, after := original.of(s.path), checkout.of(s.path)
		fmt.Fprintf(w, "%s\n  original: %v\n  checkout: %v\n", s.path, before.tally(), after.tally())
		sum.add(compare(w, before, after))
		if min(before.tally().passed, after.tally().passed) < s.atLeast {
			enough = false
			fmt.Fprintf(w, "  fewer than %d passed\n%s%s", s.atLeast, before.output, after.output)
		}
	}
	for _, r := range []results{original, checkout} {
		fmt.Fprint(w, r.otherOutput(suites))
	}
	fmt.Fprintln(w, sum)
	return enough && sum.failed == 0
}

// compare writes which tests end in different ways, or fail in the same way.
// In what it returns, a test counts as failed if it does not end with the
// checkout as it does with the original, unless it passes where that fails; one
// that fails with both says nothing of either, and counts as skipped.
func compare(w io.Writer, original, checkout *run) tally {
	var t tally
	for _, name := range names(original, checkout) {
		before, after := original.outcome(name), checkout.outcome(name)
		switch {
		case before == failed && after == failed:
			t.skipped++
			fmt.Fprintf(w, "  fails with both: %s\n", name)
		case before == after && after == skipped:
			t.skipped++
		case before == after:
			t.passed++
		case before == failed && after == passed:
			t.passed++
			fmt.Fprintf(w, "  fails with the original only: %s\n", name)
		default:
			t.failed++
			fmt.Fprintf(w, "  %s with the original, %s with the checkout: %s\n%s", before, after, name, checkout.outputs[name])
		}
	}
	return t
}
