// Package ipvs programs IPVS, the layer-4 load balancer of the Linux kernel, over
// generic netlink, without cgo and without ipvsadm. It is a drop-in replacement for
// github.com/moby/ipvs v1.1.0.
//
// # Data model
//
// A [Handle] is a connection to the IPVS table of one network namespace. The table
// has virtual services ([Service]): an address, protocol and port that clients
// connect to, or a firewall mark, and a scheduler. Each service has destinations
// ([Destination]), the real servers, with a weight and a forwarding method. Services
// and destinations carry the kernel's counters.
//
// To change a service or a destination, read it, change the fields and write it
// back: every field round-trips unchanged.
//
// A [Batch] makes many changes at once. A [Reconciler] repeatedly brings the table to
// a desired state.
//
// # Network namespaces
//
// New("") opens a handle for the network namespace of the calling thread, New(path)
// for the namespace at path (/proc/PID/ns/net, /run/netns/NAME), and [NewAt] for an
// open one. The handle stays in that namespace, whichever thread uses it.
//
// # Privileges
//
// Calls need CAP_NET_ADMIN in the initial user namespace; otherwise they fail with
// EPERM. New(path) and NewAt also need CAP_SYS_ADMIN.
//
// # Errors
//
// Errors from the kernel are returned as an unwrapped [syscall.Errno]:
//
//	EEXIST         the service or destination exists
//	ESRCH          there is no such service
//	ENOENT         there is no such destination, scheduler or persistence engine
//	ERANGE         a weight is out of range, or a lower threshold is above the upper one
//	EINVAL         the kernel rejects a value, such as a threshold above 2^31-1, or a
//	               destination whose address is not a unicast address in this network
//	               namespace
//	EAFNOSUPPORT   the address family is unknown, or the kernel lacks IPv6
//	EPERM          the caller lacks CAP_NET_ADMIN
//
// Errors of the package itself begin with "ipvs: ". A [BatchError] has the error of
// each change that failed, together with the change. [ErrNotSupported] reports that
// the kernel has no IPVS, and [ErrClosed] that the handle is closed. An error that
// matches [os.ErrDeadlineExceeded] reports that the kernel did not reply in time, and
// one that matches ENOBUFS that a reply was lost. After either, the outcome of the call
// is unknown.
//
// # Concurrency
//
// A Handle is safe for concurrent use. Calls are serialized. Close may be called at
// any time.
package ipvs
