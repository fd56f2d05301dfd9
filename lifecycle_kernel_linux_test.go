package ipvs

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// The life of a handle when the kernel, the module or the process interferes.

// Handles that are dropped without Close leave no descriptor of either socket.
func TestKernelDroppedHandles(t *testing.T) {
	needKernel(t)
	ns := newNamespace(t)
	before := descriptors(t)
	for n := range 200 {
		i, err := NewAt(ns)
		must(t, err)
		if n%2 == 0 {
			must(t, i.NewService(ipv4Service(n)))
		}
		if bulk := i.bulkSocket(); n%3 == 0 && bulk == i.socket {
			t.Fatal("no second socket")
		}
	}
	if !collected(t, before) {
		t.Fatalf("descriptors left open: %v", opened(t, before))
	}
}

// After a list that timed out, no call ends with a bare EBUSY.
func TestKernelListAfterAbandonedList(t *testing.T) {
	i, _ := newKernelHandle(t)
	var b Batch
	for n := range 3000 {
		b.NewService(ipv4Service(n))
	}
	must(t, i.Do(&b))
	counts := map[string]int{}
	for n := range 200 {
		must(t, i.SetTimeout(100*time.Microsecond))
		if n%10 == 9 {
			must(t, i.SetTimeout(time.Minute))
		}
		got, err := i.GetServices()
		switch {
		case err == nil && len(got) == 3000:
			counts["listed"]++
		case errors.Is(err, os.ErrDeadlineExceeded):
			counts["timed out"]++
		case err == nil:
			counts["incomplete"]++ // kernels from 7 on, while the table is rebuilt
		default:
			t.Fatalf("list %d: %v", n, err)
		}
		if err := i.UpdateService(ipv4Service(n)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("change %d: %v", n, err)
		}
	}
	t.Log(counts)
	if counts["listed"] < 10 {
		t.Errorf("only %v", counts)
	}
}

// The kernel runs modprobe inside sendmsg, which no timeout can end. But Close returns
// at once, and the call ends with ErrClosed when the kernel has finished.
func TestModuleCloseWhileKernelLoads(t *testing.T) {
	needVM(t)
	i, _ := newKernelHandle(t)
	const program = "/proc/sys/kernel/modprobe"
	before, err := os.ReadFile(program)
	must(t, err)
	slow := filepath.Join(t.TempDir(), "slow")
	must(t, os.WriteFile(slow, []byte("#!/bin/sh\nsleep 3\nexit 1\n"), 0o755))
	must(t, os.WriteFile(program, []byte(slow), 0))
	defer func() { must(t, os.WriteFile(program, before, 0)) }()

	must(t, i.SetTimeout(100*time.Millisecond))
	call := make(chan error, 1)
	start := time.Now()
	go func() { call <- i.NewService(serviceWith(1, "nosuch")) }()
	time.Sleep(500 * time.Millisecond)
	select {
	case err := <-call:
		t.Fatalf("the call ended with %v before it could be closed", err)
	default:
	}
	closing := time.Now()
	i.Close()
	if took := time.Since(closing); took > 400*time.Millisecond {
		t.Errorf("Close took %v", took)
	}
	if err := <-call; err != ErrClosed || time.Since(start) < 2*time.Second {
		t.Errorf("the call ended with %v after %v", err, time.Since(start))
	}
}

// While the module is being unloaded, lists end as if it were unloaded, or load it
// again.
func TestModuleListsWhileUnloading(t *testing.T) {
	needVM(t)
	unloadIPVS(t)
	defer loadIPVS(t)
	counts := map[string]int{}
	for round := range times(3, 50) {
		loadIPVS(t)
		i, err := New("")
		must(t, err)
		stop, done := make(chan struct{}), make(chan error)
		go func() {
			for {
				select {
				case <-stop:
					done <- nil
					return
				default:
				}
				time.Sleep(time.Millisecond)
				switch _, err := i.GetServices(); {
				case err == nil:
					counts["listed"]++
				case errors.Is(err, ErrNotSupported):
					counts["gone"]++
				default:
					done <- err
					return
				}
			}
		}()
		time.Sleep(time.Duration(round%5) * 3 * time.Millisecond)
		// Once is enough: the lists load it again.
		unloaded := eventually(func() bool { return exec.Command("rmmod", "ip_vs").Run() == nil })
		close(stop)
		if err := <-done; err != nil {
			t.Errorf("round %d: %v", round, err)
		}
		if !unloaded {
			t.Errorf("round %d: rmmod did not succeed once", round)
		}
		i.Close()
	}
	t.Log(counts)
	if counts["listed"] == 0 {
		t.Error("nothing was ever listed")
	}
}

// Calls that read /proc also report that the module is unloaded.
func TestModuleProcWithoutIPVS(t *testing.T) {
	needVM(t)
	loadIPVS(t)
	i, err := New("")
	must(t, err)
	defer i.Close()
	if _, err := i.GetTotals(); err != nil {
		t.Errorf("with the module: %v", err)
	}
	unloadIPVS(t)
	defer loadIPVS(t)
	var connectionsErr error
	for _, err := range i.Connections() {
		connectionsErr = err
	}
	for name, err := range map[string]error{
		"GetTotals": second(i.GetTotals()), "GetSysctl": second(i.GetSysctl("expire_nodest_conn")),
		"SetSysctl": i.SetSysctl("expire_nodest_conn", 1), "Connections": connectionsErr,
	} {
		if !errors.Is(err, ErrNotSupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
