package ipvs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// The main thread never enters another namespace.
func TestKernelInNamespaceNeverMain(t *testing.T) {
	needKernel(t)
	if out, err := helper("never-main").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func init() {
	addHelper("never-main", func() error {
		// Unlike in the tests the main thread is free here, and on one processor the
		// next goroutine often gets it.
		runtime.UnlockOSThread()
		ns, err := netns.GetFromPath("/proc/self/ns/net")
		if err != nil {
			return err
		}
		runtime.GOMAXPROCS(1)
		for range 200 {
			if err := inNamespace(ns, func() error {
				if unix.Gettid() == unix.Getpid() {
					return errors.New("f runs on the main thread")
				}
				return nil
			}); err != nil {
				return err
			}
		}
		return nil
	})
}

// While handles are opened in another namespace from many goroutines, with the
// main thread free for them, /proc/self/ns/net stays what it is.
func TestKernelMainThreadStays(t *testing.T) {
	needKernel(t)
	ns := newNamespace(t)
	c := helperWith(t, "open-elsewhere", ns)
	c.Env = append(c.Env, "IPVS_TEST_NS=/proc/self/fd/3")
	c.Stderr = os.Stderr // built for coverage, the helper has a word to say of that
	out, err := c.Output()
	if err != nil || string(out) != "stayed\n" {
		t.Errorf("%v: %s", err, out)
	}
}

func init() {
	addHelper("open-elsewhere", func() error {
		runtime.UnlockOSThread() // which the tests' init locked
		before, err := os.Readlink("/proc/self/ns/net")
		if err != nil {
			return err
		}
		done := make(chan error)
		for range 4 {
			go func() {
				for range 50 {
					i, err := New(os.Getenv("IPVS_TEST_NS"))
					if err != nil {
						done <- err
						return
					}
					i.Close()
				}
				done <- nil
			}()
		}
		for left := 4; left > 0; {
			select {
			case err := <-done:
				if err != nil {
					return err
				}
				left--
			default:
				now, err := os.Readlink("/proc/self/ns/net")
				if err != nil {
					return err
				}
				if now != before {
					return errors.New("the process shows " + now + " instead of " + before)
				}
			}
		}
		os.Stdout.WriteString("stayed\n")
		return nil
	})
}

// In a PID namespace of its own, a process can see the /proc of its parent's, where
// its process ID is another process's. Other network namespaces can be reached all
// the same, and settings are the handle's, not those of that other process.
func TestKernelProcOfAnotherPIDNamespace(t *testing.T) {
	needKernel(t)
	inOther(t, "foreign-settings", &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID})
}

// Without /proc there are handles for other network namespaces too. What IPVS has in
// /proc is not there, which is not the same as a kernel without IPVS or a setting.
func TestKernelWithoutProc(t *testing.T) {
	needKernel(t)
	inOther(t, "without-proc", &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS})
}

// inOther runs a helper with another network namespace as descriptor 3.
func inOther(t *testing.T, name string, attr *syscall.SysProcAttr) {
	t.Helper()
	c := helperWith(t, name, newNamespace(t))
	c.SysProcAttr = attr
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func init() {
	addHelper("foreign-settings", func() error {
		home, other, err := homeAndOther()
		if err != nil {
			return err
		}
		before, err := home.GetSysctl("sync_retries")
		if err != nil {
			return err
		}
		defer home.SetSysctl("sync_retries", before)
		check := func(where string) error {
			if err := firstError(home.SetSysctl("sync_retries", 1), other.SetSysctl("sync_retries", 2)); err != nil {
				return fmt.Errorf("%s: %w", where, err)
			}
			atHome, err1 := home.GetSysctl("sync_retries")
			there, err2 := other.GetSysctl("sync_retries")
			if atHome != 1 || there != 2 || err1 != nil || err2 != nil {
				return fmt.Errorf("%s: sync_retries is %d (%v) at home and %d (%v) there, want 1 and 2", where, atHome, err1, there, err2)
			}
			return nil
		}
		if err := check("at home"); err != nil {
			return err
		}
		// /proc/PID/task/TID is now the parent namespace's first process, at home.
		if err := netns.Set(netns.NsHandle(3)); err != nil {
			return err
		}
		return check("there")
	})
	addHelper("without-proc", func() error {
		if err := unix.Unmount("/proc", unix.MNT_DETACH); err != nil {
			return err
		}
		home, other, err := homeAndOther()
		if err != nil {
			return err
		}
		r := Reconciler{Handle: other}
		want := []TableEntry{{Service: &someService, Destinations: []*Destination{&someDestination}}}
		if done, err := r.Reconcile(want); err != nil || done.Total() != 2 {
			return fmt.Errorf("Reconcile: %+v, %v", done, err)
		}
		if done, err := r.Reconcile(want); err != nil || done.Total() != 0 {
			return fmt.Errorf("Reconcile again: %+v, %v", done, err)
		}
		if home.IsServicePresent(&someService) || !other.IsServicePresent(&someService) {
			return errors.New("the service is in the wrong namespace")
		}
		isMissing := func(err error, another string) bool {
			return err != nil && !errors.Is(err, ErrNotSupported) && !errors.Is(err, fs.ErrNotExist) && strings.Contains(err.Error(), "not even "+another+" is there")
		}
		for _, i := range []*Handle{home, other} {
			if _, err := i.GetSysctl("drop_entry"); !isMissing(err, "/proc/sys/net") {
				return fmt.Errorf("GetSysctl: %v, want one that says what is missing", err)
			}
			if _, err := i.GetTotals(); !isMissing(err, "/proc/thread-self/net/dev") {
				return fmt.Errorf("GetTotals: %v, want one that says what is missing", err)
			}
		}
		if err := unix.Mount("proc", "/proc", "proc", 0, "subset=pid"); err != nil {
			return err
		}
		for _, i := range []*Handle{home, other} {
			if _, err := i.GetSysctl("drop_entry"); !isMissing(err, "/proc/sys/net") {
				return fmt.Errorf("GetSysctl with only processes in /proc: %v, want one that says what is missing", err)
			}
			// Newer kernels (6.1) show a process's network all the same.
			if _, err := i.GetTotals(); err != nil && !isMissing(err, "/proc/thread-self/net/dev") {
				return fmt.Errorf("GetTotals with only processes in /proc: %w", err)
			}
		}
		return nil
	})
}
