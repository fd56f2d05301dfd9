package ipvs

import (
	"errors"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestBatchCopiesAndPrints(t *testing.T) {
	var b Batch
	s, d := ipv4Service(1), ipv4Destination(2)
	b.NewService(s)
	b.NewDestination(s, d)
	s.SchedName, s.Flags, s.Timeout = "sh", ServiceFlagPersistent, 60
	d.Weight = 7
	b.UpdateService(s)
	b.UpdateDestination(s, d)
	b.DelDestination(s, d)
	b.DelService(s)
	s.Address[15], d.Address[15] = 99, 99 // what was given before stays as it was
	const want = `-A -t 10.0.0.1:80 -s rr
-a -t 10.0.0.1:80 -r 10.1.0.2:8080 -m -w 1
-E -t 10.0.0.1:80 -s sh -p 60
-e -t 10.0.0.1:80 -r 10.1.0.2:8080 -m -w 7
-d -t 10.0.0.1:80 -r 10.1.0.2:8080
-D -t 10.0.0.1:80
`
	if got := b.String(); got != want || b.Len() != 6 {
		t.Errorf("%d changes:\n%swant:\n%s", b.Len(), got, want)
	}
	b.Reset()
	if b.Len() != 0 || b.String() != "" {
		t.Errorf("after Reset: %d changes, %q", b.Len(), b.String())
	}
	if i, k := newFake(t, acknowledge); i.Do(&b) != nil || len(k.requests) != 0 {
		t.Error("an empty batch does something")
	}
}

// refuseSome is a kernel that rejects the requests for which bad returns an error, and
// acknowledges the others on request.
func refuseSome(bad func(request []byte) syscall.Errno) func([]byte) []fakeReply {
	return func(r []byte) []fakeReply {
		if errno := bad(r); errno != 0 {
			return one(errorReply(r, errno))
		}
		if native.Uint16(r[6:])&unix.NLM_F_ACK != 0 {
			return acknowledge(r)
		}
		return nil
	}
}

func TestDoReportsEachFailure(t *testing.T) {
	i, k := newFake(t, nil)
	n := -1
	k.respond = refuseSome(func([]byte) syscall.Errno {
		if n++; n == 3 || n == 300 || n == 399 {
			return syscall.EEXIST
		}
		return 0
	})
	var b Batch
	for n := range 400 {
		b.NewService(ipv4Service(n))
	}
	err := i.Do(&b)
	var failed *BatchError
	if !errors.As(err, &failed) || !errors.Is(err, syscall.EEXIST) {
		t.Fatalf("got %v", err)
	}
	var got []string
	for _, op := range failed.Errors {
		got = append(got, op.Error())
	}
	want := []string{
		"change 3, NewService -t 10.0.0.3:80: file exists",
		"change 300, NewService -t 10.0.1.44:80: file exists",
		"change 399, NewService -t 10.0.1.143:80: file exists",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	if len(k.requests) != 400 {
		t.Errorf("%d requests", len(k.requests))
	}
	if want := "ipvs: 3 of 400 changes failed; " + strings.Join(want, "; "); err.Error() != want {
		t.Errorf("got %q", err)
	}
	var op *OpError
	if !errors.As(err, &op) || op.Index != 3 || op.Service.Port != 80 || op.Destination != nil {
		t.Errorf("errors.As gives %+v", op)
	}
}

// Changes that cannot be sent are reported with the others, which are sent.
func TestDoWithBadInput(t *testing.T) {
	i, k := newFake(t, refuseSome(func([]byte) syscall.Errno { return 0 }))
	var b Batch
	b.NewService(nil)
	b.NewService(ipv4Service(1))
	b.NewDestination(ipv4Service(1), &Destination{Address: net.IPv4(10, 1, 0, 1), Weight: -1})
	b.NewDestination(ipv4Service(1), nil)
	err := i.Do(&b)
	var failed *BatchError
	if !errors.As(err, &failed) || len(failed.Errors) != 3 || !errors.Is(err, syscall.ERANGE) {
		t.Fatalf("got %v", err)
	}
	for n, want := range []int{0, 2, 3} {
		if got := failed.Errors[n]; got.Index != want || !strings.HasPrefix(got.Err.Error(), "ipvs: ") {
			t.Errorf("error %d: %v", n, got)
		}
	}
	if len(k.requests) != 1 {
		t.Errorf("%d requests, want 1", len(k.requests))
	}
	if err := i.Do(nil); err == nil || errors.As(err, &failed) {
		t.Errorf("Do(nil): %v", err)
	}
}

// The confirming reply is lost: none of the changes sent with it counts as made, and
// later ones are not sent.
func TestDoLostConfirmation(t *testing.T) {
	for name, lost := range map[string]fakeReply{
		"no reply": {}, "queue overflow": {err: unix.ENOBUFS},
	} {
		t.Run(name, func(t *testing.T) {
			i, k := newFake(t, nil)
			n := 0
			k.respond = func(r []byte) []fakeReply {
				n++
				switch {
				case n == 130: // refused, and known to be
					return one(errorReply(r, syscall.EEXIST))
				case n <= maxSend && native.Uint16(r[6:])&unix.NLM_F_ACK != 0:
					return acknowledge(r)
				case native.Uint16(r[6:])&unix.NLM_F_ACK != 0 && lost.err != nil:
					return []fakeReply{lost}
				}
				return nil
			}
			var b Batch
			for n := range 3 * maxSend {
				b.NewService(ipv4Service(n))
			}
			err := i.Do(&b)
			var failed *BatchError
			if !errors.As(err, &failed) || len(failed.Errors) != 2*maxSend {
				t.Fatalf("got %v", err)
			}
			for _, op := range failed.Errors {
				unknown := errors.Is(op, ErrOutcomeUnknown)
				switch {
				case op.Index == 129:
					if op.Err != syscall.EEXIST {
						t.Errorf("%v", op)
					}
				case op.Index < maxSend || unknown != (op.Index < 2*maxSend):
					t.Errorf("%v", op)
				}
			}
			if len(k.requests) != 2*maxSend {
				t.Errorf("%d requests", len(k.requests))
			}
		})
	}
}

// The family id becomes stale in the middle of a batch.
func TestDoStaleFamily(t *testing.T) {
	const newFamily = fakeFamily + 1
	i, k := newFake(t, nil)
	sent := 0
	var done []uint32
	k.respond = func(r []byte) []fakeReply {
		if isFamilyRequest(r) {
			return one(familyReply(r, newFamily))
		}
		sent++
		if sent > 200 && native.Uint16(r[4:]) != newFamily {
			return one(errorReply(r, syscall.ENOENT))
		}
		var s Service
		if err := parseService(r[msgHdrLen+genlHdrLen:], &s, new(addresses)); err != nil {
			t.Error(err)
		}
		done = append(done, uint32(s.Address[2])<<8|uint32(s.Address[3]))
		return refuseSome(func([]byte) syscall.Errno { return 0 })(r)
	}
	var b Batch
	for n := range 500 {
		b.NewService(ipv4Service(n))
	}
	if err := i.Do(&b); err != nil {
		t.Fatal(err)
	}
	if len(done) != 500 {
		t.Errorf("%d changes made", len(done))
	}
	for n, got := range done {
		if got != uint32(n) {
			t.Fatalf("change %d is service %d: out of order", n, got)
		}
	}
}

// Errors about bad input can be printed, and describe the input at the time of the
// call.
func TestBatchPrintsBadInput(t *testing.T) {
	bad := &Service{AddressFamily: unix.AF_INET6, Address: net.IP{10, 0, 0, 1}, Protocol: 6, Port: 80}
	if got, want := bad.Rule(), "-t 10.0.0.1:80 -s "; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	var b Batch
	b.NewService(bad)
	b.NewDestination(ipv4Service(1), &Destination{AddressFamily: unix.AF_INET6, Address: net.IP{10, 1, 0, 1}, Weight: 1})
	bad.Address[3] = 99
	const want = `# not possible: change 0, NewService -t 10.0.0.1:80: ipvs: the service's address 10.0.0.1 is not of its address family 10
# not possible: change 1, NewDestination -t 10.0.0.1:80 -r 10.1.0.1:0: ipvs: the destination's address 10.1.0.1 is not of its address family 10
`
	if got := b.String(); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	i, _ := newFake(t, acknowledge)
	if err := i.Do(&b); err == nil || !strings.Contains(err.Error(), "2 of 2 changes failed; change 0, NewService -t 10.0.0.1:80: ") {
		t.Errorf("got %v", err)
	}
	if _, err := (&Reconciler{Handle: i, Owned: func(*Service) bool { return false }}).Reconcile([]TableEntry{{Service: bad}}); err == nil {
		t.Error("a bad service is reconciled")
	}
	i.Close()
	for range 2 {
		if err := i.Do(&b); err != ErrClosed {
			t.Errorf("closed: %v", err)
		}
	}
}

// The family id is outdated, and then the kernel is silent: changes that may have been
// made have an unknown outcome, the rest is not sent, and there is a single timeout for
// all.
func TestDoStaleFamilyThenSilence(t *testing.T) {
	const newFamily = fakeFamily + 1
	i, _ := newFake(t, func(r []byte) []fakeReply {
		switch {
		case isFamilyRequest(r):
			return one(familyReply(r, newFamily))
		case native.Uint16(r[4:]) != newFamily:
			return one(errorReply(r, syscall.ENOENT))
		}
		return nil
	})
	var b Batch
	for n := range 2 * maxSend {
		b.NewService(ipv4Service(n))
	}
	start := time.Now()
	err := i.Do(&b)
	var failed *BatchError
	if !errors.As(err, &failed) || len(failed.Errors) != b.Len() || time.Since(start) > 5*time.Second {
		t.Fatalf("%v after %v", err, time.Since(start))
	}
	for n, op := range failed.Errors {
		if errors.Is(op, ErrOutcomeUnknown) != (n == 0) || !errors.Is(op, os.ErrDeadlineExceeded) {
			t.Fatal(op)
		}
	}
}

// A batch can be read as data, in its order, including changes that cannot be sent.
func TestBatchAll(t *testing.T) {
	var b Batch
	s, d := ipv4Service(1), ipv4Destination(2)
	heavy := *d
	heavy.Weight = -1
	b.NewService(nil)
	b.NewService(s)
	b.NewDestination(s, &heavy)
	b.UpdateDestination(s, d)
	b.DelService(s)
	b.DelDestination(s, nil)
	type row struct {
		op, text string
		weight   int
		bad      bool
	}
	var got []row
	for n, c := range b.All() {
		if n != len(got) {
			t.Errorf("change %d has the number %d", len(got), n)
		}
		weight := 0
		if c.Destination != nil {
			weight = c.Destination.Weight
		}
		got = append(got, row{c.Op, c.String(), weight, c.Err != nil})
		if c.Destination != nil {
			c.Destination.Address[len(c.Destination.Address)-1] = 99 // a copy
		}
	}
	want := []row{
		{"NewService", "# not possible: NewService: ipvs: the service is nil", 0, true},
		{"NewService", "-A -t 10.0.0.1:80 -s rr", 0, false},
		{"NewDestination", "# not possible: NewDestination -t 10.0.0.1:80 -r 10.1.0.2:8080: ipvs: weight -1 is not in 0..2147483647: numerical result out of range", -1, true},
		{"UpdateDestination", "-e -t 10.0.0.1:80 -r 10.1.0.2:8080 -m -w 1", 1, false},
		{"DelService", "-D -t 10.0.0.1:80", 0, false},
		{"DelDestination", "# not possible: DelDestination -t 10.0.0.1:80: ipvs: the destination is nil", 0, true},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
	if strings.Contains(b.String(), "10.1.0.99") {
		t.Error("what All returns is no copy")
	}
	seen := 0
	for range b.All() {
		if seen++; seen == 3 {
			break
		}
	}
	if seen != 3 {
		t.Errorf("%d changes before the break", seen)
	}
	if text := (Change{Op: "NewService"}).String(); text != "# not possible: NewService: <nil>" {
		t.Errorf("without a service: %q", text)
	}
	for _, op := range []string{"NewDestination", "UpdateDestination", "DelDestination"} {
		text := Change{Op: op, Service: &someService}.String()
		if want := "# not possible: " + op + " -t 10.0.0.1:80: <nil>"; text != want {
			t.Errorf("without a destination: %q, want %q", text, want)
		}
	}
}

// If a batch cannot be sent, every change has the error.
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

// A sequence number is never used again: a late reply would be taken for that to
// another request.
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

// The kernel ignores requests without NLM_F_REQUEST. Repeated ones have it, too.
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

// As many messages as are allowed are sent at once, and at least one.
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

// The number of a change that cannot be sent counts from the start of the batch.
func TestAppendedNumbers(t *testing.T) {
	bad := &Destination{Address: net.IPv4(10, 1, 0, 9), Weight: -1}
	want := []TableEntry{{ipv4Service(1), []*Destination{ipv4Destination(1), ipv4Destination(2)}}, {ipv4Service(2), nil}}
	have := []TableEntry{{ipv4Service(1), []*Destination{{Address: net.IPv4(10, 1, 0, 9), Weight: 1}}}}
	want[0].Destinations = append(want[0].Destinations, bad)
	// New: two destinations and a service; then changes that cannot be sent.
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

// A batch fails if its socket options cannot be set, and nothing is sent.
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

// The same happens on a handle that is closed while the batch waits for another call.
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
