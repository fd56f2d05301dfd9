//go:build linux

package bench

import (
	"net"
	"testing"

	"golang.org/x/sys/unix"
	this "ipvs.test/checkout"
)

// netlinkClient reconciles with this library, but reads the whole table over
// netlink, as a caller of GetTable and Diff does.
type netlinkClient struct{ *thisClient }

func openNetlink(ns namespace) (client, error) {
	c, err := openThis(ns)
	if err != nil {
		return nil, err
	}
	return &netlinkClient{c.(*thisClient)}, nil
}

func (c *netlinkClient) reconcile() (int, error) { return reconcileOverNetlink(c.h, c.want) }

func reconcileOverNetlink(h *this.Handle, want []this.TableEntry) (int, error) {
	have, err := h.GetTable()
	if err != nil {
		return 0, err
	}
	batch, err := this.Diff(have, want)
	if err != nil {
		return 0, err
	}
	return batch.Len(), h.Do(batch)
}

// Nothing to change with 500 destinations a service. An op is the table.
func BenchmarkReconcileNothing500(b *testing.B) {
	reconcile(b, newTable(20, 500), newTable(20, 500))
}

// Tables half of which getsockopt does not tell: an op is one reconciliation
// without changes, as above.
func BenchmarkReconcileHalfIPv6(b *testing.B) {
	mixed(b, func(e *this.TableEntry) {
		e.Service.Address, e.Service.AddressFamily, e.Service.Netmask = mapped(e.Service.Address), unix.AF_INET6, 128
		for _, d := range e.Destinations {
			d.Address, d.AddressFamily = mapped(d.Address), unix.AF_INET6
		}
	})
}

func BenchmarkReconcileHalfTunnels(b *testing.B) { mixed(b, tunnels) }

// The worst that can be: a tunnel in each service.
func BenchmarkReconcileAllTunnels(b *testing.B) {
	mixedEvery(b, 1, tunnels)
}

func tunnels(e *this.TableEntry) {
	for _, d := range e.Destinations {
		d.ConnectionFlags = this.ConnectionFlagTunnel
	}
}

// mapped returns an IPv6 address that has the IPv4 one in it.
func mapped(ip net.IP) net.IP {
	return append(net.IP{0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0}, ip.To4()...)
}

func mixed(b *testing.B, change func(*this.TableEntry)) { mixedEvery(b, 2, change) }

// mixedEvery reconciles the standard table after some of its services changed.
func mixedEvery(b *testing.B, every int, change func(*this.TableEntry)) {
	m := newMeter(b)
	ns := newNamespace(b)
	c, err := openThis(ns)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(c.close)
	t := c.(*thisClient)
	t.prepareReconcile(nil, standard())
	for n := range t.want {
		if n%every == 0 {
			change(&t.want[n])
		}
	}
	if _, err := t.reconcile(); err != nil {
		b.Fatal(err)
	}
	settle(b, ns, len(t.want))
	once := t.reconcile
	switch *library {
	case "this":
	case "netlink":
		once = func() (int, error) { return reconcileOverNetlink(t.h, t.want) }
	default:
		b.Skip("it has no reconciliation")
	}
	check := func() {
		changes, err := once()
		found(b, "changes", changes, 0, err)
	}
	check() // not counted, as above
	check() // now the handle knows which services to read over netlink
	for range b.N {
		m.start()
		check()
		m.stop()
	}
	m.report()
}
