package ipvs

import (
	"fmt"
	"net"
)

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
func (i *Handle) Zero() error { return i.change(cmdZero, nil) }

// ZeroService sets the counters of one service and its destinations to zero
// (IPVS_CMD_ZERO). The kernel refuses with ESRCH if there is none.
func (i *Handle) ZeroService(s *Service) error { return i.change(cmdZero, identity(s)) }

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
