package main

import (
	"strings"
	"testing"
)

// events returns what go test -json prints for a package p: each word is a test
// with an action, "TestA=pass"; one without "=" does not end.
func events(t *testing.T, words string) results {
	t.Helper()
	var lines strings.Builder
	for _, word := range strings.Fields(words) {
		test, action, ended := strings.Cut(word, "=")
		lines.WriteString(`{"Action":"run","Package":"p","Test":"` + test + `"}` + "\n")
		lines.WriteString(`{"Action":"output","Package":"p","Test":"` + test + `","Output":"said ` + test + `\n"}` + "\n")
		if ended {
			lines.WriteString(`{"Action":"` + action + `","Package":"p","Test":"` + test + `"}` + "\n")
		}
	}
	all, err := read(strings.NewReader(lines.String()))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestReport(t *testing.T) {
	for _, test := range []struct {
		name               string
		original, checkout string
		atLeast            int
		well               bool
		sum, says          string
	}{
		{"the same", "A=pass B=skip", "A=pass B=skip", 1, true, "1 passed, 0 failed, 1 skipped", ""},
		{"a failure of the checkout", "A=pass B=pass", "A=pass B=fail", 1, false, "1 passed, 1 failed, 0 skipped",
			"passed with the original, failed with the checkout: B\nsaid B\n"},
		{"a crash of the checkout", "A=pass B=pass", "A=pass B", 1, false, "1 passed, 1 failed, 0 skipped", "failed with the checkout: B"},
		{"not run with the checkout", "A=pass B=pass", "A=pass", 1, false, "1 passed, 1 failed, 0 skipped", "not run with the checkout: B"},
		{"not run with the original", "A=pass", "A=pass B=pass", 1, false, "1 passed, 1 failed, 0 skipped", "not run with the original, passed"},
		{"skipped with the checkout", "A=pass B=pass", "A=pass B=skip", 1, false, "1 passed, 1 failed, 0 skipped", "skipped with the checkout: B"},
		{"skipped with the original", "A=pass B=skip", "A=pass B=pass", 1, false, "1 passed, 1 failed, 0 skipped", "skipped with the original"},
		{"fails with both", "A=pass B=fail", "A=pass B=fail", 1, true, "1 passed, 0 failed, 1 skipped", "fails with both: B"},
		{"mended", "A=pass B=fail", "A=pass B=pass", 1, true, "2 passed, 0 failed, 0 skipped", "fails with the original only: B"},
		{"too few", "A=pass", "A=pass", 2, false, "1 passed, 0 failed, 0 skipped", "fewer than 2 passed"},
		{"all fail with both", "A=fail", "A=fail", 1, false, "0 passed, 0 failed, 1 skipped", "fewer than 1 passed"},
		{"nothing ran", "", "", 1, false, "0 passed, 0 failed, 0 skipped", "fewer than 1 passed"},
		{"subtests count, their parent does not", "A=pass A/1=pass A/2=pass", "A=fail A/1=pass A/2=fail", 1, false,
			"1 passed, 1 failed, 0 skipped", "failed with the checkout: A/2"},
		{"a parent that fails by itself", "A=pass A/1=pass", "A=fail A/1=pass", 1, false,
			"1 passed, 1 failed, 0 skipped", "failed with the checkout: A\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var out strings.Builder
			well := report(&out, []suite{{"p", test.atLeast}}, events(t, test.original), events(t, test.checkout))
			if well != test.well {
				t.Errorf("well: %v, want %v", well, test.well)
			}
			if !strings.HasSuffix(out.String(), "\n"+test.sum+"\n") {
				t.Errorf("sum: want %q at the end", test.sum)
			}
			if !strings.Contains(out.String(), test.says) {
				t.Errorf("want %q", test.says)
			}
			if t.Failed() {
				t.Log(out.String())
			}
		})
	}
}

// TestBuildFailure checks that what a compiler says reaches the reader.
func TestBuildFailure(t *testing.T) {
	all, err := read(strings.NewReader(`{"ImportPath":"p [p.test]","Action":"build-output","Output":"undefined: X\n"}
{"ImportPath":"p [p.test]","Action":"build-fail"}
{"Action":"fail","Package":"p","FailedBuild":"p [p.test]"}
{"ImportPath":"imported","Action":"build-output","Output":"undefined: Y\n"}
`))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if report(&out, []suite{{"p", 1}}, all, results{}) {
		t.Error("all is well")
	}
	if !strings.Contains(out.String(), "undefined: X") || !strings.Contains(out.String(), "undefined: Y") {
		t.Error(out.String())
	}
}

func TestReadRefusesOtherThings(t *testing.T) {
	if _, err := read(strings.NewReader("ok  \tp\t0.1s\n")); err == nil {
		t.Error("no error")
	}
}
