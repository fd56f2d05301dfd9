package ipvs

import "testing"

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
