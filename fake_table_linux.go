package ipvs

// This file has the Fake's table of services and destinations, and the kernel's checks
// of changes to it.

import (
	"math"
	"net/netip"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// fakeTicks are the kernel's ticks a second (CONFIG_HZ).
	fakeTicks = 250

	// fakeBuckets is the size of each of the two hash tables of services.
	fakeBuckets = 256

	fakeVersion = 0x010201 // IP_VS_VERSION_CODE
)

// fakeSchedulers and fakeEngines are those for which the kernel has modules, and
// fakeNoScheduler.
var (
	fakeSchedulers = []string{
		RoundRobin, WeightedRoundRobin, LeastConnection, WeightedLeastConnection, DestinationHashing, SourceHashing,
		WeightedFailover, WeightedOverflow, LocalityBasedLeastConnection, LocalityBasedLeastConnectionWithReplication,
		MaglevHashing, ShortestExpectedDelay, NeverQueue, PowerOfTwoChoices, fakeNoScheduler,
	}
	fakeEngines = []string{"sip"}
)

// fakeNoScheduler is the name for no scheduler.
const fakeNoScheduler = "none"

// fakeTable is the IPVS of one network namespace.
type fakeTable struct {
	services map[serviceKey]*fakeService
	// The services by hash, the oldest first in each bucket. Firewall marks have a
	// table of their own.
	byAddress, byMark [fakeBuckets][]*fakeService
	fakeVariant
	mixed    int // destinations of another family than their service
	trash    map[fakeTrashKey]*fakeDestination
	timeouts [3]uint32      // in ticks, of TCP, TCP after FIN, UDP
	daemons  [2]*fakeDaemon // master, backup
}

// fakeVariant has the differences between kernels.
type fakeVariant struct {
	salt                uint8 // of the hash of services
	schedulers          []string
	connectionTableSize uint32
	maxThreshold        uint32
}

type fakeService struct {
	key serviceKey
	fakeServiceSettings
	destinations []*fakeDestination // the oldest first
	index        map[destinationKey]*fakeDestination
	stats        Stats64
}

// fakeServiceSettings are what UpdateService can change.
type fakeServiceSettings struct {
	scheduler, engine string
	flags             uint32 // without HASHED
	timeout           uint32 // in ticks
	netmask           uint32
}

type fakeDestination struct {
	key     destinationKey
	service *fakeService
	fakeDestinationSettings
	active, inactive, persistent uint32
	stats                        Stats64
}

// fakeDestinationSettings are what UpdateDestination can change.
type fakeDestinationSettings struct {
	method       uint32
	weight       int32
	upper, lower uint32
	tunnelType   uint8
	tunnelPort   uint16
	tunnelFlags  uint16
}

// fakeTrashKey identifies a deleted destination.
type fakeTrashKey struct {
	service     serviceKey
	destination destinationKey
}

func newFakeTable() fakeTable {
	return fakeTable{
		fakeVariant: fakeVariant{schedulers: fakeSchedulers, connectionTableSize: 4096, maxThreshold: math.MaxInt32},
		services:    map[serviceKey]*fakeService{},
		trash:       map[fakeTrashKey]*fakeDestination{},
		timeouts:    [3]uint32{900 * fakeTicks, 120 * fakeTicks, 300 * fakeTicks},
	}
}

// bucket returns the bucket of a service.
func (t *fakeTable) bucket(k serviceKey) *[]*fakeService {
	if k.fwmark != 0 {
		return &t.byMark[uint8(k.fwmark)^t.salt]
	}
	hash := uint8(k.protocol) ^ uint8(k.port>>8) ^ uint8(k.port) ^ t.salt
	for n := 3; n < len(k.address); n += 4 {
		hash ^= k.address[n]
	}
	return &t.byAddress[hash]
}

// eachService calls f with the services in the order of the kernel's list, as long as f
// returns true.
func (t *fakeTable) eachService(f func(*fakeService) bool) {
	for _, table := range []*[fakeBuckets][]*fakeService{&t.byAddress, &t.byMark} {
		for n := range table {
			for _, s := range slices.Backward(table[n]) {
				if !f(s) {
					return
				}
			}
		}
	}
}

// eachDestination calls f with the destinations of the service that a request names, if
// there is one, in the order of the kernel's list, as long as f returns true.
func (t *fakeTable) eachDestination(request []byte, f func(*fakeDestination) bool) {
	attrs, errno := fakeCommandPolicy.parse(request)
	if errno != 0 {
		return
	}
	parsed, errno := parseFakeService(attrs[cmdAttrService], false)
	if errno != 0 || t.services[parsed.key] == nil {
		return
	}
	for _, d := range slices.Backward(t.services[parsed.key].destinations) {
		if !f(d) {
			return
		}
	}
}

// fakeServiceRequest is the service in a request. Its flags replace those in the mask.
type fakeServiceRequest struct {
	key serviceKey
	fakeServiceSettings
	mask uint32
}

// parseFakeService reads the identity of the service in a request and, if full, its
// settings.
func parseFakeService(nest []byte, full bool) (s fakeServiceRequest, _ syscall.Errno) {
	a, errno := fakeServicePolicy.parse(nest)
	byAddress := a.has(svcAttrProtocol, svcAttrAddress, svcAttrPort)
	if nest == nil || errno != 0 || !a.has(svcAttrAddressFamily) || !a.has(svcAttrFWMark) && !byAddress {
		return s, syscall.EINVAL
	}
	s.key.family = a.uint16(svcAttrAddressFamily)
	if !fakeHasFamily(s.key.family) {
		return s, syscall.EAFNOSUPPORT
	}
	if s.key.fwmark = a.uint32(svcAttrFWMark); s.key.fwmark == 0 {
		s.key.protocol = unix.IPPROTO_TCP
		if !a.has(svcAttrFWMark) {
			s.key.protocol, s.key.port = a.uint16(svcAttrProtocol), uint32(a.port(svcAttrPort))
			s.key.address = a.address(svcAttrAddress, s.key.family)
		}
	}
	if !full {
		return s, 0
	}
	if !a.has(svcAttrSchedName, svcAttrFlags, svcAttrTimeout, svcAttrNetmask) {
		return s, syscall.EINVAL
	}
	var flags [8]byte
	copy(flags[:], a[svcAttrFlags])
	s.flags, s.mask = native.Uint32(flags[:]), native.Uint32(flags[4:])
	s.scheduler, s.engine = string(text(a[svcAttrSchedName])), string(text(a[svcAttrPEName]))
	s.timeout = a.uint32(svcAttrTimeout) * fakeTicks // may wrap
	s.netmask = a.uint32(svcAttrNetmask)
	return s, 0
}

func fakeHasFamily(family uint16) bool { return family == unix.AF_INET || family == unix.AF_INET6 }

// parseFakeDestination reads the identity of the destination in a request and, if full,
// its settings.
func parseFakeDestination(nest []byte, serviceFamily uint16, full bool) (k destinationKey, s fakeDestinationSettings, _ syscall.Errno) {
	a, errno := fakeDestPolicy.parse(nest)
	if nest == nil || errno != 0 || !a.has(destAttrAddress, destAttrPort) {
		return k, s, syscall.EINVAL
	}
	if full && !a.has(destAttrForwardingMethod, destAttrWeight, destAttrUpperThreshold, destAttrLowerThreshold) {
		return k, s, syscall.EINVAL
	}
	if k.family = a.uint16(destAttrAddressFamily); k.family == 0 {
		k.family = serviceFamily
	}
	if !fakeHasFamily(k.family) {
		return k, s, syscall.EAFNOSUPPORT
	}
	k.port, k.address = a.port(destAttrPort), a.address(destAttrAddress, k.family)
	return k, fakeDestinationSettings{
		method:      a.uint32(destAttrForwardingMethod) & ConnectionFlagFwdMask,
		weight:      int32(a.uint32(destAttrWeight)),
		upper:       a.uint32(destAttrUpperThreshold),
		lower:       a.uint32(destAttrLowerThreshold),
		tunnelType:  a.uint8(destAttrTunnelType),
		tunnelPort:  a.port(destAttrTunnelPort),
		tunnelFlags: a.uint16(destAttrTunnelFlags),
	}, 0
}

// change carries out a command that changes something.
func (t *fakeTable) change(cmd uint8, attrs fakeAttrs) syscall.Errno {
	switch cmd {
	case cmdFlush:
		for _, s := range t.services {
			t.remove(s)
		}
		return 0
	case cmdSetConfig:
		return t.setConfig(attrs)
	case cmdNewDaemon, cmdDelDaemon:
		return t.changeDaemon(cmd, attrs[cmdAttrDaemon])
	case cmdZero:
		if attrs[cmdAttrService] == nil {
			for _, s := range t.services {
				s.zero()
			}
			return 0
		}
	}
	request, errno := parseFakeService(attrs[cmdAttrService], cmd == cmdNewService || cmd == cmdSetService)
	if errno != 0 {
		return errno
	}
	s := t.services[request.key]
	switch {
	case cmd == cmdNewService && s != nil:
		return syscall.EEXIST
	case cmd == cmdNewService:
		return t.add(request)
	case s == nil:
		return syscall.ESRCH
	case cmd == cmdSetService:
		return t.update(s, request)
	case cmd == cmdDelService:
		t.remove(s)
	case cmd == cmdZero:
		s.zero()
	default:
		return t.changeDestination(cmd, s, attrs[cmdAttrDest])
	}
	return 0
}

// add adds a service.
func (t *fakeTable) add(request fakeServiceRequest) syscall.Errno {
	s := &fakeService{key: request.key, index: map[destinationKey]*fakeDestination{}}
	if errno := t.update(s, request); errno != 0 {
		return errno
	}
	t.services[s.key] = s
	bucket := t.bucket(s.key)
	*bucket = append(*bucket, s)
	return 0
}

// update gives a service the settings in a request.
func (t *fakeTable) update(s *fakeService, request fakeServiceRequest) syscall.Errno {
	switch {
	case !slices.Contains(t.schedulers, request.scheduler):
		return syscall.ENOENT
	case request.engine != "" && !slices.Contains(fakeEngines, request.engine):
		return syscall.ENOENT
	case s.key.family == unix.AF_INET6 && (request.netmask < 1 || request.netmask > 128):
		return syscall.EINVAL
	}
	flags := s.flags&^request.mask | request.flags&request.mask
	s.fakeServiceSettings = request.fakeServiceSettings
	s.flags = flags &^ ServiceFlagHashed
	return 0
}

// remove deletes a service and its destinations.
func (t *fakeTable) remove(s *fakeService) {
	bucket := t.bucket(s.key)
	*bucket = removeFrom(*bucket, s)
	delete(t.services, s.key)
	for _, d := range slices.Backward(s.destinations) {
		t.discard(d)
	}
}

// removeFrom removes an item from a list.
func removeFrom[T comparable](list []T, item T) []T {
	n := slices.Index(list, item)
	return slices.Delete(list, n, n+1)
}

// zero sets the counters of a service and its destinations to zero.
func (s *fakeService) zero() {
	s.stats = Stats64{}
	for _, d := range s.destinations {
		d.stats = Stats64{}
	}
}

// changeDestination carries out a command on a destination.
func (t *fakeTable) changeDestination(cmd uint8, s *fakeService, nest []byte) syscall.Errno {
	key, settings, errno := parseFakeDestination(nest, s.key.family, cmd != cmdDelDest)
	if errno != 0 {
		return errno
	}
	d := s.index[key]
	if cmd == cmdDelDest {
		if d == nil {
			return syscall.ENOENT
		}
		s.destinations = removeFrom(s.destinations, d)
		delete(s.index, key)
		t.discard(d)
		return 0
	}
	// Daemons cannot synchronize such a destination, and only a tunnel reaches it.
	if key.family != s.key.family && (t.daemons != [2]*fakeDaemon{} || settings.method != ConnectionFlagTunnel) {
		return syscall.EINVAL
	}
	switch {
	case settings.weight < 0, settings.lower > settings.upper:
		return syscall.ERANGE
	case settings.upper > t.maxThreshold:
		return syscall.EINVAL
	case settings.tunnelType == TunnelGUE && settings.tunnelPort == 0:
		return syscall.EINVAL
	case cmd == cmdNewDest && d != nil:
		return syscall.EEXIST
	case cmd == cmdNewDest:
		return t.addDestination(s, key, settings)
	case d == nil:
		return syscall.ENOENT
	}
	d.fakeDestinationSettings = settings
	return 0
}

// addDestination adds a destination. One that was deleted before gets its connections
// back, and its counters, too, if the service is still the same.
func (t *fakeTable) addDestination(s *fakeService, key destinationKey, settings fakeDestinationSettings) syscall.Errno {
	trashKey := fakeTrash(s, key)
	d := t.trash[trashKey]
	switch {
	case d == nil:
		if !fakeTakesAddress(key) {
			return syscall.EINVAL
		}
		d = &fakeDestination{key: key}
	case d.service != s:
		d.stats = Stats64{}
	}
	delete(t.trash, trashKey)
	d.service, d.fakeDestinationSettings = s, settings
	s.destinations = append(s.destinations, d)
	s.index[key] = d
	if key.family != s.key.family {
		t.mixed++
	}
	return 0
}

// discard moves a destination that was removed from its service to the trash if it has
// connections or counters.
func (t *fakeTable) discard(d *fakeDestination) {
	if d.key.family != d.service.key.family {
		t.mixed--
	}
	if d.active+d.inactive+d.persistent > 0 || d.stats != (Stats64{}) {
		t.trash[fakeTrash(d.service, d.key)] = d
	}
}

// fakeTrash returns the key of a deleted destination. The family of a firewall-mark
// service is not part of it.
func fakeTrash(s *fakeService, key destinationKey) fakeTrashKey {
	k := fakeTrashKey{service: s.key, destination: key}
	if s.key.fwmark != 0 {
		k.service.family = 0
	}
	return k
}

// fakeTakesAddress reports whether a destination can have an address: a unicast one and,
// for IPv6, not a link-local one.
func fakeTakesAddress(k destinationKey) bool {
	if k.family == unix.AF_INET6 {
		a := netip.AddrFrom16(k.address)
		return !a.IsUnspecified() && !a.IsMulticast() && !a.IsLinkLocalUnicast() && !a.Is4In6()
	}
	a := [4]byte(k.address[:4])
	switch {
	case a == [4]byte{}, a[0]&0xF0 == 0xE0, a == [4]byte{255, 255, 255, 255}:
		return false
	case a == [4]byte{127, 255, 255, 255}: // the broadcast address of 127.0.0.1/8
		return false
	}
	return true
}
