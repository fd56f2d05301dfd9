// Command mutation breaks the library in small ways, one at a time, and checks
// that the tests notice each. It is run by testdata/scripts/mutation.
//
//	mutation [flags] CHECKOUT
//
// The file mutants in this directory lists handwritten mutants: a name, a file and the
// kernel tests that must notice it (if there are none, the unit tests), the text to
// replace, which must occur exactly once, and its replacement.
//
// Besides, a seed chooses places to break: comparisons, constants and so on. The
// unit tests run first, then those that need a kernel, many mutants in one virtual
// machine. The file equivalents names the mutants that change nothing that a test
// could see: the reason, the function, the lines before and after.
package main

import (
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"time"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("mutation: ")
	var (
		only    = flag.String("only", "", "only mutants whose line in the report matches the `pattern`")
		build   = flag.Bool("build", false, "only check that the mutants compile")
		list    = flag.Bool("list", false, "only list the mutants")
		every   = flag.Int("every", 1, "only each `N`th mutant of those written by hand; 0 for none")
		places  = flag.Int("places", 0, "`number` of random mutants")
		skip    = flag.Int("skip", 0, "leave out the first `number` random mutants")
		seed    = flag.Uint64("seed", 1, "what chooses the random mutants")
		kernels = flag.String("kernels", "6.12", "kernels to run the kernel tests on, until one notices")
		quick   = flag.Bool("quick", false, "without the kernel tests that take long")
		jobs    = flag.Int("jobs", 1+runtime.NumCPU(), "mutants whose unit tests run at a time")
	)
	flag.Parse()
	dir, err := filepath.Abs(flag.Arg(0))
	if err != nil {
		log.Fatal(err)
	}
	pattern, err := regexp.Compile(*only)
	if err != nil {
		log.Fatal(err)
	}
	r := &runner{kernels: strings.Fields(*kernels), limit: 5 * time.Minute, quick: *quick}
	if r.library, err = loadLibrary(dir); err != nil {
		log.Fatal(err)
	}
	chosen, known, err := choices(r.library, *seed, *every, *skip, *places, pattern)
	if err != nil {
		log.Fatal(err)
	}
	if *build || *list {
		for _, m := range chosen {
			if *list {
				fmt.Println(m)
			}
		}
		fmt.Printf("%d mutants, all compile\n", len(chosen))
		return
	}
	if r.work, err = os.MkdirTemp("", "ipvs-mutation."); err != nil {
		log.Fatal(err)
	}
	ok, err := tryAll(r, chosen, known, *jobs)
	os.RemoveAll(r.work)
	if err != nil {
		log.Fatal(err)
	}
	if !ok {
		os.Exit(1)
	}
}

// choices returns the mutants to try, all of which compile.
func choices(l *library, seed uint64, every, skip, places int, only *regexp.Regexp) (chosen []*mutant, known equivalents, err error) {
	byHand, err := readMutants(filepath.Join(l.dir, "testdata/mutation/mutants"), l.sources)
	if err != nil {
		return nil, nil, fmt.Errorf("written by hand:\n%w", err)
	}
	if known, err = readEquivalents(filepath.Join(l.dir, "testdata/mutation/equivalents")); err != nil {
		return nil, nil, err
	}
	for _, key := range l.gone(known) {
		log.Printf("equivalents: no longer there: %s: %s -> %s", key[0], key[1], key[2])
	}
	for n, m := range byHand {
		if every == 0 || n%every != 0 || !only.MatchString(m.String()) {
			continue
		}
		if e := l.compiles(m); e != nil {
			err = errors.Join(err, fmt.Errorf("%s: does not compile: %w", m, e))
		}
		chosen = append(chosen, m)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("written by hand:\n%w", err)
	}
	for _, m := range l.mutants(seed) {
		if places == 0 {
			break
		}
		if !only.MatchString(m.String()) || !l.differs(m) {
			continue
		}
		if places--; skip > 0 {
			skip--
			continue
		}
		chosen = append(chosen, m)
	}
	return chosen, known, nil
}

// tryAll tries the mutants, reports how each ended, and whether all were noticed.
func tryAll(r *runner, mutants []*mutant, known equivalents, jobs int) (ok bool, err error) {
	if err := r.prepare(mutants); err != nil {
		return false, err
	}
	var mu sync.Mutex // of all that follows
	var forKernel []*mutant
	var unit, kernel, equivalent, survived int
	var firstErr error

	queue := make(chan *mutant)
	var wait sync.WaitGroup
	for job := range jobs {
		wait.Add(1)
		go func() {
			defer wait.Done()
			for m := range queue {
				err := r.try(m, fmt.Sprint("job", job))
				mu.Lock()
				switch {
				case err != nil:
					firstErr = err
				case m.noticed != "":
					unit++
					fmt.Printf("--- PASS: noticed: %s (by %s)\n", m, m.noticed)
				case m.name != "":
					survived++
					fmt.Printf("--- FAIL: SURVIVED: %s\n", m)
				default:
					forKernel = append(forKernel, m)
					fmt.Printf("(the unit tests pass: %s)\n", m)
				}
				mu.Unlock()
			}
		}()
	}
	for _, m := range mutants {
		mu.Lock()
		reason := known.reason(m)
		switch {
		case reason != "":
			equivalent++
			fmt.Printf("--- SKIP: equivalent, %s: %s\n", reason, m)
		case m.kernel != "":
			forKernel = append(forKernel, m)
		}
		mu.Unlock()
		if reason == "" && m.kernel == "" {
			queue <- m
		}
	}
	close(queue)
	wait.Wait()
	if firstErr != nil {
		return false, firstErr
	}
	err = r.onKernels(forKernel, func(m *mutant) {
		if m.noticed == "" {
			survived++
			if m.unclear {
				fmt.Printf("--- FAIL: UNCLEAR: %s\n", m)
			} else {
				fmt.Printf("--- FAIL: SURVIVED: %s\n", m)
			}
			return
		}
		kernel++
		fmt.Printf("--- PASS: noticed: %s (by %s)\n", m, m.noticed)
	})
	if err != nil {
		return false, err
	}
	fmt.Printf("%d mutants noticed by the unit tests, %d by the kernel tests, %d known as equivalent\n", unit, kernel, equivalent)
	fmt.Printf("%d passed, %d failed\n", unit+kernel, survived)
	return survived == 0 && unit+kernel > 0, nil
}
