package main

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"
)

// runner builds the tests of mutants, and runs them.
type runner struct {
	library *library
	work    string // for temporary files
	all     string // the program with most mutants
	limit   time.Duration
	kernels []string

	quick bool // without the slow tests

	kernelTests []string          // the tests that only run on a kernel with IPVS
	testFiles   map[string]string // the file of each test
}

// Kernel tests that take long; those that notice a mutant are mostly others.
var slow = regexp.MustCompile(`Killed|FailingCalls|Soak|Stress|Churn|Fault|Propert|Drain|Daemon|Counters|Tunnel|ManyHandles|Module`)

// unaware tests build the library from the checkout, without the mutant.
const unaware = "^TestFakeNotLinked$"

// build builds the library's tests, with files that are other than in the checkout.
func (r *runner) build(name string, files map[string][]byte) (binary string, err error) {
	binary = filepath.Join(r.work, name)
	replace := map[string]string{}
	for file, source := range files {
		path := binary + "." + file
		if err := os.WriteFile(path, source, 0o644); err != nil {
			return "", err
		}
		replace[filepath.Join(r.library.dir, file)] = path
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": replace})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(binary+".json", overlay, 0o644); err != nil {
		return "", err
	}
	command := exec.Command("go", "test", "-c", "-vet=off", "-o", binary, "-ldflags=-s -w", "-overlay="+binary+".json", ".")
	command.Dir, command.Env = r.library.dir, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := command.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building %s: %w\n%s", name, err, out)
	}
	return binary, nil
}

// binary returns the program with the mutant, built under the name if it is one of
// its own.
func (r *runner) binary(m *mutant, name string) (string, error) {
	if m.number > 0 {
		return r.all, nil
	}
	return r.build(name, map[string][]byte{m.file: apply(r.library.sources[m.file], m.edit)})
}

// unit runs the tests of a binary here. A mutant may take all memory, or never end.
func (r *runner) unit(binary string, number int, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), r.limit+30*time.Second)
	defer cancel()
	command := exec.CommandContext(ctx, "sh", append([]string{"-c", `ulimit -v 4194304; exec "$0" "$@"`,
		binary, "-test.timeout=" + r.limit.String(), "-test.skip=" + unaware}, args...)...)
	command.Dir, command.Env = r.library.dir, append(os.Environ(), fmt.Sprint(numberVariable, "=", number))
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	command.Cancel = func() error { return syscall.Kill(-command.Process.Pid, syscall.SIGKILL) }
	command.WaitDelay = 5 * time.Second
	out, err := command.CombinedOutput()
	return string(out), err
}

var (
	failedTest  = regexp.MustCompile(`(?m)^--- FAIL: (\S+)`)
	hangingTest = regexp.MustCompile(`(?s)\npanic: test timed out.*?\n\s*((?:Test|Fuzz|Example)\S*) \(`)
	skippedTest = regexp.MustCompile(`(?m)^ *--- SKIP: ([^\s/]+)`)
)

// failed returns the name of the test that failed.
func failed(out string) string {
	if found := failedTest.FindStringSubmatch(out); found != nil {
		return found[1]
	}
	if found := hangingTest.FindStringSubmatch("\n" + out); found != nil {
		return found[1] + ", which did not end"
	}
	return "a crash"
}

// prepare builds the program with most mutants, checks that the tests pass without a
// mutant (otherwise their failure would prove nothing), and determines which of them
// need a kernel with IPVS.
func (r *runner) prepare(mutants []*mutant) (err error) {
	if r.all, err = r.build("all", r.library.combine(mutants)); err != nil {
		return err
	}
	began := time.Now()
	out, err := r.unit(r.all, 0, "-test.v")
	if err != nil {
		return fmt.Errorf("the tests fail without a mutant: %w\n%s", err, out)
	}
	// A mutant that takes this much longer will not end.
	r.limit = 15*time.Second + 5*time.Since(began)
	seen := map[string]bool{}
	for _, found := range skippedTest.FindAllStringSubmatch(out, -1) {
		if name := found[1]; !seen[name] {
			seen[name] = true
			r.kernelTests = append(r.kernelTests, name)
		}
	}
	r.testFiles, err = testFiles(r.library.dir)
	return err
}

var testFunc = regexp.MustCompile(`(?m)^func (Test\w+)\(`)

// testFiles returns the file of each test.
func testFiles(dir string) (map[string]string, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	files := map[string]string{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		for _, found := range testFunc.FindAllSubmatch(text, -1) {
			files[string(found[1])] = filepath.Base(path)
		}
	}
	return files, err
}

// testsFor returns the patterns of the kernel tests for a mutant: those of the same
// subject first, which mostly notice it, and those that take long at last.
func (r *runner) testsFor(m *mutant) string {
	if m.kernel != "" {
		return patterns("300", []string{m.kernel})
	}
	subject, _, _ := strings.Cut(m.file, "_")
	var related, others, long []string
	for _, name := range r.kernelTests {
		switch {
		case strings.HasPrefix(r.testFiles[name], subject+"_"):
			related = append(related, name)
		case slow.MatchString(name):
			long = append(long, name)
		default:
			others = append(others, name)
		}
	}
	if r.quick {
		long = nil
	}
	return patterns("600", related) + patterns("300", others) + patterns("900", long)
}

// patterns returns the tests in the form that the guest's script reads; nothing for no
// tests.
func patterns(seconds string, names []string) string {
	if len(names) == 0 {
		return ""
	}
	return " " + seconds + ":^(" + strings.Join(names, "|") + ")$"
}

// try runs the unit tests.
func (r *runner) try(m *mutant, name string) error {
	binary, err := r.binary(m, name)
	if err != nil {
		return err
	}
	if out, err := r.unit(binary, m.number, "-test.failfast"); err != nil {
		m.noticed = failed(out)
	}
	return nil
}

//go:embed guest.sh
var guestScript string

// inGuest runs the kernel tests of mutants in one virtual machine, until it ends, and
// returns the mutants that are still to be tried.
func (r *runner) inGuest(kernel string, mutants []*mutant) (left []*mutant, err error) {
	dir, err := os.MkdirTemp(r.work, "guest.")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := os.Link(r.all, filepath.Join(dir, "all")); err != nil {
		return nil, err
	}
	script := filepath.Join(dir, "guest.sh")
	if err := os.WriteFile(script, []byte(guestScript), 0o755); err != nil {
		return nil, err
	}
	var list strings.Builder
	byName, own := map[string]*mutant{}, 0
	for n, m := range mutants {
		name := fmt.Sprint("m", n)
		binary, err := r.binary(m, name)
		if err != nil {
			return nil, err
		}
		if binary != r.all {
			own++
			if err := os.Rename(binary, filepath.Join(dir, name)); err != nil {
				return nil, err
			}
		}
		byName[name] = m
		fmt.Fprintln(&list, name, filepath.Base(binary), fmt.Sprint(m.number)+r.testsFor(m))
	}
	if err := os.WriteFile(filepath.Join(dir, "list"), []byte(list.String()), 0o644); err != nil {
		return nil, err
	}
	command := exec.Command(filepath.Join(r.library.dir, "testdata/vm/run"), "--kernel", kernel,
		"--memory", fmt.Sprint(1024+20*own), "--timeout", fmt.Sprint(300+2000*len(mutants)),
		"--file", dir+":/mutants", "--env", "IPVS_TEST_VM=1", "--", "/mutants/guest.sh")
	var stderr bytes.Buffer
	command.Stderr = &stderr
	out, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := command.Start(); err != nil {
		return nil, err
	}
	done := map[*mutant]bool{}
	var trying *mutant
	ended := false // as the script means to
	for lines := bufio.NewScanner(out); lines.Scan(); {
		verb, rest, _ := strings.Cut(lines.Text(), " ")
		name, by, _ := strings.Cut(rest, " ")
		m := byName[name]
		switch verb {
		case "began":
			trying = m
		case "why":
			fmt.Println("\t" + rest)
		case "noticed":
			m.noticed, m.unclear = by+", kernel "+kernel, false
			done[m], trying = true, nil
		case "survived":
			m.unclear = false
			done[m], trying = true, nil
		case "unclear":
			fmt.Printf("(%s fails, and then without the mutant too: %s)\n", by, m)
			if m.unclear {
				done[m] = true // in a fresh guest, too
			}
			m.unclear, ended = true, true
		case "finished":
			ended = true
		}
	}
	err = command.Wait()
	switch code := command.ProcessState.ExitCode(); {
	case ended:
	case trying == nil || code != 124 && code != 125:
		return nil, fmt.Errorf("the virtual machine: %v\n%s", err, &stderr)
	case trying.ended: // in a guest of its own, too
		trying.noticed, done[trying] = "the end of the guest", true
	default:
		trying.ended = true
	}
	for _, m := range mutants {
		if !done[m] {
			left = append(left, m)
		}
	}
	return left, nil
}

// onKernels runs the kernel tests of mutants, on one kernel after the other until
// something notices them.
func (r *runner) onKernels(mutants []*mutant, report func(*mutant)) error {
	const batch = 24 // mutants in a guest; some have a program of their own, which takes memory
	for _, kernel := range r.kernels {
		var left []*mutant
		for len(mutants) > 0 {
			n := min(batch, len(mutants))
			now := mutants[:n:n]
			again, err := r.inGuest(kernel, now)
			if err != nil {
				return err
			}
			waiting := map[*mutant]bool{}
			for _, m := range again {
				waiting[m] = true
			}
			for _, m := range now {
				switch {
				case waiting[m]:
				case m.noticed != "":
					report(m)
				default:
					left = append(left, m)
				}
			}
			mutants = append(again, mutants[n:]...)
		}
		mutants = left
	}
	for _, m := range mutants {
		report(m)
	}
	return nil
}
