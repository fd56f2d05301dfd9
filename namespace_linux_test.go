package ipvs

import (
	"errors"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// New with a path that is not there matches what callers look for, and names it.
func TestNewPathNotThere(t *testing.T) {
	const path = "/run/netns/no-such-namespace"
	i, err := New(path)
	if i != nil || !os.IsNotExist(err) || !errors.Is(err, syscall.ENOENT) {
		t.Errorf("%v, %v", i, err)
	}
	if want := "ipvs: opening network namespace " + path + ": no such file or directory"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// The main thread is never the one that goes to another namespace, whichever
// thread the goroutine was given: others read /proc/PID/ns/net of it.
func TestMainThreadStays(t *testing.T) {
	here, err := netns.Get()
	if err != nil {
		t.Skip("SKIP: needs /proc: ", err)
	}
	defer here.Close()
	if err := inNamespace(here, func() error { return nil }); errors.Is(err, syscall.EPERM) {
		t.Skip("SKIP: setns is not permitted here")
	}
	original := isMainThread
	defer func() { isMainThread = original }()
	var mu sync.Mutex
	var refused, visited map[int]bool
	for range 20 {
		refused, visited = map[int]bool{}, map[int]bool{}
		isMainThread = func() bool { // the first thread asked is taken for the main one
			mu.Lock()
			defer mu.Unlock()
			if len(refused) == 0 {
				refused[unix.Gettid()] = true
			}
			return refused[unix.Gettid()]
		}
		must(t, inNamespace(here, func() error {
			visited[unix.Gettid()] = true
			return nil
		}))
		if len(refused) != 1 || len(visited) != 1 {
			t.Fatalf("%d threads refused, %d visited", len(refused), len(visited))
		}
		for thread := range visited {
			if refused[thread] {
				t.Fatal("the main thread went")
			}
		}
	}
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
