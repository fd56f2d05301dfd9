package ipvs

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
)

// countModprobe replaces modprobe for the test, and counts its runs.
func countModprobe(t *testing.T) *int {
	runs := new(int)
	original := loadModule
	loadModule = func() error { *runs++; return errors.New("not here") }
	t.Cleanup(func() { loadModule = original })
	return runs
}

// The original's New succeeds where there is no IPVS.
func TestRowNewWithoutIPVS(t *testing.T) {
	countModprobe(t)
	i, _ := newFake(t, func(r []byte) []fakeReply { return one(errorReply(r, syscall.ENOENT)) })
	if err := i.setup(i.socket); !errors.Is(err, ErrNotSupported) {
		t.Errorf("setup: %v, want ErrNotSupported", err)
	}
	for _, hint := range []string{"ip_vs", "CONFIG_IP_VS"} {
		if !strings.Contains(ErrNotSupported.Error(), hint) {
			t.Errorf("%q does not say %q", ErrNotSupported, hint)
		}
	}
}

// The original always runs modprobe.
func TestRowModprobeOnlyIfNeeded(t *testing.T) {
	if !mayLoadModules() {
		t.Skip("SKIP: needs the right to load modules, without which modprobe is never run")
	}
	runs := countModprobe(t)
	i, k := newFake(t, func(r []byte) []fakeReply { return one(familyReply(r, 99)) })
	if err := i.setup(i.socket); err != nil || i.family != 99 || *runs != 0 {
		t.Errorf("%v, family %d, modprobe ran %d times, want 0", err, i.family, *runs)
	}
	k.respond = func(r []byte) []fakeReply {
		if *runs == 0 {
			return one(errorReply(r, syscall.ENOENT))
		}
		return one(familyReply(r, 100))
	}
	if err := i.setup(i.socket); err != nil || i.family != 100 || *runs != 1 {
		t.Errorf("%v, family %d, modprobe ran %d times, want 1", err, i.family, *runs)
	}
	*runs = 0
	k.respond = func(r []byte) []fakeReply { return one(errorReply(r, syscall.EPERM)) }
	if err := i.setup(i.socket); err != syscall.EPERM || *runs != 0 {
		t.Errorf("%v, modprobe ran %d times, want EPERM and 0", err, *runs)
	}
}

// The original looks up the family id once a process.
func TestRowFamilyIDLookedUpAgain(t *testing.T) {
	const newFamily = fakeFamily + 1
	i, k := newFake(t, func(r []byte) []fakeReply {
		switch {
		case isFamilyRequest(r):
			return one(familyReply(r, newFamily))
		case native.Uint16(r[4:]) != newFamily:
			return one(errorReply(r, syscall.ENOENT)) // as genetlink answers for an unknown family
		}
		return acknowledge(r)
	})
	for call := range 2 {
		if err := i.Flush(); err != nil {
			t.Errorf("call %d: %v", call, err)
		}
	}
	if len(k.requests) != 4 { // stale, lookup, again; then just one
		t.Errorf("%d requests, want 4", len(k.requests))
	}
}

func TestRowPlainENOENTStays(t *testing.T) {
	i, k := newFake(t, func(r []byte) []fakeReply {
		if isFamilyRequest(r) {
			return one(familyReply(r, fakeFamily))
		}
		return one(errorReply(r, syscall.ENOENT))
	})
	if err := i.DelDestination(&someService, &someDestination); err != syscall.ENOENT {
		t.Errorf("got %v, want the bare ENOENT", err)
	}
	if len(k.requests) != 2 {
		t.Errorf("%d requests, want the call's and the lookup's", len(k.requests))
	}
}

// The original waits for ever when a reply is lost.
func TestRowLostReply(t *testing.T) {
	lost := true
	i, _ := newFake(t, func(r []byte) []fakeReply {
		if lost {
			return nil
		}
		return acknowledge(r)
	})
	start := time.Now()
	if err := i.Flush(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v, want os.ErrDeadlineExceeded", err)
	}
	if d := time.Since(start); d < 50*time.Millisecond || d > 2*time.Second {
		t.Errorf("ended after %v, want the time-out of 50ms", d)
	}
	lost = false
	if err := i.Flush(); err != nil {
		t.Errorf("the call after: %v", err)
	}
}

func TestRowLateReplyIsSkipped(t *testing.T) {
	var late []byte // arrives, with its error, inside the next call
	i, _ := newFake(t, func(r []byte) []fakeReply {
		if late == nil {
			late = errorReply(r, syscall.EEXIST)
			return nil
		}
		return []fakeReply{{data: late}, {data: errorReply(r, 0), after: 40 * time.Millisecond}}
	})
	if err := i.Flush(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v, want os.ErrDeadlineExceeded", err)
	}
	i.SetTimeout(5 * time.Second)
	if err := i.Flush(); err != nil {
		t.Errorf("the next call took the late reply: %v", err)
	}
}

func TestSetTimeout(t *testing.T) {
	i, _ := newFake(t, func([]byte) []fakeReply { return nil })
	for _, d := range []time.Duration{0, -time.Second} {
		if err := i.SetTimeout(d); err == nil {
			t.Errorf("SetTimeout(%v) is taken", d)
		}
	}
	if err := i.SetTimeout(120 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	err := i.Flush()
	if d := time.Since(start); !errors.Is(err, os.ErrDeadlineExceeded) || d < 120*time.Millisecond || d > 2*time.Second {
		t.Errorf("%v after %v", err, d)
	}
}

// The original is not safe for concurrent use, and a
// closed handle may use a descriptor that is someone else's by then.
func TestRowCloseEndsCalls(t *testing.T) {
	i, _ := newFake(t, func([]byte) []fakeReply { return nil })
	i.SetTimeout(time.Minute)
	results := make(chan error)
	for range 4 { // one waits for a reply, the others for it
		go func() { results <- i.Flush() }()
	}
	time.Sleep(20 * time.Millisecond)
	i.Close()
	i.Close()
	for range 4 {
		select {
		case err := <-results:
			if !errors.Is(err, ErrClosed) || !errors.Is(err, net.ErrClosed) {
				t.Errorf("a call under way ended with %v", err)
			}
		case <-time.After(5 * time.Second):
			t.Fatal("a call goes on after Close")
		}
	}
	if _, err := i.GetServices(); !errors.Is(err, ErrClosed) {
		t.Errorf("a later call ended with %v", err)
	}
	var zero Handle
	zero.Close()
	if err := zero.Flush(); !errors.Is(err, ErrClosed) {
		t.Errorf("a call on the zero Handle ended with %v", err)
	}
}

// IsServicePresent answers false for every error, and
// GetService tells which it was.
func TestRowIsServicePresent(t *testing.T) {
	answer := syscall.ESRCH
	i, _ := newFake(t, func(r []byte) []fakeReply { return one(errorReply(r, answer)) })
	for _, answer = range []syscall.Errno{syscall.ESRCH, syscall.EPERM} {
		if i.IsServicePresent(&someService) {
			t.Errorf("present although the kernel said %v", answer)
		}
		if _, err := i.GetService(&someService); err != error(answer) {
			t.Errorf("GetService: %v, want the bare %v", err, answer)
		}
	}
}

func TestGetServiceWantsExactlyOne(t *testing.T) {
	b, err := fillService(nil, &someService, true)
	if err != nil {
		t.Fatal(err)
	}
	for n := range 4 {
		i, _ := newFake(t, func(r []byte) []fakeReply {
			if n == 0 {
				return one(doneReply(r, 0))
			}
			return one(bytes.Repeat(dataReply(r, 0, cmdNewService, b), n))
		})
		s, err := i.GetService(&someService)
		if n == 1 {
			if err != nil || s.SchedName != RoundRobin {
				t.Errorf("one service: %+v, %v", s, err)
			}
		} else if want := fmt.Sprintf("Expected only one service obtained=%d", n); err == nil || err.Error() != want {
			t.Errorf("%d services: %v, want %q", n, err, want)
		}
	}
}

func TestKernelErrorsAreBare(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EEXIST, syscall.ESRCH, syscall.EINVAL, syscall.EPERM, syscall.ERANGE} {
		i, _ := newFake(t, func(r []byte) []fakeReply { return one(errorReply(r, errno)) })
		for name, err := range map[string]error{
			"NewService":        i.NewService(&someService),
			"UpdateService":     i.UpdateService(&someService),
			"DelService":        i.DelService(&someService),
			"Flush":             i.Flush(),
			"NewDestination":    i.NewDestination(&someService, &someDestination),
			"UpdateDestination": i.UpdateDestination(&someService, &someDestination),
			"DelDestination":    i.DelDestination(&someService, &someDestination),
			"GetServices":       second(i.GetServices()),
			"GetDestinations":   second(i.GetDestinations(&someService)),
			"GetService":        second(i.GetService(&someService)),
			"GetConfig":         second(i.GetConfig()),
			"SetConfig":         i.SetConfig(&Config{}),
		} {
			if err != error(errno) {
				t.Errorf("%s: %v, want the bare %v", name, err, errno)
			}
		}
	}
}

// A time-out of for ever is one.
func TestLargestTimeout(t *testing.T) {
	i, _ := newFake(t, func(r []byte) []fakeReply {
		part := dataReply(r, unix.NLM_F_MULTI, cmdNewService, fill(fillService(nil, &someService, true)))
		return []fakeReply{{data: part}, {data: part}, {data: part}, {data: doneReply(r, 0)}}
	})
	if err := i.SetTimeout(math.MaxInt64); err != nil {
		t.Fatal(err)
	}
	if services, err := i.GetServices(); err != nil || len(services) != 1 {
		t.Errorf("%d services, %v", len(services), err)
	}
}

// Messages of other processes, without end, keep neither a call nor Close.
func TestForeignFlood(t *testing.T) {
	i, k := newFake(t, func(r []byte) []fakeReply {
		return []fakeReply{{data: errorReply(r, 0), from: 99, endless: true}}
	})
	must(t, i.SetTimeout(20*time.Millisecond))
	start := time.Now()
	if err := i.Flush(); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(start) > 5*time.Second {
		t.Errorf("%v after %v", err, time.Since(start))
	}
	must(t, i.SetTimeout(time.Minute))
	done := make(chan error)
	go func() { done <- i.Flush() }()
	time.Sleep(10 * time.Millisecond)
	i.Close()
	select {
	case err := <-done:
		if err != ErrClosed {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Error("Close does not end a call")
	}
	k.end()
}

// A list is refused with EPROTONOSUPPORT while the module is being unloaded: then
// the family is looked up again until it is gone or another, and the list
// requested again.
func TestListWhileModuleUnloads(t *testing.T) {
	countModprobe(t)
	var family uint16 = fakeFamily
	lookups := 0
	i, k := newFake(t, func(r []byte) []fakeReply {
		switch {
		case isFamilyRequest(r):
			if lookups++; lookups == 3 {
				family++
			}
			return one(familyReply(r, family))
		case native.Uint16(r[4:]) == fakeFamily:
			return one(errorReply(r, syscall.EPROTONOSUPPORT))
		}
		native.PutUint16(r[4:], fakeFamily) // what rightReplies expects
		return rightReplies(r)
	})
	must(t, i.SetTimeout(time.Minute))
	if got, err := i.GetServices(); err != nil || len(got) != 2 || lookups != 3 {
		t.Errorf("%d services, %v after %d lookups", len(got), err, lookups)
	}
	// The module is gone: that is what the list ends with.
	i.family = fakeFamily
	k.respond = func(r []byte) []fakeReply {
		if isFamilyRequest(r) {
			return one(errorReply(r, syscall.ENOENT))
		}
		return one(errorReply(r, syscall.EPROTONOSUPPORT))
	}
	if _, err := i.GetServices(); !errors.Is(err, ErrNotSupported) {
		t.Errorf("the module is gone: %v", err)
	}
	// It stays for ever: bounded.
	k.respond = func(r []byte) []fakeReply {
		if isFamilyRequest(r) {
			return one(familyReply(r, fakeFamily))
		}
		return one(errorReply(r, syscall.EPROTONOSUPPORT))
	}
	must(t, i.SetTimeout(30*time.Millisecond))
	if _, err := i.GetServices(); err != syscall.EPROTONOSUPPORT {
		t.Errorf("the module stays: %v", err)
	}
}

// The reason why IPVS could not be loaded reaches the caller, and the log once.
func TestNotSupportedSaysWhy(t *testing.T) {
	var log strings.Builder
	logrus.SetOutput(&log)
	defer logrus.SetOutput(os.Stderr)
	formatter := logrus.StandardLogger().Formatter
	logrus.SetFormatter(&logrus.TextFormatter{DisableColors: true})
	defer logrus.SetFormatter(formatter)
	warned.Store(false)
	defer warned.Store(false)
	reason := errors.New("modprobe ip_vs: exit status 1")
	for range 2 {
		err := notSupported(reason)
		if !errors.Is(err, ErrNotSupported) || !errors.Is(err, reason) || err.Error() != ErrNotSupported.Error()+": "+reason.Error() {
			t.Errorf("got %v", err)
		}
	}
	if text := log.String(); strings.Count(text, "level=warning") != 1 || !strings.Contains(text, `: modprobe ip_vs: exit status 1"`) {
		t.Errorf("logged %s", text)
	}
	if err := notSupported(nil); err != ErrNotSupported {
		t.Errorf("without a reason: %v", err)
	}
}

// modprobe is a program that leaves a child behind with its output open, fails
// with and without words, or is not there.
func TestModprobe(t *testing.T) {
	if !mayLoadModules() {
		t.Skip("SKIP: needs the right to load modules, without which modprobe is never run")
	}
	folder := t.TempDir()
	t.Setenv("PATH", folder+":/usr/bin:/bin")
	script := func(text string) {
		must(t, os.WriteFile(folder+"/modprobe", []byte("#!/bin/sh\n"+text+"\n"), 0o755))
	}
	script("sleep 300 & exit 0")
	start := time.Now()
	if err := modprobe(); err != nil || time.Since(start) > 20*time.Second {
		t.Errorf("a child left behind: %v after %v", err, time.Since(start))
	}
	script("exit 1")
	if err := modprobe(); err == nil || err.Error() != "modprobe ip_vs: exit status 1" {
		t.Errorf("without words: %v", err)
	}
	script("echo no such module; exit 1")
	if err := modprobe(); err == nil || err.Error() != "modprobe ip_vs: exit status 1: no such module" {
		t.Errorf("with words: %v", err)
	}
	must(t, os.Remove(folder+"/modprobe"))
	t.Setenv("PATH", folder)
	if err := modprobe(); !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("not there: %v", err)
	}
}

// An answer larger than the buffer is requested again, with a larger buffer; a
// change is not.
func TestAnswerLargerThanBuffer(t *testing.T) {
	truncate := 2
	i, k := newFake(t, func(r []byte) []fakeReply {
		replies := rightReplies(r)
		if truncate > 0 {
			truncate--
			replies[0].truncated = true
		}
		return replies
	})
	if s, err := i.GetService(&someService); err != nil || s == nil || len(k.requests) != 3 {
		t.Errorf("GetService: %v, %v after %d requests", s, err, len(k.requests))
	}
	if len(i.socket.in) != 4*firstBuffer {
		t.Errorf("the buffer has %d bytes", len(i.socket.in))
	}
	truncate = 1
	if err := i.setup(i.socket); err != nil || i.family != fakeFamily {
		t.Errorf("setup: %v", err)
	}
	truncate = 1
	sent := len(k.requests)
	if err := i.NewService(&someService); err != errTruncated || len(k.requests) != sent+1 {
		t.Errorf("NewService: %v after %d requests", err, len(k.requests)-sent)
	}
}
