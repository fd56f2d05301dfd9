package main

import (
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"slices"
	"strings"
	"testing"
)

const example = `package p

import "errors"

const size = 4

type table []int

func (t *table) first(n int) (int, error) {
	if n < size && t != nil { // a comment, n < size
		return 0, errors.New("too small")
	}
	n += 2
	return (*t)[n], nil
}

func check() error { return errors.New("") }

func both() error { return check() }
`

func load(t *testing.T, source string) (*token.FileSet, *ast.File, *types.Info) {
	t.Helper()
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, "p.go", source, 0)
	if err != nil {
		t.Fatal(err)
	}
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}}
	config := types.Config{Importer: importer.ForCompiler(fset, "source", nil)}
	if _, err := config.Check("p", fset, []*ast.File{file}, info); err != nil {
		t.Fatal(err)
	}
	return fset, file, info
}

// TestFindPlaces asserts every way to break the example.
func TestFindPlaces(t *testing.T) {
	fset, file, info := load(t, example)
	var got []string
	for _, p := range findPlaces(fset, "p.go", file, []byte(example), info) {
		for _, e := range p.edits {
			_, new := lines([]byte(example), e)
			got = append(got, p.function+" "+p.kind+": "+new)
		}
	}
	condition := "(*table).first condition: if "
	want := []string{
		"size constant: const size = (4 + 1)",
		"size constant: const size = (4 - 1)",
		condition + "(n < size && t != nil) && false { // a comment, n < size",
		condition + "!(n < size && t != nil) { // a comment, n < size",
		condition + "(n < size && t != nil) || true { // a comment, n < size",
		"(*table).first and-or: if n < size || t != nil { // a comment, n < size",
		"(*table).first comparison: if n >= size && t != nil { // a comment, n < size",
		"(*table).first off by one: if n <= size && t != nil { // a comment, n < size",
		"(*table).first constant: if n < (size + 1) && t != nil { // a comment, n < size",
		"(*table).first comparison: if n < size && t == nil { // a comment, n < size",
		"(*table).first constant: return (0 + 1), errors.New(\"too small\")",
		"(*table).first constant: return (0 - 1), errors.New(\"too small\")",
		"(*table).first dropped error: return 0, nil",
		"(*table).first arithmetic: n -= 2",
		"(*table).first removed statement: _ = 2",
		"(*table).first constant: n += (2 + 1)",
		"(*table).first constant: n += (2 - 1)",
		"(*table).first off by one: return (*t)[(n) + 1], nil",
		"(*table).first off by one: return (*t)[(n) - 1], nil",
		`check dropped error: func check() error { { _ = errors.New(""); return nil } }`,
		`both dropped error: func both() error { { _ = check(); return nil } }`,
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestChoiceIsStable puts code before the example: the same mutants are made of
// it, in the same order; and another seed chooses others.
func TestChoiceIsStable(t *testing.T) {
	made := func(source string, seed uint64) (all []string) {
		fset, file, info := load(t, source)
		for _, m := range choose(mutants(findPlaces(fset, "p.go", file, []byte(source), info), []byte(source), seed)) {
			if m.function != "added" {
				all = append(all, m.id+" "+m.new)
			}
		}
		return all
	}
	one := made(example, 1)
	moved := made(strings.Replace(example, "const", "func added() {}\n\nconst", 1), 1)
	if !slices.Equal(one, moved) {
		t.Errorf("got %q, want %q", moved, one)
	}
	if other := made(example, 2); slices.Equal(one, other) {
		t.Errorf("seeds 1 and 2 both choose %q", one)
	}
}
