package main

import (
	"fmt"
	"go/ast"
	"slices"
	"strings"
)

// Compiling and linking take far longer than most tests. So one program has many
// mutants: a broken function occurs twice, unchanged and as in the mutant, and begins
// with the choice between them. An environment variable chooses.

// numberVariable is the environment variable that chooses the mutant.
const numberVariable = "IPVS_MUTANT"

// chooser is appended to doc.go, which has no code of its own.
const chooser = `
import (
	"os"
	"strconv"
)

var mutantNumber, _ = strconv.Atoi(os.Getenv("` + numberVariable + `"))
`

// combine numbers the mutants that can be in one program, and returns the changed files
// of that program.
func (l *library) combine(mutants []*mutant) map[string][]byte {
	choices := map[string][]edit{}
	copies := map[string]string{}
	n := 0
	for _, m := range mutants {
		decl := l.enclosing(m)
		if decl == nil {
			continue
		}
		call, ok := l.callOf(decl, fmt.Sprint("mutant", n+1))
		if !ok {
			continue
		}
		n++
		m.number = n
		offset := func(node ast.Node) (from, to int) {
			return l.fset.Position(node.Pos()).Offset, l.fset.Position(node.End()).Offset
		}
		body, _ := offset(decl.Body)
		choice := fmt.Sprintf("if mutantNumber == %d { return %s };", n, call)
		if decl.Type.Results == nil {
			choice = fmt.Sprintf("if mutantNumber == %d { %s; return };", n, call)
		}
		choices[m.file] = append(choices[m.file], edit{body + 1, body + 1, choice})

		from, to := offset(decl)
		name, nameEnd := offset(decl.Name)
		source := l.sources[m.file][:to]
		broken := apply(source, edit{name, nameEnd, fmt.Sprint("mutant", n)}, m.edit)
		copies[m.file] += "\n" + string(broken[from:]) + "\n"
	}
	files := map[string][]byte{"doc.go": append(slices.Clone(l.sources["doc.go"]), chooser...)}
	for name, edits := range choices {
		slices.SortStableFunc(edits, func(a, b edit) int { return a.from - b.from })
		files[name] = append(apply(l.sources[name], edits...), copies[name]...)
	}
	return files
}

// enclosing returns the function that contains the mutant, or nil if there is none.
func (l *library) enclosing(m *mutant) *ast.FuncDecl {
	for _, decl := range l.files[m.file].Decls {
		f, ok := decl.(*ast.FuncDecl)
		if ok && f.Body != nil && f.Name.Name != "init" &&
			l.fset.Position(f.Body.Lbrace).Offset < m.edit.from && m.edit.to <= l.fset.Position(f.Body.Rbrace).Offset {
			return f
		}
	}
	return nil
}

// callOf returns a call of the function's copy with the function's own parameters.
func (l *library) callOf(f *ast.FuncDecl, name string) (call string, ok bool) {
	names := func(list *ast.FieldList) (names []string) {
		if list == nil {
			return nil
		}
		for _, field := range list.List {
			if len(field.Names) == 0 {
				names = append(names, "_")
			}
			for _, param := range field.Names {
				names = append(names, param.Name)
			}
		}
		return names
	}
	receiver, params, typeParams := names(f.Recv), names(f.Type.Params), names(f.Type.TypeParams)
	if slices.Contains(append(receiver, params...), "_") {
		return "", false
	}
	call = strings.Join(append(receiver, name), ".")
	if typeParams != nil {
		call += "[" + strings.Join(typeParams, ", ") + "]"
	}
	call += "(" + strings.Join(params, ", ")
	if n := len(f.Type.Params.List); n > 0 {
		if _, variadic := f.Type.Params.List[n-1].Type.(*ast.Ellipsis); variadic {
			call += "..."
		}
	}
	return call + ")", true
}
