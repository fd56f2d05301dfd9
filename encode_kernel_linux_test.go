package ipvs

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// A netmask that is not an IPv6 prefix length is an error that names it, in every call
// and for firewall marks, and nothing is sent. A valid one is read back.
func TestKernelIPv6Netmask(t *testing.T) {
	i, _ := newKernelHandle(t)
	address := Service{Address: []byte("\x20\x01\x0d\xb8\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01"), Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: RoundRobin}
	mark := Service{FWMark: 7, AddressFamily: unix.AF_INET6, SchedName: RoundRobin}
	for _, s := range []Service{address, mark} {
		must(t, i.NewService(&s))
		for _, netmask := range []uint32{129, 0x00FFFFFF, 0xFFFFFFFF, 0xFFFFFF00} {
			s.Netmask = netmask
			var b Batch
			b.NewService(&s)
			b.UpdateService(&s)
			for name, err := range map[string]error{"NewService": i.NewService(&s), "UpdateService": i.UpdateService(&s), "Do": i.Do(&b)} {
				if !errors.Is(err, syscall.EINVAL) || !strings.Contains(err.Error(), fmt.Sprintf("netmask %d", netmask)) {
					t.Errorf("%s with netmask %#x: %v", name, netmask, err)
				}
			}
			if got := mustGet(i.GetService(&s))(t); got.Netmask != 128 {
				t.Fatalf("netmask %d after an update that was refused", got.Netmask)
			}
		}
		for want := uint32(1); want <= 128; want++ {
			s.Netmask = want
			must(t, i.UpdateService(&s))
			if got := mustGet(i.GetService(&s))(t); got.Netmask != want {
				t.Errorf("netmask %d is read back as %d", want, got.Netmask)
			}
		}
	}
	// No IPv4 value is refused or changed.
	s := *ipv4Service(1)
	must(t, i.NewService(&s))
	for _, want := range []uint32{0, 1, 24, 32, 0x00FFFFFF, 0xFFFFFF00, 0xFFFFFFFF, 0x12345678} {
		s.Netmask = want
		must(t, i.UpdateService(&s))
		if got := mustGet(i.GetService(&s))(t); got.Netmask != want {
			t.Errorf("netmask %#x is read back as %#x", want, got.Netmask)
		}
	}
}
