package ipvs_test

import (
	"errors"
	"fmt"
	"log"
	"net"
	"syscall"
	"time"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"
)

func ExampleHandle_SetConfig() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	// A timeout of 0 stays as it is.
	if err := handle.SetConfig(&ipvs.Config{TimeoutTCP: 15 * time.Minute}); err != nil {
		log.Fatal(err)
	}
}

func ExampleHandle_GetInfo() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	info, err := handle.GetInfo()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("IPVS", info.Version, "with", info.ConnectionTableSize, "buckets")
}

func ExampleHandle_Zero() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	web := &ipvs.Service{Address: net.ParseIP("192.0.2.10"), Protocol: unix.IPPROTO_TCP, Port: 80}
	if err := handle.ZeroService(web); err != nil { // one service and its destinations
		log.Fatal(err)
	}
	if err := handle.Zero(); err != nil { // everything in the network namespace
		log.Fatal(err)
	}
}

// A director that sends its connections to its backups.
func ExampleHandle_NewDaemon() {
	handle, err := ipvs.New("")
	if err != nil {
		log.Fatal(err)
	}
	defer handle.Close()

	err = handle.NewDaemon(&ipvs.Daemon{State: ipvs.DaemonMaster, MulticastInterface: "eth0", SyncID: 7})
	if err != nil && !errors.Is(err, syscall.EEXIST) {
		log.Fatal(err)
	}
	daemons, err := handle.GetDaemons()
	if err != nil {
		log.Fatal(err)
	}
	for _, d := range daemons {
		fmt.Println(d.State, d.MulticastInterface, d.MulticastGroup, d.MulticastPort)
	}
}
