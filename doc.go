// Package ipvs programs IPVS, the layer-4 load balancer of the Linux kernel, over
// generic netlink: no cgo, no ipvsadm. It takes the place of github.com/moby/ipvs
// v1.1.0 without a change to its callers.
//
// # Data model
//
// A [Handle] is a connection to the IPVS table of one network namespace. The
// table has virtual services ([Service]): an address, protocol and port that
// clients connect to, or a firewall mark, with a scheduler. Each service has
// destinations ([Destination]), the real servers, with a weight and a forwarding
// method. What the kernel counts comes with both.
//
// To change a service or a destination, read it, change the fields and write it
// back: everything that the kernel reports survives the way there and back.
//
// # Network namespaces
//
// New("") works in the network namespace of the calling thread, New(path) in the
// one at path (/proc/PID/ns/net, /run/netns/NAME), and NewAt in an open one. The
// handle stays there, whichever thread uses it.
//
// # Errors
//
// What the kernel refuses comes back as the bare [syscall.Errno]:
//
//	EEXIST         the service or destination exists
//	ESRCH          no such service
//	ENOENT         no such destination; or no such scheduler or persistence engine
//	ERANGE         a weight is out of range, or a lower threshold above the upper
//	EINVAL         it makes no sense to the kernel, such as a threshold above 2^31-1,
//	               or a destination whose address is not a unicast one in this
//	               network namespace
//	EAFNOSUPPORT   the address family is unknown, or the kernel lacks IPv6
//	EPERM          the caller lacks CAP_NET_ADMIN
//
// Errors of the package's own begin with "ipvs: ", those of single changes in a
// [BatchError] with the change. [ErrNotSupported] says that
// the kernel has no IPVS, [ErrClosed] that the handle is closed. One that matches
// [os.ErrDeadlineExceeded] says that the kernel did not answer in time, and one
// that matches ENOBUFS that an answer was lost: then it is not known whether the
// request was carried out.
//
// # Concurrency
//
// A Handle is safe for concurrent use. Its calls are worked off one at a time.
// Close may be called at any time.
package ipvs
