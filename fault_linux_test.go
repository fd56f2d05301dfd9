package ipvs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Each fault that a netlink socket can have, in each call. A combination is right if
// the call ends in time with the right result, or with an error that names the fault
// and no result, and the next call on the handle is right.

// rightReplies is a kernel without faults, with a small table.
func rightReplies(r []byte) []fakeReply {
	if isFamilyRequest(r) {
		return one(familyReply(r, fakeFamily))
	}
	dump := native.Uint16(r[6:])&unix.NLM_F_DUMP == unix.NLM_F_DUMP
	parts := func(cmd uint8, items ...[]byte) (replies []fakeReply) {
		for _, attrs := range items {
			replies = append(replies, fakeReply{data: dataReply(r, unix.NLM_F_MULTI, cmd, attrs)})
		}
		return append(replies, fakeReply{data: doneReply(r, 0)})
	}
	service := func(n int) []byte { return fill(fillService(nil, ipv4Service(n), true)) }
	switch cmd := cmdOf(r); {
	case cmd == cmdGetService && dump:
		return parts(cmdNewService, service(1), service(2))
	case cmd == cmdGetService:
		return one(dataReply(r, 0, cmdNewService, service(1)))
	case cmd == cmdGetDest:
		return parts(cmdNewDest, fill(fillDestination(nil, ipv4Destination(1), true)), fill(fillDestination(nil, ipv4Destination(2), true)))
	case cmd == cmdGetDaemon:
		return parts(cmdNewDaemon, fill(fillDaemon(nil, &Daemon{State: DaemonMaster, MulticastInterface: "eth0"})))
	case cmd == cmdGetConfig:
		return one(dataReply(r, 0, cmdSetConfig, fill(fillConfig(nil, &Config{900 * time.Second, 120 * time.Second, 300 * time.Second}))))
	case cmd == cmdGetInfo:
		return one(dataReply(r, 0, cmdSetInfo, appendUint32(appendUint32(nil, infoAttrVersion, 0x010201), infoAttrConnectionTableSize, 4096)))
	case native.Uint16(r[6:])&unix.NLM_F_ACK != 0:
		return acknowledge(r)
	}
	return nil
}

func fill(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

func testBatch() *Batch {
	b := new(Batch)
	b.NewService(ipv4Service(7))
	b.NewDestination(ipv4Service(7), ipv4Destination(1))
	b.DelService(ipv4Service(7))
	return b
}

// calls are all calls of a handle, with their results from rightReplies.
var calls = []struct {
	name string
	dump bool // part of the answer comes as a dump
	get  bool // the answer is data, not an acknowledgement
	call func(i *Handle) (any, error)
}{
	{"NewService", false, false, func(i *Handle) (any, error) { return nil, i.NewService(&someService) }},
	{"UpdateService", false, false, func(i *Handle) (any, error) { return nil, i.UpdateService(&someService) }},
	{"DelService", false, false, func(i *Handle) (any, error) { return nil, i.DelService(&someService) }},
	{"NewDestination", false, false, func(i *Handle) (any, error) { return nil, i.NewDestination(&someService, &someDestination) }},
	{"UpdateDestination", false, false, func(i *Handle) (any, error) { return nil, i.UpdateDestination(&someService, &someDestination) }},
	{"DelDestination", false, false, func(i *Handle) (any, error) { return nil, i.DelDestination(&someService, &someDestination) }},
	{"Flush", false, false, func(i *Handle) (any, error) { return nil, i.Flush() }},
	{"Zero", false, false, func(i *Handle) (any, error) { return nil, i.Zero() }},
	{"ZeroService", false, false, func(i *Handle) (any, error) { return nil, i.ZeroService(&someService) }},
	{"SetConfig", false, false, func(i *Handle) (any, error) { return nil, i.SetConfig(&Config{TimeoutTCP: time.Second}) }},
	{"NewDaemon", false, false, func(i *Handle) (any, error) {
		return nil, i.NewDaemon(&Daemon{State: DaemonBackup, MulticastInterface: "eth0"})
	}},
	{"DelDaemon", false, false, func(i *Handle) (any, error) { return nil, i.DelDaemon(DaemonBackup) }},
	{"Do", false, false, func(i *Handle) (any, error) { return nil, i.Do(testBatch()) }},
	{"GetService", false, true, func(i *Handle) (any, error) { return result(i.GetService(&someService)) }},
	{"GetServices", true, true, func(i *Handle) (any, error) { return result(i.GetServices()) }},
	{"GetDestinations", true, true, func(i *Handle) (any, error) { return result(i.GetDestinations(&someService)) }},
	{"GetConfig", false, true, func(i *Handle) (any, error) { return result(i.GetConfig()) }},
	{"GetInfo", false, true, func(i *Handle) (any, error) { return result(i.GetInfo()) }},
	{"GetDaemons", true, true, func(i *Handle) (any, error) { return result(i.GetDaemons()) }},
	{"GetTable", true, true, func(i *Handle) (any, error) { return result(i.GetTable()) }},
	{"Reconcile", true, true, func(i *Handle) (any, error) {
		c, err := (&Reconciler{Handle: i}).Reconcile(nil)
		if c == (Changes{}) {
			return nil, err
		}
		return c, err
	}},
}

// result turns a typed nil into a plain one.
func result[T any](v T, err error) (any, error) {
	if reflect.ValueOf(v).IsNil() {
		return nil, err
	}
	return v, err
}

// fault changes the replies to one request.
type fault struct {
	name    string
	sendErr error
	// apply returns the replies with the fault, or nil if these cannot have it.
	apply func(r []byte, right []fakeReply) []fakeReply
	only  func(dump, get bool) bool // the calls in which it makes sense; nil: all
	// Errors that the call may end with; if nil, it must succeed.
	want []error
}

var errMalformed = errors.New("malformed reply") // stands for any error with this text

func faults() []fault {
	deadline := []error{os.ErrDeadlineExceeded}
	malformed := []error{errMalformed}
	all := []fault{
		{name: "reply lost", want: deadline,
			apply: func(_ []byte, right []fakeReply) []fakeReply { return []fakeReply{} }},
		{name: "reply late, inside the next call", want: deadline,
			apply: func(_ []byte, right []fakeReply) []fakeReply {
				for n := range right {
					right[n].after = faultTimeout * 50
				}
				return right
			}},
		{name: "older sequence number before the reply",
			apply: func(_ []byte, right []fakeReply) []fakeReply {
				return append(each(right, func(m []byte) { native.PutUint32(m[8:], native.Uint32(m[8:])-7) }), right...)
			}},
		{name: "newer sequence number only", want: deadline,
			apply: func(_ []byte, right []fakeReply) []fakeReply {
				return each(right, func(m []byte) { native.PutUint32(m[8:], native.Uint32(m[8:])+7) })
			}},
		{name: "wrong port id", want: deadline,
			apply: func(_ []byte, right []fakeReply) []fakeReply {
				return each(right, func(m []byte) { native.PutUint32(m[12:], fakePortID+1) })
			}},
		{name: "sender is not the kernel", want: deadline,
			apply: func(_ []byte, right []fakeReply) []fakeReply {
				for n := range right {
					right[n].from = 1234
				}
				return right
			}},
		{name: "another process lies before the reply",
			apply: func(r []byte, right []fakeReply) []fakeReply {
				return append([]fakeReply{{data: errorReply(r, syscall.EPERM), from: 1234}}, right...)
			}},
		{name: "dump ends with an error", want: []error{syscall.ENOMEM}, only: func(dump, _ bool) bool { return dump },
			apply: func(r []byte, right []fakeReply) []fakeReply {
				return append(right[:len(right)-1], fakeReply{data: doneReply(r, syscall.ENOMEM)})
			}},
		{name: "dump interrupted, always", want: []error{syscall.EINTR}, only: func(dump, _ bool) bool { return dump },
			apply: func(_ []byte, right []fakeReply) []fakeReply {
				return each(right, func(m []byte) { m[6+lowByte] |= unix.NLM_F_DUMP_INTR })
			}},
		{name: "dump never ends", want: deadline, only: func(dump, _ bool) bool { return dump },
			apply: func(_ []byte, right []fakeReply) []fakeReply {
				right[0].endless = true
				return right
			}},
		{name: "dump repeats", only: func(dump, _ bool) bool { return dump },
			apply: func(_ []byte, right []fakeReply) []fakeReply {
				return append(append([]fakeReply(nil), right[:len(right)-1]...), right...)
			}},
		{name: "truncated, always", want: []error{errTruncated},
			apply: func(_ []byte, right []fakeReply) []fakeReply {
				for n := range right {
					right[n].truncated = true
				}
				return right
			}},
		{name: "acknowledged before the answer", only: func(_, get bool) bool { return get },
			apply: func(r []byte, right []fakeReply) []fakeReply {
				return append([]fakeReply{{data: errorReply(r, 0)}}, right...)
			}},
		{name: "acknowledged twice",
			apply: func(r []byte, right []fakeReply) []fakeReply {
				return append(right, fakeReply{data: errorReply(r, 0)})
			}},
		{name: "empty datagrams before the reply",
			apply: func(_ []byte, right []fakeReply) []fakeReply {
				return append([]fakeReply{{}, {}}, right...)
			}},
		{name: "NLMSG_NOOP before the reply",
			apply: func(r []byte, right []fakeReply) []fakeReply {
				return append([]fakeReply{{data: netlinkMessage(unix.NLMSG_NOOP, 0, seqOf(r), nil)}}, right...)
			}},
		{name: "NLMSG_OVERRUN", want: []error{syscall.ENOBUFS},
			apply: func(r []byte, right []fakeReply) []fakeReply {
				return one(netlinkMessage(unix.NLMSG_OVERRUN, 0, seqOf(r), nil))
			}},
		{name: "positive error number", want: malformed,
			apply: func(r []byte, _ []fakeReply) []fakeReply {
				return one(netlinkMessage(unix.NLMSG_ERROR, 0, seqOf(r), native.AppendUint32(nil, 5)))
			}},
	}
	// Errors of the kernel are returned unwrapped by every call.
	for _, errno := range []syscall.Errno{syscall.EPERM, syscall.EINVAL, syscall.EBUSY, syscall.ENOMEM} {
		all = append(all, fault{name: "refused: " + errno.Error(), want: []error{errno},
			apply: func(r []byte, _ []fakeReply) []fakeReply { return one(errorReply(r, errno)) }})
	}
	for n := range 4 {
		all = append(all, fault{name: fmt.Sprintf("error reply cut to %d bytes", n), want: malformed,
			apply: func(r []byte, _ []fakeReply) []fakeReply {
				return one(netlinkMessage(unix.NLMSG_ERROR, 0, seqOf(r), make([]byte, n))[:msgHdrLen+n])
			}})
	}
	for _, errno := range []syscall.Errno{unix.ENOBUFS, unix.EINTR, unix.EAGAIN, unix.ENOMEM, unix.EBADF} {
		var want []error
		if errno != unix.EINTR && errno != unix.EAGAIN {
			want = []error{errno}
		}
		all = append(all,
			fault{name: "send: " + errno.Error(), sendErr: errno, want: want,
				apply: func(_ []byte, right []fakeReply) []fakeReply { return right }},
			fault{name: "receive: " + errno.Error(), want: want,
				apply: func(_ []byte, right []fakeReply) []fakeReply {
					return append([]fakeReply{{err: errno}}, right...)
				}})
	}
	// A message that claims more bytes than it has, at every length.
	for n := 1; n < 400; n++ {
		all = append(all, fault{name: fmt.Sprintf("cut to %d bytes", n), want: malformed,
			apply: func(_ []byte, right []fakeReply) []fakeReply {
				if n >= len(right[0].data) {
					return nil
				}
				right[0].data = right[0].data[:n]
				return right[:1]
			}})
	}
	return all
}

// lowByte is the offset of the low byte of a 16-bit number.
var lowByte = func() int {
	if native.Uint16([]byte{1, 0}) == 1 {
		return 0
	}
	return 1
}()

// each changes a copy of every message of the replies.
func each(replies []fakeReply, change func(m []byte)) (changed []fakeReply) {
	for _, r := range replies {
		r.data = bytes.Clone(r.data)
		for b := r.data; len(b) >= msgHdrLen; b = b[align(int(native.Uint32(b))):] {
			change(b)
		}
		changed = append(changed, r)
	}
	return changed
}

const faultTimeout = 4 * time.Millisecond

func TestFaultMatrix(t *testing.T) {
	cells := 0
	for _, c := range calls {
		i, _ := newFake(t, rightReplies)
		right, err := c.call(i)
		if err != nil || (right != nil) != (c.get) {
			t.Fatalf("%s without a fault: %v, %v", c.name, right, err)
		}
		for _, f := range faults() {
			if (f.only == nil || f.only(c.dump, c.get)) && cell(t, c.name+"/"+f.name, f, c.call, right) {
				cells++
			}
		}
	}
	t.Logf("%d cells", cells)
	if cells < 1500 {
		t.Errorf("%d cells are too few", cells)
	}
}

// cell checks one fault in one call; it returns false if the fault is not possible there.
func cell(t *testing.T, name string, f fault, call func(i *Handle) (any, error), right any) bool {
	faulty, applied := true, false
	i, k := newFake(t, nil)
	defer k.close(i)
	i.timeout.Store(int64(5 * time.Second)) // where no time-out is wanted, a slow machine must not make one
	if slices.Contains(f.want, os.ErrDeadlineExceeded) {
		i.timeout.Store(int64(faultTimeout))
	}
	k.respond = func(r []byte) []fakeReply {
		replies := rightReplies(r)
		if !faulty || len(replies) == 0 { // of a batch only the last change has a reply
			return replies
		}
		changed := f.apply(r, rightReplies(r))
		if changed == nil {
			return replies
		}
		applied = true
		return changed
	}
	if f.sendErr != nil {
		k.sendErr = []error{f.sendErr}
		applied = true
	}
	defer func() {
		if p := recover(); p != nil {
			t.Errorf("%s: panic: %v", name, p)
		}
	}()
	start := time.Now()
	got, err := call(i)
	if d := time.Since(start); d > 2*time.Second+maxReplyTimeouts*dumpAttempts*faultTimeout {
		t.Errorf("%s: ended after %v", name, d)
	}
	if !applied {
		return false
	}
	if f.want == nil {
		if err != nil || !reflect.DeepEqual(got, right) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	} else if got != nil || !isOneOf(err, f.want) {
		t.Errorf("%s: result %v, error %v", name, got, err)
	}

	faulty = false
	k.end()
	i.timeout.Store(int64(5 * time.Second))
	if got, err := call(i); err != nil || !reflect.DeepEqual(got, right) {
		t.Errorf("%s: the next call: %v, %v", name, got, err)
	}
	return true
}

func isOneOf(err error, want []error) bool {
	for _, w := range want {
		if errors.Is(err, w) || w == errMalformed && err != nil && strings.Contains(err.Error(), w.Error()) {
			return true
		}
	}
	return false
}
