package main

import (
	"bytes"
	"errors"
	"fmt"
	"go/token"
	"os"
	"strings"
)

// mutant is one way to break the library.
type mutant struct {
	name     string // of those written by hand
	file     string // its base name
	function string
	kind     string
	id       string
	order    uint64
	at       token.Position
	old, new string
	kernel   string // the kernel tests that must notice it; "" for all tests, the unit tests first
	edit     edit
	number   int // in the program of many mutants; 0 for those that need one of their own

	noticed string // by what; "" as long as nothing did
	ended   bool   // a guest ended with it
	unclear bool   // a test fails with it, and then without it too
}

func (m *mutant) String() string {
	if m.name != "" {
		return m.name
	}
	return fmt.Sprintf("%s %s:%d:%d %s in %s: %s -> %s", m.id, m.file, m.at.Line, m.at.Column, m.kind, m.function, m.old, m.new)
}

// paragraphs reads paragraphs of four lines: "# " and a text, a line, "- " and the
// original, "+ " and its replacement.
func paragraphs(path string) (all [][4]string, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(bytes.TrimSpace(text)) == 0 {
		return nil, nil
	}
	for _, paragraph := range strings.Split(strings.TrimSpace(string(text)), "\n\n") {
		lines := strings.Split(paragraph, "\n")
		if len(lines) != 4 || !strings.HasPrefix(lines[0], "# ") || !strings.HasPrefix(lines[2], "- ") || !strings.HasPrefix(lines[3]+" ", "+ ") {
			return nil, fmt.Errorf("%s: not understood:\n%s", path, paragraph)
		}
		all = append(all, [4]string{lines[0][2:], lines[1], lines[2][2:], strings.TrimPrefix(lines[3][1:], " ")})
	}
	return all, nil
}

// readMutants reads the mutants written by hand: a name, "file [kernel tests]", the
// text to replace, which must occur exactly once, and its replacement; \n and \t in
// them stand for themselves.
func readMutants(path string, sources map[string][]byte) (mutants []*mutant, err error) {
	all, err := paragraphs(path)
	if err != nil {
		return nil, err
	}
	unescape := strings.NewReplacer(`\n`, "\n", `\t`, "\t")
	for _, p := range all {
		m := &mutant{name: p[0], kind: "by hand"}
		m.file, m.kernel, _ = strings.Cut(p[1], " ")
		m.old, m.new = unescape.Replace(p[2]), unescape.Replace(p[3])
		if n := strings.Count(string(sources[m.file]), m.old); n != 1 {
			err = errors.Join(err, fmt.Errorf("%s: %q is %d times in %s, want once", m.name, m.old, n, m.file))
			continue
		}
		from := strings.Index(string(sources[m.file]), m.old)
		m.edit = edit{from, from + len(m.old), m.new}
		mutants = append(mutants, m)
	}
	return mutants, err
}

// equivalents are the random mutants that change nothing that a test can see, by
// function, old and new lines; the values are the reasons.
type equivalents map[[3]string]string

func readEquivalents(path string) (equivalents, error) {
	all, err := paragraphs(path)
	if err != nil {
		return nil, err
	}
	e := equivalents{}
	for _, p := range all {
		e[[3]string{p[1], p[2], p[3]}] = p[0]
	}
	return e, nil
}

func (e equivalents) reason(m *mutant) string { return e[[3]string{m.function, m.old, m.new}] }
