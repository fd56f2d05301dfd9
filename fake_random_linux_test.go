package ipvs

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"reflect"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Random operations for the Fake and a kernel side by side. Values come from small
// pools, so that services and destinations recur.

// fakeOperation is a call that both get, and its service.
type fakeOperation struct {
	format  string // of its name, which is only made to be printed
	args    []any
	service *Service // nil: of all
	do      func(*Handle) (any, error)
	changes int  // of a batch
	lists   bool // reads the list of services
}

func (o fakeOperation) String() string { return fmt.Sprintf(o.format, o.args...) }

// fakeRandom makes random calls. It remembers their services and destinations, and uses
// them again.
type fakeRandom struct {
	*rand.Rand
	recent *[60]TableEntry // with one destination each
}

func newFakeRandom(seed uint64) fakeRandom {
	return fakeRandom{rand.New(rand.NewPCG(seed, 1)), new([60]TableEntry)}
}

// place returns a service and a destination for a call, often ones that were used
// before.
func (r fakeRandom) place() (*Service, *Destination) {
	e := &r.recent[r.IntN(len(r.recent))]
	if e.Service == nil || r.rarely(40) {
		s, d := r.identity(), r.destination()
		for !r.rarely(4) && (d.Address.To4() == nil) != (s.Address.To4() == nil) { // mostly of one family
			d = r.destination()
		}
		*e = TableEntry{s, []*Destination{d}}
	}
	s, d := *e.Service, r.destination()
	if !r.rarely(8) {
		d.Address, d.Port, d.AddressFamily = e.Destinations[0].Address, e.Destinations[0].Port, e.Destinations[0].AddressFamily
	}
	return &s, d
}

func oneOf[T any](r fakeRandom, from ...T) T { return from[r.IntN(len(from))] }

// rarely is true once in n times.
func (r fakeRandom) rarely(n int) bool { return r.IntN(n) == 0 }

var (
	randomAddresses = []string{"10.0.0.1", "10.0.0.2", "10.0.1.1", "2001:db8::1", "2001:db8::2"}
	// oddAddresses are addresses that a kernel may reject.
	oddAddresses = []string{"0.0.0.0", "0.1.2.3", "127.0.0.1", "127.255.255.255", "169.254.1.1", "224.0.0.1", "239.1.2.3",
		"240.0.0.1", "255.255.255.255", "255.255.255.254", "192.0.2.255", "::", "::1", "::2", "::10.0.0.1", "::ffff:10.0.0.1",
		"fe80::1", "febf::1", "fec0::1", "fc00::1", "ff02::1", "ff0e::1", "64:ff9b::1", "2002::1", "100::1"}
)

func (r fakeRandom) address() net.IP {
	if r.rarely(8) {
		return net.ParseIP(oneOf(r, oddAddresses...))
	}
	a := net.ParseIP(oneOf(r, randomAddresses...))
	if v4 := a.To4(); v4 != nil && r.rarely(2) {
		return v4
	}
	return a
}

func (r fakeRandom) family() uint16 {
	if r.rarely(10) {
		return oneOf[uint16](r, unix.AF_INET, unix.AF_INET6, 1, 99, math.MaxUint16)
	}
	return 0
}

func (r fakeRandom) identity() *Service {
	s := &Service{Address: r.address(), Protocol: oneOf[uint16](r, unix.IPPROTO_TCP, unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP),
		Port: oneOf[uint16](r, 80, 80, 443, 21, 0), AddressFamily: r.family()}
	switch {
	case r.rarely(4):
		s.FWMark = oneOf[uint32](r, 1, 2, 0x101, 0x80000000, math.MaxUint32)
		s.AddressFamily = oneOf[uint16](r, unix.AF_INET, unix.AF_INET, unix.AF_INET, unix.AF_INET6, unix.AF_INET6, unix.AF_INET6, 0, 99)
	case r.rarely(20):
		s.Protocol, s.Port = oneOf[uint16](r, 0, 1, 47, 255, 256+6, math.MaxUint16), math.MaxUint16
	}
	return s
}

func (r fakeRandom) scheduler() string {
	if r.rarely(300) { // the kernel looks for a module
		return oneOf(r, "", "nosuch", "RR", "rr ", "ftp", "pe_sip", "123456789012345", "1234567890123456", "r\x00r")
	}
	return oneOf(r, fakeSchedulers...)
}

func (r fakeRandom) service() *Service {
	s, _ := r.place()
	s.SchedName = r.scheduler()
	s.Flags = oneOf[uint32](r, 0, 0, ServiceFlagPersistent, ServiceFlagHashed, ServiceFlagOnePacket, ServiceFlagSched1|ServiceFlagSched2,
		ServiceFlagSched3|ServiceFlagPersistent, 0x40, math.MaxUint32)
	s.Timeout = oneOf[uint32](r, 0, 1, 360, 4294967, 4294968, 17179869, 17179870, 1<<31, math.MaxUint32)
	s.Netmask = oneOf[uint32](r, math.MaxUint32, 0, 32, 24, 64, 128, 129, 1)
	if r.rarely(5) {
		s.PEName = "sip"
	} else if r.rarely(300) {
		s.PEName = oneOf(r, "nosuch", "SIP", "12345678901234567")
	}
	return s
}

func (r fakeRandom) destination() *Destination {
	d := &Destination{Address: r.address(), Port: oneOf[uint16](r, 80, 80, 8080, 0, math.MaxUint16), AddressFamily: r.family(),
		Weight:          oneOf(r, 0, 1, 1, 100, 65537, math.MaxInt32),
		ConnectionFlags: oneOf[uint32](r, 0, 0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8, 0x102, math.MaxUint32)}
	if r.rarely(20) {
		d.Weight = oneOf(r, -1, math.MaxInt)
	}
	if r.rarely(3) {
		d.UpperThreshold = oneOf[uint32](r, 0, 1, 100, math.MaxInt32, math.MaxInt32+1, math.MaxUint32)
		d.LowerThreshold = oneOf[uint32](r, 0, 1, 50, 100, math.MaxInt32, math.MaxUint32)
	}
	if r.rarely(3) {
		d.TunnelType = oneOf[uint8](r, TunnelIPIP, TunnelGUE, TunnelGRE, 3, math.MaxUint8)
		d.TunnelPort = oneOf[uint16](r, 0, 6080, math.MaxUint16)
		d.TunnelFlags = oneOf[uint16](r, 0, TunnelFlagChecksum, TunnelFlagRemoteChecksum, math.MaxUint16)
	}
	return d
}

func (r fakeRandom) config() *Config {
	timeout := func() time.Duration {
		return oneOf(r, 0, 0, time.Second, 900*time.Second, 90*time.Minute+time.Millisecond, 2147483*time.Second, 2147484*time.Second,
			8589934*time.Second, 8589935*time.Second, math.MaxInt32*time.Second, time.Millisecond, -1, math.MaxInt64)
	}
	return &Config{timeout(), timeout(), timeout()}
}

func (r fakeRandom) daemon() *Daemon {
	d := &Daemon{State: oneOf(r, DaemonMaster, DaemonBackup, 3), MulticastInterface: "sync", SyncID: oneOf[uint32](r, 0, 1, 255, 256),
		SyncMaxLen: oneOf[uint16](r, 0, 1, 1000, 1024, 1473, math.MaxUint16), MulticastTTL: oneOf[uint8](r, 0, 1, 255)}
	if r.rarely(2) {
		d.MulticastPort = oneOf[uint16](r, 8848, 12345)
	}
	if r.rarely(2) {
		d.MulticastGroup = net.ParseIP(oneOf(r, "224.0.0.81", "239.1.2.3", "10.0.0.1", "ff02::81", "2001:db8::1"))
	}
	if r.rarely(20) {
		d.MulticastInterface = "1234567890123456"
	}
	return d
}

// startAndList returns a call that starts a daemon and lists those that run.
func startAndList(d *Daemon) func(*Handle) (any, error) {
	return func(i *Handle) (any, error) {
		err := i.NewDaemon(d)
		daemons, listErr := i.GetDaemons()
		return daemons, firstError(err, listErr)
	}
}

// operation returns a random call.
func (r fakeRandom) operation() fakeOperation {
	op := func(s *Service, do func(*Handle) (any, error), format string, args ...any) fakeOperation {
		return fakeOperation{format: format, args: args, service: s, do: do}
	}
	change := func(s *Service, do func(*Handle) error, format string, args ...any) fakeOperation {
		return op(s, func(i *Handle) (any, error) { return nil, do(i) }, format, args...)
	}
	s, d := r.place()
	switch k := r.IntN(1000); {
	case k < 160:
		s := r.service()
		return change(s, func(i *Handle) error { return i.NewService(s) }, "NewService %+v", s)
	case k < 210:
		s := r.service()
		return change(s, func(i *Handle) error { return i.UpdateService(s) }, "UpdateService %+v", s)
	case k < 230:
		return change(s, func(i *Handle) error { return i.DelService(s) }, "DelService %+v", s)
	case k < 500:
		return change(s, func(i *Handle) error { return i.NewDestination(s, d) }, "NewDestination %+v %+v", s, d)
	case k < 620:
		return change(s, func(i *Handle) error { return i.UpdateDestination(s, d) }, "UpdateDestination %+v %+v", s, d)
	case k < 700:
		return change(s, func(i *Handle) error { return i.DelDestination(s, d) }, "DelDestination %+v %+v", s, d)
	case k < 710:
		b := r.batch()
		o := change(nil, func(i *Handle) error { return i.Do(b) }, "Do\n%v", b)
		o.changes = b.Len()
		return o
	case k < 715:
		o := op(nil, func(i *Handle) (any, error) { return i.GetServices() }, "GetServices")
		o.lists = true
		return o
	case k < 725:
		return op(nil, func(i *Handle) (any, error) { return i.GetConfig() }, "GetConfig")
	case k < 750:
		c := r.config()
		return change(nil, func(i *Handle) error { return i.SetConfig(c) }, "SetConfig %+v", c)
	case k < 755:
		return op(nil, func(i *Handle) (any, error) { return i.GetInfo() }, "GetInfo")
	case k < 760:
		return change(nil, (*Handle).Zero, "Zero")
	case k < 770:
		return change(s, func(i *Handle) error { return i.ZeroService(s) }, "ZeroService %+v", s)
	case k < 772:
		return change(nil, (*Handle).Flush, "Flush")
	case k < 782:
		d := r.daemon()
		return op(nil, startAndList(d), "NewDaemon and GetDaemons %+v", d)
	case k < 800:
		state := oneOf(r, DaemonMaster, DaemonBackup, 0, 3, math.MaxUint32)
		return change(nil, func(i *Handle) error { return i.DelDaemon(state) }, "DelDaemon %v", state)
	case k < 810:
		return op(nil, func(i *Handle) (any, error) { return i.GetDaemons() }, "GetDaemons")
	case k < 820:
		return op(s, func(i *Handle) (any, error) { return i.IsServicePresent(s), nil }, "IsServicePresent %+v", s)
	case k < 822:
		want := r.table()
		o := op(nil, func(i *Handle) (any, error) { return (&Reconciler{Handle: i}).Reconcile(want) }, "Reconcile %d services", len(want))
		o.lists = true
		return o
	}
	return r.rawOperation()
}

// table returns a table to reconcile with, which may have invalid entries.
func (r fakeRandom) table() (table []TableEntry) {
	for range r.IntN(20) {
		e := TableEntry{Service: r.service()}
		for range r.IntN(5) {
			e.Destinations = append(e.Destinations, r.destination())
		}
		table = append(table, e)
	}
	return table
}

// batch returns some changes.
func (r fakeRandom) batch() *Batch {
	var b Batch
	for range 1 + r.IntN(oneOf(r, 5, 50, 300)) {
		switch s, d := r.place(); r.IntN(6) {
		case 0:
			b.NewService(r.service())
		case 1:
			b.UpdateService(r.service())
		case 2:
			b.DelService(s)
		case 3:
			b.NewDestination(s, d)
		case 4:
			b.UpdateDestination(s, d)
		case 5:
			b.DelDestination(s, d)
		}
	}
	return &b
}

// rawOperation returns a request that the library does not send: with attributes that
// are missing, unknown, truncated, too long or duplicated, and with commands that do
// not exist.
func (r fakeRandom) rawOperation() fakeOperation {
	cmd := oneOf(r, cmdNewService, cmdNewService, cmdSetService, cmdSetService, cmdDelService, cmdNewDest, cmdNewDest, cmdSetDest,
		cmdSetDest, cmdDelDest, cmdZero, cmdGetService, cmdGetDest, cmdSetConfig, cmdDelDaemon)
	if r.rarely(20) {
		cmd = oneOf(r, cmdUnspec, cmdSetInfo, cmdFlush+1, uint8(math.MaxUint8), cmdGetDaemon, cmdGetConfig, cmdGetInfo)
	}
	var flags uint16 = unix.NLM_F_ACK
	// For unknown commands, newer kernels check the flags first.
	if cmd == cmdGetService || cmd == cmdGetDest || r.rarely(20) && cmd <= cmdFlush {
		flags = oneOf[uint16](r, unix.NLM_F_ACK, unix.NLM_F_DUMP, unix.NLM_F_ROOT|unix.NLM_F_ACK, unix.NLM_F_MATCH|unix.NLM_F_ACK)
	}
	s := r.service()
	identity, d := r.place()
	if cmd != cmdNewService && cmd != cmdSetService {
		s = identity
	}
	if r.rarely(2) {
		d.Address, d.AddressFamily = net.ParseIP(oneOf(r, oneOf(r, oddAddresses...), "::ffff:10.0.0.1")), 0
		if s.Address.To4() == nil {
			d.AddressFamily = unix.AF_INET6 // the library makes none of these with an IPv4 address
		}
	}
	if s.Address.To4() == nil {
		s.AddressFamily = unix.AF_INET6
	}
	netmask := s.Netmask // the library checks it
	s.Netmask = 1
	body, _ := fillService(nil, s, r.rarely(2) || cmd == cmdNewService || cmd == cmdSetService)
	if cmd >= cmdNewDest && cmd <= cmdDelDest {
		body, _ = fillDestination(body, d, cmd != cmdDelDest || r.rarely(2))
	}
	switch cmd {
	case cmdNewService, cmdSetService: // flags that a mask chooses
		body = withAttr(body, cmdAttrService, svcAttrNetmask, ne32(oneOf(r, netmask, 0, 128, 129)))
		mask := oneOf[uint32](r, 0, 1, 0x38, 0x3D, math.MaxUint32)
		body = withAttr(body, cmdAttrService, svcAttrFlags, append(ne32(oneOf(r, 0, s.Flags, math.MaxUint32)), ne32(mask)...))
		if r.rarely(8) {
			name := append([]byte(oneOf(r, fakeSchedulers...)), make([]byte, 1+r.IntN(22))...)
			body = withAttr(body, cmdAttrService, svcAttrSchedName, name)
		}
	case cmdNewDest, cmdSetDest:
		if r.rarely(2) {
			body = withAttr(body, cmdAttrDest, destAttrWeight, ne32(oneOf[uint32](r, 1<<31, math.MaxUint32)))
		}
	case cmdSetConfig:
		body = nil
		for typ := cmdAttrTimeoutTCP; typ <= cmdAttrTimeoutUDP; typ++ {
			body = appendUint32(body, typ, oneOf[uint32](r, 0, 7, 8589934, 8589935, math.MaxInt32, 1<<31, math.MaxUint32))
		}
	case cmdDelDaemon:
		body = attr(cmdAttrDaemon, attr(daemonAttrState, ne32(oneOf[uint32](r, 0, 3, 4, math.MaxUint32))))
	}
	for range oneOf(r, 0, 0, 1, 2) {
		body = r.mutate(body, r.rarely(6))
	}
	fill := func(b []byte) ([]byte, error) { return append(b, body...), nil }
	return fakeOperation{lists: cmd == cmdGetService, format: "command %d, flags %#x, %x", args: []any{cmd, flags, body}, do: func(i *Handle) (any, error) {
		var got []string
		err := i.call(cmd, flags, fill, parserFunc(func(attrs []byte) error {
			got = append(got, string(attrs))
			return nil
		}))
		return got, err
	}}
}

// withAttr adds an attribute inside one of the first level, where it replaces any before it.
func withAttr(body []byte, nest, typ uint16, value []byte) (out []byte) {
	for a := (attributes{level: body}); a.next(); {
		inner := a.value()
		if a.typ == nest {
			inner = slices.Concat(inner, attr(typ, value))
		}
		out = append(out, attr(a.typ, inner)...)
	}
	return out
}

// mutate changes an attribute, of the first level or inside one of it.
func (r fakeRandom) mutate(body []byte, first bool) []byte {
	type attribute struct {
		typ   uint16
		value []byte
	}
	var level []attribute
	for a := (attributes{level: body}); a.next(); {
		level = append(level, attribute{a.typ, slices.Clone(a.value())})
	}
	if len(level) == 0 {
		return append(body, make([]byte, r.IntN(6))...)
	}
	n := r.IntN(len(level))
	at := &level[n]
	if !first && len(at.value) > 8 {
		at.value = r.mutate(at.value, true)
	} else {
		switch r.IntN(9) {
		case 0:
			level = slices.Delete(level, n, n+1)
		case 1:
			level = append(level, attribute{at.typ, at.value})
		case 2:
			at.value = at.value[:r.IntN(len(at.value)+1)]
		case 3:
			at.value = append(at.value, make([]byte, 1+r.IntN(20))...)
		case 4:
			at.value = append(at.value, 'x')
		case 5:
			at.typ = uint16(r.IntN(20))
		case 6:
			at.typ |= oneOf[uint16](r, 0x8000, 0x4000)
		case 7:
			for k := range at.value {
				at.value[k] = oneOf[byte](r, 0, 0, 1, 0x7f, 0x80, 0xff)
			}
		case 8:
			level = append(level, attribute{uint16(oneOf(r, 0, 6, 7, 16, 1000)), []byte("xyz\x00")})
		}
	}
	var out []byte
	for _, a := range level {
		out = append(out, attr(a.typ, a.value)...)
	}
	if r.rarely(20) {
		out = append(out, []byte{9, 0, 1}[:1+r.IntN(3)]...)
	}
	if r.rarely(20) && len(out) > 4 {
		native.PutUint16(out, uint16(r.IntN(len(out)+8))) // a length that may not be
	}
	return out
}

// equalErrors reports whether two errors are the same; those of a batch are compared
// one by one.
func equalErrors(a, b error) bool {
	var failedA, failedB *BatchError
	switch {
	case a == nil || b == nil:
		return a == b
	case errors.As(a, &failedA) && errors.As(b, &failedB):
		return slices.EqualFunc(failedA.Errors, failedB.Errors, func(a, b *OpError) bool {
			return a.Index == b.Index && a.Op == b.Op && a.Message == b.Message && equalErrors(a.Err, b.Err)
		})
	case reflect.TypeOf(a) != reflect.TypeOf(b):
		return false
	}
	return a == b || a.Error() == b.Error()
}

// describe prints a result and its error.
func describeResult(result any, err error) string {
	var b strings.Builder
	fmt.Fprintf(&b, "error %v (%T)\n", err, err)
	var failed *BatchError
	if errors.As(err, &failed) {
		b.Reset()
		for _, op := range failed.Errors {
			fmt.Fprintf(&b, "%v (%T)\n", op, op.Err)
		}
	}
	switch v := result.(type) {
	case *Config:
		fmt.Fprintf(&b, "%+v", v)
	case *Info:
		fmt.Fprintf(&b, "%+v", v)
	case *Service:
		if v != nil {
			fmt.Fprintf(&b, "%+v", *v)
		}
	case []*Daemon:
		for _, d := range v {
			fmt.Fprintf(&b, "%+v\n", *d)
		}
	case []TableEntry:
		for _, e := range v {
			fmt.Fprintf(&b, "%+v\n%s\n", *e.Service, show(e.Destinations))
		}
	case []string:
		for _, attrs := range v {
			fmt.Fprintf(&b, "%x\n", attrs)
		}
	default:
		b.WriteString(show(v))
	}
	return b.String()
}
