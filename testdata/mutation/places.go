package main

import (
	"bytes"
	"cmp"
	"fmt"
	"go/ast"
	"go/constant"
	"go/token"
	"go/types"
	"hash/fnv"
	"slices"
	"strings"
)

// Kinds of random mutants, in the order in which they take turns.
var kinds = []string{
	"comparison", "constant", "condition", "removed statement",
	"arithmetic", "dropped error", "off by one", "and-or",
}

// edit replaces source[from:to].
type edit struct {
	from, to int
	text     string
}

// place is one spot of the library, with the ways to break it there.
type place struct {
	file     string // its base name
	function string // as in "(*Handle).Close", or the declared constant or variable
	kind     string
	at       token.Position
	edits    []edit
}

// finder collects the places of one file.
type finder struct {
	file     string
	fset     *token.FileSet
	source   []byte
	info     *types.Info
	function string
	result   *types.Tuple // of the innermost function
	places   []place
}

// findPlaces returns all places of a file, in the order of the source.
func findPlaces(fset *token.FileSet, name string, file *ast.File, source []byte, info *types.Info) []place {
	f := &finder{file: name, fset: fset, source: source, info: info}
	for _, decl := range file.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			f.function = functionName(decl)
			if decl.Body != nil {
				f.inFunction(info.Defs[decl.Name].Type(), decl.Body)
			}
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				if spec, ok := spec.(*ast.ValueSpec); ok {
					f.function = spec.Names[0].Name
					for _, value := range spec.Values {
						ast.Inspect(value, f.visit)
					}
				}
			}
		}
	}
	slices.SortStableFunc(f.places, func(a, b place) int { return a.at.Offset - b.at.Offset })
	return f.places
}

// functionName returns the name of a function, with its receiver's type.
func functionName(decl *ast.FuncDecl) string {
	if decl.Recv == nil {
		return decl.Name.Name
	}
	recv, star := decl.Recv.List[0].Type, ""
	if pointer, ok := recv.(*ast.StarExpr); ok {
		recv, star = pointer.X, "*"
	}
	if generic, ok := recv.(*ast.IndexExpr); ok {
		recv = generic.X
	}
	if name, ok := recv.(*ast.Ident); ok {
		return fmt.Sprintf("(%s%s).%s", star, name.Name, decl.Name.Name)
	}
	return decl.Name.Name
}

func (f *finder) inFunction(signature types.Type, body *ast.BlockStmt) {
	outer := f.result
	f.result = signature.(*types.Signature).Results()
	ast.Inspect(body, f.visit)
	f.result = outer
}

func (f *finder) offset(pos token.Pos) int { return f.fset.Position(pos).Offset }

func (f *finder) text(n ast.Node) string {
	return string(f.source[f.offset(n.Pos()):f.offset(n.End())])
}

// add records a place; each text is another way to write node.
func (f *finder) add(kind string, node ast.Node, texts ...string) {
	var edits []edit
	for _, text := range texts {
		edits = append(edits, edit{f.offset(node.Pos()), f.offset(node.End()), text})
	}
	f.addEdits(kind, node, edits...)
}

func (f *finder) addEdits(kind string, node ast.Node, edits ...edit) {
	f.places = append(f.places, place{f.file, f.function, kind, f.fset.Position(node.Pos()), edits})
}

// operator returns the edits that put each of the operators at pos.
func (f *finder) operator(pos token.Pos, old token.Token, new ...string) (edits []edit) {
	for _, text := range new {
		edits = append(edits, edit{f.offset(pos), f.offset(pos) + len(old.String()), text})
	}
	return edits
}

var otherComparison = map[token.Token]string{
	token.EQL: "!=", token.NEQ: "==", token.LSS: ">=", token.GEQ: "<", token.GTR: "<=", token.LEQ: ">",
}

var boundary = map[token.Token]string{
	token.LSS: "<=", token.LEQ: "<", token.GTR: ">=", token.GEQ: ">",
}

var otherArithmetic = map[token.Token]string{
	token.ADD: "-", token.SUB: "+", token.MUL: "/", token.QUO: "*", token.REM: "*",
	token.AND: "|", token.OR: "&", token.XOR: "|", token.AND_NOT: "&", token.SHL: ">>", token.SHR: "<<",
	token.ADD_ASSIGN: "-=", token.SUB_ASSIGN: "+=", token.MUL_ASSIGN: "/=", token.QUO_ASSIGN: "*=", token.REM_ASSIGN: "*=",
	token.AND_ASSIGN: "|=", token.OR_ASSIGN: "&=", token.XOR_ASSIGN: "|=", token.AND_NOT_ASSIGN: "&=",
	token.SHL_ASSIGN: ">>=", token.SHR_ASSIGN: "<<=", token.INC: "--", token.DEC: "++",
}

func (f *finder) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.FuncLit:
		f.inFunction(f.info.TypeOf(n), n.Body)
		return false
	case *ast.BinaryExpr:
		f.binary(n)
	case *ast.UnaryExpr:
		switch n.Op {
		case token.NOT, token.SUB, token.XOR:
			f.add("arithmetic", n, f.text(n.X))
		}
	case *ast.BasicLit:
		if n.Kind == token.INT {
			f.add("constant", n, "("+n.Value+" + 1)", "("+n.Value+" - 1)")
		}
	case *ast.SelectorExpr:
		if f.constant(n, n.Sel) {
			return false
		}
	case *ast.Ident:
		f.constant(n, n)
	case *ast.IfStmt:
		f.condition(n.Cond, true)
	case *ast.ForStmt:
		if n.Cond != nil {
			f.condition(n.Cond, false) // true would only hang
		}
	case *ast.SwitchStmt:
		if n.Tag == nil {
			for _, clause := range n.Body.List {
				for _, cond := range clause.(*ast.CaseClause).List {
					f.condition(cond, true)
				}
			}
		}
	case *ast.SliceExpr:
		for _, bound := range []ast.Expr{n.Low, n.High} {
			f.bound(bound)
		}
	case *ast.IndexExpr:
		switch f.under(n.X).(type) {
		case *types.Slice, *types.Array, *types.Pointer, *types.Basic:
			f.bound(n.Index)
		}
	case *ast.CallExpr:
		// A capacity is only the initial size of the memory.
		if name, ok := n.Fun.(*ast.Ident); ok && name.Name == "make" && len(n.Args) == 3 {
			for _, arg := range n.Args[:2] {
				ast.Inspect(arg, f.visit)
			}
			return false
		}
	case *ast.ReturnStmt:
		f.dropError(n)
	default:
		if statement, ok := n.(ast.Stmt); ok {
			f.statement(statement)
		}
	}
	return true
}

func (f *finder) under(x ast.Expr) types.Type {
	if t := f.info.TypeOf(x); t != nil {
		return t.Underlying()
	}
	return nil
}

func (f *finder) binary(n *ast.BinaryExpr) {
	if other := otherComparison[n.Op]; other != "" {
		f.addEdits("comparison", n, f.operator(n.OpPos, n.Op, other)...)
	}
	if other := boundary[n.Op]; other != "" {
		f.addEdits("off by one", n, f.operator(n.OpPos, n.Op, other)...)
	}
	if other := otherArithmetic[n.Op]; other != "" {
		f.addEdits("arithmetic", n, f.operator(n.OpPos, n.Op, other)...)
	}
	switch n.Op {
	case token.LAND:
		f.addEdits("and-or", n, f.operator(n.OpPos, n.Op, "||")...)
	case token.LOR:
		f.addEdits("and-or", n, f.operator(n.OpPos, n.Op, "&&")...)
	}
}

// constant breaks a named constant, where it is used.
func (f *finder) constant(x ast.Expr, name *ast.Ident) bool {
	object, ok := f.info.Uses[name].(*types.Const)
	if !ok || name.Name == "iota" {
		return false
	}
	switch object.Val().Kind() {
	case constant.Bool:
		f.add("constant", x, "!"+f.text(x))
	case constant.Int:
		f.add("constant", x, "("+f.text(x)+" + 1)")
	}
	return true
}

// condition breaks the condition of a branch. Its calls are still made.
func (f *finder) condition(cond ast.Expr, canBeTrue bool) {
	text := f.text(cond)
	texts := []string{"(" + text + ") && false"}
	if n, ok := cond.(*ast.BinaryExpr); !ok || otherComparison[n.Op] == "" {
		texts = append(texts, "!("+text+")") // else it is a comparison's mutant
	}
	if canBeTrue {
		texts = append(texts, "("+text+") || true")
	}
	f.add("condition", cond, texts...)
}

// bound breaks an index that is no literal; literals are constants.
func (f *finder) bound(x ast.Expr) {
	if x == nil {
		return
	}
	if _, literal := x.(*ast.BasicLit); !literal {
		f.add("off by one", x, "("+f.text(x)+") + 1", "("+f.text(x)+") - 1")
	}
}

// dropError breaks statements that return an error.
func (f *finder) dropError(n *ast.ReturnStmt) {
	if f.result == nil || len(n.Results) == 0 || len(n.Results) != f.result.Len() ||
		f.result.At(f.result.Len()-1).Type().String() != "error" {
		return
	}
	last := n.Results[len(n.Results)-1]
	switch text := f.text(last); {
	case text == "nil":
	case len(n.Results) == 1 && isCall(last):
		f.add("dropped error", n, "{ _ = "+text+"; return nil }")
	default:
		f.add("dropped error", last, "nil")
	}
}

func isCall(x ast.Expr) bool {
	_, ok := x.(*ast.CallExpr)
	return ok
}

// statement removes a statement. The calls of an assignment are still made.
func (f *finder) statement(n ast.Stmt) {
	const kind = "removed statement"
	switch n := n.(type) {
	case *ast.ExprStmt, *ast.DeferStmt, *ast.GoStmt, *ast.SendStmt, *ast.BranchStmt:
		f.add(kind, n, "")
	case *ast.IncDecStmt:
		f.add(kind, n, "")
		f.addEdits("arithmetic", n, f.operator(n.TokPos, n.Tok, otherArithmetic[n.Tok])...)
	case *ast.AssignStmt:
		if n.Tok == token.DEFINE {
			return
		}
		if other := otherArithmetic[n.Tok]; other != "" {
			f.addEdits("arithmetic", n, f.operator(n.TokPos, n.Tok, other)...)
		}
		var left []string
		for range n.Lhs {
			left = append(left, "_")
		}
		var right []string
		for _, x := range n.Rhs {
			right = append(right, f.text(x))
		}
		if len(right) == 1 && right[0] == "nil" {
			f.add(kind, n, "")
		} else {
			f.add(kind, n, strings.Join(left, ", ")+" = "+strings.Join(right, ", "))
		}
	}
}

// mutants makes one mutant of each place: which of the ways, the seed decides.
// Neither that nor a mutant's key depends on the code around it.
func mutants(places []place, source []byte, seed uint64) (all []*mutant) {
	seen := map[string]int{}
	for _, p := range places {
		old, _ := lines(source, p.edits[0])
		key := strings.Join([]string{p.function, p.kind, old}, "\x00")
		seen[key]++
		key += fmt.Sprint("\x00", seen[key])
		e := p.edits[hash(seed, key)%uint64(len(p.edits))]
		m := &mutant{file: p.file, function: p.function, kind: p.kind, at: p.at, edit: e}
		m.old, m.new = lines(source, e)
		m.id = fmt.Sprintf("%08x", uint32(hash(0, key, m.new)))
		m.order = hash(seed, key, m.new)
		all = append(all, m)
	}
	return all
}

// apply returns the source with the edits made, which are in order.
func apply(source []byte, edits ...edit) []byte {
	var out bytes.Buffer
	at := 0
	for _, e := range edits {
		out.Write(source[at:e.from])
		out.WriteString(e.text)
		at = e.to
	}
	out.Write(source[at:])
	return out.Bytes()
}

// lines returns the lines that the edit changes, before and after, without the
// surrounding ones and with single spaces.
func lines(source []byte, e edit) (old, new string) {
	from, to := bytes.LastIndexByte(source[:e.from], '\n')+1, len(source)
	if n := bytes.IndexByte(source[e.to:], '\n'); n >= 0 {
		to = e.to + n
	}
	return oneLine(source[from:to]), oneLine(apply(source[from:to], edit{e.from - from, e.to - from, e.text}))
}

func oneLine(text []byte) string { return strings.Join(strings.Fields(string(text)), " ") }

func hash(seed uint64, parts ...string) uint64 {
	h := fnv.New64a()
	fmt.Fprint(h, seed)
	for _, part := range parts {
		h.Write([]byte{0})
		h.Write([]byte(part))
	}
	// FNV's upper bits hardly depend on the last bytes: mix them.
	x := h.Sum64()
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// choose returns the mutants in the order of the seed, one of each kind in turn.
func choose(all []*mutant) []*mutant {
	byKind := map[string][]*mutant{}
	for _, m := range all {
		byKind[m.kind] = append(byKind[m.kind], m)
	}
	for _, list := range byKind {
		slices.SortStableFunc(list, func(a, b *mutant) int { return cmp.Compare(a.order, b.order) })
	}
	chosen := make([]*mutant, 0, len(all))
	for n := 0; len(chosen) < len(all); n++ {
		for _, kind := range kinds {
			if n < len(byKind[kind]) {
				chosen = append(chosen, byKind[kind][n])
			}
		}
	}
	return chosen
}
