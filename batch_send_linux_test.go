package ipvs

import (
	"errors"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A batch that cannot be sent says so of every change, and stops.
func TestDoCannotSend(t *testing.T) {
	i, k := newFake(t, acknowledge)
	k.sendErr = []error{unix.ENOBUFS}
	var b Batch
	for n := range maxSend + 2 {
		b.NewService(ipv4Service(n))
	}
	var failed *BatchError
	if err := i.Do(&b); !errors.As(err, &failed) || len(failed.Errors) != maxSend+2 || len(k.requests) != 0 {
		t.Fatalf("%v, %d requests", err, len(k.requests))
	}
	const why = "ipvs: sending a batch: the kernel had no room for it: no buffer space available"
	for n, op := range failed.Errors {
		want := why
		if n >= maxSend {
			want = "ipvs: not sent, after: " + why
		}
		if op.Index != n || op.Err.Error() != want || !errors.Is(op, unix.ENOBUFS) {
			t.Errorf("change %d: %v, want %s", n, op, want)
		}
	}
}

// Every change that fails is known by its method.
func TestOperationNames(t *testing.T) {
	i, _ := newFake(t, func(r []byte) []fakeReply { return one(errorReply(r, syscall.EPERM)) })
	var b Batch
	s, d := ipv4Service(1), ipv4Destination(1)
	b.NewService(s)
	b.UpdateService(s)
	b.DelService(s)
	b.NewDestination(s, d)
	b.UpdateDestination(s, d)
	b.DelDestination(s, d)
	var failed *BatchError
	if err := i.Do(&b); !errors.As(err, &failed) || len(failed.Errors) != 6 {
		t.Fatal(err)
	}
	for n, want := range []string{"NewService", "UpdateService", "DelService", "NewDestination", "UpdateDestination", "DelDestination"} {
		if got := failed.Errors[n].Op; got != want {
			t.Errorf("change %d: %s, want %s", n, got, want)
		}
	}
	if got := opName(cmdFlush); got != "command 17" {
		t.Errorf("got %q", got)
	}
}

// A sequence number is never used again: a late reply would be taken for another.
func TestSequenceNumbersAreUsedOnce(t *testing.T) {
	i, k := newFake(t, refuseSome(func([]byte) syscall.Errno { return 0 }))
	var b Batch
	for n := range 2*maxSend + 1 {
		b.NewService(ipv4Service(n))
	}
	must(t, i.Do(&b))
	must(t, i.NewService(ipv4Service(1)))
	must(t, i.Do(&b))
	must(t, i.DelDaemon(DaemonMaster))
	must(t, i.NewService(ipv4Service(1)))
	seen := map[uint32]bool{}
	for _, r := range k.requests {
		if seq := seqOf(r); seen[seq] {
			t.Errorf("sequence number %d again", seq)
		} else {
			seen[seq] = true
		}
	}
}

// Requests without NLM_F_REQUEST do nothing. What is sent again has it, too.
func TestEveryRequestIsOne(t *testing.T) {
	const newFamily = fakeFamily + 1
	i, k := newFake(t, func(r []byte) []fakeReply {
		switch {
		case native.Uint16(r[6:])&unix.NLM_F_REQUEST == 0:
			t.Errorf("not a request: %x", r)
		case isFamilyRequest(r):
			return one(familyReply(r, newFamily))
		case native.Uint16(r[4:]) == fakeFamily:
			return one(errorReply(r, syscall.ENOENT))
		case native.Uint16(r[6:])&unix.NLM_F_ACK == 0:
			return nil
		}
		return acknowledge(r)
	})
	var b Batch
	b.NewService(ipv4Service(1))
	b.NewService(ipv4Service(2))
	if err := i.Do(&b); err != nil || len(k.requests) != 5 {
		t.Errorf("%d requests, %v", len(k.requests), err)
	}
}

// So many messages as are allowed travel at once, and at least one.
func TestNextChunk(t *testing.T) {
	var messages []byte
	for range 3 {
		msg := newGenlRequest(nil, 0, cmdFlush, genlVersion, 0)
		setLength(msg)
		messages = append(messages, msg...)
	}
	one := len(messages) / 3
	for _, c := range []struct{ atMost, bytes, size, count int }{
		{3, 3 * one, 3 * one, 3},
		{9, 9 * one, 3 * one, 3},
		{2, 9 * one, 2 * one, 2},
		{1, 9 * one, one, 1},
		{9, 2 * one, 2 * one, 2},
		{9, 2*one - 1, one, 1},
		{9, 1, one, 1},
		{9, 0, one, 1},
	} {
		if size, count := nextChunk(messages, c.atMost, c.bytes); size != c.size || count != c.count {
			t.Errorf("at most %d and %d bytes: %d bytes, %d messages; want %d, %d", c.atMost, c.bytes, size, count, c.size, c.count)
		}
	}
}

// The number of a change that cannot be sent counts from the batch's start.
func TestAppendedNumbers(t *testing.T) {
	bad := &Destination{Address: net.IPv4(10, 1, 0, 9), Weight: -1}
	want := []TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(1), ipv4Destination(2)}}, {ipv4Service(2), nil}}
	have := []TableEntry{{ipv4Service(1), []*Destination{{Address: net.IPv4(10, 1, 0, 9), Weight: 1}}}}
	want[0].Destinations = append(want[0].Destinations, bad)
	// To come: two destinations and a service; then what is to change, which cannot.
	plan, err := Diff(have, want)
	must(t, err)
	var numbers []int
	for n, c := range plan.All() {
		if c.Err != nil {
			numbers = append(numbers, n)
		}
	}
	if want := []int{3}; !slices.Equal(numbers, want) || plan.Len() != 4 {
		t.Errorf("bad are %v of %d:\n%s", numbers, plan.Len(), plan)
	}
}

// A socket without the options that a batch needs makes it fail, and nothing is sent.
func TestDoWithoutSocketOptions(t *testing.T) {
	i, k := newFake(t, acknowledge)
	i.socket.errorText = false // the fake's socket, which is not netlink's, has none
	var b Batch
	b.NewService(ipv4Service(1))
	err := i.Do(&b)
	if !errors.Is(err, unix.EOPNOTSUPP) || !strings.HasPrefix(err.Error(), "ipvs: setting netlink socket option 10: ") || len(k.requests) != 0 {
		t.Errorf("%v, %d requests", err, len(k.requests))
	}
	r := &Reconciler{Handle: i}
	k.respond = listingTable(nil)
	if got, err := r.Reconcile(wantedTable(1, 1)); !errors.Is(err, unix.EOPNOTSUPP) || got != (Changes{}) {
		t.Errorf("Reconcile: %+v, %v", got, err)
	}
}

// A batch on a closed handle ends with ErrClosed itself: nothing was sent.
func TestDoClosed(t *testing.T) {
	i, k := newFake(t, acknowledge)
	i.Close()
	var b Batch
	b.NewService(ipv4Service(1))
	if err := i.Do(&b); err != ErrClosed || len(k.requests) != 0 {
		t.Errorf("%v, %d requests", err, len(k.requests))
	}
}

// A table with an entry that no kernel has is none that Diff could go by.
func TestDiffBadExistingTable(t *testing.T) {
	bad := []TableEntry{{ipv4Service(1), []*Destination{{Port: 80}}}}
	want := []TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(1)}}}
	if b, err := Diff(bad, want); err == nil || b != nil || !strings.HasSuffix(err.Error(), " (of the existing service -t 10.0.0.1:80)") {
		t.Errorf("got %v, %v", b, err)
	}
}

// What is wrong with a destination is reported also where its service is bad, and
// where it is wrong for a new one only.
func TestDiffBadDestinationOfBadService(t *testing.T) {
	v6 := &Destination{AddressFamily: unix.AF_INET6, Address: net.ParseIP("10.1.0.1"), Weight: 1}
	b, err := Diff(nil, []TableEntry{{&Service{Protocol: unix.IPPROTO_TCP, Port: 80}, []*Destination{v6, ipv4Destination(2)}}})
	must(t, err)
	i, k := newFake(t, acknowledge)
	var failed *BatchError
	if err := i.Do(b); !errors.As(err, &failed) || len(failed.Errors) != 2 || len(k.requests) != 0 ||
		failed.Errors[1].Destination == nil || !strings.Contains(failed.Errors[1].Error(), "is not of its address family") {
		t.Errorf("%d requests, %v", len(k.requests), err)
	}
}

// So it does on a handle that is closed while it waits for another call.
func TestDoClosedMeanwhile(t *testing.T) {
	i, k := newFake(t, acknowledge)
	var b Batch
	b.NewService(ipv4Service(1))
	i.mu.Lock()
	done := make(chan error, 1)
	go func() { done <- i.Do(&b) }()
	time.Sleep(50 * time.Millisecond) // until it waits; if it does not yet, it ends the same
	i.Close()
	i.mu.Unlock()
	if err := <-done; err != ErrClosed || len(k.requests) != 0 {
		t.Errorf("%v, %d requests", err, len(k.requests))
	}
}
