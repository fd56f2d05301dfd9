package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// outcome is how a test ended.
type outcome string

const (
	passed  outcome = "passed"
	failed  outcome = "failed"
	skipped outcome = "skipped"
	absent  outcome = "not run"
)

// run holds the tests of one package.
type run struct {
	outcomes map[string]outcome
	outputs  map[string]string
	output   string // what belongs to no test
}

// results holds a run for each package.
type results map[string]*run

func (r results) of(path string) *run {
	if r[path] == nil {
		r[path] = &run{outcomes: map[string]outcome{}, outputs: map[string]string{}}
	}
	return r[path]
}

// otherOutput returns what belongs to other packages: what the compiler says of
// those that the suites import.
func (r results) otherOutput(suites []suite) string {
	others := maps.Clone(r)
	for _, s := range suites {
		delete(others, s.path)
	}
	var output strings.Builder
	for _, path := range slices.Sorted(maps.Keys(others)) {
		output.WriteString(others[path].output)
	}
	return output.String()
}

// read reads what go test -json printed.
func read(from io.Reader) (results, error) {
	all := results{}
	for decoder := json.NewDecoder(from); ; {
		var event struct{ Action, Package, ImportPath, Test, Output string }
		if err := decoder.Decode(&event); err == io.EOF {
			break
		} else if err != nil {
			return nil, err
		}
		if event.Package == "" { // of a build: "PACKAGE [PACKAGE.test]"
			event.Package, _, _ = strings.Cut(event.ImportPath, " ")
		}
		all.of(event.Package).note(event.Action, event.Test, event.Output)
	}
	for _, r := range all {
		r.dropParents()
	}
	return all, nil
}

// note records an event. A test that began and did not end has failed.
func (r *run) note(action, test, output string) {
	switch {
	case test == "":
		r.output += output
	case action == "run":
		r.outcomes[test] = failed
	case action == "pass":
		r.outcomes[test] = passed
	case action == "skip":
		r.outcomes[test] = skipped
	default:
		r.outputs[test] += output
	}
}

// dropParents leaves a test with subtests out: they are counted themselves.
// One that failed although they did not is kept.
func (r *run) dropParents() {
	parents := map[string]bool{} // whether a subtest failed
	for name, outcome := range r.outcomes {
		for at := range name {
			if name[at] == '/' {
				parents[name[:at]] = parents[name[:at]] || outcome == failed
			}
		}
	}
	for name, subtestFailed := range parents {
		if r.outcomes[name] != failed || subtestFailed {
			delete(r.outcomes, name)
		}
	}
}

func (r *run) outcome(name string) outcome {
	if how, ok := r.outcomes[name]; ok {
		return how
	}
	return absent
}

// names returns the sorted names of the tests in either run.
func names(a, b *run) []string {
	both := maps.Clone(a.outcomes)
	maps.Copy(both, b.outcomes)
	return slices.Sorted(maps.Keys(both))
}

// tally counts tests.
type tally struct{ passed, failed, skipped int }

func (t tally) String() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped", t.passed, t.failed, t.skipped)
}

func (t *tally) add(more tally) {
	t.passed += more.passed
	t.failed += more.failed
	t.skipped += more.skipped
}

func (r *run) tally() tally {
	var t tally
	for _, how := range r.outcomes {
		switch how {
		case passed:
			t.passed++
		case failed:
			t.failed++
		case skipped:
			t.skipped++
		}
	}
	return t
}
