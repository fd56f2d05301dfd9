package ipvs_test

import (
	"errors"
	"fmt"
	"io/fs"
	"log"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"
)

// Which clients does a draining destination still have?
func ExampleHandle_Connections() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	service := netip.MustParseAddrPort("192.0.2.10:80")
	draining := netip.MustParseAddrPort("10.0.0.1:8080")
	for c, err := range handle.Connections() {
		if err != nil {
			log.Fatal(err)
		}
		if c.Virtual != service || c.Destination != draining {
			continue
		}
		if c.Client.Port() == 0 {
			fmt.Println(c.Client.Addr(), "is kept there by persistence for", c.Expires)
			continue
		}
		fmt.Println(c.Client, c.State, "expires after", c.Expires)
	}
}

// The settings that a proxier makes once, before it drains destinations.
func ExampleHandle_SetSysctl() {
	handle, err := ipvs.New("/run/netns/blue") // its settings are its own
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	for name, want := range map[string]int{
		"expire_quiescent_template": 1, // clients of a draining destination may go elsewhere
		"conn_reuse_mode":           1,
		"expire_nodest_conn":        1,
	} {
		value, err := handle.GetSysctl(name)
		if errors.Is(err, fs.ErrNotExist) {
			log.Print(err) // an old kernel
			continue
		}
		if err == nil && value != want {
			err = handle.SetSysctl(name, want)
		}
		if errors.Is(err, unix.EROFS) {
			log.Fatal("run the container with a writable /proc/sys: ", err)
		} else if err != nil {
			log.Fatal(err)
		}
	}
}

func ExampleHandle_GetTotals() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	totals, err := handle.GetTotals()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(totals.Connections, "connections,", totals.BytesIn, "bytes in,", totals.BPSIn, "a second")
}

// Restore a saved table over a running one. Unlike with ipvsadm -C and -R, connections
// to destinations that stay are not cut, and those to the others may finish.
func ExampleParseTable() {
	file, err := os.Open("/etc/ipvsadm.rules")
	if err != nil {
		log.Fatal(err)
	}
	defer file.Close()
	saved, err := ipvs.ParseTable(file)
	if err != nil {
		log.Fatal(file.Name(), ": ", err) // with line and column
	}

	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()
	reconciler := &ipvs.Reconciler{Handle: handle, Drain: 10 * time.Minute}
	for {
		changes, err := reconciler.Reconcile(saved)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%+v\n", changes)
		if changes.RequeueAfter == 0 {
			return // nothing drains any more
		}
		time.Sleep(changes.RequeueAfter)
	}
}

func ExampleParseTable_errors() {
	_, err := ipvs.ParseTable(strings.NewReader("# the web servers\n-A -t 192.0.2.10:80 -s wrr\n-a -t 192.0.2.10:80 -r web1:8080 -m\n"))
	fmt.Println(err)
	// Output: ipvs: line 3, column 24: "web1" is not an IP address (names are not looked up: save with ipvsadm -Sn)
}

func ExampleWriteTable() {
	table := []ipvs.TableEntry{{ // or what Handle.GetTable returns
		Service: &ipvs.Service{
			Address: []byte{192, 0, 2, 10}, Protocol: unix.IPPROTO_TCP, Port: 80, SchedName: ipvs.WeightedRoundRobin,
			Flags: ipvs.ServiceFlagPersistent, Timeout: 300, Netmask: 0xFFFFFFFF,
		},
		Destinations: []*ipvs.Destination{{Address: []byte{10, 0, 0, 1}, Port: 8080, Weight: 3}},
	}}
	if err := ipvs.WriteTable(os.Stdout, table); err != nil {
		log.Fatal(err)
	}
	// Output:
	// -A -t 192.0.2.10:80 -s wrr -p 300
	// -a -t 192.0.2.10:80 -r 10.0.0.1:8080 -m -w 3
}
