package ipvs

// This file has the Fake, a kernel in memory for tests.

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"
	"syscall"
)

// Fake is an IPVS table in memory that answers as the kernel does, for tests of
// programs that use this package: no root, no module, no virtual machine. Its
// handles are those that production code uses, and speak to it in the kernel's own
// messages: everything above the system calls is what runs in production.
//
//	kernel := ipvs.NewFake()
//	p := newProxier(kernel.Handle())
//
// It checks what Linux 6.12 checks, in the same order and with the same error
// numbers, and lists in the same order. Of the other kernels that this package is
// tested with, Debian's 5.10 and 6.1 have no scheduler "twos", 5.10 takes thresholds
// above 2^31-1, and on 7.2 the order of services is random and the connection table
// of GetInfo smaller as long as there are few connections. On all but 7.2 the order of
// services depends on where the kernel keeps the network namespace in memory, in one
// of 256 ways: the Fake's is one of these, always the same. The kernel counts
// Service.Timeout in ticks, of which the Fake, as Debian's kernels, has 250 a second.
//
// It stands for a network namespace that has the address 127.0.0.1, and where a
// synchronization daemon finds any interface, with an MTU of 1,500 bytes: use Fail
// for ENODEV. All schedulers and the persistence engine "sip" are there. Packets do
// not flow, daemons do nothing: connections and counters are what SetConnections
// and SetStats say. As in the kernel a destination that is deleted and added again
// to its service has its connections and counters back; the kernel forgets them
// after some minutes, the Fake does not.
//
// What does not go over netlink is not there: Connections, GetSysctl, SetSysctl and
// GetTotals end with an error that matches errors.ErrUnsupported.
//
// A Fake is safe for concurrent use. It has no goroutine and no descriptor, and
// needs no Close.
type Fake struct {
	mu     sync.Mutex
	table  fakeTable
	faults map[string][]error // of the next calls, by method
	ports  uint32             // the port id given to a socket last
}

// NewFake returns a kernel with an empty table.
func NewFake() *Fake {
	return &Fake{table: newFakeTable(), faults: map[string][]error{}}
}

// Handle returns a new handle. All handles of a Fake work on one table. Closing one
// does not touch the others or the table.
func (f *Fake) Handle() *Handle {
	// The family is known: else to look it up would tell other handles of it.
	i := &Handle{socket: f.open(), family: fakeFamilyID}
	i.timeout.Store(int64(defaultTimeout))
	return i
}

// open opens a socket to the Fake.
func (f *Fake) open() *socket {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ports++
	s := &fakeSocket{fake: f, portID: f.ports}
	return newSocketFunc(s.portID, s.sendmsg, s.recvmsg, f.open)
}

// SetConnections sets the numbers of connections of a destination: active,
// inactive, and persistence entries. They stay until they are set again; what the
// handles do does not change them. The error is ESRCH if there is no such service,
// and ENOENT if it has no such destination.
func (f *Fake) SetConnections(s *Service, d *Destination, active, inactive, persistent int) error {
	for _, n := range []int{active, inactive, persistent} {
		if n < 0 || n > math.MaxInt32 {
			return fmt.Errorf("ipvs: %d connections are not in 0..%d: %w", n, math.MaxInt32, syscall.ERANGE)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	_, destination, err := f.find(s, d)
	if err != nil {
		return err
	}
	destination.active, destination.inactive, destination.persistent = uint32(active), uint32(inactive), uint32(persistent)
	return nil
}

// SetStats sets the counters of a destination, or of the service itself if d is
// nil. Service.Stats and Destination.Stats are the low 32 bits of them, but for the
// bytes. Zero and ZeroService set them to zero. The error is ESRCH if there is no
// such service, and ENOENT if it has no such destination.
func (f *Fake) SetStats(s *Service, d *Destination, stats Stats64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	service, destination, err := f.find(s, d)
	switch {
	case err != nil && (d != nil || service == nil):
		return err
	case d == nil:
		service.stats = stats
	default:
		destination.stats = stats
	}
	return nil
}

// find returns a service and its destination. The caller holds f.mu.
func (f *Fake) find(s *Service, d *Destination) (*fakeService, *fakeDestination, error) {
	key, err := sentServiceKey(s)
	if err != nil {
		return nil, nil, err
	}
	service := f.table.services[key]
	if service == nil {
		return nil, nil, syscall.ESRCH
	}
	destKey, err := sentDestinationKey(d)
	if err != nil {
		return service, nil, err
	}
	destination := service.index[destKey]
	if destination == nil {
		return service, nil, syscall.ENOENT
	}
	return service, destination, nil
}

// Fail says how the next call of a method of Handle ends, on any handle: with an
// error number, and then the table is as before; with os.ErrDeadlineExceeded, where
// the kernel does what it is asked to and its answer is lost; or with nil, as it
// would have. More calls of Fail for the same method are for the calls after it.
//
// Every change of a batch, and of Reconcile, counts as a call of its method, such as
// "NewDestination". If its answer is lost, so are those to the changes that were
// sent with it and come after it. GetTable and Reconcile read with "GetServices" and
// "GetDestinations", and IsServicePresent with "GetService".
//
// Fail panics if there is no such method, or the error is none of these.
func (f *Fake) Fail(op string, err error) {
	if !slices.Contains(fakeMethods, op) {
		panic(fmt.Sprintf("ipvs: Fake.Fail: %q is not one of %q", op, fakeMethods))
	}
	var errno syscall.Errno
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) && (!errors.As(err, &errno) || errno <= 0 || errno > fakeMaxErrno) {
		panic(fmt.Sprintf("ipvs: Fake.Fail: %v is neither an error number nor os.ErrDeadlineExceeded", err))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faults[op] = append(f.faults[op], err)
}

// fakeMethods are the methods that send one request each.
var fakeMethods = []string{
	"NewService", "UpdateService", "DelService", "GetService", "GetServices",
	"NewDestination", "UpdateDestination", "DelDestination", "GetDestinations",
	"NewDaemon", "DelDaemon", "GetDaemons",
	"GetConfig", "SetConfig", "GetInfo", "Zero", "ZeroService", "Flush",
}

// fakeMethod returns the name of the method that sends a command.
func fakeMethod(cmd uint8, dump, ofService bool) string {
	switch {
	case cmd == cmdGetService && dump:
		return "GetServices"
	case cmd == cmdZero && ofService:
		return "ZeroService"
	}
	switch cmd {
	case cmdGetService:
		return "GetService"
	case cmdGetDest:
		return "GetDestinations"
	case cmdNewDaemon:
		return "NewDaemon"
	case cmdDelDaemon:
		return "DelDaemon"
	case cmdGetDaemon:
		return "GetDaemons"
	case cmdGetConfig:
		return "GetConfig"
	case cmdSetConfig:
		return "SetConfig"
	case cmdGetInfo:
		return "GetInfo"
	case cmdZero:
		return "Zero"
	case cmdFlush:
		return "Flush"
	}
	return opName(cmd)
}

// fault returns how the next call of a method is to end, and forgets it.
func (f *Fake) fault(method string) error {
	faults := f.faults[method]
	if len(faults) == 0 {
		return nil
	}
	f.faults[method] = faults[1:]
	return faults[0]
}
