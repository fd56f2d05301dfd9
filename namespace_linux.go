package ipvs

// This file opens sockets in other network namespaces.

import (
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// inNamespace calls f on a thread that is in the network namespace ns.
//
// A descriptor belongs to the namespace that its thread was in when it was
// opened, so a thread has to go there. It is never the caller's: if the way back
// fails, the goroutine ends while locked to its thread, and the runtime then ends
// the thread instead of running other goroutines in a foreign namespace. Nor is it
// the main thread, whose namespace other processes take for that of this one
// (/proc/PID/ns/net).
func inNamespace(ns netns.NsHandle, f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		if isMainThread() {
			// Held here, it cannot be the thread of the next goroutine.
			err := inNamespace(ns, f)
			runtime.UnlockOSThread()
			result <- err
			return
		}
		restored, err := visit(ns, f)
		if restored {
			runtime.UnlockOSThread()
		}
		result <- err
	}()
	return <-result
}

// isMainThread is a variable for tests.
var isMainThread = func() bool { return unix.Gettid() == unix.Getpid() }

// visit moves the calling thread into ns, calls f and moves back; restored
// reports whether the thread is where it was before.
func visit(ns netns.NsHandle, f func() error) (restored bool, err error) {
	home, err := netns.Get()
	if err != nil {
		return true, fmt.Errorf("ipvs: opening the thread's own network namespace: %w", err)
	}
	defer home.Close()
	if err := netns.Set(ns); err != nil {
		return true, fmt.Errorf("ipvs: entering the network namespace: %w", err)
	}
	err = f()
	return netns.Set(home) == nil, err
}

// openSocketAt opens a socket in the network namespace ns.
func openSocketAt(ns netns.NsHandle) (s *socket, err error) {
	err = inNamespace(ns, func() (err error) {
		s, err = openSocket()
		return err
	})
	return s, err
}

// openSocketLike opens another socket in the network namespace of s. From a
// thread that is there already it needs no privilege.
func openSocketLike(s *socket) (like *socket, err error) {
	ns := netns.None()
	err = s.withFD(func(fd int) error {
		n, err := unix.IoctlRetInt(fd, unix.SIOCGSKNS)
		ns = netns.NsHandle(n)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if here, err := netns.Get(); err == nil {
		defer here.Close()
		if here.Equal(ns) {
			return openSocket()
		}
	}
	return openSocketAt(ns)
}
