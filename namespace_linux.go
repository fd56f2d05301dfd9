package ipvs

// This file opens sockets and files of /proc in other network namespaces.

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// inNamespace calls f on a thread that is in the network namespace ns.
//
// A descriptor belongs to the namespace that its thread was in when it was opened, so
// a thread has to enter ns. It is never the caller's thread: if it cannot return to its
// own namespace, the goroutine ends while locked to it, and the runtime then ends the
// thread instead of running other goroutines in a foreign namespace. Nor is it the main
// thread, whose namespace other processes see as that of the process
// (/proc/PID/ns/net).
func inNamespace(ns netns.NsHandle, f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		if isMainThread() {
			// While it is locked here, the next goroutine runs on another thread.
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

// processID is cached, since unix.Getpid is a system call.
var processID = unix.Getpid()

// isMainThread is a variable for tests.
var isMainThread = func() bool { return unix.Gettid() == processID }

// threadNamespace opens the network namespace of the calling thread. It does not use
// the thread's number, as netns.Get does: if /proc belongs to another PID namespace,
// another thread has that number there.
func threadNamespace() (netns.NsHandle, error) {
	return netns.GetFromPath("/proc/thread-self/ns/net")
}

// visit moves the calling thread into ns, calls f and moves back; restored reports
// whether the thread is in its own namespace again. It cannot move back if /proc
// does not have the thread.
func visit(ns netns.NsHandle, f func() error) (restored bool, err error) {
	home, homeErr := threadNamespace()
	if homeErr == nil {
		defer home.Close()
	}
	if err := netns.Set(ns); err != nil {
		return true, fmt.Errorf("ipvs: entering the network namespace: %w", err)
	}
	err = f()
	return homeErr == nil && netns.Set(home) == nil, err
}

// openSocketAt opens a socket in the network namespace ns.
func openSocketAt(ns netns.NsHandle) (s *socket, err error) {
	err = inNamespace(ns, func() (err error) {
		s, err = openSocket()
		return err
	})
	return s, err
}

// openSocketLike opens another socket in the network namespace of s.
func openSocketLike(s *socket) (like *socket, err error) {
	if s.another != nil {
		return s.another(), nil
	}
	err = inNamespaceOf(s, func() (err error) {
		like, err = openSocket()
		return err
	})
	return like, err
}

// inNamespaceOf calls f on a thread in the network namespace of s. If the calling
// thread is there already, f runs on it, which requires no privilege. Otherwise
// inNamespaceOf requires CAP_NET_ADMIN in that namespace, and CAP_SYS_ADMIN.
func inNamespaceOf(s *socket, f func() error) error {
	if s.another != nil {
		return errNoNamespace
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ns, err := namespaceOf(s)
	if err != nil {
		if isOpenHere(s) {
			return f()
		}
		return fmt.Errorf("ipvs: finding the handle's network namespace: %w", err)
	}
	defer ns.Close()
	if here, err := threadNamespace(); err == nil {
		defer here.Close()
		if here.Equal(ns) {
			return f()
		}
	}
	return inNamespace(ns, f)
}

// errNoNamespace is the error of a call on a Fake's handle that needs a network
// namespace. Without it, the call would reach the machine's own.
var errNoNamespace = fmt.Errorf("ipvs: a Fake has no network namespace with connections, settings and totals: %w", errors.ErrUnsupported)

// namespaceOf opens the network namespace of s, which requires CAP_NET_ADMIN in it.
func namespaceOf(s *socket) (ns netns.NsHandle, err error) {
	ns = netns.None()
	err = s.withFD(func(fd int) error {
		n, err := unix.IoctlRetInt(fd, unix.SIOCGSKNS)
		ns = netns.NsHandle(n)
		return err
	})
	return ns, err
}

// isOpenHere reports whether s is a socket of the calling thread's network namespace,
// by looking for its inode number in the namespace's list of netlink sockets. Unlike
// namespaceOf it needs no privilege.
func isOpenHere(s *socket) bool {
	var stat unix.Stat_t
	if err := s.withFD(func(fd int) error { return unix.Fstat(fd, &stat) }); err != nil {
		return false
	}
	inode := strconv.FormatUint(stat.Ino, 10)
	list, err := os.ReadFile("/proc/thread-self/net/netlink")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(list)) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[len(fields)-1] == inode {
			return true
		}
	}
	return false
}

// openProc opens a file below /proc/net of the network namespace of s for reading.
func openProc(s *socket, name string) (file *os.File, err error) {
	err = inNamespaceOf(s, func() (err error) {
		file, err = os.Open("/proc/thread-self/net/" + name)
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = missingInProc("/proc/thread-self/net/dev", err)
	}
	return file, err
}

// missingInProc returns the error of opening a file of IPVS in /proc that does not
// exist: the kernel has no IPVS, unless a file that every kernel has is missing too.
// That is the case if /proc is not mounted, or mounted with subset=pid.
func missingInProc(everyKernels string, err error) error {
	file, openErr := os.Open(everyKernels) // older kernels (5.10) list what cannot be opened
	if openErr != nil {
		// Not fs.ErrNotExist, which would mean that the kernel has no such setting.
		return fmt.Errorf("not even %s is there: %v", everyKernels, err)
	}
	file.Close()
	return fmt.Errorf("%w: %w", ErrNotSupported, err)
}
