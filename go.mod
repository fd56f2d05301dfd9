module github.com/moby/ipvs

go 1.24

require (
	github.com/sirupsen/logrus v1.9.0
	github.com/vishvananda/netlink v1.1.0
	github.com/vishvananda/netns v0.0.2
	golang.org/x/sys v0.2.0
)
