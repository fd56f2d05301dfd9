package ipvs

// This file has the public types and every plain call of a Handle.

import (
	"fmt"
	"math"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Service is a virtual service, to which clients connect.
//
// A service is identified by (AddressFamily, Protocol, Address, Port), or by
// (AddressFamily, FWMark) if FWMark is not 0. These fields are enough for every
// call except NewService and UpdateService. To change a service, read it, change
// fields and pass it to UpdateService: every other field round-trips unchanged.
type Service struct {
	// Address is the virtual IP address; an IPv4 address may have 4 or 16 bytes. It
	// is returned with 4 bytes for IPv4 and 16 for IPv6, and as nil for a
	// firewall-mark service. An IPv4-mapped IPv6 address is the IPv4 address: net.IP
	// does not distinguish the two (IPVS_SVC_ATTR_ADDR).
	Address net.IP

	// Protocol is the IP protocol: unix.IPPROTO_TCP, IPPROTO_UDP or IPPROTO_SCTP. The
	// kernel accepts a service of another protocol, but schedules no connections for it
	// (IPVS_SVC_ATTR_PROTOCOL).
	Protocol uint16

	// Port is in host byte order. Port 0 matches every port of the address for which
	// there is no other service. It needs ServiceFlagPersistent: without the flag the
	// kernel accepts the service, but schedules no connections for it
	// (IPVS_SVC_ATTR_PORT).
	Port uint16

	// FWMark, if not 0, makes this the service for all packets that carry this
	// firewall mark (IPVS_SVC_ATTR_FWMARK).
	FWMark uint32

	// SchedName is the scheduler, such as RoundRobin, of at most 15 bytes
	// (IPVS_SVC_ATTR_SCHED_NAME).
	SchedName string

	// Flags are the service's flags (IP_VS_SVC_F_*). UpdateService replaces all of
	// them (IPVS_SVC_ATTR_FLAGS with all bits in its mask), except for
	// ServiceFlagHashed, which belongs to the kernel: it is set in every service that
	// is read, and never sent.
	Flags uint32

	// Timeout is how long a client stays bound to its destination, in seconds; used
	// only with ServiceFlagPersistent (IPVS_SVC_ATTR_TIMEOUT). The kernel converts it to
	// clock ticks without checking for overflow: a value above about 4 million may be
	// read back as another one.
	Timeout uint32

	// Netmask groups clients for persistence: those with the same masked address get
	// the same destination (IPVS_SVC_ATTR_NETMASK).
	//
	// For IPv4 it is the mask's four bytes in network order, loaded as a native-endian
	// uint32 (see IPv4Netmask); 0xFFFFFFFF makes each client a group of its own.
	// Any value is sent unchanged. Beware of 0 (0.0.0.0) and of a prefix length such
	// as 24 (24.0.0.0 on little-endian machines): they put all, or almost all, clients
	// of a persistent service on one destination.
	//
	// For IPv6 it is a prefix length, 1 to 128; 0 is sent as 128, and a value above 128
	// is an error that matches EINVAL.
	Netmask uint32

	// AddressFamily is unix.AF_INET or AF_INET6. If it is 0, it is taken from
	// Address; a firewall-mark service must set it (IPVS_SVC_ATTR_AF).
	AddressFamily uint16

	// PEName is the persistence engine, such as "sip", of at most 15 bytes, or ""
	// for none (IPVS_SVC_ATTR_PE_NAME).
	PEName string

	// Stats has the counters. It is read-only (IPVS_SVC_ATTR_STATS).
	Stats SvcStats

	// Stats64 has the same counters in 64 bits (IPVS_SVC_ATTR_STATS64).
	Stats64 Stats64
}

// SvcStats has the counters of a service. Most are 32 bits wide and wrap; Stats64
// has the same counters in 64 bits.
type SvcStats struct {
	Connections uint32 // scheduled connections (IPVS_STATS_ATTR_CONNS)
	PacketsIn   uint32 // from clients (IPVS_STATS_ATTR_INPKTS)
	PacketsOut  uint32 // to clients, if they pass through the director (IPVS_STATS_ATTR_OUTPKTS)
	BytesIn     uint64 // IPVS_STATS_ATTR_INBYTES
	BytesOut    uint64 // IPVS_STATS_ATTR_OUTBYTES
	CPS         uint32 // current connections per second (IPVS_STATS_ATTR_CPS)
	BPSOut      uint32 // current bytes per second out (IPVS_STATS_ATTR_OUTBPS)
	PPSIn       uint32 // current packets per second in (IPVS_STATS_ATTR_INPPS)
	PPSOut      uint32 // current packets per second out (IPVS_STATS_ATTR_OUTPPS)
	BPSIn       uint32 // current bytes per second in (IPVS_STATS_ATTR_INBPS)
}

// Stats64 has the counters of a service or a destination in 64 bits. On kernels
// without 64-bit counters (before 4.1) it is filled from the 32-bit ones.
type Stats64 struct {
	Connections uint64
	PacketsIn   uint64
	PacketsOut  uint64
	BytesIn     uint64
	BytesOut    uint64
	CPS         uint64
	BPSOut      uint64
	PPSIn       uint64
	PPSOut      uint64
	BPSIn       uint64
}

// Destination is a real server of a service. Within its service it is identified
// by (AddressFamily, Address, Port).
type Destination struct {
	// Address is the real server's IP address; an IPv4 address may have 4 or 16
	// bytes (IPVS_DEST_ATTR_ADDR).
	Address net.IP

	// Port is in host byte order (IPVS_DEST_ATTR_PORT).
	Port uint16

	// Weight is the real server's share with weighted schedulers, 0 to 2^31-1. A real
	// server of weight 0 gets no new connections (IPVS_DEST_ATTR_WEIGHT).
	Weight int

	// ConnectionFlags is the forwarding method: ConnectionFlagMasq,
	// ConnectionFlagTunnel or ConnectionFlagDirectRoute. Only the bits of
	// ConnectionFlagFwdMask are sent. The kernel accepts the other values, which are
	// for its own use; a destination with 4 to 7 serves nobody
	// (IPVS_DEST_ATTR_FWD_METHOD).
	ConnectionFlags uint32

	// AddressFamily is unix.AF_INET or AF_INET6. If it is 0, it is taken from
	// Address. With ConnectionFlagTunnel it may differ from the service's
	// (IPVS_DEST_ATTR_ADDR_FAMILY).
	AddressFamily uint16

	// UpperThreshold is the number of connections above which the real server gets
	// no new ones, and LowerThreshold the number below which it gets new ones again.
	// 0 means no threshold; a lower threshold needs an upper one at least as high. Newer
	// kernels (6.1 and later) accept at most 2^31-1 (IPVS_DEST_ATTR_U_THRESH,
	// IPVS_DEST_ATTR_L_THRESH).
	UpperThreshold uint32
	LowerThreshold uint32

	// ActiveConnections and InactiveConnections are the current numbers of
	// connections. They are read-only (IPVS_DEST_ATTR_ACTIVE_CONNS,
	// IPVS_DEST_ATTR_INACT_CONNS).
	ActiveConnections   int
	InactiveConnections int

	// Stats has the counters. It is read-only (IPVS_DEST_ATTR_STATS).
	Stats DstStats

	// PersistentConnections is the current number of persistence entries. It is
	// read-only (IPVS_DEST_ATTR_PERSIST_CONNS).
	PersistentConnections int

	// TunnelType, TunnelPort (in host byte order) and TunnelFlags set how
	// ConnectionFlagTunnel encapsulates packets. Kernels before 5.3 have only
	// TunnelIPIP, which is 0 (IPVS_DEST_ATTR_TUN_TYPE, IPVS_DEST_ATTR_TUN_PORT,
	// IPVS_DEST_ATTR_TUN_FLAGS).
	TunnelType  uint8
	TunnelPort  uint16
	TunnelFlags uint16

	// Stats64 has the same counters as Stats, in 64 bits (IPVS_DEST_ATTR_STATS64).
	Stats64 Stats64
}

// DstStats has the counters of a destination.
type DstStats SvcStats

// Config has the connection timeouts of the handle's network namespace, in whole
// seconds.
type Config struct {
	TimeoutTCP    time.Duration // idle TCP connections (IPVS_CMD_ATTR_TIMEOUT_TCP)
	TimeoutTCPFin time.Duration // TCP connections after a FIN (IPVS_CMD_ATTR_TIMEOUT_TCP_FIN)
	TimeoutUDP    time.Duration // idle UDP "connections" (IPVS_CMD_ATTR_TIMEOUT_UDP)
}

// Handle programs the IPVS table of one network namespace. It is safe for
// concurrent use; calls on one handle are serialized.
//
// Every call waits for the kernel's reply for a bounded time (see SetTimeout). On
// timeout the error matches os.ErrDeadlineExceeded, and the handle stays usable.
//
// Close releases the handle. A handle that is dropped without Close is closed by
// the garbage collector.
type Handle struct {
	timeout atomic.Int64 // a time.Duration
	closed  atomic.Bool
	kernel  bool                      // the socket reaches the real kernel, not a Fake or a test
	opt     atomic.Pointer[optReader] // nil until a table is read for Reconcile

	mu      sync.Mutex // held during a call; guards the fields below
	socket  *socket
	family  uint16  // family ID of IPVS
	seq     uint32  // last sequence number
	scratch []byte  // memory for the current request,
	answer  answer  // its answer,
	message message // and the current message of the answer

	hints sizeHints              // expected lengths of lists
	bulk  atomic.Pointer[socket] // for long lists; nil until it is needed
}

// New opens a handle for a network namespace: that of the calling thread if path
// is "", otherwise the one at path, such as /proc/PID/ns/net or /run/netns/NAME.
// Entering another namespace requires CAP_SYS_ADMIN. An open handle keeps its network
// namespace in existence.
//
// If IPVS is not loaded, New loads it: newer kernels (6.1 and later) do so themselves,
// for older ones New runs modprobe if the process has CAP_SYS_MODULE. If that fails,
// the error matches ErrNotSupported and gives the reason. If path does not exist, the
// error matches fs.ErrNotExist, and os.IsNotExist reports true for it.
//
// Once the process has found IPVS, New does not look for it again. If it is unloaded
// later, calls load it again or return an error that matches ErrNotSupported.
func New(path string) (*Handle, error) {
	if path == "" {
		return newHandle(openSocket())
	}
	ns, err := netns.GetFromPath(path)
	if err != nil {
		// Callers use os.IsNotExist, which does not look into other wrappers.
		return nil, &os.PathError{Op: "ipvs: opening network namespace", Path: path, Err: err}
	}
	defer ns.Close()
	i, err := NewAt(ns)
	if err != nil {
		return nil, fmt.Errorf("%w (network namespace %s)", err, path)
	}
	return i, nil
}

// NewAt is like New for an open network namespace. The caller remains responsible
// for closing ns.
func NewAt(ns netns.NsHandle) (*Handle, error) {
	return newHandle(openSocketAt(ns))
}

func newHandle(s *socket, err error) (*Handle, error) {
	if err != nil {
		return nil, err
	}
	i := &Handle{socket: s, family: uint16(knownFamily.Load()), kernel: true}
	i.closeWithHandle(s)
	i.timeout.Store(int64(defaultTimeout))
	if i.family != 0 {
		return i, nil // if it is outdated, the first call finds the new one
	}
	if err := i.setup(s); err != nil {
		i.Close()
		return nil, err
	}
	return i, nil
}

// closeWithHandle makes the garbage collector close s if the handle is dropped
// without Close. That cannot happen during a call, since a call holds the
// handle's lock.
func (i *Handle) closeWithHandle(s *socket) { runtime.AddCleanup(i, (*socket).close, s) }

// Close releases the handle. It may be called at any time and more than once, and
// returns immediately. Ongoing calls return ErrClosed, after the kernel has finished
// with a request that it is handling; later calls return ErrClosed at once.
func (i *Handle) Close() {
	if i == nil || i.socket == nil || i.closed.Swap(true) {
		return
	}
	i.socket.close()
	if bulk := i.bulk.Load(); bulk != nil {
		bulk.close()
	}
	if opt := i.opt.Load(); opt != nil {
		if s := opt.socket.Load(); s != nil {
			s.close()
		}
	}
}

// SetTimeout sets how long a call may wait for the kernel's reply, 3 s by default.
// A long reply may take that time for each of its parts, and ten times as long in
// total.
//
// The kernel handles a request while it is being sent. If that takes long, for
// example because a scheduler's module is being loaded, the call takes as long:
// no timeout can end it.
func (i *Handle) SetTimeout(d time.Duration) error {
	if i == nil {
		return ErrClosed
	}
	if d <= 0 {
		return fmt.Errorf("ipvs: timeout %v is not positive", d)
	}
	i.timeout.Store(int64(d))
	return nil
}

func (i *Handle) receiveTimeout() time.Duration { return time.Duration(i.timeout.Load()) }

// answerTimeout returns how long a whole answer may take.
func (i *Handle) answerTimeout() time.Duration {
	return maxReplyTimeouts * min(i.receiveTimeout(), math.MaxInt64/maxReplyTimeouts)
}

// NewService adds a virtual service (IPVS_CMD_NEW_SERVICE). The kernel returns
// EEXIST if the service exists, and ENOENT if there is no such scheduler or
// persistence engine.
func (i *Handle) NewService(s *Service) error {
	return i.call(cmdNewService, unix.NLM_F_ACK, change(cmdNewService, s, nil), nil)
}

// IsServicePresent reports whether the kernel has the service. It also returns
// false if the kernel could not be asked: to distinguish the two cases, call
// GetService and check for errors.Is(err, syscall.ESRCH).
func (i *Handle) IsServicePresent(s *Service) bool {
	_, err := i.GetService(s)
	return err == nil
}

// UpdateService updates all settable fields of an existing service
// (IPVS_CMD_SET_SERVICE), which keeps its connections and destinations. The kernel
// returns ESRCH if there is no such service.
func (i *Handle) UpdateService(s *Service) error {
	return i.call(cmdSetService, unix.NLM_F_ACK, change(cmdSetService, s, nil), nil)
}

// DelService removes a service with its destinations (IPVS_CMD_DEL_SERVICE). The
// kernel returns ESRCH if there is no such service.
func (i *Handle) DelService(s *Service) error {
	return i.call(cmdDelService, unix.NLM_F_ACK, change(cmdDelService, s, nil), nil)
}

// Flush removes all services of the network namespace (IPVS_CMD_FLUSH).
func (i *Handle) Flush() error {
	return i.call(cmdFlush, unix.NLM_F_ACK, nil, nil)
}

// NewDestination adds a real server to a service (IPVS_CMD_NEW_DEST). The kernel
// returns ESRCH if there is no such service, EEXIST if the destination exists, and
// ERANGE if the lower threshold is above the upper one.
func (i *Handle) NewDestination(s *Service, d *Destination) error {
	return i.call(cmdNewDest, unix.NLM_F_ACK, change(cmdNewDest, s, d), nil)
}

// UpdateDestination updates all settable fields of a service's real server
// (IPVS_CMD_SET_DEST). The kernel returns ESRCH if there is no such service, and
// ENOENT if there is no such destination.
func (i *Handle) UpdateDestination(s *Service, d *Destination) error {
	return i.call(cmdSetDest, unix.NLM_F_ACK, change(cmdSetDest, s, d), nil)
}

// DelDestination removes a real server from a service (IPVS_CMD_DEL_DEST). The
// kernel returns ESRCH if there is no such service, and ENOENT if there is no such
// destination.
func (i *Handle) DelDestination(s *Service, d *Destination) error {
	return i.call(cmdDelDest, unix.NLM_F_ACK, change(cmdDelDest, s, d), nil)
}

// GetServices returns all services of the network namespace (IPVS_CMD_GET_SERVICE).
//
// The list is not a snapshot: if services are added or deleted at the same time
// (before kernel 7, also in other network namespaces; on kernel 7 and later, also
// shortly before), a service that existed throughout can be missing. No service is
// listed twice.
func (i *Handle) GetServices() ([]*Service, error) {
	var services serviceList
	err := i.dump(cmdGetService, nil, &services, serviceKey{})
	if err != nil {
		return nil, err
	}
	return services.items, nil
}

// GetDestinations returns the real servers of a service (IPVS_CMD_GET_DEST). The
// list is empty if there is no such service: the kernel does not distinguish the
// two cases. As with GetServices, it is not a snapshot.
func (i *Handle) GetDestinations(s *Service) ([]*Destination, error) {
	var destinations destinationList
	key, err := sentServiceKey(s)
	if err == nil {
		err = i.dump(cmdGetDest, identity(s), &destinations, key)
	}
	if err != nil {
		return nil, err
	}
	return destinations.items, nil
}

// GetService returns the service with the identity of s (IPVS_CMD_GET_SERVICE). The
// kernel returns ESRCH if there is no such service.
func (i *Handle) GetService(s *Service) (*Service, error) {
	var services serviceList
	err := i.call(cmdGetService, 0, identity(s), &services)
	if err != nil {
		return nil, err
	}
	if n := len(services.items); n != 1 {
		//lint:ignore ST1005 callers know this text
		return nil, fmt.Errorf("Expected only one service obtained=%d", n)
	}
	return services.items[0], nil
}

// GetConfig returns the connection timeouts (IPVS_CMD_GET_CONFIG).
func (i *Handle) GetConfig() (*Config, error) {
	var c Config
	err := i.call(cmdGetConfig, 0, nil, parserFunc(func(body []byte) (err error) {
		c, err = parseConfig(body)
		return err
	}))
	if err != nil {
		return nil, err
	}
	return &c, nil
}

// SetConfig sets the connection timeouts (IPVS_CMD_SET_CONFIG). A timeout of 0 stays
// as it is; fractions of a second are cut off. A negative timeout, a positive one
// below a second and one above 2^31-1 seconds are errors. The kernel returns EINVAL
// for a timeout of several weeks or more, which it cannot count in its clock ticks.
func (i *Handle) SetConfig(c *Config) error {
	return i.call(cmdSetConfig, unix.NLM_F_ACK, func(b []byte) ([]byte, error) { return fillConfig(b, c) }, nil)
}

// call sends a request and passes its answer to p. With NLM_F_ACK in flags it waits
// for the acknowledgement.
func (i *Handle) call(cmd uint8, flags uint16, fill filler, p parser) error {
	if err := i.lock(); err != nil {
		return err
	}
	defer i.mu.Unlock()
	msg, err := i.newRequest(cmd, flags, fill)
	if err != nil {
		return err
	}
	for range dumpAttempts {
		err = i.execute(i.socket, msg, i.answerTo(msg, p))
		if err != errTruncated || p == nil { // a change is not made again
			break
		}
	}
	return err
}

// lock locks the handle for a call.
func (i *Handle) lock() error {
	if i == nil || i.socket == nil || i.closed.Load() { // without waiting for another call
		return ErrClosed
	}
	i.mu.Lock()
	return nil
}

// Info describes the kernel's IPVS.
type Info struct {
	Version             Version // IPVS_INFO_ATTR_VERSION
	ConnectionTableSize uint32  // number of buckets of the connection table (IPVS_INFO_ATTR_CONN_TAB_SIZE)
}

// Version is a version of IPVS, with one byte for each of its three numbers:
// 0x010201 is 1.2.1.
type Version uint32

// String returns the version as ipvsadm prints it, such as "1.2.1".
func (v Version) String() string {
	return fmt.Sprintf("%d.%d.%d", byte(v>>16), byte(v>>8), byte(v))
}

// GetInfo returns the version of IPVS and the size of its connection table
// (IPVS_CMD_GET_INFO).
func (i *Handle) GetInfo() (*Info, error) {
	info := new(Info)
	err := i.call(cmdGetInfo, 0, nil, parserFunc(func(body []byte) error {
		a := attributes{level: body}
		for a.next() {
			switch a.typ {
			case infoAttrVersion:
				info.Version = Version(a.uint32())
			case infoAttrConnectionTableSize:
				info.ConnectionTableSize = a.uint32()
			}
		}
		return a.err
	}))
	if err != nil {
		return nil, err
	}
	return info, nil
}

// Zero sets the counters and rates of all services and destinations to zero
// (IPVS_CMD_ZERO). The kernel sums up its counters every two seconds, so traffic of
// the last two seconds can still appear afterwards.
func (i *Handle) Zero() error { return i.call(cmdZero, unix.NLM_F_ACK, nil, nil) }

// ZeroService sets the counters of one service and its destinations to zero
// (IPVS_CMD_ZERO). The kernel returns ESRCH if there is no such service.
func (i *Handle) ZeroService(s *Service) error {
	return i.call(cmdZero, unix.NLM_F_ACK, identity(s), nil)
}

// IPv4Netmask returns the value of Service.Netmask for an IPv4 prefix length of 0
// to 32: the mask's four bytes in network order, loaded as a native-endian uint32.
// For 24 these bytes are 255, 255, 255, 0 on every machine.
func IPv4Netmask(prefixLen int) (uint32, error) {
	mask := net.CIDRMask(prefixLen, 8*net.IPv4len)
	if mask == nil {
		return 0, fmt.Errorf("ipvs: an IPv4 prefix of %d bits is not in 0..32", prefixLen)
	}
	return native.Uint32(mask), nil
}
