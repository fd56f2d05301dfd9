//go:build linux

package ipvs

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// ipv4Service returns service number n of many.
func ipv4Service(n int) *Service {
	return &Service{Address: net.IPv4(10, 0, byte(n>>8), byte(n)), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin, Netmask: 0xFFFFFFFF}
}

func ipv4Destination(n int) *Destination {
	return &Destination{Address: net.IPv4(10, 1, byte(n>>8), byte(n)), Port: 8080, Weight: 1}
}

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

// refuseSome is a kernel that refuses the requests that bad names, and
// acknowledges only where it is asked to.
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

// What cannot be sent is reported with the rest, which is sent.
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

// The reply that confirms is lost: nothing of what was sent with it counts as
// done, and what comes after is not sent.
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
				unknown := errors.Is(op, ErrUnknown)
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

func TestOpErrorHintsAndKernelText(t *testing.T) {
	i, k := newFake(t, nil)
	k.respond = func(r []byte) []fakeReply {
		body := native.AppendUint32(nil, ^uint32(syscall.ENOENT)+1)
		body = append(body, r[:msgHdrLen]...)
		body = appendString(body, unix.NLMSGERR_ATTR_MSG, "said the kernel")
		if isFamilyRequest(r) {
			return one(familyReply(r, fakeFamily))
		}
		return one(netlinkMessage(unix.NLMSG_ERROR, unix.NLM_F_ACK_TLVS|unix.NLM_F_CAPPED, seqOf(r), body))
	}
	var b Batch
	b.NewService(&Service{Address: net.IPv4(10, 0, 0, 1), Protocol: 6, Port: 80, SchedName: "nosuch"})
	b.DelDestination(ipv4Service(1), ipv4Destination(1))
	err := i.Do(&b)
	var failed *BatchError
	if !errors.As(err, &failed) || len(failed.Errors) != 2 {
		t.Fatal(err)
	}
	for n, want := range []string{
		`change 0, NewService -t 10.0.0.1:80: no such file or directory: said the kernel (the kernel has no scheduler "nosuch": module ip_vs_nosuch)`,
		`change 1, DelDestination -t 10.0.0.1:80 -r 10.1.0.1:8080: no such file or directory: said the kernel (no such destination)`,
	} {
		if got := failed.Errors[n].Error(); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

// A small receive queue makes small sends, so that even if all fail the replies fit.
func TestKernelDoAllFail(t *testing.T) {
	i, ns := newKernelHandle(t)
	for _, queue := range []int{0, 20000, 1} {
		if queue > 0 {
			must(t, unix.SetsockoptInt(i.socket.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, queue))
		}
		var b Batch
		for n := range 1000 {
			b.DelService(ipv4Service(n))
		}
		err := i.Do(&b)
		var failed *BatchError
		if !errors.As(err, &failed) || len(failed.Errors) != 1000 {
			t.Fatalf("queue %d: %v", queue, err)
		}
		for n, op := range failed.Errors {
			if op.Index != n || op.Err != syscall.ESRCH {
				t.Fatalf("queue %d: %v", queue, op)
			}
		}
	}
	if out := ipvsadm(t, ns, "-Sn"); out != "" {
		t.Errorf("ipvsadm shows %s", out)
	}
}

func TestKernelBatch(t *testing.T) {
	i, ns := newKernelHandle(t)
	const services, dests = 300, 3
	var b Batch
	var want []string
	for n := range services {
		s := ipv4Service(n)
		b.NewService(s)
		want = append(want, "-A "+s.String())
		for m := range dests {
			d := ipv4Destination(m)
			b.NewDestination(s, d)
			want = append(want, fmt.Sprintf("-a %s %s", serviceName(s), d))
		}
		if n == 150 { // in the middle, what fails
			b.NewService(s)
			b.DelDestination(s, ipv4Destination(99))
		}
	}
	err := i.Do(&b)
	var failed *BatchError
	if !errors.As(err, &failed) || len(failed.Errors) != 2 || failed.Errors[0].Err != syscall.EEXIST || failed.Errors[1].Err != syscall.ENOENT {
		t.Fatalf("got %v", err)
	}
	got := strings.Split(strings.TrimSpace(ipvsadm(t, ns, "-Sn")), "\n")
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("ipvsadm shows %d lines, want %d", len(got), len(want))
	}
	// The list is long enough for large buffers now; both ways give the same.
	for range 2 {
		var table []TableEntry
		eventually(func() bool { // kernels from 7 on list a growing table incompletely
			table = mustGet(i.GetTable())(t)
			return len(table) == services
		})
		if len(table) != services {
			t.Errorf("%d services", len(table))
		}
		for _, e := range table {
			if len(e.Destinations) != dests {
				t.Errorf("%v has %d destinations", e.Service, len(e.Destinations))
			}
		}
	}
	if i.bulk.Load() == nil {
		t.Error("a long list is still read with small buffers")
	}
	b.Reset()
	for n := range services {
		b.DelService(ipv4Service(n))
	}
	must(t, i.Do(&b))
	if services := mustGet(i.GetServices())(t); len(services) != 0 {
		t.Errorf("%d services left", len(services))
	}
}

// What is wrong with bad input can be printed, and is what was given then.
func TestBatchPrintsBadInput(t *testing.T) {
	bad := &Service{AddressFamily: unix.AF_INET6, Address: net.IP{10, 0, 0, 1}, Protocol: 6, Port: 80}
	if got, want := bad.String(), "-t 10.0.0.1:80 -s "; got != want {
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

// The family id is an old one, and then the kernel is silent: what may have been
// done is unknown, the rest is not sent, and it does not take a time-out each.
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
		if errors.Is(op, ErrUnknown) != (n == 0) || !errors.Is(op, os.ErrDeadlineExceeded) {
			t.Fatal(op)
		}
	}
}

// A small send buffer makes small sends.
func TestKernelDoSmallSendBuffer(t *testing.T) {
	i, _ := newKernelHandle(t)
	must(t, unix.SetsockoptInt(i.socket.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1))
	var b Batch
	for n := range 300 {
		b.NewService(ipv4Service(n))
	}
	must(t, i.Do(&b))
	var got int
	if !eventually(func() bool { got = len(mustGet(i.GetServices())(t)); return got == 300 }) {
		t.Errorf("%d services", got)
	}
}
