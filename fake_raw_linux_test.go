package ipvs

import (
	"bytes"
	"fmt"
	"math"
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Requests that the library does not make, to the Fake and to a kernel.

// The Fake answers requests that the library does not make as the kernel does.
func TestFakeRaw(t *testing.T) {
	i := NewFake().Handle()
	defer i.Close()
	checkRaw(t, i, math.MaxInt32)
}

// The kernel answers them as expected.
func TestKernelFakeRaw(t *testing.T) {
	i, _ := newKernelHandle(t)
	maxThreshold := uint32(math.MaxInt32)
	if kernelBefore(t, 6, 1) {
		maxThreshold = math.MaxUint32
	}
	checkRaw(t, i, maxThreshold)
}

// rawRequest is a request that the library does not make, and the kernel's result.
type rawRequest struct {
	name  string
	cmd   uint8
	attrs []byte
	want  syscall.Errno
}

// rawRequests are for a table with the service of rawService.
func rawRequests() (all []rawRequest) {
	add := func(name string, want syscall.Errno, cmd uint8, attrs ...[]byte) {
		all = append(all, rawRequest{name, cmd, bytes.Join(attrs, nil), want})
	}
	text := func(s string) []byte { return append([]byte(s), 0) }
	type attrs = map[uint16][]byte
	nest := func(typ, last uint16, a attrs) []byte {
		var b []byte
		for t := range last + 1 {
			if value, ok := a[t]; ok {
				b = append(b, attr(t, value)...)
			}
		}
		return attr(typ|nestedFlag, b)
	}
	service := func(port uint16, change func(a attrs)) []byte {
		a := attrs{
			svcAttrAddressFamily: ne16(unix.AF_INET), svcAttrProtocol: ne16(unix.IPPROTO_TCP),
			svcAttrAddress: {10, 9, 0, 1}, svcAttrPort: be16(port),
			svcAttrSchedName: text("rr"), svcAttrFlags: append(ne32(0), ne32(math.MaxUint32)...),
			svcAttrTimeout: ne32(0), svcAttrNetmask: ne32(math.MaxUint32),
		}
		change(a)
		return nest(cmdAttrService, svcAttrPEName, a)
	}
	same := func(attrs) {}
	for n, missing := range []uint16{svcAttrAddressFamily, svcAttrProtocol, svcAttrAddress, svcAttrPort, svcAttrSchedName, svcAttrFlags, svcAttrTimeout, svcAttrNetmask} {
		names := []string{"family", "protocol", "address", "port", "scheduler", "flags", "timeout", "netmask"}
		add("a service without "+names[n], syscall.EINVAL, cmdNewService, service(100, func(a attrs) { delete(a, missing) }))
		want := syscall.EINVAL
		if missing == svcAttrAddress || missing == svcAttrFlags { // of any length up to their own
			want = 0
		}
		add("a service with an empty "+names[n], want, cmdNewService, service(101, func(a attrs) { a[missing] = nil }))
	}
	add("no service at all", syscall.EINVAL, cmdNewService)
	add("a command that there is not", syscall.EOPNOTSUPP, 99)
	add("a command of replies", syscall.EOPNOTSUPP, cmdSetInfo)
	for size, want := range map[int]syscall.Errno{14: syscall.ENOENT, 15: syscall.ENOENT, 16: syscall.EINVAL} {
		add("a scheduler's name of "+string(rune('0'+size/10))+string(rune('0'+size%10)), want, cmdNewService,
			service(102, func(a attrs) { a[svcAttrSchedName] = text(string(bytes.Repeat([]byte("x"), size))) }))
	}
	mark := func(a attrs) {
		delete(a, svcAttrProtocol)
		delete(a, svcAttrAddress)
		delete(a, svcAttrPort)
		a[svcAttrFWMark] = ne32(7)
	}
	add("a firewall mark", 0, cmdNewService, service(0, mark))
	for _, netmask := range []struct {
		value uint32
		want  syscall.Errno
	}{{0, syscall.EINVAL}, {129, syscall.EINVAL}, {1, 0}, {128, syscall.EEXIST}} {
		add("an IPv6 netmask", netmask.want, cmdNewService, service(103, func(a attrs) {
			a[svcAttrAddressFamily], a[svcAttrAddress], a[svcAttrNetmask] = ne16(unix.AF_INET6), net.ParseIP("2001:db8::9"), ne32(netmask.value)
		}))
	}

	destination := func(port uint16, change func(a attrs)) []byte {
		a := attrs{
			destAttrAddress: {10, 9, 1, 1}, destAttrPort: be16(port), destAttrForwardingMethod: ne32(ConnectionFlagMasq), destAttrWeight: ne32(1),
			destAttrUpperThreshold: ne32(0), destAttrLowerThreshold: ne32(0), destAttrAddressFamily: ne16(unix.AF_INET),
		}
		change(a)
		return nest(cmdAttrDest, destAttrTunnelFlags, a)
	}
	there := service(80, same)
	for n, missing := range []uint16{destAttrAddress, destAttrPort, destAttrForwardingMethod, destAttrWeight, destAttrUpperThreshold, destAttrLowerThreshold} {
		names := []string{"address", "port", "method", "weight", "upper threshold", "lower threshold"}
		add("a destination without "+names[n], syscall.EINVAL, cmdNewDest, there, destination(100, func(a attrs) { delete(a, missing) }))
	}
	add("a destination without a family", 0, cmdNewDest, there, destination(101, func(a attrs) { delete(a, destAttrAddressFamily) }))
	add("a destination of an IPv4 address and more", syscall.EEXIST, cmdNewDest, there, destination(101, func(a attrs) {
		a[destAttrAddress] = append([]byte{10, 9, 1, 1}, bytes.Repeat([]byte{9}, 12)...)
	}))
	for _, threshold := range []struct {
		upper, lower uint32
		want         syscall.Errno
	}{{math.MaxInt32, 0, 0}, {math.MaxInt32 + 1, 0, syscall.EINVAL}, {5, 5, syscall.EEXIST}, {5, 6, syscall.ERANGE}} {
		add(fmt.Sprintf("thresholds %d and %d", threshold.upper, threshold.lower), threshold.want, cmdNewDest, there, destination(102, func(a attrs) {
			a[destAttrUpperThreshold], a[destAttrLowerThreshold] = ne32(threshold.upper), ne32(threshold.lower)
		}))
	}
	add("a short count of persistent connections", syscall.EINVAL, cmdNewDest, there, destination(103, func(a attrs) { a[destAttrPersistentConnections] = ne16(1) }))
	add("counts, which have no effect", 0, cmdNewDest, there, destination(105, func(a attrs) {
		a[destAttrActiveConnections], a[destAttrInactiveConnections], a[destAttrPersistentConnections] = ne32(1), ne32(1), ne32(1)
	}))
	add("a GUE tunnel without a port", syscall.EINVAL, cmdNewDest, there, destination(104, func(a attrs) {
		a[destAttrForwardingMethod], a[destAttrTunnelType], a[destAttrTunnelPort], a[destAttrTunnelFlags] = ne32(ConnectionFlagTunnel), []byte{TunnelGUE}, be16(0), ne16(0)
	}))

	config := func(seconds uint32) []byte { return attr(cmdAttrTimeoutTCP, ne32(seconds)) }
	add("the longest timeout", 0, cmdSetConfig, config(math.MaxInt32/250))
	add("a longer timeout", syscall.EINVAL, cmdSetConfig, config(math.MaxInt32/250+1))

	daemon := func(change func(a attrs)) []byte {
		a := attrs{daemonAttrState: ne32(uint32(DaemonMaster)), daemonAttrInterface: text("lo"), daemonAttrSyncID: ne32(1)}
		change(a)
		return nest(cmdAttrDaemon, daemonAttrTTL, a)
	}
	for n, missing := range []uint16{daemonAttrState, daemonAttrInterface, daemonAttrSyncID} {
		add("a daemon without "+[]string{"state", "interface", "id"}[n], syscall.EINVAL, cmdNewDaemon, daemon(func(a attrs) { delete(a, missing) }))
	}
	add("a daemon of no interface", syscall.ENODEV, cmdNewDaemon, daemon(func(a attrs) { a[daemonAttrInterface] = text("") }))
	for group, want := range map[[4]byte]syscall.Errno{{10, 0, 0, 1}: syscall.EINVAL, {240, 0, 0, 1}: syscall.EINVAL} {
		add("a daemon of no multicast group", want, cmdNewDaemon, daemon(func(a attrs) { a[daemonAttrGroup] = group[:] }))
	}
	add("a daemon of no IPv6 multicast group", syscall.EINVAL, cmdNewDaemon, daemon(func(a attrs) { a[daemonAttrGroup6] = net.ParseIP("fe80::1") }))
	add("a short IPv6 multicast group", syscall.EINVAL, cmdNewDaemon, daemon(func(a attrs) { a[daemonAttrGroup6] = net.ParseIP("ff02::1")[:15] }))
	return all
}

// checkRaw sends the requests, and compares the results.
func checkRaw(t *testing.T, i *Handle, maxThreshold uint32) {
	t.Helper()
	must(t, i.NewService(&Service{Address: net.IPv4(10, 9, 0, 1), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin}))
	for _, r := range rawRequests() {
		err := i.call(r.cmd, unix.NLM_F_ACK, func(b []byte) ([]byte, error) { return append(b, r.attrs...), nil }, nil)
		var want error
		if r.want != 0 {
			want = r.want
		}
		if r.name == "thresholds 2147483648 and 0" && maxThreshold == math.MaxUint32 {
			want = syscall.EEXIST // this kernel has nothing against it
		}
		if err != want {
			t.Errorf("%s: %v, want %v", r.name, err, want)
		}
	}
}

// An attribute without a value at the end of the message is present.
func TestFakeLastAttribute(t *testing.T) {
	if _, errno := fakeServicePolicy.parse(attr(svcAttrPEName)); errno != syscall.EINVAL {
		t.Errorf("a text without its NUL: %v", errno)
	}
	if a, errno := fakeServicePolicy.parse(attr(svcAttrFlags)); errno != 0 || !a.has(svcAttrFlags) {
		t.Errorf("bytes, of which there may be none: %v", errno)
	}
}
