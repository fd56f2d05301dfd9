package ipvs

// This file has the numbers of the protocol and the public constants.

// Generic netlink identity of IPVS, from the kernel's linux/ip_vs.h.
const (
	genlName    = "IPVS" // IPVS_GENL_NAME
	genlVersion = 1      // IPVS_GENL_VERSION
)

// Commands, IPVS_CMD_*.
const (
	cmdUnspec uint8 = iota
	cmdNewService
	cmdSetService
	cmdDelService
	cmdGetService
	cmdNewDest
	cmdSetDest
	cmdDelDest
	cmdGetDest
	cmdNewDaemon
	cmdDelDaemon
	cmdGetDaemon
	cmdSetConfig
	cmdGetConfig
	cmdSetInfo // only the reply to cmdGetInfo carries it
	cmdGetInfo
	cmdZero
	cmdFlush
)

// Attributes of the first level, IPVS_CMD_ATTR_*.
const (
	cmdAttrUnspec uint16 = iota
	cmdAttrService
	cmdAttrDest
	cmdAttrDaemon
	cmdAttrTimeoutTCP
	cmdAttrTimeoutTCPFin
	cmdAttrTimeoutUDP
)

// Attributes of a service, IPVS_SVC_ATTR_*.
const (
	svcAttrUnspec uint16 = iota
	svcAttrAddressFamily
	svcAttrProtocol
	svcAttrAddress
	svcAttrPort
	svcAttrFWMark
	svcAttrSchedName
	svcAttrFlags
	svcAttrTimeout
	svcAttrNetmask
	svcAttrStats
	svcAttrPEName
	svcAttrStats64
)

// Attributes of a destination, IPVS_DEST_ATTR_*.
const (
	destAttrUnspec uint16 = iota
	destAttrAddress
	destAttrPort
	destAttrForwardingMethod
	destAttrWeight
	destAttrUpperThreshold
	destAttrLowerThreshold
	destAttrActiveConnections
	destAttrInactiveConnections
	destAttrPersistentConnections
	destAttrStats
	destAttrAddressFamily
	destAttrStats64
	destAttrTunnelType
	destAttrTunnelPort
	destAttrTunnelFlags
)

// Counters of a service or a destination, IPVS_STATS_ATTR_*; 32 bits wide
// inside a STATS attribute (the bytes have 64), 64 bits wide inside STATS64.
const (
	statsAttrUnspec uint16 = iota
	statsAttrConnections
	statsAttrPacketsIn
	statsAttrPacketsOut
	statsAttrBytesIn
	statsAttrBytesOut
	statsAttrCPS
	statsAttrPPSIn
	statsAttrPPSOut
	statsAttrBPSIn
	statsAttrBPSOut
	statsAttrPad
)

// Attributes of a synchronization daemon, IPVS_DAEMON_ATTR_*.
const (
	daemonAttrUnspec uint16 = iota
	daemonAttrState
	daemonAttrInterface
	daemonAttrSyncID
	daemonAttrSyncMaxLen
	daemonAttrGroup
	daemonAttrGroup6
	daemonAttrPort
	daemonAttrTTL
)

// Attributes of the kernel's IPVS as a whole, IPVS_INFO_ATTR_*.
const (
	infoAttrUnspec uint16 = iota
	infoAttrVersion
	infoAttrConnectionTableSize
)

// Lengths of the kernel's strings, including the terminating NUL.
const (
	schedNameMaxLen = 16 // IP_VS_SCHEDNAME_MAXLEN
	peNameMaxLen    = 16 // IP_VS_PENAME_MAXLEN
)

// Mask and values of the forwarding method in Destination.ConnectionFlags.
const (
	// ConnectionFlagFwdMask selects the forwarding method (IP_VS_CONN_F_FWD_MASK).
	ConnectionFlagFwdMask = 0x0007

	// ConnectionFlagMasq forwards by masquerading, that is NAT (IP_VS_CONN_F_MASQ).
	ConnectionFlagMasq = 0x0000

	// ConnectionFlagLocalNode delivers to the director itself (IP_VS_CONN_F_LOCALNODE).
	ConnectionFlagLocalNode = 0x0001

	// ConnectionFlagTunnel forwards through a tunnel (IP_VS_CONN_F_TUNNEL).
	ConnectionFlagTunnel = 0x0002

	// ConnectionFlagDirectRoute forwards by direct routing (IP_VS_CONN_F_DROUTE).
	ConnectionFlagDirectRoute = 0x0003
)

// The forwarding methods again, under a second set of names that moby/ipvs has for
// them.
const (
	// ConnFwdMask selects the forwarding method (IP_VS_CONN_F_FWD_MASK).
	ConnFwdMask = 0x0007

	// ConnFwdMasq forwards by masquerading, that is NAT (IP_VS_CONN_F_MASQ).
	ConnFwdMasq = 0x0000

	// ConnFwdLocalNode delivers to the director itself (IP_VS_CONN_F_LOCALNODE).
	ConnFwdLocalNode = 0x0001

	// ConnFwdTunnel forwards through a tunnel (IP_VS_CONN_F_TUNNEL).
	ConnFwdTunnel = 0x0002

	// ConnFwdDirectRoute forwards by direct routing (IP_VS_CONN_F_DROUTE).
	ConnFwdDirectRoute = 0x0003

	// ConnFwdBypass bypasses the real servers and forwards to the original
	// destination; only the kernel uses it (IP_VS_CONN_F_BYPASS).
	ConnFwdBypass = 0x0004
)

// Schedulers, for Service.SchedName. Each is a kernel module, ip_vs_rr and so on,
// which the kernel loads when a service first uses it.
const (
	// RoundRobin hands new connections to the real servers in turn.
	RoundRobin = "rr"

	// LeastConnection picks the real server with the fewest active connections.
	LeastConnection = "lc"

	// DestinationHashing picks by a hash of the destination address.
	DestinationHashing = "dh"

	// SourceHashing picks by a hash of the client's address.
	SourceHashing = "sh"

	// WeightedRoundRobin is round robin in proportion to the weights.
	WeightedRoundRobin = "wrr"

	// WeightedLeastConnection is least connection in proportion to the weights.
	WeightedLeastConnection = "wlc"
)

// Schedulers for which moby/ipvs has no constants.
const (
	// WeightedFailover sends all connections to the available real server of the
	// highest weight.
	WeightedFailover = "fo"

	// WeightedOverflow fills the real server of the highest weight with as many
	// connections as its weight, then the next one.
	WeightedOverflow = "ovf"

	// LocalityBasedLeastConnection keeps a destination address on one real server,
	// for caches.
	LocalityBasedLeastConnection = "lblc"

	// LocalityBasedLeastConnectionWithReplication keeps it on a set of real servers.
	LocalityBasedLeastConnectionWithReplication = "lblcr"

	// MaglevHashing picks by a consistent hash of the client's address.
	MaglevHashing = "mh"

	// ShortestExpectedDelay picks by (active connections + 1) / weight.
	ShortestExpectedDelay = "sed"

	// NeverQueue picks an idle real server if there is one, and otherwise works like
	// ShortestExpectedDelay.
	NeverQueue = "nq"

	// PowerOfTwoChoices picks the less loaded of two real servers drawn at random.
	PowerOfTwoChoices = "twos"
)

// Flags, for Service.Flags.
const (
	// ServiceFlagPersistent keeps a client on its real server for Service.Timeout
	// (IP_VS_SVC_F_PERSISTENT).
	ServiceFlagPersistent = 0x0001

	// ServiceFlagHashed is set by the kernel in every service (IP_VS_SVC_F_HASHED).
	ServiceFlagHashed = 0x0002

	// ServiceFlagOnePacket schedules each UDP packet by itself (IP_VS_SVC_F_ONEPACKET).
	ServiceFlagOnePacket = 0x0004

	// ServiceFlagSched1, ServiceFlagSched2 and ServiceFlagSched3 have a meaning that
	// depends on the scheduler (IP_VS_SVC_F_SCHED1 to IP_VS_SVC_F_SCHED3).
	ServiceFlagSched1 = 0x0008
	ServiceFlagSched2 = 0x0010
	ServiceFlagSched3 = 0x0020

	// ServiceFlagSHFallback makes "sh" pick another real server if the chosen one
	// accepts no new connections (IP_VS_SVC_F_SCHED_SH_FALLBACK).
	ServiceFlagSHFallback = ServiceFlagSched1

	// ServiceFlagSHPort makes "sh" hash the client's port too (IP_VS_SVC_F_SCHED_SH_PORT).
	ServiceFlagSHPort = ServiceFlagSched2

	// ServiceFlagMHFallback is ServiceFlagSHFallback for "mh" (IP_VS_SVC_F_SCHED_MH_FALLBACK).
	ServiceFlagMHFallback = ServiceFlagSched1

	// ServiceFlagMHPort is ServiceFlagSHPort for "mh" (IP_VS_SVC_F_SCHED_MH_PORT).
	ServiceFlagMHPort = ServiceFlagSched2
)

// Tunnels, for Destination.TunnelType and TunnelFlags, used with
// ConnectionFlagTunnel. All but TunnelIPIP need Linux 5.3.
const (
	// TunnelIPIP wraps packets in IP (IP_VS_CONN_F_TUNNEL_TYPE_IPIP).
	TunnelIPIP = 0

	// TunnelGUE wraps packets in UDP to Destination.TunnelPort
	// (IP_VS_CONN_F_TUNNEL_TYPE_GUE).
	TunnelGUE = 1

	// TunnelGRE wraps packets in GRE (IP_VS_CONN_F_TUNNEL_TYPE_GRE).
	TunnelGRE = 2

	// TunnelFlagNoChecksum omits the tunnel's checksum (IP_VS_TUNNEL_ENCAP_FLAG_NOCSUM).
	TunnelFlagNoChecksum = 0

	// TunnelFlagChecksum adds a checksum to GUE and GRE (IP_VS_TUNNEL_ENCAP_FLAG_CSUM).
	TunnelFlagChecksum = 0x1

	// TunnelFlagRemoteChecksum lets the receiver of GUE compute the inner checksum
	// (IP_VS_TUNNEL_ENCAP_FLAG_REMCSUM).
	TunnelFlagRemoteChecksum = 0x2
)
