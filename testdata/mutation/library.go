package main

import (
	"fmt"
	"go/ast"
	"go/build"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// library is the package that gets broken: its files without the tests.
type library struct {
	dir     string
	fset    *token.FileSet
	names   []string
	sources map[string][]byte
	files   map[string]*ast.File
	info    *types.Info
	imports types.Importer
}

func loadLibrary(dir string) (*library, error) {
	pkg, err := build.ImportDir(dir, 0)
	if err != nil {
		return nil, err
	}
	l := &library{dir: dir, fset: token.NewFileSet(), names: pkg.GoFiles, sources: map[string][]byte{}, files: map[string]*ast.File{}}
	for _, name := range l.names {
		if l.sources[name], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
			return nil, err
		}
		if l.files[name], err = parser.ParseFile(l.fset, name, l.sources[name], parser.SkipObjectResolution); err != nil {
			return nil, err
		}
	}
	if l.imports, err = compiled(dir, l.fset); err != nil {
		return nil, err
	}
	l.info = &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}}
	return l, l.check("", nil, l.info)
}

// compiled imports the packages that the library imports, as the go command compiled
// them.
func compiled(dir string, fset *token.FileSet) (types.Importer, error) {
	list := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}", ".")
	list.Dir, list.Env, list.Stderr = dir, append(os.Environ(), "CGO_ENABLED=0"), os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	exports := map[string]string{}
	for _, line := range strings.Split(string(out), "\n") {
		path, file, _ := strings.Cut(line, " ")
		exports[path] = file
	}
	return importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) }), nil
}

// check reports the first error of the types, with one file's source replaced.
func (l *library) check(name string, source []byte, info *types.Info) error {
	var files []*ast.File
	for _, n := range l.names {
		file := l.files[n]
		if n == name {
			var err error
			if file, err = parser.ParseFile(l.fset, n, source, parser.SkipObjectResolution); err != nil {
				return err
			}
		}
		files = append(files, file)
	}
	config := types.Config{Importer: l.imports, GoVersion: "go1.24"}
	_, err := config.Check("ipvs", l.fset, files, info)
	return err
}

// mutants returns one mutant of each place of the library, in the order of the seed.
func (l *library) mutants(seed uint64) []*mutant {
	var all []*mutant
	for _, name := range l.names {
		all = append(all, mutants(findPlaces(l.fset, name, l.files[name], l.sources[name], l.info), l.sources[name], seed)...)
	}
	return choose(all)
}

// compiles reports the error of the mutant, if any.
func (l *library) compiles(m *mutant) error {
	return l.check(m.file, apply(l.sources[m.file], m.edit), nil)
}

// differs reports whether the mutant compiles and is another program.
func (l *library) differs(m *mutant) bool { return m.old != m.new && l.compiles(m) == nil }

// gone returns the equivalents that no longer occur, whatever the seed.
func (l *library) gone(known equivalents) (gone [][3]string) {
	there := map[[3]string]bool{}
	for _, name := range l.names {
		for _, p := range findPlaces(l.fset, name, l.files[name], l.sources[name], l.info) {
			for _, e := range p.edits {
				old, new := lines(l.sources[name], e)
				there[[3]string{p.function, old, new}] = true
			}
		}
	}
	for key := range known {
		if !there[key] {
			gone = append(gone, key)
		}
	}
	return gone
}
