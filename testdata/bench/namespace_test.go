//go:build linux

package bench

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	this "ipvs.test/checkout"
)

// The main thread stays with the main goroutine: a thread that works in
// another namespace ends with its goroutine, but the main thread cannot.
func init() { runtime.LockOSThread() }

// namespace is a network namespace of its own for each table, since what a
// table leaves behind (deleted destinations are kept for minutes, and looked
// through) changes the cost of the next one.
type namespace struct{ file *os.File }

// all are the namespaces so far. They stay until the process ends, so that the
// kernel does not clean up while something is measured.
var all []namespace

func newNamespace(b *testing.B) (ns namespace) {
	b.Helper()
	// Kernels before 7 have one hash table for the services of all namespaces.
	if len(all) > 0 {
		h, err := this.New(all[len(all)-1].path())
		if err == nil {
			err = h.Flush()
			h.Close()
		}
		if err != nil {
			b.Fatal("flushing the last table: ", err)
		}
	}
	err := onOwnThread(func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		// Before a device is up the kernel takes no IPv4 destination.
		if err = netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "lo"}}); err != nil {
			return err
		}
		// Kernels before 6.2 cannot switch the estimation of rates off.
		err = os.WriteFile("/proc/sys/net/ipv4/vs/run_estimation", []byte("0"), 0)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		ns.file, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		b.Fatal("a new network namespace: ", err)
	}
	all = append(all, ns)
	return ns
}

// path names the namespace for whoever opens it by path.
func (ns namespace) path() string { return fmt.Sprintf("/proc/self/fd/%d", ns.file.Fd()) }

// do runs f on a thread that is in the namespace.
func (ns namespace) do(f func() error) error {
	return onOwnThread(func() error {
		if err := unix.Setns(int(ns.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// onOwnThread runs f on a thread that ends with it.
func onOwnThread(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		result <- f()
	}()
	return <-result
}
