package ipvs

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Tests that load and unload the ip_vs module. They run only in the project's own
// virtual machine, each in its own process: the test binary runs itself, and the
// environment names the test.

// ipvsModules returns the loaded modules of IPVS; those that others use come last.
func ipvsModules(t *testing.T) (modules []string) {
	t.Helper()
	data, err := os.ReadFile("/proc/modules")
	must(t, err)
	for _, line := range strings.Split(string(data), "\n") {
		if name, _, _ := strings.Cut(line, " "); strings.HasPrefix(name, "ip_vs_") {
			modules = append(modules, name)
		} else if name == "ip_vs" {
			defer func() { modules = append(modules, name) }()
		}
	}
	return modules
}

// unloadIPVS removes the modules; namespaces of earlier tests, which still use
// schedulers, are removed by the kernel some time later.
func unloadIPVS(t *testing.T) {
	t.Helper()
	for range 100 {
		modules := ipvsModules(t)
		if len(modules) == 0 {
			return
		}
		exec.Command("rmmod", modules...).Run()
		exec.Command("rmmod", "ip_vs").Run()
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatalf("still loaded: %v", ipvsModules(t))
}

func loadIPVS(t *testing.T) {
	t.Helper()
	if out, err := exec.Command("modprobe", "ip_vs").CombinedOutput(); err != nil {
		t.Fatalf("modprobe ip_vs: %v: %s", err, out)
	}
}

func init() {
	// Calls New for each line of input, and prints the result.
	addHelper("new", func() error {
		for {
			var line string
			if _, err := fmt.Scanln(&line); err != nil {
				if err == io.EOF {
					return nil
				}
				return err
			}
			i, err := New("")
			if err == nil {
				_, err = i.GetServices()
				i.Close()
			}
			if errors.Is(err, ErrNotSupported) {
				fmt.Println("ErrNotSupported")
			} else {
				fmt.Println(err)
			}
		}
	})
}

// Without modprobe, as in most containers, the kernel is asked first, and loads the
// module itself if it can; if not, New fails, and succeeds in the same process once the
// module is loaded.
func TestModuleRowWithoutModprobe(t *testing.T) {
	needVM(t)
	unloadIPVS(t)
	root := t.TempDir()
	copyFile(t, "/proc/self/exe", filepath.Join(root, "test"))

	c := helper("new")
	c.Path = "/test"
	c.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	c.Dir = "/"
	c.Stderr = new(strings.Builder)
	in, err := c.StdinPipe()
	must(t, err)
	out, err := c.StdoutPipe()
	must(t, err)
	must(t, c.Start())
	ask := func() (answer string) {
		t.Helper()
		fmt.Fprintln(in, "new")
		if _, err := fmt.Fscanln(out, &answer); err != nil {
			t.Fatalf("%v: %s", err, c.Stderr)
		}
		return answer
	}
	want := "<nil>"
	if kernelBefore(t, 6, 1) {
		want = "ErrNotSupported"
	}
	for range 2 {
		if got := ask(); got != want {
			t.Errorf("without modprobe: %s, want %s", got, want)
		}
	}
	loadIPVS(t)
	if got := ask(); got != "<nil>" {
		t.Errorf("with the module loaded: %s", got)
	}
	in.Close()
	must(t, c.Wait())
	warnings := 0
	if want != "<nil>" {
		warnings = 1 // of two attempts
	}
	if n := strings.Count(c.Stderr.(*strings.Builder).String(), "level=warning"); n != warnings {
		t.Errorf("%d warnings, want %d: %s", n, warnings, c.Stderr)
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	must(t, err)
	must(t, os.WriteFile(to, data, 0o755))
}

// With a modprobe program, New loads the module on every kernel.
func TestModuleRowLoadedByNew(t *testing.T) {
	needVM(t)
	unloadIPVS(t)
	knownFamily.Store(0) // as in a new process
	i, err := New("")
	must(t, err)
	i.Close()
	if len(ipvsModules(t)) == 0 {
		t.Error("ip_vs is not loaded")
	}
}

// The module is loaded again, with a new family id, and an open handle still works.
func TestModuleRowReloaded(t *testing.T) {
	i, ns := newKernelHandle(t)
	needVM(t)
	must(t, i.NewService(&someService))
	before := i.family
	must(t, i.Flush())
	for range 2 {
		unloadIPVS(t)
		loadIPVS(t)
		must(t, i.NewService(&someService))
		services := mustGet(i.GetServices())(t)
		if len(services) != 1 {
			t.Errorf("%d services", len(services))
		}
		if out := ipvsadm(t, ns, "-Sn"); out != "-A -t 10.0.0.1:80 -s rr -M 0.0.0.0\n" && out != "-A -t 10.0.0.1:80 -s rr\n" {
			t.Errorf("ipvsadm shows %q", out)
		}
		if i.family == before {
			t.Errorf("family id %d as before: the test shows nothing", before)
		}
		before = i.family
		must(t, i.Flush())
	}
	// A dump can have an outdated family id, too.
	unloadIPVS(t)
	loadIPVS(t)
	if services := mustGet(i.GetServices())(t); len(services) != 0 {
		t.Errorf("%d services after the module was loaded anew", len(services))
	}
}
