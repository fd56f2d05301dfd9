package ipvs

import (
	"fmt"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// The exported numbers are those of the kernel's header linux/ip_vs.h.
func TestConstantValues(t *testing.T) {
	for name, c := range map[string]struct{ got, want uint32 }{
		"IP_VS_CONN_F_FWD_MASK":           {ConnectionFlagFwdMask, 7},
		"IP_VS_CONN_F_MASQ":               {ConnectionFlagMasq, 0},
		"IP_VS_CONN_F_LOCALNODE":          {ConnectionFlagLocalNode, 1},
		"IP_VS_CONN_F_TUNNEL":             {ConnectionFlagTunnel, 2},
		"IP_VS_CONN_F_DROUTE":             {ConnectionFlagDirectRoute, 3},
		"IP_VS_CONN_F_FWD_MASK, again":    {ConnFwdMask, 7},
		"IP_VS_CONN_F_MASQ, again":        {ConnFwdMasq, 0},
		"IP_VS_CONN_F_LOCALNODE, again":   {ConnFwdLocalNode, 1},
		"IP_VS_CONN_F_TUNNEL, again":      {ConnFwdTunnel, 2},
		"IP_VS_CONN_F_DROUTE, again":      {ConnFwdDirectRoute, 3},
		"IP_VS_CONN_F_BYPASS":             {ConnFwdBypass, 4},
		"IP_VS_SVC_F_PERSISTENT":          {ServiceFlagPersistent, 0x01},
		"IP_VS_SVC_F_HASHED":              {ServiceFlagHashed, 0x02},
		"IP_VS_SVC_F_ONEPACKET":           {ServiceFlagOnePacket, 0x04},
		"IP_VS_SVC_F_SCHED1":              {ServiceFlagSched1, 0x08},
		"IP_VS_SVC_F_SCHED2":              {ServiceFlagSched2, 0x10},
		"IP_VS_SVC_F_SCHED3":              {ServiceFlagSched3, 0x20},
		"IP_VS_SVC_F_SCHED_SH_FALLBACK":   {ServiceFlagSHFallback, 0x08},
		"IP_VS_SVC_F_SCHED_SH_PORT":       {ServiceFlagSHPort, 0x10},
		"IP_VS_SVC_F_SCHED_MH_FALLBACK":   {ServiceFlagMHFallback, 0x08},
		"IP_VS_SVC_F_SCHED_MH_PORT":       {ServiceFlagMHPort, 0x10},
		"IP_VS_CONN_F_TUNNEL_TYPE_IPIP":   {TunnelIPIP, 0},
		"IP_VS_CONN_F_TUNNEL_TYPE_GUE":    {TunnelGUE, 1},
		"IP_VS_CONN_F_TUNNEL_TYPE_GRE":    {TunnelGRE, 2},
		"IP_VS_TUNNEL_ENCAP_FLAG_NOCSUM":  {TunnelFlagNoChecksum, 0},
		"IP_VS_TUNNEL_ENCAP_FLAG_CSUM":    {TunnelFlagChecksum, 1},
		"IP_VS_TUNNEL_ENCAP_FLAG_REMCSUM": {TunnelFlagRemoteChecksum, 2},
		"IP_VS_STATE_MASTER":              {uint32(DaemonMaster), 1},
		"IP_VS_STATE_BACKUP":              {uint32(DaemonBackup), 2},
	} {
		if c.got != c.want {
			t.Errorf("%s is %d, in the library %d", name, c.want, c.got)
		}
	}
}

// protocol has every command and attribute of the kernel's header linux/ip_vs.h,
// with its number in the package and the exported name for it.
var protocol = []struct {
	header string
	number int
	goName string
}{
	{"IPVS_CMD_NEW_SERVICE", int(cmdNewService), "Handle.NewService"},
	{"IPVS_CMD_SET_SERVICE", int(cmdSetService), "Handle.UpdateService"},
	{"IPVS_CMD_DEL_SERVICE", int(cmdDelService), "Handle.DelService"},
	{"IPVS_CMD_GET_SERVICE", int(cmdGetService), "Handle.GetService, Handle.GetServices"},
	{"IPVS_CMD_NEW_DEST", int(cmdNewDest), "Handle.NewDestination"},
	{"IPVS_CMD_SET_DEST", int(cmdSetDest), "Handle.UpdateDestination"},
	{"IPVS_CMD_DEL_DEST", int(cmdDelDest), "Handle.DelDestination"},
	{"IPVS_CMD_GET_DEST", int(cmdGetDest), "Handle.GetDestinations"},
	{"IPVS_CMD_NEW_DAEMON", int(cmdNewDaemon), "Handle.NewDaemon"},
	{"IPVS_CMD_DEL_DAEMON", int(cmdDelDaemon), "Handle.DelDaemon"},
	{"IPVS_CMD_GET_DAEMON", int(cmdGetDaemon), "Handle.GetDaemons"},
	{"IPVS_CMD_SET_CONFIG", int(cmdSetConfig), "Handle.SetConfig"},
	{"IPVS_CMD_GET_CONFIG", int(cmdGetConfig), "Handle.GetConfig"},
	{"IPVS_CMD_SET_INFO", int(cmdSetInfo), "Handle.GetInfo"},
	{"IPVS_CMD_GET_INFO", int(cmdGetInfo), "Handle.GetInfo"},
	{"IPVS_CMD_ZERO", int(cmdZero), "Handle.Zero, Handle.ZeroService"},
	{"IPVS_CMD_FLUSH", int(cmdFlush), "Handle.Flush"},

	{"IPVS_CMD_ATTR_SERVICE", int(cmdAttrService), "Service"},
	{"IPVS_CMD_ATTR_DEST", int(cmdAttrDest), "Destination"},
	{"IPVS_CMD_ATTR_DAEMON", int(cmdAttrDaemon), "Daemon"},
	{"IPVS_CMD_ATTR_TIMEOUT_TCP", int(cmdAttrTimeoutTCP), "Config.TimeoutTCP"},
	{"IPVS_CMD_ATTR_TIMEOUT_TCP_FIN", int(cmdAttrTimeoutTCPFin), "Config.TimeoutTCPFin"},
	{"IPVS_CMD_ATTR_TIMEOUT_UDP", int(cmdAttrTimeoutUDP), "Config.TimeoutUDP"},

	{"IPVS_SVC_ATTR_AF", int(svcAttrAddressFamily), "Service.AddressFamily"},
	{"IPVS_SVC_ATTR_PROTOCOL", int(svcAttrProtocol), "Service.Protocol"},
	{"IPVS_SVC_ATTR_ADDR", int(svcAttrAddress), "Service.Address"},
	{"IPVS_SVC_ATTR_PORT", int(svcAttrPort), "Service.Port"},
	{"IPVS_SVC_ATTR_FWMARK", int(svcAttrFWMark), "Service.FWMark"},
	{"IPVS_SVC_ATTR_SCHED_NAME", int(svcAttrSchedName), "Service.SchedName"},
	{"IPVS_SVC_ATTR_FLAGS", int(svcAttrFlags), "Service.Flags"},
	{"IPVS_SVC_ATTR_TIMEOUT", int(svcAttrTimeout), "Service.Timeout"},
	{"IPVS_SVC_ATTR_NETMASK", int(svcAttrNetmask), "Service.Netmask"},
	{"IPVS_SVC_ATTR_STATS", int(svcAttrStats), "Service.Stats"},
	{"IPVS_SVC_ATTR_PE_NAME", int(svcAttrPEName), "Service.PEName"},
	{"IPVS_SVC_ATTR_STATS64", int(svcAttrStats64), "Service.Stats64"},

	{"IPVS_DEST_ATTR_ADDR", int(destAttrAddress), "Destination.Address"},
	{"IPVS_DEST_ATTR_PORT", int(destAttrPort), "Destination.Port"},
	{"IPVS_DEST_ATTR_FWD_METHOD", int(destAttrForwardingMethod), "Destination.ConnectionFlags"},
	{"IPVS_DEST_ATTR_WEIGHT", int(destAttrWeight), "Destination.Weight"},
	{"IPVS_DEST_ATTR_U_THRESH", int(destAttrUpperThreshold), "Destination.UpperThreshold"},
	{"IPVS_DEST_ATTR_L_THRESH", int(destAttrLowerThreshold), "Destination.LowerThreshold"},
	{"IPVS_DEST_ATTR_ACTIVE_CONNS", int(destAttrActiveConnections), "Destination.ActiveConnections"},
	{"IPVS_DEST_ATTR_INACT_CONNS", int(destAttrInactiveConnections), "Destination.InactiveConnections"},
	{"IPVS_DEST_ATTR_PERSIST_CONNS", int(destAttrPersistentConnections), "Destination.PersistentConnections"},
	{"IPVS_DEST_ATTR_STATS", int(destAttrStats), "Destination.Stats"},
	{"IPVS_DEST_ATTR_ADDR_FAMILY", int(destAttrAddressFamily), "Destination.AddressFamily"},
	{"IPVS_DEST_ATTR_STATS64", int(destAttrStats64), "Destination.Stats64"},
	{"IPVS_DEST_ATTR_TUN_TYPE", int(destAttrTunnelType), "Destination.TunnelType"},
	{"IPVS_DEST_ATTR_TUN_PORT", int(destAttrTunnelPort), "Destination.TunnelPort"},
	{"IPVS_DEST_ATTR_TUN_FLAGS", int(destAttrTunnelFlags), "Destination.TunnelFlags"},

	{"IPVS_DAEMON_ATTR_STATE", int(daemonAttrState), "Daemon.State"},
	{"IPVS_DAEMON_ATTR_MCAST_IFN", int(daemonAttrInterface), "Daemon.MulticastInterface"},
	{"IPVS_DAEMON_ATTR_SYNC_ID", int(daemonAttrSyncID), "Daemon.SyncID"},
	{"IPVS_DAEMON_ATTR_SYNC_MAXLEN", int(daemonAttrSyncMaxLen), "Daemon.SyncMaxLen"},
	{"IPVS_DAEMON_ATTR_MCAST_GROUP", int(daemonAttrGroup), "Daemon.MulticastGroup"},
	{"IPVS_DAEMON_ATTR_MCAST_GROUP6", int(daemonAttrGroup6), "Daemon.MulticastGroup"},
	{"IPVS_DAEMON_ATTR_MCAST_PORT", int(daemonAttrPort), "Daemon.MulticastPort"},
	{"IPVS_DAEMON_ATTR_MCAST_TTL", int(daemonAttrTTL), "Daemon.MulticastTTL"},

	{"IPVS_STATS_ATTR_CONNS", int(statsAttrConnections), "Stats64.Connections"},
	{"IPVS_STATS_ATTR_INPKTS", int(statsAttrPacketsIn), "Stats64.PacketsIn"},
	{"IPVS_STATS_ATTR_OUTPKTS", int(statsAttrPacketsOut), "Stats64.PacketsOut"},
	{"IPVS_STATS_ATTR_INBYTES", int(statsAttrBytesIn), "Stats64.BytesIn"},
	{"IPVS_STATS_ATTR_OUTBYTES", int(statsAttrBytesOut), "Stats64.BytesOut"},
	{"IPVS_STATS_ATTR_CPS", int(statsAttrCPS), "Stats64.CPS"},
	{"IPVS_STATS_ATTR_INPPS", int(statsAttrPPSIn), "Stats64.PPSIn"},
	{"IPVS_STATS_ATTR_OUTPPS", int(statsAttrPPSOut), "Stats64.PPSOut"},
	{"IPVS_STATS_ATTR_INBPS", int(statsAttrBPSIn), "Stats64.BPSIn"},
	{"IPVS_STATS_ATTR_OUTBPS", int(statsAttrBPSOut), "Stats64.BPSOut"},

	{"IPVS_INFO_ATTR_VERSION", int(infoAttrVersion), "Info.Version"},
	{"IPVS_INFO_ATTR_CONN_TAB_SIZE", int(infoAttrConnectionTableSize), "Info.ConnectionTableSize"},
}

const headerPath = "/usr/include/linux/ip_vs.h"

// The package has every command and attribute of the header, with the header's number.
func TestHeaderIsCovered(t *testing.T) {
	text, err := os.ReadFile(headerPath)
	if os.IsNotExist(err) {
		t.Skip("SKIP: needs " + headerPath + " (Debian: linux-libc-dev)")
	}
	must(t, err)
	known := map[string]int{}
	for _, p := range protocol {
		known[p.header] = p.number
	}
	found := 0
	for name, number := range enumerators(string(text)) {
		// Zero, padding and the ends of the lists have no meaning of their own.
		if !strings.HasPrefix(name, "IPVS_") || strings.HasSuffix(name, "_UNSPEC") || strings.HasSuffix(name, "_PAD") {
			continue
		}
		found++
		if got, ok := known[name]; !ok {
			t.Errorf("the library does not know %s = %d", name, number)
		} else if got != number {
			t.Errorf("%s is %d, in the library %d", name, number, got)
		}
	}
	if found < len(protocol) {
		t.Errorf("found %d names in the header, the library knows %d", found, len(protocol))
	}
}

// enumerators returns the names that C enumerations without explicit values
// declare, with their numbers.
func enumerators(source string) map[string]int {
	source = regexp.MustCompile(`(?s)/\*.*?\*/`).ReplaceAllString(source, "")
	numbers := map[string]int{}
	for _, enum := range regexp.MustCompile(`(?s)enum\s*\{(.*?)\}`).FindAllStringSubmatch(source, -1) {
		for n, field := range strings.Split(enum[1], ",") {
			name, _, _ := strings.Cut(field, "=")
			numbers[strings.TrimSpace(name)] = n
		}
	}
	return numbers
}

func TestEnumeratorsFindsNewOnes(t *testing.T) {
	got := enumerators("enum { A_UNSPEC = 0, /* x, y */ A_ONE,\n A_TWO, };\nenum {\nB, C }")
	for name, want := range map[string]int{"A_UNSPEC": 0, "A_ONE": 1, "A_TWO": 2, "B": 0, "C": 1} {
		if n, ok := got[name]; !ok || n != want {
			t.Errorf("%s is %d, want %d", name, n, want)
		}
	}
}

// Each name of the table exists, and docs/protocol.md lists it.
func TestProtocolNames(t *testing.T) {
	listed := page(t, "docs/protocol.md")
	types := map[string]reflect.Type{}
	for _, v := range []any{Service{}, Destination{}, Daemon{}, Config{}, Info{}, Stats64{}, &Handle{}} {
		typ := reflect.TypeOf(v)
		name := typ.String()
		types[name[strings.LastIndexByte(name, '.')+1:]] = typ
	}
	for _, p := range protocol {
		for _, name := range strings.Split(p.goName, ", ") {
			typ, member, _ := strings.Cut(name, ".")
			var isField bool
			if t := types[typ]; t != nil && t.Kind() == reflect.Struct {
				_, isField = t.FieldByName(member)
			} else if t != nil {
				_, isField = t.MethodByName(member)
			}
			if types[typ] == nil || member != "" && !isField {
				t.Errorf("%s: there is no %s", p.header, name)
			}
		}
		row := fmt.Sprintf("| `%s` | `%s` |", p.header, strings.ReplaceAll(p.goName, ", ", "`, `"))
		if !strings.Contains(listed, row) {
			t.Errorf("docs/protocol.md lacks\n%s", row)
		}
	}
}
