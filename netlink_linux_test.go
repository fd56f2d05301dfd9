package ipvs

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
)

// The messages of a datagram are parsed one by one, and the bytes after each are
// counted.
func TestParseMessageLeft(t *testing.T) {
	first, second := netlinkMessage(1, 2, 3, []byte{1, 2, 3, 4, 5}), netlinkMessage(4, 5, 6, nil)
	var m message
	rest, err := parseMessage(append(first, second...), &m)
	if err != nil || !bytes.Equal(rest, second) || m.left != len(second) || !bytes.Equal(m.body, []byte{1, 2, 3, 4, 5}) {
		t.Errorf("%v, rest %x, %+v", err, rest, m)
	}
	rest, err = parseMessage(rest, &m)
	if err != nil || len(rest) != 0 || m.left != 0 || m.typ != 4 || m.flags != 5 || m.seq != 6 || m.portID != fakePortID {
		t.Errorf("%v, rest %x, %+v", err, rest, m)
	}
}

// The kernel's error text is found after the request, of which it echoes all or only
// the header.
func TestErrorText(t *testing.T) {
	request := newGenlRequest(nil, fakeFamily, cmdNewService, genlVersion, unix.NLM_F_ACK)
	request = append(request, attr(1, []byte("not the text\x00"))...)
	setLength(request)
	text := attr(unix.NLMSGERR_ATTR_MSG, []byte("the text\x00"))
	for _, c := range []struct {
		flags uint16
		echo  []byte
		want  string
	}{
		{unix.NLM_F_ACK_TLVS | unix.NLM_F_CAPPED, request[:msgHdrLen], "the text"},
		{unix.NLM_F_ACK_TLVS, request, "the text"},
		{unix.NLM_F_CAPPED, request[:msgHdrLen], ""},
		{unix.NLM_F_ACK_TLVS, nil, ""},
	} {
		m := message{flags: c.flags, body: append(ne32(^uint32(0)), c.echo...)}
		if c.echo != nil {
			m.body = append(m.body, text...)
		}
		if got := m.errorText(); got != c.want {
			t.Errorf("flags %#x: got %q, want %q", c.flags, got, c.want)
		}
	}
}

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

// Errors of sending and receiving say what failed, and why.
func TestTransportErrors(t *testing.T) {
	i := &Handle{}
	i.timeout.Store(int64(2 * time.Second))
	for _, c := range []struct {
		err  error
		want string
	}{
		{unix.ENOBUFS, "ipvs: sending: the kernel had no room for it: no buffer space available"},
		{unix.EPERM, "ipvs: sending: operation not permitted"},
		{os.ErrDeadlineExceeded, "ipvs: no reply from the kernel within 2s: i/o timeout"},
		{errTruncated, errTruncated.Error()},
	} {
		if got := i.transportError("sending", c.err); got.Error() != c.want || !errors.Is(got, c.err) {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
	i.closed.Store(true)
	if got := i.transportError("sending", unix.EPERM); got != ErrClosed {
		t.Errorf("got %v", got)
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

// Replies with the sequence numbers of later requests are skipped.
func TestReplyToAnotherRequest(t *testing.T) {
	for _, off := range []uint32{1, 2, 1 << 20, 1 << 31, ^uint32(0)} {
		i, _ := newFake(t, func(r []byte) []fakeReply {
			other := bytes.Clone(r)
			setSequence(other, seqOf(r)+off)
			return append(one(errorReply(other, syscall.EPERM)), one(errorReply(r, syscall.EEXIST))...)
		})
		i.seq = 1000
		if err := i.NewService(ipv4Service(1)); err != syscall.EEXIST {
			t.Errorf("%#x later: %v", off, err)
		}
	}
}

// An endless stream of messages from other processes delays neither a call nor Close.
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

// A request for a list fails with EPROTONOSUPPORT while the module is being unloaded.
// Then the family is looked up again until it is gone or has another id, and the list
// is requested again.
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
	// The module is unloaded: the list ends with that error.
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
	// The module stays: the wait is bounded.
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

// A missing IPVS is logged once until IPVS is found.
func TestMissingIPVSIsLoggedOnce(t *testing.T) {
	if !mayLoadModules() {
		t.Skip("SKIP: needs the right to load modules, without which nothing is logged")
	}
	countModprobe(t)
	var log bytes.Buffer
	out := logrus.StandardLogger().Out
	logrus.SetOutput(&log)
	was := warned.Swap(false)
	t.Cleanup(func() { logrus.SetOutput(out); warned.Store(was) })
	there := false
	i, _ := newFake(t, func(r []byte) []fakeReply {
		if there {
			return one(familyReply(r, fakeFamily))
		}
		return one(errorReply(r, syscall.ENOENT))
	})
	for turn, step := range []struct {
		there bool
		lines int
	}{{true, 0}, {false, 1}, {false, 0}, {true, 0}, {false, 1}} {
		log.Reset()
		there = step.there
		if err := i.setup(i.socket); (err == nil) != there {
			t.Errorf("turn %d: %v", turn, err)
		}
		if got := strings.Count(log.String(), "\n"); got != step.lines || got > 0 && !strings.Contains(log.String(), "not here") {
			t.Errorf("turn %d: logged %q", turn, log.String())
		}
	}
}

// The reason why IPVS could not be loaded is returned, and logged once.
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

// Only the capability to load modules counts.
func TestMayLoadModules(t *testing.T) {
	effective := func() uint64 {
		status, err := os.ReadFile("/proc/thread-self/status")
		must(t, err)
		_, after, _ := strings.Cut(string(status), "CapEff:")
		caps, err := strconv.ParseUint(strings.Fields(after)[0], 16, 64)
		must(t, err)
		return caps
	}
	set := func(caps uint64) {
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		must(t, unix.Capget(&hdr, &data[0]))
		data[0].Effective, data[1].Effective = uint32(caps), uint32(caps>>32)
		must(t, unix.Capset(&hdr, &data[0]))
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		const module = 1 << unix.CAP_SYS_MODULE
		all := effective()
		for _, caps := range []uint64{all, all & module, all &^ module, 0} {
			set(caps)
			if got, want := mayLoadModules(), caps&module != 0; got != want {
				t.Errorf("capabilities %#x: %v", caps, got)
			}
		}
	}()
	<-done
}

// modprobe is a program that leaves a child running with its output open, fails with
// and without a message, or is missing.
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

// A reply that fills the buffer to the last byte is not truncated.
func TestReplyFillsBuffer(t *testing.T) {
	i, k := newFake(t, func(r []byte) []fakeReply {
		return one(dataReply(r, 0, cmdSetInfo, attr(infoAttrVersion, ne32(0x010201))))
	})
	for missing, requests := range map[int]int{0: 1, 1: 2} { // what does not fit is requested again
		i.socket.in, k.requests = make([]byte, msgHdrLen+genlHdrLen+8-missing), nil
		if info, err := i.GetInfo(); err != nil || info.Version != 0x010201 || len(k.requests) != requests {
			t.Errorf("%+v, %v after %d requests", info, err, len(k.requests))
		}
	}
}
