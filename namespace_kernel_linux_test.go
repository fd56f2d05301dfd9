package ipvs

import (
	"errors"
	"os"
	"runtime"
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
	c := helper("open-elsewhere")
	c.Env = append(c.Env, "IPVS_TEST_NS=/proc/self/fd/3")
	c.ExtraFiles = []*os.File{os.NewFile(uintptr(must2(unix.Dup(int(ns)))), "namespace")}
	defer c.ExtraFiles[0].Close()
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
