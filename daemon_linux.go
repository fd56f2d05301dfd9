package ipvs

// This file has the connection synchronization daemon.

import (
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// DaemonState selects one of the two synchronization daemons.
type DaemonState uint32

const (
	// DaemonMaster sends this host's connections (IP_VS_STATE_MASTER).
	DaemonMaster DaemonState = 1

	// DaemonBackup receives the connections of other hosts (IP_VS_STATE_BACKUP).
	DaemonBackup DaemonState = 2
)

// String returns the state as ipvsadm prints it, "master" or "backup".
func (s DaemonState) String() string {
	switch s {
	case DaemonMaster:
		return "master"
	case DaemonBackup:
		return "backup"
	}
	return fmt.Sprintf("state %d", uint32(s))
}

// Daemon is a connection synchronization daemon: a kernel thread that sends
// connections to other directors over multicast, or receives them, so that one
// director can take over from another. A network namespace can have one daemon of
// each state.
type Daemon struct {
	// State is DaemonMaster or DaemonBackup (IPVS_DAEMON_ATTR_STATE).
	State DaemonState

	// MulticastInterface is the network interface, of at most 15 bytes
	// (IPVS_DAEMON_ATTR_MCAST_IFN).
	MulticastInterface string

	// SyncID identifies a group of directors, 0 to 255; a backup with 0 accepts the
	// connections of all groups (IPVS_DAEMON_ATTR_SYNC_ID).
	SyncID uint32

	// SyncMaxLen is the maximum length of a message in bytes. If it is 0, a message fits
	// into a packet of 1500 bytes for a master, and into the interface's MTU for a
	// backup. The kernel reduces values that are too large
	// (IPVS_DAEMON_ATTR_SYNC_MAXLEN).
	SyncMaxLen uint16

	// MulticastGroup is the multicast group, IPv4 or IPv6; nil means 224.0.0.81
	// (IPVS_DAEMON_ATTR_MCAST_GROUP, IPVS_DAEMON_ATTR_MCAST_GROUP6).
	MulticastGroup net.IP

	// MulticastPort is the UDP port, in host byte order; 0 means 8848
	// (IPVS_DAEMON_ATTR_MCAST_PORT).
	MulticastPort uint16

	// MulticastTTL is the TTL of messages; 0 means 1 (IPVS_DAEMON_ATTR_MCAST_TTL).
	MulticastTTL uint8
}

const (
	interfaceNameMaxLen = 16  // IP_VS_IFNAME_MAXLEN
	maxSyncID           = 255 // the daemon's messages have one byte for it
)

// NewDaemon starts a synchronization daemon (IPVS_CMD_NEW_DAEMON). The kernel returns
// EEXIST if a daemon of that state is running, ENODEV if there is no such interface,
// and EINVAL if there are destinations of another address family than their
// service, which the daemon's messages cannot carry.
func (i *Handle) NewDaemon(d *Daemon) error {
	return i.call(cmdNewDaemon, unix.NLM_F_ACK, func(b []byte) ([]byte, error) { return fillDaemon(b, d) }, nil)
}

// DelDaemon stops the synchronization daemon of that state (IPVS_CMD_DEL_DAEMON).
// The kernel returns ESRCH if none is running.
func (i *Handle) DelDaemon(state DaemonState) error {
	if err := i.lock(); err != nil {
		return err
	}
	defer i.mu.Unlock()
	msg, err := i.newRequest(cmdDelDaemon, unix.NLM_F_ACK, func(b []byte) ([]byte, error) {
		b, nest := openNest(b, cmdAttrDaemon)
		b = appendUint32(b, daemonAttrState, uint32(state))
		closeNest(b, nest)
		return b, nil
	})
	if err != nil {
		return err
	}
	return i.execute(i.socket, appendFence(msg), &fenced{handle: i})
}

// appendFence appends a request that does nothing but is acknowledged.
//
// The kernel sends no reply to a request that ends with EINTR, as does one that stops a
// daemon whose thread has not run yet; the daemon is stopped nevertheless. If the fence
// is acknowledged but the request before it is not, that request ended with EINTR.
func appendFence(msg []byte) []byte {
	fence := append(msg, make([]byte, msgHdrLen)...)[len(msg):]
	native.PutUint16(fence[4:], unix.NLMSG_NOOP)
	setFlags(fence, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	setLength(fence)
	return append(msg, fence...)
}

// fenced takes the acknowledgements of a request and of the fence sent with it.
type fenced struct {
	handle *Handle
	err    error // the kernel's verdict on the request
}

func (f *fenced) take(m *message) (done bool, err error) {
	if m.typ != unix.NLMSG_ERROR {
		return false, nil
	}
	if m.seq == f.handle.seq { // the fence was sent last
		err, f.err = f.err, nil
		return true, err
	}
	f.err, err = m.errno()
	return false, err
}

// GetDaemons returns the running synchronization daemons: none, one or two
// (IPVS_CMD_GET_DAEMON).
func (i *Handle) GetDaemons() ([]*Daemon, error) {
	var daemons daemonList
	if err := i.dump(cmdGetDaemon, nil, &daemons, serviceKey{}); err != nil {
		return nil, err
	}
	return daemons, nil
}

// daemonList collects the daemons of an answer.
type daemonList []*Daemon

func (l *daemonList) reset(int) { *l = nil }

func (l *daemonList) finish() {}

func (l *daemonList) length() int { return len(*l) }

func (l *daemonList) parse(m *message) error {
	d, err := parseDaemon(m.attrs())
	for _, earlier := range *l {
		if err == nil && earlier.State == d.State {
			return nil // a daemon was started between two parts of the answer
		}
	}
	*l = append(*l, d)
	return err
}

func fillDaemon(b []byte, d *Daemon) ([]byte, error) {
	if d == nil {
		return b, errors.New("ipvs: the daemon is nil")
	}
	if d.State != DaemonMaster && d.State != DaemonBackup {
		return b, fmt.Errorf("ipvs: daemon state %d is neither master nor backup", uint32(d.State))
	}
	if d.MulticastInterface == "" {
		return b, errors.New("ipvs: the daemon has no multicast interface")
	}
	if err := checkName("multicast interface", d.MulticastInterface, interfaceNameMaxLen); err != nil {
		return b, err
	}
	if d.SyncID > maxSyncID {
		return b, fmt.Errorf("ipvs: sync id %d is above %d", d.SyncID, maxSyncID)
	}
	b, nest := openNest(b, cmdAttrDaemon)
	b = appendUint32(b, daemonAttrState, uint32(d.State))
	b = appendString(b, daemonAttrInterface, d.MulticastInterface)
	b = appendUint32(b, daemonAttrSyncID, d.SyncID)
	// The kernel chooses the values of omitted attributes.
	if d.SyncMaxLen != 0 {
		b = appendUint16(b, daemonAttrSyncMaxLen, d.SyncMaxLen)
	}
	if len(d.MulticastGroup) != 0 {
		family, address, err := familyOf(0, d.MulticastGroup, "multicast group")
		if err != nil {
			return b, err
		}
		attr := daemonAttrGroup
		if family == unix.AF_INET6 {
			attr = daemonAttrGroup6
		}
		b = appendBytes(b, attr, address)
	}
	if d.MulticastPort != 0 {
		b = appendUint16(b, daemonAttrPort, d.MulticastPort) // unlike other ports, in host byte order
	}
	if d.MulticastTTL != 0 {
		b = appendUint8(b, daemonAttrTTL, d.MulticastTTL)
	}
	closeNest(b, nest)
	return b, nil
}

func parseDaemon(body []byte) (*Daemon, error) {
	attrs, err := nested(body, cmdAttrDaemon, "daemon")
	if err != nil {
		return nil, err
	}
	d := new(Daemon)
	var memory addresses
	a := attributes{level: attrs}
	for a.next() {
		switch a.typ {
		case daemonAttrState:
			d.State = DaemonState(a.uint32())
		case daemonAttrInterface:
			d.MulticastInterface = string(a.text())
		case daemonAttrSyncID:
			d.SyncID = a.uint32()
		case daemonAttrSyncMaxLen:
			d.SyncMaxLen = a.uint16()
		case daemonAttrGroup:
			d.MulticastGroup, err = memory.copyIP(unix.AF_INET, a.value())
			a.nest(err)
		case daemonAttrGroup6:
			d.MulticastGroup, err = memory.copyIP(unix.AF_INET6, a.value())
			a.nest(err)
		case daemonAttrPort:
			d.MulticastPort = a.uint16()
		case daemonAttrTTL:
			d.MulticastTTL = a.uint8()
		}
	}
	return d, a.err
}
