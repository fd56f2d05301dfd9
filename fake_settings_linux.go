package ipvs

// This file has the Fake's timeouts and synchronization daemons.

import (
	"bytes"
	"math"
	"syscall"
)

var fakeTimeoutAttrs = [3]uint16{cmdAttrTimeoutTCP, cmdAttrTimeoutTCPFin, cmdAttrTimeoutUDP}

// setConfig sets the timeouts that are present and not 0. If one is invalid, it sets
// none.
func (t *fakeTable) setConfig(attrs fakeAttrs) syscall.Errno {
	timeouts := t.timeouts
	for n, typ := range fakeTimeoutAttrs {
		seconds := attrs.uint32(typ)
		if seconds > math.MaxInt32/fakeTicks {
			return syscall.EINVAL
		}
		if seconds > 0 {
			timeouts[n] = seconds * fakeTicks
		}
	}
	t.timeouts = timeouts
	return 0
}

func (t *fakeTable) appendConfig(b []byte) []byte {
	for n, typ := range fakeTimeoutAttrs {
		b = appendUint32(b, typ, t.timeouts[n]/fakeTicks)
	}
	return b
}

// fakeDaemon is a synchronization daemon that does nothing.
type fakeDaemon struct {
	state  DaemonState
	link   string
	syncID uint32
	maxLen uint16
	group  []byte // of 4 or 16 bytes
	port   uint16 // in host byte order
	ttl    uint8
}

// Defaults and limits of a daemon.
const (
	fakeSyncPort     = 8848
	fakeSyncMTU      = 1500
	fakeLeastBackup  = 1024
	fakeHeaders      = 20 + 8 // of IPv4 and UDP
	fakeHeadersIPv6  = 40 + 8
	fakeLargestFrame = math.MaxUint16
)

// changeDaemon starts or stops a daemon.
func (t *fakeTable) changeDaemon(cmd uint8, nest []byte) syscall.Errno {
	a, errno := fakeDaemonPolicy.parse(nest)
	if nest == nil || errno != 0 || !a.has(daemonAttrState) {
		return syscall.EINVAL
	}
	state := DaemonState(a.uint32(daemonAttrState))
	known := state == DaemonMaster || state == DaemonBackup
	if cmd == cmdDelDaemon {
		switch {
		case !known:
			return syscall.EINVAL
		case t.daemons[state-1] == nil:
			return syscall.ESRCH
		}
		t.daemons[state-1] = nil
		return 0
	}
	if !a.has(daemonAttrInterface, daemonAttrSyncID) {
		return syscall.EINVAL
	}
	d := &fakeDaemon{
		state:  state,
		link:   string(text(a[daemonAttrInterface])),
		syncID: a.uint32(daemonAttrSyncID),
		maxLen: a.uint16(daemonAttrSyncMaxLen),
		port:   a.uint16(daemonAttrPort),
		ttl:    a.uint8(daemonAttrTTL),
	}
	headers := fakeHeaders
	switch {
	case a.has(daemonAttrGroup):
		d.group = bytes.Clone(a[daemonAttrGroup][:4])
		if d.group[0]&0xF0 != 0xE0 {
			return syscall.EINVAL
		}
	case a.has(daemonAttrGroup6):
		d.group, headers = bytes.Clone(a[daemonAttrGroup6][:16]), fakeHeadersIPv6
		if d.group[0] != 0xFF {
			return syscall.EINVAL
		}
	default:
		d.group = []byte{224, 0, 0, 81}
	}
	switch {
	case t.mixed > 0:
		return syscall.EINVAL
	case d.link == "":
		return syscall.ENODEV
	case !known:
		return syscall.EINVAL
	case t.daemons[state-1] != nil:
		return syscall.EEXIST
	}
	if d.port == 0 {
		d.port = fakeSyncPort
	}
	if d.ttl == 0 {
		d.ttl = 1
	}
	least := 1
	if state == DaemonBackup {
		least = fakeLeastBackup
	}
	if d.maxLen == 0 {
		d.maxLen = uint16(fakeSyncMTU - headers)
	} else {
		d.maxLen = uint16(min(max(int(d.maxLen), least), fakeLargestFrame-headers))
	}
	t.daemons[state-1] = d
	return 0
}
