package ipvs

import (
	"errors"
	"fmt"
	"math"
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Each error number whose text misleads has its hint, and no other has one.
func TestHints(t *testing.T) {
	tunnel := func(kind uint8, port uint16) *Destination {
		return &Destination{AddressFamily: unix.AF_INET, TunnelType: kind, TunnelPort: port}
	}
	service := func(scheduler, engine string) *Service {
		return &Service{AddressFamily: unix.AF_INET, SchedName: scheduler, PEName: engine}
	}
	const unicast = "the address must be a unicast one in this network namespace, which needs an interface that is up"
	for _, c := range []struct {
		s    *Service
		d    *Destination
		err  error
		want string
	}{
		{nil, nil, syscall.ENOENT, ""},
		{nil, tunnel(0, 0), syscall.ENOENT, ""},
		{service("rr", ""), tunnel(0, 0), syscall.ENOENT, "no such destination"},
		{service("", ""), nil, syscall.ENOENT, "the service names no scheduler"},
		{service("", "sip"), nil, syscall.ENOENT, "the service names no scheduler"},
		{service("rr", "sip"), nil, syscall.ENOENT, `the kernel has no scheduler "rr" or no persistence engine "sip"`},
		{service("rr", ""), nil, syscall.ENOENT, `the kernel has no scheduler "rr": module ip_vs_rr`},
		{service("rr", ""), nil, syscall.ESRCH, "no such service"},
		{service("rr", ""), tunnel(0, 0), syscall.ESRCH, "no such service"},
		{service("", ""), nil, syscall.EEXIST, ""},
		{service("rr", "sip"), nil, syscall.EPERM, ""},
		{service("rr", ""), tunnel(TunnelGUE, 0), syscall.EEXIST, ""},
		{service("rr", ""), nil, syscall.EINVAL, ""},
		{service("rr", ""), &Destination{AddressFamily: unix.AF_INET6}, syscall.EINVAL,
			"only a tunnel reaches a destination of another address family, and none while a synchronization daemon runs"},
		{service("rr", ""), &Destination{AddressFamily: unix.AF_INET6}, syscall.EEXIST, ""},
		{service("rr", ""), tunnel(TunnelGUE, 0), syscall.EINVAL, "a GUE tunnel needs a port"},
		{service("rr", ""), tunnel(TunnelGUE, 6080), syscall.EINVAL, unicast},
		{service("rr", ""), tunnel(TunnelGRE, 0), syscall.EINVAL, unicast},
		{service("rr", ""), tunnel(TunnelIPIP, 0), syscall.EINVAL, unicast},
		{service("rr", ""), &Destination{AddressFamily: unix.AF_INET, UpperThreshold: math.MaxInt32}, syscall.EINVAL, unicast},
		{service("rr", ""), &Destination{AddressFamily: unix.AF_INET, UpperThreshold: math.MaxInt32 + 1}, syscall.EINVAL, "thresholds go up to 2^31-1"},
		{service("rr", ""), &Destination{AddressFamily: unix.AF_INET, LowerThreshold: math.MaxInt32 + 1}, syscall.EINVAL, "thresholds go up to 2^31-1"},
		{service("rr", ""), &Destination{AddressFamily: unix.AF_INET, LowerThreshold: math.MaxInt32 + 1}, syscall.ERANGE, "a lower threshold needs an upper one that is not below it"},
		{service("rr", ""), nil, syscall.ERANGE, ""},
		{&Service{AddressFamily: unix.AF_INET6}, &Destination{AddressFamily: unix.AF_INET6, Address: net.ParseIP("fe80::1")}, syscall.EINVAL,
			"the kernel looks for a link-local address on no interface in particular: only one of this machine itself is accepted"},
		{service("rr", ""), &Destination{AddressFamily: unix.AF_INET, Address: net.IPv4(169, 254, 0, 1)}, syscall.EINVAL, unicast},
	} {
		if got := (&OpError{Service: c.s, Destination: c.d, Err: c.err}).hint(); got != c.want {
			t.Errorf("%v of %+v, %+v: got %q, want %q", c.err, c.s, c.d, got, c.want)
		}
	}
}

// A batch's error names the first changes, and how many more failed.
func TestBatchErrorText(t *testing.T) {
	for failures, more := range map[int]string{1: "", 16: "", 17: "; and 1 more", 21: "; and 5 more"} {
		e := &BatchError{total: 30}
		want := fmt.Sprintf("ipvs: %d of 30 changes failed", failures)
		for n := range failures {
			e.Errors = append(e.Errors, &OpError{Index: n, Op: "DelService", Err: syscall.EPIPE})
			if n < 16 {
				want += fmt.Sprintf("; change %d, DelService: broken pipe", n)
			}
		}
		if want += more; e.Error() != want {
			t.Errorf("got  %s\nwant %s", e, want)
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

// Errors about a family name the valid families.
func TestFamilyErrors(t *testing.T) {
	err := errUnknownFamily(7)
	if want := "ipvs: address family 7 is neither AF_INET (2) nor AF_INET6 (10): address family not supported by protocol"; err.Error() != want || !errors.Is(err, syscall.EAFNOSUPPORT) {
		t.Errorf("got %q, want %q", err, want)
	}
	err = errFamilyMismatch(unix.AF_INET6, net.IP{10, 0, 0, 1}, "service")
	if want := "ipvs: the service's address 10.0.0.1 is not of its address family 10"; err.Error() != want {
		t.Errorf("got %q, want %q", err, want)
	}
}

// A reply without its service, destination or daemon is an error.
func TestReplyLacksAttribute(t *testing.T) {
	for cmd, call := range map[uint8]func(*Handle) (any, error){
		cmdNewService: func(i *Handle) (any, error) { s, err := i.GetServices(); return len(s), err },
		cmdNewDest:    func(i *Handle) (any, error) { d, err := i.GetDestinations(&someService); return len(d), err },
		cmdNewDaemon:  func(i *Handle) (any, error) { d, err := i.GetDaemons(); return len(d), err },
	} {
		i, _ := newFake(t, func(r []byte) []fakeReply {
			return one(append(dataReply(r, unix.NLM_F_MULTI, cmd, attr(99, ne32(1))), doneReply(r, 0)...))
		})
		want := map[uint8]string{cmdNewService: "service", cmdNewDest: "destination", cmdNewDaemon: "daemon"}[cmd]
		if n, err := call(i); n != 0 || fmt.Sprint(err) != "ipvs: malformed reply: no "+want {
			t.Errorf("got %v, %v", n, err)
		}
	}
}
