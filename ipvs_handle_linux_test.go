package ipvs

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A Handle without a real kernel: how it is opened, what its plain calls return, and
// how it ends.

// A new handle sends nothing if the process knows the family, and its timeout is 3 s.
func TestNewHandle(t *testing.T) {
	known := knownFamily.Swap(fakeFamily)
	t.Cleanup(func() { knownFamily.Store(known) })
	from, k := newFake(t, func(r []byte) []fakeReply { return one(familyReply(r, fakeFamily)) })
	i, err := newHandle(from.socket, nil)
	if err != nil || i.family != fakeFamily || len(k.requests) != 0 {
		t.Errorf("%v, family %d, %d requests", err, i.family, len(k.requests))
	}
	if i.receiveTimeout() != defaultTimeout || i.answerTimeout() != 10*defaultTimeout {
		t.Errorf("waits %v, and %v for all", i.receiveTimeout(), i.answerTimeout())
	}
	knownFamily.Store(0)
	i, err = newHandle(from.socket, nil)
	if err != nil || i.family != fakeFamily || len(k.requests) != 1 || knownFamily.Load() != fakeFamily {
		t.Errorf("%v, family %d, %d requests", err, i.family, len(k.requests))
	}
	if i, err := newHandle(nil, unix.EMFILE); err != unix.EMFILE || i != nil {
		t.Errorf("got %v, %v", i, err)
	}
}

// The error of New for a missing path matches the errors that callers check for, and
// names the path.
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

// If New fails halfway, no descriptor stays open.
func TestRowNoLeakWhenNewFails(t *testing.T) {
	before := descriptors(t)
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	for _, path := range []string{"/nonexistent", file, os.DevNull, t.TempDir()} {
		i, err := New(path)
		if err == nil {
			i.Close()
			t.Errorf("New(%q) succeeds", path)
		} else if !strings.HasPrefix(err.Error(), "ipvs: ") || !strings.Contains(err.Error(), path) {
			t.Errorf("New(%q): %v", path, err)
		}
	}
	if _, err := New("/nonexistent"); !errors.Is(err, syscall.ENOENT) || errors.Is(err, ErrNotSupported) {
		t.Errorf("New of a path that is not there: %v", err)
	}
	if i, err := New(""); err == nil {
		i.Close()
	}
	if after := descriptors(t); len(after) > len(before)+2 { // the poller's own two, made at first use
		t.Errorf("descriptors before %v\nafter %v", before, after)
	}
}

// IsServicePresent returns false on every error, and GetService returns the error.
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

// A malformed reply to a request for a single object is an error.
func TestMalformedSingleReplies(t *testing.T) {
	short := attr(infoAttrVersion, []byte{1}) // and cmdAttrTimeoutTCP has another number
	i, _ := newFake(t, func(r []byte) []fakeReply {
		if cmdOf(r) == cmdGetConfig {
			return one(dataReply(r, 0, cmdSetConfig, attr(cmdAttrTimeoutTCP, []byte{1})))
		}
		return one(dataReply(r, 0, cmdSetInfo, short))
	})
	if c, err := i.GetConfig(); err == nil || c != nil {
		t.Errorf("GetConfig: %+v, %v", c, err)
	}
	if info, err := i.GetInfo(); err == nil || info != nil {
		t.Errorf("GetInfo: %+v, %v", info, err)
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

// The longest possible timeout is valid.
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

// Handles are safe for concurrent use, and a closed one does not use a descriptor
// number that was reused. The original fails in both.
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

// A handle that is dropped without Close is closed by the garbage collector, both
// of its sockets, and never during a call.
func TestDroppedHandlesAreClosed(t *testing.T) {
	before := descriptors(t)
	const handles = 200
	func() {
		for range handles {
			s := netlinkSocket(t)
			bulk := netlinkSocket(t)
			i := &Handle{socket: s}
			i.closeWithHandle(s)
			i.bulk.Store(bulk)
			i.closeWithHandle(bulk)
		}
	}()
	if !collected(t, before) {
		t.Fatalf("descriptors left open: %v", opened(t, before))
	}

	// A call on a handle that nothing else refers to.
	released := make(chan struct{})
	done := make(chan error, 1)
	func() {
		i, _ := newFake(t, func(r []byte) []fakeReply {
			<-released
			return acknowledge(r)
		})
		detached := &Handle{socket: i.socket, family: i.family}
		i.socket = nil // the test's cleanup leaves it alone
		detached.timeout.Store(int64(time.Minute))
		detached.closeWithHandle(detached.socket)
		go func() { done <- detached.Flush() }()
	}()
	for range 5 {
		runtime.GC()
		time.Sleep(5 * time.Millisecond)
	}
	close(released)
	if err := <-done; err != nil {
		t.Errorf("a call on a handle that was dropped meanwhile: %v", err)
	}
}
