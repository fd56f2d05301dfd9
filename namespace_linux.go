package ipvs

// This file opens sockets in other network namespaces.

import (
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// openSocketAt opens a socket in the network namespace ns.
//
// A descriptor belongs to the namespace that its thread was in when it was
// opened, so a thread has to go there. That is never the caller's: if the way
// back fails, the goroutine ends while locked to its thread, and the runtime
// then ends the thread instead of running other goroutines in a foreign
// namespace.
func openSocketAt(ns netns.NsHandle) (*socket, error) {
	type result struct {
		s   *socket
		err error
	}
	results := make(chan result)
	go func() {
		runtime.LockOSThread()
		s, restored, err := openSocketThere(ns)
		if restored {
			runtime.UnlockOSThread()
		}
		results <- result{s, err}
	}()
	r := <-results
	return r.s, r.err
}

// openSocketThere moves the calling thread into ns, opens the socket and moves
// back; restored tells whether the thread is where it was before.
func openSocketThere(ns netns.NsHandle) (_ *socket, restored bool, err error) {
	home, err := netns.Get()
	if err != nil {
		return nil, true, fmt.Errorf("ipvs: opening the thread's own network namespace: %w", err)
	}
	defer home.Close()
	if err := netns.Set(ns); err != nil {
		return nil, true, fmt.Errorf("ipvs: entering the network namespace: %w", err)
	}
	s, err := openSocket()
	return s, netns.Set(home) == nil, err
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
