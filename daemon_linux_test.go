package ipvs

import (
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The kernel answers a request that ends with EINTR not at all. It stops a
// daemon so whose thread has not run yet.
func TestDelDaemonWithoutReply(t *testing.T) {
	var refuse syscall.Errno
	silent := true
	i, k := newFake(t, func(r []byte) []fakeReply {
		if cmdOf(r) != cmdDelDaemon {
			return acknowledge(r)
		}
		if silent {
			return nil
		}
		return one(errorReply(r, refuse))
	})
	if err := i.DelDaemon(DaemonMaster); err != nil {
		t.Errorf("no reply: %v", err)
	}
	if len(k.requests) != 2 || native.Uint16(k.requests[1][4:]) != unix.NLMSG_NOOP {
		t.Errorf("requests %x", k.requests)
	}
	silent = false
	for _, refuse = range []syscall.Errno{0, syscall.ESRCH} {
		var want error
		if refuse != 0 {
			want = refuse
		}
		if err := i.DelDaemon(DaemonMaster); err != want {
			t.Errorf("got %v, want %v", err, want)
		}
	}
}
