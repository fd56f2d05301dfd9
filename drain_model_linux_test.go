package ipvs

import (
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// drainModel drives a Reconciler through random wanted tables, other writers, lost
// replies, closed handles and new processes, on a clock of its own, and checks what
// draining promises:
//
//   - No destination is deleted by a drain while the kernel has it at a weight.
//   - None that has connections is deleted before its time is up.
//   - No drain lasts longer than its time after weight 0 was confirmed in this process.
//   - In the end everything that is not wanted is deleted.
type drainModel struct {
	t    *testing.T
	rand *rand.Rand
	// The kernel: a new handle, its table, another writer, and connections that come
	// and go.
	open    func() *Handle
	table   func() []TableEntry
	write   func(cmd uint8, s *Service, d *Destination)
	connect func()

	timeout time.Duration
	handle  *Handle
	r       *Reconciler
	clock   time.Time
	want    []TableEntry

	sends    int // until the fault, in this call
	fault    string
	dropping bool
	closing  bool

	// When weight 0 can have become known to this process at the earliest, and when
	// at the latest.
	earliest, latest map[drainKey]time.Time
	quietBefore      map[drainKey]bool // had weight 0 and no connection before this call
	ended, quieted   int
	faults           map[string]int
}

func (x *drainModel) run(steps int) {
	x.clock = time.Unix(1000, 0)
	x.faults = map[string]int{}
	x.newHandle()
	x.newProcess()
	x.want = x.randomTable()
	for range steps {
		switch n := x.rand.IntN(20); {
		case n < 3:
			x.want = x.randomTable()
		case n < 7:
			x.otherWriter()
		case n < 9:
			x.connect()
		case n < 10:
			x.newProcess()
		case n < 11:
			x.clock = x.clock.Add(time.Duration(x.rand.Int64N(int64(3 * time.Minute))))
		default:
			x.clock = x.clock.Add(time.Duration(x.rand.Int64N(int64(10 * time.Second))))
			x.reconcile()
		}
		if x.t.Failed() {
			return
		}
	}
	x.finish()
}

// newHandle opens a handle that watches what is sent, and can lose replies.
func (x *drainModel) newHandle() {
	i := x.open()
	must(x.t, i.SetTimeout(x.timeout))
	send, receive := i.socket.sendmsg, i.socket.recvmsg
	i.socket.sendmsg = func(fd int, b []byte) error {
		if x.sends--; x.sends == 0 {
			switch x.fault {
			case "lost":
				x.dropping = true
			case "closed":
				x.closing = true
				go i.Close() // this is inside of a call
				return unix.EBADF
			}
		}
		x.sent(b)
		return send(fd, b)
	}
	i.socket.recvmsg = func(fd int, b []byte) (int, uint32, error) {
		n, from, err := receive(fd, b)
		if x.dropping && err == nil {
			return 0, 0, unix.EAGAIN
		}
		return n, from, err
	}
	x.handle = i
	if x.r != nil {
		x.r.Handle = i
	}
}

// newProcess forgets everything.
func (x *drainModel) newProcess() {
	x.r = &Reconciler{Handle: x.handle, DrainFor: x.drainFor, now: func() time.Time { return x.clock }}
	x.earliest, x.latest = map[drainKey]time.Time{}, map[drainKey]time.Time{}
}

// The pool of services and destinations, which have few keys.

func (x *drainModel) randomService() *Service {
	s := [...]Service{
		{Address: net.ParseIP(virtual4), Protocol: unix.IPPROTO_TCP, Port: 80},
		{Address: net.ParseIP(virtual4), Protocol: unix.IPPROTO_TCP, Port: 81},
		{Address: net.ParseIP(virtual4), Protocol: unix.IPPROTO_TCP, Flags: ServiceFlagPersistent, Timeout: 1},
		{Address: net.ParseIP(virtual4), Protocol: unix.IPPROTO_UDP, Port: 80},
		{FWMark: 5, AddressFamily: unix.AF_INET},
	}[x.rand.IntN(5)]
	s.Netmask = 0xFFFFFFFF
	s.SchedName = [...]string{"rr", "wrr", "sh", "mh", "dh"}[x.rand.IntN(5)]
	return &s
}

func (x *drainModel) randomDestination() *Destination {
	return &Destination{Address: net.ParseIP(real4), Port: 8080 + uint16(x.rand.IntN(4)), Weight: x.rand.IntN(3)}
}

// limitOf is how long destinations may drain.
func limitOf(s *Service, d *Destination) time.Duration {
	if s.Protocol == unix.IPPROTO_UDP && d.Port == 8080 {
		return 0
	}
	return [...]time.Duration{30 * time.Second, 0, 5 * time.Second, 2 * time.Minute}[d.Port-8080]
}

func (x *drainModel) randomTable() (table []TableEntry) {
	services := map[serviceKey]bool{}
	for range x.rand.IntN(5) {
		s := x.randomService()
		key, _ := sentServiceKey(s)
		if services[key] {
			continue
		}
		services[key] = true
		e := TableEntry{Service: s}
		destinations := map[destinationKey]bool{}
		for range x.rand.IntN(5) {
			d := x.randomDestination()
			key, _ := sentDestinationKey(d)
			if !destinations[key] {
				e.Destinations = append(e.Destinations, d)
			}
			destinations[key] = true
		}
		table = append(table, e)
	}
	if x.rand.IntN(8) == 0 {
		table = append(table, TableEntry{}) // a bad one, which harms nobody
	}
	return table
}

// otherWriter makes some change to the table.
func (x *drainModel) otherWriter() {
	cmds := [...]uint8{cmdNewService, cmdNewDest, cmdNewDest, cmdSetDest, cmdSetDest, cmdSetDest, cmdDelDest, cmdSetService, cmdDelService}
	s, d := x.randomService(), x.randomDestination()
	cmd := cmds[x.rand.IntN(len(cmds))]
	service, _ := sentServiceKey(s)
	destination, _ := sentDestinationKey(d)
	switch cmd { // it may be added again before the test sees that it was deleted
	case cmdDelDest:
		delete(x.latest, drainKey{service, destination})
	case cmdDelService:
		for k := range x.latest {
			if k.service == service {
				delete(x.latest, k)
			}
		}
	}
	x.write(cmd, s, d)
}

// drainFor is what the Reconciler asks whenever it sees a destination that is not wanted.
func (x *drainModel) drainFor(s *Service, d *Destination) time.Duration {
	k := keyOfDrain(x.t, s, d)
	if d.Weight != 0 {
		delete(x.earliest, k)
		delete(x.latest, k)
	} else {
		if _, known := x.earliest[k]; !known {
			x.earliest[k] = x.clock
		}
		if _, known := x.latest[k]; !known {
			x.latest[k] = x.clock
		}
	}
	return limitOf(s, d)
}

func keyOfDrain(t *testing.T, s *Service, d *Destination) drainKey {
	return drainKey{mustGet(sentServiceKey(s))(t), mustGet(sentDestinationKey(d))(t)}
}

// wanted returns a service and a destination as they are wanted, or nil if they are
// not.
func (x *drainModel) wanted(s *Service, d *Destination) (*Service, *Destination) {
	for _, e := range x.want {
		if e.Service == nil || mustGet(sentServiceKey(e.Service))(x.t) != mustGet(sentServiceKey(s))(x.t) {
			continue
		}
		for _, w := range e.Destinations {
			if d != nil && mustGet(sentDestinationKey(w))(x.t) == mustGet(sentDestinationKey(d))(x.t) {
				return e.Service, w
			}
		}
		return e.Service, nil
	}
	return nil, nil
}

// limit is how long a destination that is not wanted may drain, in its service as it
// is wanted.
func (x *drainModel) limit(s *Service, d *Destination) time.Duration {
	wanted, _ := x.wanted(s, nil)
	if wanted == nil {
		wanted = s
		anyPort := *s
		anyPort.Port = 0
		if s.FWMark == 0 {
			if w, _ := x.wanted(&anyPort, nil); w != nil {
				return 0
			}
		}
	}
	if wanted.SchedName == DestinationHashing {
		return 0
	}
	return limitOf(s, d)
}

// sent checks a request that is about to be sent.
func (x *drainModel) sent(b []byte) {
	for len(b) > 0 {
		var msg []byte
		msg, b = cutRequest(b)
		if isFamilyRequest(msg) || cmdOf(msg) == cmdUnspec {
			continue
		}
		s, d := decode(msg)
		switch cmdOf(msg) {
		case cmdSetDest:
			if _, w := x.wanted(s, d); w == nil {
				if d.Weight != 0 {
					x.t.Errorf("gets a weight, but is not wanted: %v %v", s.Rule(), d.Rule())
				}
				x.earliest[keyOfDrain(x.t, s, d)] = x.clock
				x.quieted++
			}
		case cmdDelDest:
			x.deleted(s, d)
		case cmdDelService:
			x.deleted(s, nil)
		}
	}
}

// deleted checks that a destination, or all those of a service, may be deleted.
func (x *drainModel) deleted(s *Service, only *Destination) {
	for _, e := range x.table() {
		if mustGet(sentServiceKey(e.Service))(x.t) != mustGet(sentServiceKey(s))(x.t) {
			continue
		}
		for _, d := range e.Destinations {
			if only != nil && mustGet(sentDestinationKey(only))(x.t) != mustGet(sentDestinationKey(d))(x.t) {
				continue
			}
			limit := x.limit(e.Service, d)
			k := keyOfDrain(x.t, s, d)
			if limit > 0 {
				x.ended++
				if d.Weight != 0 {
					x.t.Errorf("deleted at weight %d: %s %s", d.Weight, serviceName(s), d.Rule())
				}
				since, known := x.earliest[k]
				if d.ActiveConnections+d.InactiveConnections > 0 && (!known || x.clock.Sub(since) < limit) {
					x.t.Errorf("deleted with connections after %v of %v: %s %s", x.clock.Sub(since), limit, serviceName(s), d.Rule())
				}
			}
			delete(x.earliest, k)
			delete(x.latest, k)
		}
	}
}

// reconcile calls Reconcile once, perhaps with a fault, and checks the table
// afterwards.
func (x *drainModel) reconcile() {
	x.fault, x.sends = "", 1+x.rand.IntN(14)
	if n := x.rand.IntN(20); n < 2 {
		x.fault = [...]string{"lost", "closed"}[n]
	}
	for k := range x.latest {
		for _, e := range x.want {
			if e.Service == nil || mustGet(sentServiceKey(e.Service))(x.t) != k.service {
				continue
			}
			for _, d := range e.Destinations {
				delete(x.latest, drainKey{k.service, mustGet(sentDestinationKey(d))(x.t)})
			}
		}
	}
	x.quietBefore = map[drainKey]bool{}
	for _, e := range x.table() {
		for _, d := range e.Destinations {
			if d.Weight == 0 && d.ActiveConnections+d.InactiveConnections == 0 {
				x.quietBefore[keyOfDrain(x.t, e.Service, d)] = true
			}
		}
	}
	changes, err := x.r.Reconcile(x.want)
	x.dropping, x.sends = false, 0
	if x.closing {
		x.closing = false
		x.handle.Close()
		x.newHandle()
	}
	if err == nil || onlyBad(err) {
		x.check(changes)
		return
	}
	if x.fault == "" && !errors.Is(err, os.ErrDeadlineExceeded) { // the machine can be slow
		x.t.Errorf("without a fault: %v", err)
	}
	x.faults[x.fault]++
}

// onlyBad reports whether an error is only about entries that cannot be sent.
func onlyBad(err error) bool {
	var failed *BatchError
	if !errors.As(err, &failed) {
		return false
	}
	for _, op := range failed.Errors {
		if op.Err != errNilService {
			return false
		}
	}
	return true
}

// check checks the table after a call that reached the kernel.
func (x *drainModel) check(changes Changes) {
	draining := 0
	seen := map[drainKey]bool{}
	for _, e := range x.table() {
		for _, d := range e.Destinations {
			k := keyOfDrain(x.t, e.Service, d)
			seen[k] = true
			if _, w := x.wanted(e.Service, d); w != nil {
				if w.Weight != d.Weight {
					x.t.Errorf("wanted with weight %d: %s %s", w.Weight, serviceName(e.Service), d.Rule())
				}
				continue
			}
			draining++
			limit := x.limit(e.Service, d)
			latest, known := x.latest[k]
			switch {
			case d.Weight != 0:
				x.t.Errorf("not wanted, but with a weight: %s %s", serviceName(e.Service), d.Rule())
			case limit <= 0:
				x.t.Errorf("drains, but must not: %s %s", e.Service.Rule(), d.Rule())
			case known && x.clock.Sub(latest) >= limit:
				x.t.Errorf("drains for %v, longer than %v: %s %s", x.clock.Sub(latest), limit, serviceName(e.Service), d.Rule())
			case x.quietBefore[k] && known && d.ActiveConnections+d.InactiveConnections == 0:
				x.t.Errorf("had weight 0 and no connection, and is still there: %s %s", serviceName(e.Service), d.Rule())
			}
		}
		if wanted, _ := x.wanted(e.Service, nil); wanted == nil && len(e.Destinations) == 0 {
			x.t.Errorf("a service without destinations is not wanted, but there: %s", e.Service.Rule())
		}
	}
	for _, e := range x.want {
		for _, d := range e.Destinations {
			if e.Service != nil && !seen[keyOfDrain(x.t, e.Service, d)] {
				x.t.Errorf("wanted, but not there: %s %s", serviceName(e.Service), d.Rule())
			}
		}
	}
	if draining != changes.Draining || (draining == 0) != (changes.RequeueAfter == 0) {
		x.t.Errorf("%d destinations drain, and it returns %+v", draining, changes)
	}
}

// finish waits for the draining destinations, as a caller does, with RequeueAfter.
func (x *drainModel) finish() {
	must(x.t, x.handle.SetTimeout(5*time.Minute))
	began := x.clock
	for looks := 0; ; looks++ {
		x.quietBefore = map[drainKey]bool{}
		changes, err := x.r.Reconcile(x.want)
		if err != nil && !onlyBad(err) {
			x.t.Fatal(err)
		}
		x.check(changes)
		if x.t.Failed() {
			return
		}
		if changes.Draining == 0 {
			break
		}
		if looks > 60 || x.clock.Sub(began) > 2*time.Minute {
			x.t.Fatalf("after %d looks in %v: %+v", looks, x.clock.Sub(began), changes)
		}
		x.clock = x.clock.Add(changes.RequeueAfter)
	}
	b := mustGet(Diff(x.table(), x.want))(x.t)
	for n, c := range b.All() {
		if c.Err == nil {
			x.t.Errorf("the table lacks change %d, %v", n, c)
		}
	}
}

func TestDrainModel(t *testing.T) {
	seeds := uint64(60)
	if testing.Short() {
		seeds = 20
	}
	ended, quieted, faults := 0, 0, map[string]int{}
	for seed := range seeds {
		_, m := newMemory(t)
		x := &drainModel{t: t, rand: rand.New(rand.NewPCG(seed, 1)), open: m.open, table: m.table, timeout: 10 * time.Millisecond}
		x.write = func(cmd uint8, s *Service, d *Destination) { m.apply(cmd, s, d) }
		x.connect = func() {
			for _, e := range m.table() {
				for _, d := range e.Destinations {
					if d.Weight > 0 && x.rand.IntN(2) == 0 {
						m.connect(e.Service, d, d.ActiveConnections+1, d.InactiveConnections)
					} else if x.rand.IntN(3) == 0 {
						m.connect(e.Service, d, 0, d.ActiveConnections)
					}
				}
			}
		}
		x.run(80)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
		ended, quieted = ended+x.ended, quieted+x.quieted
		for fault, n := range x.faults {
			faults[fault] += n
		}
	}
	t.Logf("%d drains ended, %d times weight 0, faults %v", ended, quieted, faults)
	if ended < int(seeds) || quieted < int(seeds) || faults["lost"] < int(seeds)/10 || faults["closed"] < int(seeds)/10 {
		t.Errorf("too little happens: %d drains ended, %d times weight 0, faults %v", ended, quieted, faults)
	}
}
