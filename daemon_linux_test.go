package ipvs

import (
	"bytes"
	"net"
	"reflect"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Fields of a daemon that are zero are not sent; all others are.
func TestFillDaemonBytes(t *testing.T) {
	state, ifn, id := attr(daemonAttrState, ne32(1)), attr(daemonAttrInterface, []byte("eth0\x00")), attr(daemonAttrSyncID, ne32(255))
	for _, c := range []struct {
		d    Daemon
		want [][]byte
	}{
		{Daemon{}, nil},
		{Daemon{SyncMaxLen: 1400}, [][]byte{attr(daemonAttrSyncMaxLen, ne16(1400))}},
		{Daemon{MulticastGroup: net.IPv4(224, 0, 0, 81)}, [][]byte{attr(daemonAttrGroup, []byte{224, 0, 0, 81})}},
		{Daemon{MulticastGroup: net.ParseIP("ff02::51")}, [][]byte{attr(daemonAttrGroup6, net.ParseIP("ff02::51"))}},
		{Daemon{MulticastPort: 8848}, [][]byte{attr(daemonAttrPort, ne16(8848))}},
		{Daemon{MulticastTTL: 3}, [][]byte{attr(daemonAttrTTL, []byte{3})}},
	} {
		c.d.State, c.d.MulticastInterface, c.d.SyncID = DaemonMaster, "eth0", 255
		got, err := fillDaemon(nil, &c.d)
		want := attr(cmdAttrDaemon|nestedFlag, append([][]byte{state, ifn, id}, c.want...)...)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%+v: %v, got\n%x, want\n%x", c.d, err, got, want)
		}
	}
	for want, d := range map[string]*Daemon{
		"ipvs: the daemon is nil":                           nil,
		"ipvs: daemon state 3 is neither master nor backup": {State: 3, MulticastInterface: "eth0"},
		"ipvs: daemon state 0 is neither master nor backup": {MulticastInterface: "eth0"},
		"ipvs: the daemon has no multicast interface":       {State: DaemonBackup},
		"ipvs: sync id 256 is above 255":                    {State: DaemonBackup, MulticastInterface: "eth0", SyncID: 256},
	} {
		if _, err := fillDaemon(nil, d); err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

// Each attribute of a daemon is read into its own field.
func TestDaemonFields(t *testing.T) {
	daemon := func(state uint32, more ...[]byte) []byte {
		return attr(cmdAttrDaemon, append([][]byte{attr(daemonAttrState, ne32(state))}, more...)...)
	}
	group := append([]byte{224, 0, 0, 81}, make([]byte, 12)...)
	master := daemon(1, attr(daemonAttrInterface, []byte("eth0\x00")), attr(daemonAttrSyncID, ne32(7)), attr(daemonAttrSyncMaxLen, ne16(1400)),
		attr(daemonAttrGroup, group[:4]), attr(daemonAttrPort, ne16(8848)), attr(daemonAttrTTL, []byte{3}))
	backup := daemon(2, attr(daemonAttrInterface, []byte("eth1\x00")), attr(daemonAttrGroup6, net.ParseIP("ff02::51")))
	broken := daemon(2, attr(daemonAttrSyncID, ne16(1)))
	want := []*Daemon{
		{State: DaemonMaster, MulticastInterface: "eth0", SyncID: 7, SyncMaxLen: 1400, MulticastGroup: net.IP{224, 0, 0, 81}, MulticastPort: 8848, MulticastTTL: 3},
		{State: DaemonBackup, MulticastInterface: "eth1", MulticastGroup: net.ParseIP("ff02::51")},
	}
	var parts [][]byte
	i, _ := newFake(t, func(r []byte) []fakeReply {
		var answer []byte
		for _, part := range parts {
			answer = append(answer, dataReply(r, unix.NLM_F_MULTI, cmdNewDaemon, part)...)
		}
		return one(append(answer, doneReply(r, 0)...))
	})
	parts = [][]byte{master, backup, backup} // one that was started between two parts is listed twice
	if got, err := i.GetDaemons(); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v, got %+v", err, got)
	}
	parts = [][]byte{master, broken}
	if got, err := i.GetDaemons(); err == nil || got != nil {
		t.Errorf("got %+v, %v", got, err)
	}
}

// The kernel does not answer a request that ends with EINTR, such as one that stops a
// daemon whose thread has not run yet.
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

// Only acknowledgements answer a request that is sent with a fence.
func TestFenceTakesAcknowledgements(t *testing.T) {
	i, _ := newFake(t, nil)
	i.seq = 7
	f := &fenced{handle: i, err: syscall.ESRCH}
	for _, typ := range []uint16{fakeFamily, unix.NLMSG_DONE} {
		if done, err := f.take(&message{typ: typ, seq: 7, body: ne32(0)}); done || err != nil || f.err != syscall.ESRCH {
			t.Errorf("type %d: %v, %v", typ, done, err)
		}
	}
	if done, err := f.take(&message{typ: unix.NLMSG_ERROR, seq: 7, body: ne32(0)}); !done || err != syscall.ESRCH {
		t.Errorf("the fence: %v, %v", done, err)
	}
}
