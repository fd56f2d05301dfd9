module scale

go 1.24

require (
	github.com/moby/ipvs v1.1.0
	github.com/vishvananda/netlink v1.3.1
	golang.org/x/sys v0.30.0
)

require (
	github.com/sirupsen/logrus v1.9.3 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
)

replace github.com/moby/ipvs => ../..
