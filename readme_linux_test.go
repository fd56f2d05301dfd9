package ipvs

import (
	"embed"
	"regexp"
	"strings"
	"testing"
)

// pages are the documentation, and the files that it quotes or lists.
//
//go:embed *.md docs/*.md *.go
var pages embed.FS

func page(t *testing.T, name string) string {
	t.Helper()
	text, err := pages.ReadFile(name)
	must(t, err)
	return string(text)
}

// quoting are the pages whose Go code is taken from the examples.
var quoting = []string{"README.md", "docs/examples.md", "docs/reconcile.md"}

// Each block of Go code in a page is a part of an example, so it compiles.
func TestReadmeCompiles(t *testing.T) {
	flat := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	files, err := pages.ReadDir(".")
	must(t, err)
	var examples []string
	for _, file := range files {
		if strings.HasPrefix(file.Name(), "example") {
			examples = append(examples, flat(page(t, file.Name())))
		}
	}
	for _, name := range quoting {
		blocks := strings.Split(page(t, name), "```go\n")[1:]
		if len(blocks) == 0 {
			t.Errorf("%s has no Go code", name)
		}
	blocks:
		for n, block := range blocks {
			block, _, closed := strings.Cut(block, "```")
			if !closed {
				t.Fatalf("%s: block %d does not end", name, n+1)
			}
			for _, example := range examples {
				if strings.Contains(example, flat(block)) {
					continue blocks
				}
			}
			t.Errorf("%s: block %d is in no example:\n%s", name, n+1, block)
		}
	}
}

// Links between pages lead to pages and headings that exist.
func TestPagesLink(t *testing.T) {
	names := []string{"README.md", "CHANGELOG.md", "CONTRIBUTING.md"}
	folder, err := pages.ReadDir("docs")
	must(t, err)
	for _, file := range folder {
		names = append(names, "docs/"+file.Name())
	}
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	found := 0
	for _, name := range names {
		for _, match := range link.FindAllStringSubmatch(page(t, name), -1) {
			target, anchor, _ := strings.Cut(match[1], "#")
			switch {
			case strings.Contains(target, "://"):
				continue
			case target == "":
				target = name
			case strings.HasPrefix(target, "../"):
				target = target[len("../"):]
			case strings.HasPrefix(name, "docs/"):
				target = "docs/" + target
			}
			if !strings.HasSuffix(target, ".md") || strings.HasPrefix(target, "testdata/") {
				continue // not embedded
			}
			found++
			if _, err := pages.ReadFile(target); err != nil {
				t.Errorf("%s: no page %s", name, match[1])
			} else if anchor != "" && !headings(page(t, target))[anchor] {
				t.Errorf("%s: no heading %s", name, match[1])
			}
		}
	}
	if found < 10 {
		t.Errorf("found %d links", found)
	}
}

// headings returns the anchors of a page's headings.
func headings(text string) map[string]bool {
	anchors := map[string]bool{}
	for _, match := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
		anchor := strings.ReplaceAll(strings.ToLower(match[1]), " ", "-")
		anchors[regexp.MustCompile(`[^\w-]`).ReplaceAllString(anchor, "")] = true
	}
	return anchors
}

// The file map has a line for each file of the package, and for no other.
func TestFileMap(t *testing.T) {
	mapped := map[string]bool{}
	for _, match := range regexp.MustCompile("(?m)^\\| `([a-z_]+\\.go)` \\| \\S").FindAllStringSubmatch(page(t, "CONTRIBUTING.md"), -1) {
		mapped[match[1]] = true
	}
	files, err := pages.ReadDir(".")
	must(t, err)
	for _, file := range files {
		name := file.Name()
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			continue
		}
		if !mapped[name] {
			t.Errorf("CONTRIBUTING.md has no line for %s", name)
		}
		delete(mapped, name)
	}
	for name := range mapped {
		t.Errorf("CONTRIBUTING.md has a line for %s, which does not exist", name)
	}
}
