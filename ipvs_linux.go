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

// Service is a virtual service: what clients connect to.
//
// (AddressFamily, Protocol, Address, Port) identify it, or (AddressFamily,
// FWMark) where FWMark is not 0. That is enough for every call but NewService
// and UpdateService. To change a service, read it, change the fields and give
// it to UpdateService: whatever else the kernel knows of it stays as it is.
type Service struct {
	// Address is the virtual IP address; an IPv4 one may have 4 or 16 bytes. It
	// comes back with 4 or 16 bytes, and nil for a firewall-mark service
	// (IPVS_SVC_ATTR_ADDR).
	Address net.IP

	// Protocol is the IP protocol: unix.IPPROTO_TCP, IPPROTO_UDP or IPPROTO_SCTP. The
	// kernel accepts any other, and then serves nobody (IPVS_SVC_ATTR_PROTOCOL).
	Protocol uint16

	// Port is in host byte order. Port 0 stands for every port that no other
	// service has. The kernel accepts it without ServiceFlagPersistent, and then
	// serves nobody (IPVS_SVC_ATTR_PORT).
	Port uint16

	// FWMark, if not 0, makes this the service of all packets that carry this
	// firewall mark (IPVS_SVC_ATTR_FWMARK).
	FWMark uint32

	// SchedName is the scheduler, such as RoundRobin, of at most 15 bytes
	// (IPVS_SVC_ATTR_SCHED_NAME).
	SchedName string

	// Flags are the service's flags (IP_VS_SVC_F_*). They replace those that the
	// kernel has (IPVS_SVC_ATTR_FLAGS with all bits in its mask), except for
	// ServiceFlagHashed, which is the kernel's own: it is always set in what is read,
	// and never sent.
	Flags uint32

	// Timeout is how long a client stays bound to its destination, in seconds; used
	// only with ServiceFlagPersistent (IPVS_SVC_ATTR_TIMEOUT). The kernel multiplies it
	// by its ticks a second without a check: above some 4 million it may wrap and be
	// read back as another value.
	Timeout uint32

	// Netmask groups clients for persistence: those with the same masked address get
	// the same destination (IPVS_SVC_ATTR_NETMASK).
	//
	// For IPv4 it is the mask's four bytes in network order, loaded as a native-endian
	// uint32 (see IPv4Netmask); 0xFFFFFFFF makes each client a group of its own.
	// Any value is sent as it is. Beware of 0 (0.0.0.0) and of a prefix length such
	// as 24 (on little-endian machines 24.0.0.0): they put all, or almost all, clients
	// of a persistent service on one destination.
	//
	// For IPv6 it is a prefix length, 1 to 128; 0 is sent as 128, and anything else is
	// an error that matches EINVAL.
	Netmask uint32

	// AddressFamily is unix.AF_INET or AF_INET6. 0 takes it from Address; a
	// firewall-mark service must name it (IPVS_SVC_ATTR_AF).
	AddressFamily uint16

	// PEName is the persistence engine, such as "sip", of at most 15 bytes; ""
	// for none (IPVS_SVC_ATTR_PE_NAME).
	PEName string

	// Stats are the counters; they are read only (IPVS_SVC_ATTR_STATS).
	Stats SvcStats

	// Stats64 are the same counters in 64 bits (IPVS_SVC_ATTR_STATS64).
	Stats64 Stats64
}

// SvcStats are the counters of a service, as the kernel gives them in 32 bits:
// they wrap. Stats64 has them without.
type SvcStats struct {
	Connections uint32 // connections scheduled (IPVS_STATS_ATTR_CONNS)
	PacketsIn   uint32 // from clients (IPVS_STATS_ATTR_INPKTS)
	PacketsOut  uint32 // to clients, where they pass the director (IPVS_STATS_ATTR_OUTPKTS)
	BytesIn     uint64 // IPVS_STATS_ATTR_INBYTES
	BytesOut    uint64 // IPVS_STATS_ATTR_OUTBYTES
	CPS         uint32 // current connections a second (IPVS_STATS_ATTR_CPS)
	BPSOut      uint32 // current bytes a second out (IPVS_STATS_ATTR_OUTBPS)
	PPSIn       uint32 // current packets a second in (IPVS_STATS_ATTR_INPPS)
	PPSOut      uint32 // current packets a second out (IPVS_STATS_ATTR_OUTPPS)
	BPSIn       uint32 // current bytes a second in (IPVS_STATS_ATTR_INBPS)
}

// Stats64 are the counters of a service or a destination in 64 bits. Where the
// kernel has no 64-bit ones (before 4.1) they are the 32-bit ones.
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

// Destination is a real server of a service. (AddressFamily, Address, Port)
// identify it in its service.
type Destination struct {
	// Address is the real server's IP address; an IPv4 one may have 4 or 16 bytes
	// (IPVS_DEST_ATTR_ADDR).
	Address net.IP

	// Port is in host byte order (IPVS_DEST_ATTR_PORT).
	Port uint16

	// Weight is the real server's share for schedulers that weigh, 0 to 2^31-1. With
	// 0 it gets no new connections (IPVS_DEST_ATTR_WEIGHT).
	Weight int

	// ConnectionFlags is the forwarding method: ConnectionFlagMasq,
	// ConnectionFlagTunnel or ConnectionFlagDirectRoute. Only the bits of
	// ConnectionFlagFwdMask are sent. The kernel accepts the other values, which it
	// uses itself; 4 to 7 serve nobody (IPVS_DEST_ATTR_FWD_METHOD).
	ConnectionFlags uint32

	// AddressFamily is unix.AF_INET or AF_INET6; 0 takes it from Address. It may
	// differ from the service's with ConnectionFlagTunnel (IPVS_DEST_ATTR_ADDR_FAMILY).
	AddressFamily uint16

	// UpperThreshold is the number of connections above which the real server gets
	// no new ones, LowerThreshold the one below which it gets some again; 0 for
	// none. Newer kernels (6.1) take up to 2^31-1 (IPVS_DEST_ATTR_U_THRESH,
	// IPVS_DEST_ATTR_L_THRESH).
	UpperThreshold uint32
	LowerThreshold uint32

	// ActiveConnections and InactiveConnections are the numbers of connections at
	// the moment; they are read only (IPVS_DEST_ATTR_ACTIVE_CONNS,
	// IPVS_DEST_ATTR_INACT_CONNS).
	ActiveConnections   int
	InactiveConnections int

	// Stats are the counters; they are read only (IPVS_DEST_ATTR_STATS).
	Stats DstStats

	// PersistentConnections is the number of persistence entries at the moment; it
	// is read only (IPVS_DEST_ATTR_PERSIST_CONNS).
	PersistentConnections int

	// TunnelType, TunnelPort (in host byte order) and TunnelFlags say how
	// ConnectionFlagTunnel wraps the packets; kernels before 5.3 know IPIP only, 0
	// (IPVS_DEST_ATTR_TUN_TYPE, IPVS_DEST_ATTR_TUN_PORT, IPVS_DEST_ATTR_TUN_FLAGS).
	TunnelType  uint8
	TunnelPort  uint16
	TunnelFlags uint16

	// Stats64 are the same counters as Stats, in 64 bits (IPVS_DEST_ATTR_STATS64).
	Stats64 Stats64
}

// DstStats are the counters of a destination.
type DstStats SvcStats

// Config has the timeouts of connections in the handle's network namespace, in
// whole seconds.
type Config struct {
	TimeoutTCP    time.Duration // idle TCP connections (IPVS_CMD_ATTR_TIMEOUT_TCP)
	TimeoutTCPFin time.Duration // TCP connections after a FIN (IPVS_CMD_ATTR_TIMEOUT_TCP_FIN)
	TimeoutUDP    time.Duration // idle UDP "connections" (IPVS_CMD_ATTR_TIMEOUT_UDP)
}

// Handle programs the IPVS table of one network namespace. It is safe for
// concurrent use; calls on one handle are worked off one at a time.
//
// Every call waits for the kernel a bounded time, see SetTimeout, and ends then
// with an error that matches os.ErrDeadlineExceeded. The handle stays usable.
type Handle struct {
	timeout atomic.Int64 // a time.Duration
	closed  atomic.Bool

	mu      sync.Mutex // held during a call; guards what follows
	socket  *socket
	family  uint16  // family id of IPVS
	seq     uint32  // last sequence number
	scratch []byte  // memory of the request under way,
	answer  answer  // of its answer,
	message message // and of the message at hand

	hints       sizeHints              // of lists
	bulk        atomic.Pointer[socket] // for long ones; nil until there is one
	bulkRefused bool                   // it could not be opened
}

// New opens a handle for a network namespace: that of the calling thread for
// "", else the one at path, such as /proc/PID/ns/net or /run/netns/NAME.
//
// If the kernel has no IPVS, New tries to load it: newer kernels (6.1) do so by
// themselves, for older ones it runs modprobe if the process may load modules.
// If that does not help the error is ErrNotSupported.
//
// Once IPVS was found New does not ask for it again. Should it be unloaded later,
// calls load it again, or end with ErrNotSupported.
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

// NewAt is New for an open network namespace, which stays the caller's to close.
func NewAt(ns netns.NsHandle) (*Handle, error) {
	return newHandle(openSocketAt(ns))
}

func newHandle(s *socket, err error) (*Handle, error) {
	if err != nil {
		return nil, err
	}
	i := &Handle{socket: s, family: uint16(knownFamily.Load())}
	i.closeWithHandle(s)
	i.timeout.Store(int64(defaultTimeout))
	if i.family != 0 {
		return i, nil // if it is an old one, the first call will find the new one
	}
	if err := i.setup(s); err != nil {
		i.Close()
		return nil, err
	}
	return i, nil
}

// closeWithHandle has the garbage collector close a socket of a handle that was
// dropped without Close. A handle is never dropped during a call: the call holds
// its lock.
func (i *Handle) closeWithHandle(s *socket) { runtime.AddCleanup(i, (*socket).close, s) }

// Close releases the handle. It may be called at any time and more than once,
// and returns at once. Ongoing calls end with ErrClosed as soon as the kernel
// returns from what it is doing, and so do later ones.
func (i *Handle) Close() {
	if i == nil || i.socket == nil || i.closed.Swap(true) {
		return
	}
	i.socket.close()
	if bulk := i.bulk.Load(); bulk != nil {
		bulk.close()
	}
}

// SetTimeout sets how long a call may wait for the kernel's reply, 3 s at
// first. A long answer may take that time for each of its parts, and ten times
// as long as a whole.
func (i *Handle) SetTimeout(d time.Duration) error {
	if i == nil {
		return ErrClosed
	}
	if d <= 0 {
		return fmt.Errorf("ipvs: a time-out of %v is not positive", d)
	}
	i.timeout.Store(int64(d))
	return nil
}

func (i *Handle) receiveTimeout() time.Duration { return time.Duration(i.timeout.Load()) }

// answerTimeout is how long a whole answer may take.
func (i *Handle) answerTimeout() time.Duration {
	return maxReplyTimeouts * min(i.receiveTimeout(), math.MaxInt64/maxReplyTimeouts)
}

// NewService adds a virtual service (IPVS_CMD_NEW_SERVICE). The kernel refuses
// with EEXIST if it has it already, and with ENOENT if it has no such scheduler
// or persistence engine.
func (i *Handle) NewService(s *Service) error {
	return i.call(cmdNewService, unix.NLM_F_ACK, change(cmdNewService, s, nil), nil)
}

// IsServicePresent tells whether the kernel has the service. It answers false
// too when the kernel could not be asked: to tell absent from failed, call
// GetService and look whether errors.Is(err, syscall.ESRCH).
func (i *Handle) IsServicePresent(s *Service) bool {
	_, err := i.GetService(s)
	return err == nil
}

// UpdateService sets what can be set of a service that is there
// (IPVS_CMD_SET_SERVICE). The kernel refuses with ESRCH if there is none. Its
// connections and destinations stay.
func (i *Handle) UpdateService(s *Service) error {
	return i.call(cmdSetService, unix.NLM_F_ACK, change(cmdSetService, s, nil), nil)
}

// DelService removes a service with its destinations (IPVS_CMD_DEL_SERVICE). The
// kernel refuses with ESRCH if there is none.
func (i *Handle) DelService(s *Service) error {
	return i.call(cmdDelService, unix.NLM_F_ACK, change(cmdDelService, s, nil), nil)
}

// Flush removes all services of the network namespace (IPVS_CMD_FLUSH).
func (i *Handle) Flush() error {
	return i.call(cmdFlush, unix.NLM_F_ACK, nil, nil)
}

// NewDestination adds a real server to a service (IPVS_CMD_NEW_DEST). The kernel
// refuses with ESRCH if there is no such service, with EEXIST if it has the
// destination already, and with ERANGE for a lower threshold above the upper.
func (i *Handle) NewDestination(s *Service, d *Destination) error {
	return i.call(cmdNewDest, unix.NLM_F_ACK, change(cmdNewDest, s, d), nil)
}

// UpdateDestination sets what can be set of a service's real server
// (IPVS_CMD_SET_DEST). The kernel refuses with ESRCH if there is no such
// service, and with ENOENT if it has no such destination.
func (i *Handle) UpdateDestination(s *Service, d *Destination) error {
	return i.call(cmdSetDest, unix.NLM_F_ACK, change(cmdSetDest, s, d), nil)
}

// DelDestination removes a real server from a service (IPVS_CMD_DEL_DEST). The
// kernel refuses with ESRCH if there is no such service, and with ENOENT if it
// has no such destination.
func (i *Handle) DelDestination(s *Service, d *Destination) error {
	return i.call(cmdDelDest, unix.NLM_F_ACK, change(cmdDelDest, s, d), nil)
}

// GetServices returns all services of the network namespace (IPVS_CMD_GET_SERVICE).
//
// The kernel does not promise a snapshot: if services are added or deleted at
// the same time, or on kernels from 7 on were just before, one that was there
// throughout can be missing. None comes twice.
func (i *Handle) GetServices() ([]*Service, error) {
	var services serviceList
	err := i.dump(cmdGetService, nil, &services, serviceKey{})
	if err != nil {
		return nil, err
	}
	return services.items, nil
}

// GetDestinations returns the real servers of a service (IPVS_CMD_GET_DEST). It
// returns none if there is no such service: the kernel does not tell that apart.
//
// As with GetServices, it is not a snapshot.
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

// GetService returns one service as the kernel has it (IPVS_CMD_GET_SERVICE). The
// kernel refuses with ESRCH if there is none.
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

// GetConfig returns the timeouts of connections (IPVS_CMD_GET_CONFIG).
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

// SetConfig sets the timeouts of connections (IPVS_CMD_SET_CONFIG). One that is 0
// stays as it is; fractions of a second are cut. Less than a second, a negative
// one, and more than 2^31-1 seconds are errors. The kernel refuses with EINVAL
// what its clock ticks cannot count, from some weeks up.
func (i *Handle) SetConfig(c *Config) error {
	return i.call(cmdSetConfig, unix.NLM_F_ACK, func(b []byte) ([]byte, error) { return fillConfig(b, c) }, nil)
}

// filler appends the attributes of a request to b.
type filler func(b []byte) ([]byte, error)

// change fills in what a command on a service or a destination carries.
func change(cmd uint8, s *Service, d *Destination) filler {
	return func(b []byte) ([]byte, error) { return fillChange(b, cmd, s, d) }
}

// identity fills in what identifies a service.
func identity(s *Service) filler {
	return func(b []byte) ([]byte, error) { return fillService(b, s, false) }
}

// call sends a request and hands its answer to p. With NLM_F_ACK in flags it waits
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
	return i.execute(i.socket, msg, i.answerTo(msg, p))
}

// lock locks the handle for a call.
func (i *Handle) lock() error {
	if i == nil || i.socket == nil || i.closed.Load() { // not behind a call that the kernel keeps
		return ErrClosed
	}
	i.mu.Lock()
	return nil
}

// newRequest makes a request in the handle's memory for one.
func (i *Handle) newRequest(cmd uint8, flags uint16, fill filler) ([]byte, error) {
	msg := newGenlRequest(i.scratch[:0], i.family, cmd, genlVersion, flags)
	if fill != nil {
		var err error
		if msg, err = fill(msg); err != nil {
			return nil, err
		}
	}
	i.scratch = msg // grown, maybe
	setLength(msg)
	return msg, nil
}

// answerTo returns the taker of the answer to a request, in the handle's memory
// for one.
func (i *Handle) answerTo(request []byte, p parser) *answer {
	i.answer = answer{parser: p, acked: flagsOf(request)&unix.NLM_F_ACK != 0}
	return &i.answer
}

// Info is what the kernel tells of its IPVS.
type Info struct {
	Version             Version // IPVS_INFO_ATTR_VERSION
	ConnectionTableSize uint32  // buckets of the connection table (IPVS_INFO_ATTR_CONN_TAB_SIZE)
}

// Version is a version of IPVS, one byte each for its three numbers:
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
// (IPVS_CMD_ZERO). The kernel adds up what it counts every two seconds: traffic of
// the last two can still appear afterwards.
func (i *Handle) Zero() error { return i.call(cmdZero, unix.NLM_F_ACK, nil, nil) }

// ZeroService sets the counters of one service and its destinations to zero
// (IPVS_CMD_ZERO). The kernel refuses with ESRCH if there is none.
func (i *Handle) ZeroService(s *Service) error {
	return i.call(cmdZero, unix.NLM_F_ACK, identity(s), nil)
}

// IPv4Netmask returns Service.Netmask for a prefix length of 0 to 32: the mask's
// four bytes as they lie in memory, so that 24 gives 255, 255, 255, 0 in this
// order on every machine, and not the number 0xFFFFFF00.
func IPv4Netmask(prefixLen int) (uint32, error) {
	mask := net.CIDRMask(prefixLen, 8*net.IPv4len)
	if mask == nil {
		return 0, fmt.Errorf("ipvs: an IPv4 prefix of %d bits is not in 0..32", prefixLen)
	}
	return native.Uint32(mask), nil
}
