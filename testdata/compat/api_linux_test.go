//go:build linux

package compat

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/constant"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const (
	originalPath = "github.com/moby/ipvs"
	checkoutPath = "ipvs.test/checkout"
)

// mayGrow names the structs that may have more fields than the original's,
// after them. Every other struct must have exactly the original's: callers
// build Config unkeyed, and convert the two statistics types.
var mayGrow = map[string]bool{"Service": true, "Destination": true}

// TestExportedAPI checks that every exported name of the original is in the
// checkout, with the same type and value. It asks the go command for the
// packages, so it must run with -count=1: the go command does not know that
// an earlier result depends on more than the test's own program.
func TestExportedAPI(t *testing.T) {
	packages := load(t, originalPath, checkoutPath)
	original, checkout := packages[0], packages[1]
	if n := len(exported(original.Scope())); n < 20 {
		t.Fatalf("only %d exported names read from %s: the comparison would prove nothing", n, originalPath)
	}
	for _, d := range differences(original, checkout, mayGrow) {
		t.Error(d)
	}
}

// TestInterfaces checks that no type of the original's implements an interface of
// the standard library that it did not: packages look for those, see lookedFor.
func TestInterfaces(t *testing.T) {
	packages := load(t, originalPath, checkoutPath, "fmt", "encoding", "encoding/json", "encoding/gob", "encoding/xml", "errors",
		"log/slog", "flag", "sort", "container/heap", "io", "io/fs", "net", "os", "sync", "context", "expvar", "hash",
		"database/sql", "database/sql/driver", "testing/quick")
	original, checkout := packages[0].Scope(), packages[1].Scope()
	n := 0
	for _, p := range packages[2:] {
		for _, name := range exported(p.Scope()) {
			object, ok := p.Scope().Lookup(name).(*types.TypeName)
			if !ok {
				continue
			}
			wanted, ok := object.Type().Underlying().(*types.Interface)
			if !ok || wanted.NumMethods() == 0 || !wanted.IsMethodSet() {
				continue
			}
			n++
			for _, of := range exported(original) {
				if _, ok := original.Lookup(of).(*types.TypeName); !ok {
					continue
				}
				o, c := original.Lookup(of).Type(), checkout.Lookup(of).Type()
				if !types.Implements(types.NewPointer(o), wanted) && types.Implements(types.NewPointer(c), wanted) {
					t.Errorf("*%s is a %s.%s", of, p.Name(), name)
				}
			}
		}
	}
	if n < 50 {
		t.Fatalf("only %d interfaces in the standard library: the comparison would prove nothing", n)
	}
}

// load reads the type information of packages that the go command compiles.
func load(t *testing.T, paths ...string) []*types.Package {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("SKIP: no go command here to read the packages with: ", err)
	}
	args := append([]string{"list", "-export", "-deps", "-json=ImportPath,Export"}, paths...)
	cmd := exec.Command("go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, stderr.String())
	}
	files := map[string]string{}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct{ ImportPath, Export string }
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		files[p.ImportPath] = p.Export
	}
	imp := importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) {
		if files[path] == "" {
			return nil, fmt.Errorf("no export data for %s", path)
		}
		return os.Open(files[path])
	})
	var packages []*types.Package
	for _, path := range paths {
		p, err := imp.Import(path)
		if err != nil {
			t.Fatal(err)
		}
		packages = append(packages, p)
	}
	return packages
}

// differences lists what a program written for original would miss or find
// changed in checkout. Further names in checkout are no difference.
func differences(original, checkout *types.Package, mayGrow map[string]bool) []string {
	c := comparison{original: original, checkout: checkout, mayGrow: mayGrow}
	names := exported(original.Scope())
	for _, name := range names {
		o, n := original.Scope().Lookup(name), checkout.Scope().Lookup(name)
		if n == nil {
			c.addf("%s: missing", name)
			continue
		}
		if kind(o) != kind(n) {
			c.addf("%s: a %s, was a %s", name, kind(n), kind(o))
			continue
		}
		switch o := o.(type) {
		case *types.Const:
			c.constants(o, n.(*types.Const))
		case *types.TypeName:
			c.types(o, n.(*types.TypeName))
		case *types.Func:
			c.signatures(name, o.Type(), n.Type())
		default:
			c.same(name, o.Type(), n.Type())
		}
	}
	c.conversions(names)
	return c.found
}

type comparison struct {
	original, checkout *types.Package
	mayGrow            map[string]bool
	found              []string
}

func (c *comparison) addf(format string, args ...any) {
	c.found = append(c.found, fmt.Sprintf(format, args...))
}

// text writes a type with the name of either package replaced by the same word.
func (c *comparison) text(t types.Type) string {
	return types.TypeString(t, func(p *types.Package) string {
		if p == c.original || p == c.checkout {
			return "ipvs"
		}
		return p.Path()
	})
}

func (c *comparison) same(what string, o, n types.Type) {
	if c.text(o) != c.text(n) {
		c.addf("%s: %s, was %s", what, c.text(n), c.text(o))
	}
}

func (c *comparison) signatures(what string, o, n types.Type) {
	c.same(what, unnamed(o.(*types.Signature)), unnamed(n.(*types.Signature)))
}

// unnamed drops the receiver and the names of parameters and results.
func unnamed(s *types.Signature) *types.Signature {
	strip := func(t *types.Tuple) *types.Tuple {
		var vars []*types.Var
		for i := range t.Len() {
			vars = append(vars, types.NewParam(token.NoPos, nil, "", t.At(i).Type()))
		}
		return types.NewTuple(vars...)
	}
	return types.NewSignatureType(nil, nil, nil, strip(s.Params()), strip(s.Results()), s.Variadic())
}

func (c *comparison) constants(o, n *types.Const) {
	c.same(o.Name(), o.Type(), n.Type())
	if o.Val().Kind() != n.Val().Kind() || !constant.Compare(o.Val(), token.EQL, n.Val()) {
		c.addf("%s: value %s, was %s", o.Name(), n.Val().ExactString(), o.Val().ExactString())
	}
}

func (c *comparison) types(o, n *types.TypeName) {
	name := o.Name()
	if o.IsAlias() != n.IsAlias() {
		c.addf("%s: an alias: %t, was %t", name, n.IsAlias(), o.IsAlias())
	}
	ou, nu := o.Type().Underlying(), n.Type().Underlying()
	os, oIsStruct := ou.(*types.Struct)
	ns, nIsStruct := nu.(*types.Struct)
	switch {
	case oIsStruct && nIsStruct:
		c.fields(name, os, ns)
	case oIsStruct || nIsStruct:
		c.addf("%s: underlying %s, was %s", name, c.text(nu), c.text(ou))
	default:
		c.same(name+": underlying", ou, nu)
	}
	c.methods(name, o.Type(), n.Type())
	if !types.IsInterface(o.Type()) {
		c.methods("*"+name, types.NewPointer(o.Type()), types.NewPointer(n.Type()))
	}
}

func (c *comparison) fields(name string, o, n *types.Struct) {
	of, nf := fieldsOf(o), fieldsOf(n)
	for i, f := range of {
		if i >= len(nf) {
			c.addf("%s.%s: missing", name, f.Name())
			continue
		}
		g := nf[i]
		if f.Name() != g.Name() {
			c.addf("%s: exported field %d is %s, was %s", name, i, g.Name(), f.Name())
			continue
		}
		if f.Embedded() != g.Embedded() {
			c.addf("%s.%s: embedded: %t, was %t", name, f.Name(), g.Embedded(), f.Embedded())
		}
		c.same(name+"."+f.Name(), f.Type(), g.Type())
	}
	// A struct without exported fields is opaque to callers: what it holds is
	// its own affair.
	if len(of) == 0 {
		return
	}
	if types.Comparable(o) && !types.Comparable(n) {
		c.addf("%s: can no longer be compared with ==", name)
	}
	for i := range min(o.NumFields(), n.NumFields()) {
		if o.Tag(i) != n.Tag(i) {
			c.addf("%s: tag of field %d is %q, was %q", name, i, n.Tag(i), o.Tag(i))
		}
	}
	if !c.mayGrow[name] && o.NumFields() != n.NumFields() {
		c.addf("%s: %d fields, was %d", name, n.NumFields(), o.NumFields())
	}
	// Where all the original's fields are exported, none may come before or
	// between them.
	if len(of) == o.NumFields() {
		for i := range min(o.NumFields(), n.NumFields()) {
			if !n.Field(i).Exported() {
				c.addf("%s: unexported field %s before the end of the original's", name, n.Field(i).Name())
			}
		}
	}
}

func fieldsOf(s *types.Struct) []*types.Var {
	var fields []*types.Var
	for i := range s.NumFields() {
		if s.Field(i).Exported() {
			fields = append(fields, s.Field(i))
		}
	}
	return fields
}

func (c *comparison) methods(name string, o, n types.Type) {
	has := types.NewMethodSet(n)
	for m := range types.NewMethodSet(o).Methods() {
		f := m.Obj()
		if !f.Exported() {
			continue
		}
		// A lookup by an exported name does not depend on the package.
		g := has.Lookup(c.checkout, f.Name())
		if g == nil {
			c.addf("%s.%s: missing", name, f.Name())
			continue
		}
		c.signatures(name+"."+f.Name(), f.Type(), g.Obj().Type())
	}
}

// conversions finds types that callers can convert into each other in the
// original, and no longer in the checkout.
func (c *comparison) conversions(names []string) {
	lookup := func(p *types.Package, name string) types.Type {
		if t, ok := p.Scope().Lookup(name).(*types.TypeName); ok {
			return t.Type()
		}
		return nil
	}
	for _, a := range names {
		for _, b := range names {
			oa, ob := lookup(c.original, a), lookup(c.original, b)
			na, nb := lookup(c.checkout, a), lookup(c.checkout, b)
			if oa == nil || ob == nil || na == nil || nb == nil {
				continue
			}
			if types.ConvertibleTo(oa, ob) && !types.ConvertibleTo(na, nb) {
				c.addf("%s: can no longer be converted to %s", a, b)
			}
		}
	}
}

func exported(s *types.Scope) []string {
	return slices.DeleteFunc(s.Names(), func(name string) bool { return !token.IsExported(name) })
}

func kind(o types.Object) string {
	return strings.TrimPrefix(fmt.Sprintf("%T", o), "*types.")
}

// TestDifferences proves that the comparison notices what it should, on small
// packages made for it.
func TestDifferences(t *testing.T) {
	const base = `package ipvs
		const Mask = 7
		const Name = "rr"
		const Typed uint32 = 1
		type Kind uint32
		type Address []byte
		type Stats struct { In uint32; Out uint64 }
		type Copy Stats
		type Config struct { TCP, UDP int64 }
		type Service struct { Address Address; Port uint16; Stats Stats }
		type Handle struct { fd int }
		type Getter interface { Get(s *Service) error }
		var Default *Handle
		func New(path string) (*Handle, error) { return nil, nil }
		func Print(format string, args ...any) {}
		func (h *Handle) Close() {}
		func (h *Handle) Get(s *Service) ([]*Service, error) { return nil, nil }
		func (k Kind) String() string { return "" }
	`
	grow := map[string]bool{"Service": true}
	for _, test := range []struct {
		name     string
		old, new string
		want     []string
	}{
		{"nothing", "", "", nil},
		{"a parameter's name", "New(path string)", "New(p string)", nil},
		{"more names", "type Config", "type More int; func (h *Handle) Extra() {}; type Config", nil},
		{"inside an opaque struct", "fd int", "a, b []string", nil},
		{"a field at the end", "Stats Stats }", "Stats Stats; More int }", nil},

		{"missing function", "func Print(", "func print(", []string{"Print: missing"}},
		{"missing method", "Handle) Close(", "Handle) close(", []string{"*Handle.Close: missing"}},
		{"missing constant", "const Mask", "const mask", []string{"Mask: missing"}},
		{"missing field", "Port uint16; ", "", []string{"Service: exported field 1 is Stats, was Port", "Service.Stats: missing"}},
		{"missing type", "type Config", "type config", []string{"Config: missing"}},

		{"field order", "Address Address; Port uint16", "Port uint16; Address Address",
			[]string{"Service: exported field 0 is Port, was Address", "Service: exported field 1 is Address, was Port"}},
		{"field order in unkeyed struct", "TCP, UDP", "UDP, TCP",
			[]string{"Config: exported field 0 is UDP, was TCP", "Config: exported field 1 is TCP, was UDP"}},
		{"field type", "Port uint16", "Port uint32", []string{"Service.Port: uint32, was uint16"}},
		{"field tag", "Port uint16", "Port uint16 `json:\"p\"`", []string{"Service: tag of field 1 is \"json:\\\"p\\\"\", was \"\""}},
		{"field made embedded", "Stats Stats }", "Stats }", []string{"Service.Stats: embedded: true, was false"}},
		{"one field more", "TCP, UDP", "TCP, UDP, Fin", []string{"Config: 3 fields, was 2"}},
		{"one unexported field more", "TCP, UDP", "TCP, UDP, fin", []string{"Config: 3 fields, was 2"}},
		{"unexported field between", "Port uint16;", "Port uint16; more int;",
			[]string{"Service: unexported field more before the end of the original's"}},

		{"constant's value", "Mask = 7", "Mask = 3", []string{"Mask: value 3, was 7"}},
		{"constant's string", `"rr"`, `"wrr"`, []string{`Name: value "wrr", was "rr"`}},
		{"constant's kind", "Mask = 7", `Mask = "7"`, []string{"Mask: untyped string, was untyped int", `Mask: value "7", was 7`}},
		{"constant gets a type", "Mask = 7", "Mask uint32 = 7", []string{"Mask: uint32, was untyped int"}},
		{"constant gets a type of the package", "Mask = 7", "Mask Kind = 7", []string{"Mask: ipvs.Kind, was untyped int"}},
		{"constant loses its type", "Typed uint32", "Typed", []string{"Typed: untyped int, was uint32"}},
		{"constant becomes a variable", "const Mask", "var Mask", []string{"Mask: a Var, was a Const"}},
		{"variable's type", "Default *Handle", "Default Handle", []string{"Default: ipvs.Handle, was *ipvs.Handle"}},

		{"parameter's type", "New(path string)", "New(path []byte)",
			[]string{"New: func([]byte) (*ipvs.Handle, error), was func(string) (*ipvs.Handle, error)"}},
		{"variadic", "args ...any", "args []any",
			[]string{"Print: func(string, []any), was func(string, ...any)"}},
		{"method's result", "([]*Service, error) { return nil, nil }", "([]Service, error) { return nil, nil }",
			[]string{"*Handle.Get: func(*ipvs.Service) ([]ipvs.Service, error), was func(*ipvs.Service) ([]*ipvs.Service, error)"}},
		{"method of the pointer only", "(k Kind) String", "(k *Kind) String", []string{"Kind.String: missing"}},
		{"interface's method", "Get(s *Service) error", "Get(s Service) error",
			[]string{"Getter: underlying: interface{Get(s ipvs.Service) error}, was interface{Get(s *ipvs.Service) error}",
				"Getter.Get: func(ipvs.Service) error, was func(*ipvs.Service) error"}},
		{"underlying type", "type Kind uint32", "type Kind uint64", []string{"Kind: underlying: uint64, was uint32"}},
		{"struct becomes another type", "type Config struct { TCP, UDP int64 }", "type Config int",
			[]string{"Config: underlying int, was struct{TCP int64; UDP int64}"}},
		{"alias", "type Copy Stats", "type Copy = Stats", []string{"Copy: an alias: true, was false"}},
		{"conversion and comparison lost", "type Copy Stats", "type Copy struct { In uint32; Out uint64; More []int }",
			[]string{"Copy: can no longer be compared with ==", "Copy: 3 fields, was 2",
				"Copy: can no longer be converted to Stats", "Stats: can no longer be converted to Copy"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			changed := strings.Replace(base, test.old, test.new, 1)
			if changed == base && test.old != "" {
				t.Fatalf("%q is not in the base package", test.old)
			}
			got := differences(fake(t, originalPath, base), fake(t, checkoutPath, changed), grow)
			if !slices.Equal(got, test.want) {
				t.Errorf("differences found:\n\t%s\nwant:\n\t%s", strings.Join(got, "\n\t"), strings.Join(test.want, "\n\t"))
			}
		})
	}
}

func fake(t *testing.T, path, source string) *types.Package {
	t.Helper()
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, "fake.go", source, 0)
	if err != nil {
		t.Fatal(err)
	}
	p, err := new(types.Config).Check(path, files, []*ast.File{file}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return p
}
