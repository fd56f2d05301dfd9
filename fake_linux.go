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
// programs that use this package: no root, no module, no virtual machine. Its handles
// have the type that production code uses, and exchange the kernel's own messages with
// it: everything above the system calls is the code that runs in production.
//
//	kernel := ipvs.NewFake()
//	p := newProxier(kernel.Handle())
//
// It makes the checks of Linux 6.12, in the same order and with the same error numbers,
// and lists entries in the same order. The other kernels that this package is tested
// with differ in a few details:
//
//   - Debian's 5.10 and 6.1 have no scheduler "twos".
//   - 5.10 accepts thresholds above 2^31-1.
//   - On 7.2 the order of services is random, and GetInfo returns a smaller connection
//     table as long as there are few connections.
//   - On the others the order of services depends on the address of the network
//     namespace in the kernel's memory, with 256 possibilities. The Fake always uses the
//     same one.
//
// The kernel counts Service.Timeout in clock ticks. The Fake has 250 per second, like
// Debian's kernels.
//
// A Fake represents a network namespace with the address 127.0.0.1, in which every
// interface that a synchronization daemon names exists, with an MTU of 1,500 bytes; use
// Fail for ENODEV. All schedulers and the persistence engine "sip" are available. There
// is no traffic, and daemons do nothing: connections and counters are set with
// SetConnections and SetStats. As in the kernel, a destination that is deleted and added
// again to its service gets its connections and counters back; the kernel forgets them
// after some minutes, the Fake does not.
//
// Calls that do not use netlink are not supported: Connections, GetSysctl, SetSysctl and
// GetTotals return an error that matches errors.ErrUnsupported.
//
// NewFake returns one; the zero value is not usable. A Fake is safe for concurrent use.
// It has no goroutine and no descriptor, and needs no Close.
type Fake struct {
	mu     sync.Mutex
	table  fakeTable
	faults map[string][]error // of the next calls, by method
	ports  uint32             // the port id of the newest socket
}

// NewFake returns a kernel with an empty table.
func NewFake() *Fake {
	return &Fake{table: newFakeTable(), faults: map[string][]error{}}
}

// Handle returns a new handle. All handles of a Fake share one table. Closing one does
// not affect the others or the table.
func (f *Fake) Handle() *Handle {
	// The family is set, since setup would share it with handles on the real kernel.
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

// SetConnections sets the numbers of a destination's active and inactive connections
// and of its persistence entries. No call on a handle changes them. The error is ESRCH
// if there is no such service, and ENOENT if it has no such destination.
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

// SetStats sets the counters of a destination, or of the service itself if d is nil.
// The 32-bit counters in Service.Stats and Destination.Stats have their low 32 bits.
// Zero and ZeroService set them to zero. The error is ESRCH if there is no such service,
// and ENOENT if it has no such destination.
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

// Fail sets how the next call of the method op ends, on any handle. If err is an error
// number, the call fails with it, and the table stays as it is. If err is
// os.ErrDeadlineExceeded, the call has its effect, but its reply is lost. If err is nil,
// the call ends as it would have without Fail. Further calls of Fail for the same method
// apply to the calls after that one.
//
// Every change of a batch, and of Reconcile, counts as a call of its method, such as
// "NewDestination". If the reply to it is lost, so are those to the later changes that
// were sent together with it. GetTable and Reconcile read with "GetServices" and
// "GetDestinations", and IsServicePresent with "GetService".
//
// Fail panics if op is not a method that sends a request, or if err is none of these.
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

// fakeMethods are the methods of Handle that send one request each.
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

// fault removes and returns the error with which the next call of a method is to end.
func (f *Fake) fault(method string) error {
	faults := f.faults[method]
	if len(faults) == 0 {
		return nil
	}
	f.faults[method] = faults[1:]
	return faults[0]
}
