package ipvs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const (
	fakePortID = 4711
	fakeFamily = fakeFamilyID
)

// fakeKernel takes the place of a socket's system calls, and sends scripted replies
// that a real kernel cannot be made to send. The socket's descriptor is one end of a
// socket pair: it becomes readable for Go's poller when something is queued.
type fakeKernel struct {
	t       *testing.T
	wakeFD  int
	respond func(request []byte) []fakeReply // called for each message sent
	sendErr []error                          // of the next sends, in order

	mu       sync.Mutex
	queue    []fakeReply
	requests [][]byte
}

// fakeReply is what one recvmsg returns.
type fakeReply struct {
	data      []byte
	from      uint32 // the sender's netlink port id; the kernel's is 0
	truncated bool   // MSG_TRUNC
	err       error
	after     time.Duration // delays the reply
	endless   bool          // it comes again and again
}

// newFake returns a handle whose kernel is fake, with the family id known.
func newFake(t *testing.T, respond func(request []byte) []fakeReply) (*Handle, *fakeKernel) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	s := newSocket(fds[0], fakePortID)
	s.errorText = true // a fake has no socket options
	k := &fakeKernel{t: t, wakeFD: fds[1], respond: respond}
	s.sendmsg, s.recvmsg = k.sendmsg, k.recvmsg
	i := &Handle{socket: s, family: fakeFamily}
	i.timeout.Store(int64(50 * time.Millisecond))
	t.Cleanup(func() { k.close(i) })
	return i, k
}

// close closes both ends, before the test ends if it needs many.
func (k *fakeKernel) close(i *Handle) {
	k.mu.Lock()
	defer k.mu.Unlock()
	i.Close()
	if k.wakeFD >= 0 {
		unix.Close(k.wakeFD)
		k.wakeFD = -1
	}
}

func (k *fakeKernel) sendmsg(_ int, b []byte) error {
	k.mu.Lock()
	if len(k.sendErr) > 0 {
		err := k.sendErr[0]
		k.sendErr = k.sendErr[1:]
		if err != nil {
			k.mu.Unlock()
			return err
		}
	}
	k.mu.Unlock()
	for len(b) > 0 {
		var m message
		rest, err := parseMessage(b, &m)
		if err != nil {
			k.t.Errorf("the library sent what is not a message: %v", err)
			return nil
		}
		request := append([]byte(nil), b[:msgHdrLen+len(m.body)]...)
		b = rest
		k.mu.Lock()
		k.requests = append(k.requests, request)
		k.mu.Unlock()
		k.push(k.respond(request)...)
	}
	return nil
}

// push queues replies, each at its time.
func (k *fakeKernel) push(replies ...fakeReply) {
	for _, r := range replies {
		if r.after > 0 {
			time.AfterFunc(r.after, func() { r.after = 0; k.push(r) })
			continue
		}
		k.mu.Lock()
		k.queue = append(k.queue, r)
		if k.wakeFD >= 0 {
			unix.Write(k.wakeFD, []byte{0})
		}
		k.mu.Unlock()
	}
}

// end ends replies that are repeated.
func (k *fakeKernel) end() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for n := range k.queue {
		k.queue[n].endless = false
	}
}

func (k *fakeKernel) recvmsg(fd int, b []byte) (n int, from uint32, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.queue) == 0 {
		var wake [1]byte
		for {
			if _, err := unix.Read(fd, wake[:]); err != nil {
				return 0, 0, unix.EAGAIN
			}
		}
	}
	r := k.queue[0]
	if !r.endless {
		k.queue = k.queue[1:]
	}
	if r.err != nil {
		return 0, 0, r.err
	}
	copy(b, r.data)
	n = len(r.data)
	if r.truncated {
		n = len(b) + 1
	}
	return n, r.from, nil
}

// Handmade replies.

func seqOf(request []byte) uint32 { return native.Uint32(request[8:]) }

// cmdOf returns the command of a request, or 0 for a fence.
func cmdOf(request []byte) uint8 {
	if native.Uint16(request[4:]) < unix.NLMSG_MIN_TYPE {
		return cmdUnspec
	}
	return request[msgHdrLen]
}

// netlinkMessage makes a message of the kernel's to the fake's socket.
func netlinkMessage(typ, flags uint16, seq uint32, body []byte) []byte {
	b := native.AppendUint32(nil, uint32(msgHdrLen+len(body)))
	b = native.AppendUint16(b, typ)
	b = native.AppendUint16(b, flags)
	b = native.AppendUint32(b, seq)
	b = native.AppendUint32(b, fakePortID)
	return pad(append(b, body...), len(body))
}

// errorReply answers a request with an error number, 0 to acknowledge it.
func errorReply(request []byte, errno syscall.Errno) []byte {
	body := native.AppendUint32(nil, uint32(-int32(errno)))
	return netlinkMessage(unix.NLMSG_ERROR, 0, seqOf(request), append(body, request[:msgHdrLen]...))
}

// dataReply answers a request with a message of IPVS; flags NLM_F_MULTI makes it a part of a dump.
func dataReply(request []byte, flags uint16, cmd uint8, attrs []byte) []byte {
	return netlinkMessage(fakeFamily, flags, seqOf(request), append([]byte{cmd, genlVersion, 0, 0}, attrs...))
}

// doneReply ends a dump.
func doneReply(request []byte, errno syscall.Errno) []byte {
	return netlinkMessage(unix.NLMSG_DONE, unix.NLM_F_MULTI, seqOf(request), native.AppendUint32(nil, uint32(-int32(errno))))
}

// familyReply answers the request for the family id.
func familyReply(request []byte, family uint16) []byte {
	attrs := appendString(nil, unix.CTRL_ATTR_FAMILY_NAME, genlName)
	attrs = appendUint16(attrs, unix.CTRL_ATTR_FAMILY_ID, family)
	return netlinkMessage(unix.GENL_ID_CTRL, 0, seqOf(request), append([]byte{unix.CTRL_CMD_NEWFAMILY, 2, 0, 0}, attrs...))
}

func isFamilyRequest(request []byte) bool { return native.Uint16(request[4:]) == unix.GENL_ID_CTRL }

func one(b []byte) []fakeReply { return []fakeReply{{data: b}} }

// acknowledge is a kernel that accepts every request.
func acknowledge(request []byte) []fakeReply { return one(errorReply(request, 0)) }

// be16 and ne16, ne32 spell out expected bytes in network and native order.
func be16(v uint16) []byte { return binary.BigEndian.AppendUint16(nil, v) }

func ne16(v uint16) []byte { return binary.NativeEndian.AppendUint16(nil, v) }

func ne32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// attr spells out an attribute: length, type, value, padding.
func attr(typ uint16, value ...[]byte) []byte {
	v := bytes.Join(value, nil)
	b := bytes.Join([][]byte{ne16(uint16(4 + len(v))), ne16(typ), v}, nil)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

const nestedFlag = 0x8000

func second[T any](_ T, err error) error { return err }

// inVM reports whether this is the project's own virtual machine, where a test may
// unload modules; there, a missing kernel is a failure and not a reason to skip.
var inVM = os.Getenv("IPVS_TEST_VM") != ""

var homeNamespace, _ = os.Readlink("/proc/self/ns/net")

// The main thread stays with the main goroutine: a thread that a test left in
// another namespace ends with its goroutine, but the main thread cannot.
func init() { runtime.LockOSThread() }

// needKernel skips the test where it cannot run.
func needKernel(t *testing.T) {
	t.Helper()
	why := ""
	if os.Geteuid() != 0 {
		why = "needs root"
	} else if i, err := New(""); err != nil {
		why = "needs a kernel with IPVS: " + err.Error()
	} else {
		i.Close()
	}
	switch {
	case why == "":
	case inVM:
		t.Fatal(why)
	default:
		t.Skip("SKIP: " + why + " (make test runs this in a VM)")
	}
}

// openIn opens a handle in the namespace, closed at the end of the test.
func openIn(t *testing.T, ns netns.NsHandle) *Handle {
	t.Helper()
	i, err := NewAt(ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(i.Close)
	return i
}

// newKernelHandle opens a handle in a new namespace.
func newKernelHandle(t *testing.T) (*Handle, netns.NsHandle) {
	t.Helper()
	needKernel(t)
	ns := newNamespace(t)
	return openIn(t, ns), ns
}

// ipvsadm runs the independent reader in the namespace.
func ipvsadm(t *testing.T, ns netns.NsHandle, args ...string) string {
	t.Helper()
	var out []byte
	var err error
	within(t, ns, func() { out, err = exec.Command("ipvsadm", args...).CombinedOutput() })
	if errors.Is(err, exec.ErrNotFound) && !inVM {
		t.Skip("SKIP: needs ipvsadm to compare with")
	}
	if err != nil {
		t.Fatalf("ipvsadm %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func mustGet[T any](v T, err error) func(t *testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		must(t, err)
		return v
	}
}

// ipv4Service returns service number n of many.
func ipv4Service(n int) *Service {
	return &Service{Address: net.IPv4(10, 0, byte(n>>8), byte(n)), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin, Netmask: 0xFFFFFFFF}
}

func ipv4Destination(n int) *Destination {
	return &Destination{Address: net.IPv4(10, 1, byte(n>>8), byte(n)), Port: 8080, Weight: 1}
}

const helperEnv = "IPVS_TEST_HELPER"

var helpers = map[string]func() error{}

// addHelper registers the code of a process that a test starts as helper(name).
func addHelper(name string, f func() error) {
	if helpers[name] != nil {
		panic("two helpers are called " + name)
	}
	helpers[name] = f
}

func TestMain(m *testing.M) {
	if name := os.Getenv(helperEnv); name != "" {
		if err := helpers[name](); err != nil {
			fmt.Fprintln(os.Stderr, name+":", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// helper makes a command that runs a helper in its own process.
func helper(name string) *exec.Cmd {
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), helperEnv+"="+name)
	return c
}

// helperWith is like helper, with a network namespace as the process's descriptor 3.
func helperWith(t *testing.T, name string, ns netns.NsHandle) *exec.Cmd {
	t.Helper()
	file := os.NewFile(uintptr(must2(unix.Dup(int(ns)))), "namespace")
	t.Cleanup(func() { file.Close() })
	c := helper(name)
	c.ExtraFiles = []*os.File{file}
	return c
}

// homeAndOther opens handles for the own network namespace and for that of helperWith.
func homeAndOther() (home, other *Handle, err error) {
	if home, err = New(""); err == nil {
		other, err = NewAt(netns.NsHandle(3))
	}
	return home, other, err
}

func needVM(t *testing.T) {
	t.Helper()
	if !inVM {
		t.Skip("SKIP: loads and unloads kernel modules (make test runs this in a VM)")
	}
}

// kernelBefore reports whether the kernel is older than major.minor.
func kernelBefore(t *testing.T, major, minor int) bool {
	t.Helper()
	var u unix.Utsname
	must(t, unix.Uname(&u))
	parts := strings.SplitN(unix.ByteSliceToString(u.Release[:]), ".", 3)
	gotMajor, err := strconv.Atoi(parts[0])
	must(t, err)
	gotMinor, err := strconv.Atoi(parts[1])
	must(t, err)
	return gotMajor < major || gotMajor == major && gotMinor < minor
}

func kernelAtLeast7(t *testing.T) bool { return !kernelBefore(t, 7, 0) }

// ipv4Mask returns a netmask of four bytes in memory order.
func ipv4Mask(ones int) uint32 { return native.Uint32(net.CIDRMask(ones, 32)) }

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// descriptors returns the open descriptors and what they are.
func descriptors(t *testing.T) map[string]string {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	open := map[string]string{}
	for _, e := range entries {
		if target, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil && !strings.HasPrefix(target, "/proc/") {
			open[e.Name()] = target
		}
	}
	return open
}

// opened returns the descriptors that were not open before. It does not count: what
// earlier tests dropped may be closed meanwhile.
func opened(t *testing.T, before map[string]string) map[string]string {
	t.Helper()
	now := descriptors(t)
	maps.DeleteFunc(now, func(fd, what string) bool { return before[fd] == what })
	return now
}

// collected reports whether the garbage collector closes all descriptors that were not
// open before.
func collected(t *testing.T, before map[string]string) bool {
	t.Helper()
	return eventually(func() bool { runtime.GC(); return len(opened(t, before)) == 0 })
}

// strayThreads returns threads that are not in the process's own network namespace,
// but for those that are just ending.
func strayThreads(t *testing.T) (stray []string) {
	t.Helper()
	eventually(func() bool { stray = foreignThreads(t); return len(stray) == 0 })
	return stray
}

func foreignThreads(t *testing.T) (stray []string) {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*")
	must(t, err)
	for _, task := range tasks {
		if ns, err := os.Readlink(task + "/ns/net"); err == nil && ns != homeNamespace {
			stray = append(stray, task+": "+ns)
		}
	}
	return stray
}

var (
	someService     = Service{Address: net.IP{10, 0, 0, 1}, Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin}
	someDestination = Destination{Address: net.IP{10, 0, 0, 2}, Port: 8080, Weight: 1}
)

// netlinkSocket opens a netlink socket. It skips the test where there are none, as in
// emulators of other processors.
func netlinkSocket(t *testing.T) *socket {
	t.Helper()
	s, err := openSocket()
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		t.Skip("SKIP: needs generic netlink: ", err)
	}
	must(t, err)
	return s
}
