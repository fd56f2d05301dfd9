package ipvs

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// A function called in another namespace runs there, its error is returned, and no
// thread is left.
func TestInNamespaceOfAnother(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIP: needs root, to make a network namespace")
	}
	netlinkSocket(t).close() // or skips
	ns := newNamespace(t)
	broken := errors.New("broken")
	var there string
	visitThere := func() error {
		there, _ = os.Readlink("/proc/thread-self/ns/net")
		return broken
	}
	if err := inNamespace(ns, visitThere); err != broken || there == "" || there == homeNamespace {
		t.Errorf("in %q: %v", there, err)
	}
	s, err := openSocketAt(ns)
	must(t, err)
	defer s.close()
	there = ""
	if err := inNamespaceOf(s, visitThere); err != broken || there == "" || there == homeNamespace {
		t.Errorf("of a socket, in %q: %v", there, err)
	}
	if isOpenHere(s) {
		t.Error("the socket is taken for one of this namespace")
	}
}

// In the socket's own namespace the error of the function is returned, with privileges
// and without.
func TestInNamespaceOfOwn(t *testing.T) {
	s := netlinkSocket(t)
	defer s.close()
	broken := errors.New("broken")
	check := func(doing string) {
		called := 0
		if err := inNamespaceOf(s, func() error { called++; return broken }); err != broken || called != 1 {
			t.Errorf("%s: called %d times, %v", doing, called, err)
		}
		if err := inNamespaceOf(s, func() error { called++; return nil }); err != nil || called != 2 {
			t.Errorf("%s: called %d times, %v", doing, called, err)
		}
		if !isOpenHere(s) {
			t.Errorf("%s: the socket is not found", doing)
		}
	}
	check("as it is")
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&hdr, &none[0]); err != nil {
			t.Error(err)
			return
		}
		check("without privileges")
		if err := modprobe(); err == nil || !strings.Contains(err.Error(), "it needs CAP_SYS_MODULE") {
			t.Errorf("modprobe without privileges: %v", err)
		}
	}()
	<-done
	other, _ := newFake(t, nil) // whose socket is none of netlink's
	if isOpenHere(other.socket) {
		t.Error("another socket is taken for one of this namespace")
	}
	s.close()
	if isOpenHere(s) {
		t.Error("a closed socket is taken for one of this namespace")
	}
}

// The main thread never enters another namespace, whichever thread the goroutine runs
// on: other processes read its /proc/PID/ns/net.
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

// A thread finds its network namespace even if /proc belongs to another PID namespace,
// in which its numbers are those of other threads.
func TestThreadNamespaceForeignProc(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIP: needs root, to make a PID namespace")
	}
	c := helper("foreign-proc")
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	out, err := c.CombinedOutput()
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) {
		t.Skip("SKIP: needs a PID namespace, which emulators of other processors do not make: ", err)
	}
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func init() {
	addHelper("foreign-proc", func() error {
		ns, err := threadNamespace()
		if err != nil {
			return err
		}
		defer ns.Close()
		if own, err := netns.GetFromPath("/proc/thread-self/ns/net"); err != nil || !own.Equal(ns) {
			return fmt.Errorf("another network namespace than %v (%v)", own, err)
		}
		return nil
	})
}
