package ipvs

import (
	_ "embed"
	"strings"
	"testing"
)

var (
	//go:embed README.md
	readme string
	//go:embed example_linux_test.go
	examples string
)

// Every Go block of the README stands in a file of examples, so it compiles.
func TestReadmeCompiles(t *testing.T) {
	plain := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	blocks := strings.Split(readme, "```go\n")[1:]
	if len(blocks) == 0 {
		t.Fatal("README.md has no Go code")
	}
	for n, block := range blocks {
		block, _, closed := strings.Cut(block, "```")
		if !closed {
			t.Fatalf("block %d does not end", n+1)
		}
		if !strings.Contains(plain(examples), plain(block)) {
			t.Errorf("block %d is in no example:\n%s", n+1, block)
		}
	}
}
