package ipvs

// This file has the errors of the package, and hints on error numbers that mislead.

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

var (
	// ErrNotSupported reports that the running kernel has no IPVS, and that IPVS could
	// not be loaded.
	ErrNotSupported = errors.New("ipvs: the kernel has no IPVS: load the ip_vs module (modprobe ip_vs), or run a kernel built with CONFIG_IP_VS")

	// ErrClosed reports that the handle is closed, or was closed during the call, in
	// which case the outcome is unknown. It matches net.ErrClosed, too.
	ErrClosed = fmt.Errorf("ipvs: the handle is closed: %w", net.ErrClosed)
)

// ErrOutcomeUnknown reports that the outcome of a change is unknown: the kernel may or
// may not have made it.
var ErrOutcomeUnknown = errors.New("ipvs: the outcome is unknown")

// errTruncated reports that a datagram was larger than the buffer for it.
var errTruncated = errors.New("ipvs: the kernel's reply was larger than the buffer for it")

// errInterrupted reports that the kernel marked a list as inconsistent, since the
// table changed meanwhile (NLM_F_DUMP_INTR).
var errInterrupted = fmt.Errorf("ipvs: the dump was interrupted by changes to the table: %w", unix.EINTR)

var (
	errNilService     = errors.New("ipvs: the service is nil")
	errNilDestination = errors.New("ipvs: the destination is nil")
)

// BatchError lists the changes of a batch that failed. errors.Is and errors.As reach
// each of them.
type BatchError struct {
	Errors []*OpError // in the order of the batch
	total  int
}

// newBatchError returns the error of a batch of total changes, of which some failed.
func newBatchError(failed []*OpError, total int) *BatchError {
	slices.SortFunc(failed, func(a, b *OpError) int { return cmp.Compare(a.Index, b.Index) })
	return &BatchError{Errors: failed, total: total}
}

// Error names the first few changes that failed.
func (e *BatchError) Error() string {
	const shown = 16
	var b strings.Builder
	fmt.Fprintf(&b, "ipvs: %d of %d changes failed", len(e.Errors), e.total)
	for n, op := range e.Errors {
		if n == shown {
			fmt.Fprintf(&b, "; and %d more", len(e.Errors)-shown)
			break
		}
		b.WriteString("; ")
		b.WriteString(op.Error())
	}
	return b.String()
}

// Unwrap returns the errors of the individual changes.
func (e *BatchError) Unwrap() []error {
	errs := make([]error, len(e.Errors))
	for n, op := range e.Errors {
		errs[n] = op
	}
	return errs
}

// OpError is the error of one change of a batch.
type OpError struct {
	Index       int          // the number of the change in the batch, from 0
	Op          string       // the method, such as "NewService"
	Service     *Service     // the service as it was sent
	Destination *Destination // the destination as it was sent; nil for a change of a service
	Err         error        // a syscall.Errno if the kernel rejected the change
	Message     string       // the kernel's own text (extended acknowledgement), if it sent any
}

// Error returns a text that names the change and its object, and says why it failed.
func (e *OpError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "change %d, %s: %v", e.Index, describe(e.Op, e.Service, e.Destination), e.Err)
	if e.Message != "" {
		fmt.Fprintf(&b, ": %s", e.Message)
	}
	if hint := e.hint(); hint != "" {
		fmt.Fprintf(&b, " (%s)", hint)
	}
	return b.String()
}

// describe returns the method of a change and the object that it changes.
func describe(op string, s *Service, d *Destination) string {
	if s != nil {
		op += " " + serviceName(s)
	}
	if d != nil {
		op += " " + destinationName(d)
	}
	return op
}

// Unwrap returns the error of the change.
func (e *OpError) Unwrap() error { return e.Err }

// hint explains an error number whose text misleads.
func (e *OpError) hint() string {
	switch onDestination := e.Destination != nil; {
	case e.Service == nil:
		return ""
	case e.Err == syscall.ENOENT && onDestination:
		return "no such destination"
	case e.Err == syscall.ENOENT && e.Service.SchedName == "":
		return "the service names no scheduler"
	case e.Err == syscall.ENOENT && e.Service.PEName != "":
		return fmt.Sprintf("the kernel has no scheduler %q or no persistence engine %q", e.Service.SchedName, e.Service.PEName)
	case e.Err == syscall.ENOENT:
		return fmt.Sprintf("the kernel has no scheduler %q: module %s", e.Service.SchedName, oneWord("ip_vs_"+e.Service.SchedName))
	case e.Err == syscall.ESRCH:
		return "no such service"
	case e.Err == syscall.EINVAL && onDestination && e.Destination.AddressFamily != e.Service.AddressFamily:
		return "only a tunnel reaches a destination of another address family, and none while a synchronization daemon runs"
	case e.Err == syscall.EINVAL && onDestination && e.Destination.TunnelType == TunnelGUE && e.Destination.TunnelPort == 0:
		return "a GUE tunnel needs a port"
	case e.Err == syscall.EINVAL && onDestination && max(e.Destination.UpperThreshold, e.Destination.LowerThreshold) > math.MaxInt32:
		return "thresholds go up to 2^31-1"
	case e.Err == syscall.ERANGE && onDestination:
		return "a lower threshold needs an upper one that is not below it"
	case e.Err == syscall.EINVAL && onDestination && e.Destination.Address.IsLinkLocalUnicast() && e.Destination.Address.To4() == nil:
		return "the kernel looks for a link-local address on no interface in particular: only one of this machine itself is accepted"
	case e.Err == syscall.EINVAL && onDestination:
		return "the address must be a unicast one in this network namespace, which needs an interface that is up"
	}
	return ""
}

// notSent is the error of a change that was not sent, because the kernel could no
// longer be reached.
func notSent(lost error) error { return fmt.Errorf("ipvs: not sent, after: %w", lost) }

// errMissing is the error of a reply without an attribute that every kernel sends.
func errMissing(what string) error {
	return fmt.Errorf("ipvs: malformed reply: no %s", what)
}

func errFamilyMismatch(family uint16, address net.IP, whose string) error {
	return fmt.Errorf("ipvs: the %s's address %v is not of its address family %d", whose, address, family)
}

func errUnknownFamily(family uint16) error {
	return fmt.Errorf("ipvs: address family %d is neither AF_INET (%d) nor AF_INET6 (%d): %w",
		family, unix.AF_INET, unix.AF_INET6, syscall.EAFNOSUPPORT)
}
