//go:build linux

package compat

import (
	"archive/zip"
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestSwitch makes a program that uses the original, and switches it to the
// checkout in each way that docs/switching.md describes. It needs the go
// command, and the module proxy or what it gave before.
func TestSwitch(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("SKIP: no go command here to build a program with: ", err)
	}
	for _, test := range []struct {
		name string
		run  func(t *testing.T, p *program)
	}{
		{"replace with a path", switchPath},
		{"replace with a fork's version", switchFork},
		{"vendor", switchVendor},
		{"vendor in a workspace", switchWorkspace},
		{"copy into vendor", switchCopy},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newProgram(t, root)
			test.run(t, p)
		})
	}
}

// program is a main module in its own folder.
type program struct {
	t            *testing.T
	checkout     string
	dir          string
	env          []string
	goMod, goSum string // as they are with the original
}

const programSource = `package main

import (
	"fmt"

	"github.com/moby/ipvs"
)

func main() {
	handle, err := ipvs.New("")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer handle.Close()
	fmt.Println(handle.GetServices())
}
`

// newProgram makes a program that requires what the original requires, as go
// mod tidy writes it, and builds it with the original.
func newProgram(t *testing.T, checkout string) *program {
	t.Helper()
	p := &program{t: t, checkout: checkout, dir: t.TempDir(), env: append(os.Environ(), "GOFLAGS=", "GOWORK=off", "CGO_ENABLED=0")}
	p.write("main.go", programSource)
	p.write("go.mod", "module example.com/program\n\ngo 1.24\n\nrequire "+originalPath+" v1.1.0\n")
	p.run("go", "mod", "tidy")
	p.goMod, p.goSum = p.read("go.mod"), p.read("go.sum")
	for _, module := range []string{
		"github.com/sirupsen/logrus v1.9.0", "github.com/vishvananda/netlink v1.1.0",
		"github.com/vishvananda/netns v0.0.2", "golang.org/x/sys v0.2.0",
	} {
		if !strings.Contains(p.goMod, module+" // indirect\n") {
			t.Fatalf("the original does not require %s:\n%s", module, p.goMod)
		}
	}
	p.run("go", "build", "-mod=readonly", "-o", os.DevNull, ".")
	return p
}

func (p *program) path(name string) string { return filepath.Join(p.dir, name) }

func (p *program) write(name, content string) {
	p.t.Helper()
	if err := os.MkdirAll(filepath.Dir(p.path(name)), 0o755); err != nil {
		p.t.Fatal(err)
	}
	if err := os.WriteFile(p.path(name), []byte(content), 0o644); err != nil {
		p.t.Fatal(err)
	}
}

func (p *program) read(name string) string {
	p.t.Helper()
	content, err := os.ReadFile(p.path(name))
	if err != nil {
		p.t.Fatal(err)
	}
	return string(content)
}

func (p *program) try(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Env = p.dir, p.env
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (p *program) run(name string, args ...string) string {
	p.t.Helper()
	out, err := p.try(name, args...)
	if err != nil {
		p.t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return out
}

// fails runs a command that must not work, with the text in its output.
func (p *program) fails(text, name string, args ...string) {
	p.t.Helper()
	if out, err := p.try(name, args...); err == nil || !strings.Contains(out, text) {
		p.t.Fatalf("%s %s: %v, want a failure with %q\n%s", name, strings.Join(args, " "), err, text, out)
	}
}

// switched builds the program with the go command's own idea of -mod or another,
// and checks that it is the checkout that is built.
func (p *program) switched(flags ...string) {
	p.t.Helper()
	p.run("go", append(append([]string{"build"}, flags...), "-o", "switched", ".")...)
	// The original has no such name.
	symbols := p.run("go", "tool", "nm", "switched")
	if !strings.Contains(symbols, originalPath+".ErrNotSupported") {
		p.t.Error("the program is not built with the checkout")
	}
}

// same fails if go.mod has more than the added text, or go.sum more than the
// added lines.
func (p *program) same(added string, sums ...string) {
	p.t.Helper()
	if got, want := p.read("go.mod"), p.goMod+added; got != want {
		p.t.Errorf("go.mod:\n%swant:\n%s", got, want)
	}
	got := p.read("go.sum")
	for _, sum := range sums {
		if !strings.Contains(got, sum) {
			p.t.Errorf("go.sum has no line %q", sum)
		}
	}
	rest := slices.DeleteFunc(strings.SplitAfter(got, "\n"), func(line string) bool {
		return slices.ContainsFunc(sums, func(sum string) bool { return strings.HasPrefix(line, sum) })
	})
	if strings.Join(rest, "") != p.goSum {
		p.t.Errorf("go.sum:\n%swant, beside %q:\n%s", got, sums, p.goSum)
	}
}

// replace adds the one line.
func (p *program) replace(with string) string {
	line := "\nreplace " + originalPath + " => " + with + "\n"
	p.write("go.mod", p.goMod+line)
	return line
}

// modules lists the modules of the build without the replaced one.
func (p *program) modules() string {
	var kept []string
	for _, l := range strings.Split(p.run("go", "list", "-mod=readonly", "-m", "all"), "\n") {
		if !strings.HasPrefix(l, originalPath+" ") {
			kept = append(kept, l)
		}
	}
	return strings.Join(kept, "\n")
}

func switchPath(t *testing.T, p *program) {
	before := p.modules()
	line := p.replace(p.checkout)
	p.switched("-mod=readonly")
	p.run("go", "vet", "-mod=readonly", ".")
	p.same(line)
	if after := p.modules(); after != before {
		t.Errorf("modules:\n%swith the original:\n%s", after, before)
	}
}

// switchFork gives the checkout to the go command as a version of a module with
// another path, through a module proxy of files.
func switchFork(t *testing.T, p *program) {
	const fork, version = "example.com/fork/ipvs", "v1.2.0"
	cached := strings.TrimSpace(p.run("go", "env", "GOMODCACHE"))
	dir := filepath.Join(t.TempDir(), fork, "@v")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	goMod, err := os.ReadFile(filepath.Join(p.checkout, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"list":            []byte(version + "\n"),
		version + ".info": []byte(`{"Version":"` + version + `"}`),
		version + ".mod":  goMod,
		version + ".zip":  moduleZip(t, p.checkout, fork+"@"+version+"/"),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	proxy := strings.TrimSuffix(dir, "/"+fork+"/@v")
	p.env = append(p.env, "GOPROXY=file://"+proxy+",file://"+cached+"/cache/download", "GOMODCACHE="+t.TempDir(), "GOFLAGS=-modcacherw", "GONOSUMDB=example.com")

	line := p.replace(fork + " " + version)
	p.fails("missing go.sum entry", "go", "build", "-mod=readonly", "-o", os.DevNull, ".")
	p.run("go", "mod", "download", originalPath)
	p.switched("-mod=readonly")
	p.same(line, fork+" "+version+" h1:", fork+" "+version+"/go.mod h1:")
}

// moduleZip packs a module as its version is published: without the modules
// inside it.
func moduleZip(t *testing.T, root, prefix string) []byte {
	t.Helper()
	var content bytes.Buffer
	w := zip.NewWriter(&content)
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			_, nested := os.Stat(filepath.Join(path, "go.mod"))
			if path != root && (nested == nil || entry.Name() == ".git") {
				return filepath.SkipDir
			}
			return nil
		}
		if !entry.Type().IsRegular() || entry.Name() == ".git" {
			return nil
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		file, err := w.Create(prefix + filepath.ToSlash(name))
		if err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		_, err = file.Write(data)
		return err
	})
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return content.Bytes()
}

func switchVendor(t *testing.T, p *program) {
	p.run("go", "mod", "vendor")
	line := p.replace(p.checkout)
	p.fails("inconsistent vendoring", "go", "build", "-o", os.DevNull, ".")
	p.run("go", "mod", "vendor")
	p.switched()
	p.same(line)
	if modules := p.read("vendor/modules.txt"); !strings.Contains(modules, "# "+originalPath+" v1.1.0 => "+p.checkout+"\n## explicit; go 1.24\n") {
		t.Errorf("vendor/modules.txt:\n%s", modules)
	}
	if _, err := os.Stat(p.path("vendor/" + originalPath + "/testdata")); err == nil {
		t.Error("testdata is vendored")
	}
}

// switchWorkspace vendors a workspace with the program in it, and the line in
// go.work.
func switchWorkspace(t *testing.T, p *program) {
	p.write("go.work", "go 1.24\n\nuse .\n\nreplace "+originalPath+" => "+p.checkout+"\n")
	p.env = append(p.env, "GOWORK="+p.path("go.work"))
	p.switched()
	p.fails("go work vendor", "go", "mod", "vendor")
	p.run("go", "work", "vendor")
	p.switched()
	p.same("")
	if modules := p.read("vendor/modules.txt"); !strings.HasPrefix(modules, "## workspace\n# "+originalPath+" v1.1.0 => "+p.checkout+"\n") {
		t.Errorf("vendor/modules.txt:\n%s", modules)
	}
}

// switchCopy replaces the files in the vendor folder, and nothing else.
func switchCopy(t *testing.T, p *program) {
	p.run("go", "mod", "vendor")
	folder := "vendor/" + originalPath
	if err := os.RemoveAll(p.path(folder)); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(p.checkout, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		p.write(filepath.Join(folder, filepath.Base(file)), string(content))
	}
	// The go command compiles them in the version of the language that
	// modules.txt names for the original.
	p.fails("-lang was set to go1.17", "go", "build", "-o", os.DevNull, ".")
	const heading = "# " + originalPath + " v1.1.0\n## explicit; go 1."
	modules := p.read("vendor/modules.txt")
	changed := strings.Replace(modules, heading+"17\n", heading+"24\n", 1)
	if changed == modules {
		t.Fatalf("vendor/modules.txt:\n%s", modules)
	}
	p.write("vendor/modules.txt", changed)
	p.switched()
	p.run("go", "vet", ".")
	p.same("")
}
