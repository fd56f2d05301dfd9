// Command mutation breaks the library in small ways, one at a time, and checks
// that the tests notice each. It is run by testdata/scripts/mutation.
//
//	mutation [-only WORD] [-every N] [-build] CHECKOUT
//
// The file mutants, beside this one, says what to break: a name, a file, the text
// to replace, which must be there exactly once, and its replacement.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// mutant is one way to break the library.
type mutant struct {
	name, file, old, new string
	kernel               string // the kernel tests that must notice it; "" for the unit tests
}

func main() {
	log.SetFlags(0)
	only := flag.String("only", "", "only mutants with this `word` in their name")
	build := flag.Bool("build", false, "only check that the mutants compile")
	every := flag.Int("every", 1, "only each `N`th mutant")
	flag.Parse()
	checkout, err := filepath.Abs(flag.Arg(0))
	if err != nil {
		log.Fatal(err)
	}
	mutants, err := readMutants(filepath.Join(checkout, "testdata/mutation/mutants"))
	if err != nil {
		log.Fatal(err)
	}
	tree, err := os.MkdirTemp("", "ipvs-mutation.")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(tree)
	if out, err := exec.Command("cp", "-r", checkout+"/.", tree).CombinedOutput(); err != nil {
		log.Fatalf("copying: %v: %s", err, out)
	}
	// Without a mutant the tests must pass, or their failure would say nothing.
	if noticed, out := (&mutant{}).noticed(tree); noticed && !*build {
		log.Fatalf("the tests fail without a mutant:\n%s", out)
	}
	var caught, survived int
	for n, m := range mutants {
		if n%*every != 0 || !strings.Contains(m.name, *only) {
			continue
		}
		noticed, err := m.try(tree, *build)
		switch {
		case err != nil:
			survived++
			fmt.Printf("--- FAIL: %s: %v\n", m.name, err)
		case noticed:
			caught++
			fmt.Printf("--- PASS: noticed: %s\n", m.name)
		default:
			survived++
			fmt.Printf("--- FAIL: SURVIVED: %s (%s: %q -> %q)\n", m.name, m.file, m.old, m.new)
		}
	}
	fmt.Printf("%d passed, %d failed\n", caught, survived)
	if survived > 0 || caught == 0 {
		os.RemoveAll(tree)
		os.Exit(1)
	}
}

// readMutants reads paragraphs of the lines "# name", "file [kernel tests]",
// "- old", "+ new"; \n and \t in them stand for themselves.
func readMutants(path string) (mutants []mutant, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	unescape := strings.NewReplacer(`\n`, "\n", `\t`, "\t")
	for _, paragraph := range strings.Split(strings.TrimSpace(string(text)), "\n\n") {
		lines := strings.Split(paragraph, "\n")
		if len(lines) != 4 || !strings.HasPrefix(lines[0], "# ") || !strings.HasPrefix(lines[2], "- ") || !strings.HasPrefix(lines[3], "+ ") {
			return nil, fmt.Errorf("mutants: not understood:\n%s", paragraph)
		}
		file, kernel, _ := strings.Cut(lines[1], " ")
		mutants = append(mutants, mutant{lines[0][2:], file, unescape.Replace(lines[2][2:]), unescape.Replace(lines[3][2:]), kernel})
	}
	return mutants, nil
}

// try puts the mutant into the tree, runs the tests, and takes it out again.
func (m *mutant) try(tree string, onlyBuild bool) (noticed bool, err error) {
	path := filepath.Join(tree, m.file)
	source, err := os.ReadFile(path)
	if err != nil {
		return false, err
	}
	if n := strings.Count(string(source), m.old); n != 1 {
		return false, fmt.Errorf("%q is %d times in %s, want once", m.old, n, m.file)
	}
	if err := os.WriteFile(path, []byte(strings.Replace(string(source), m.old, m.new, 1)), 0o644); err != nil {
		return false, err
	}
	defer os.WriteFile(path, source, 0o644)
	if out, err := run(tree, "go", "build", "."); err != nil {
		return false, fmt.Errorf("does not compile: %s", out)
	}
	if onlyBuild {
		return true, nil
	}
	noticed, _ = m.noticed(tree)
	return noticed, nil
}

// noticed runs the tests, and tells whether they fail.
func (m *mutant) noticed(tree string) (bool, string) {
	if m.kernel == "" {
		out, err := run(tree, "go", "test", "-count=1", "-timeout=60s", ".")
		return err != nil, out
	}
	binary := filepath.Join(tree, "mutant.test")
	if out, err := run(tree, "go", "test", "-c", "-o", binary, "."); err != nil {
		return true, out
	}
	out, err := run(tree, filepath.Join(tree, "testdata/vm/run"), "--timeout", "200", "--env", "IPVS_TEST_VM=1", "--",
		binary, "-test.timeout=150s", "-test.run="+m.kernel)
	return err != nil, out
}

func run(dir, name string, args ...string) (string, error) {
	c := exec.Command(name, args...)
	c.Dir = dir
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := c.CombinedOutput()
	return string(out), err
}
