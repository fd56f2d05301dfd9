module ipvs.test/bench

go 1.25.0

require (
	github.com/cloudflare/ipvs v0.12.0
	github.com/moby/ipvs v1.1.0
	github.com/vishvananda/netlink v1.3.1
	golang.org/x/sys v0.43.0
	ipvs.test/checkout v0.0.0
)

require (
	github.com/aclements/go-moremath v0.0.0-20210112150236-f10218a38794 // indirect
	github.com/google/go-cmp v0.6.0 // indirect
	github.com/mdlayher/genetlink v1.3.2 // indirect
	github.com/mdlayher/netlink v1.8.0 // indirect
	github.com/mdlayher/socket v0.5.1 // indirect
	github.com/sirupsen/logrus v1.9.3 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	golang.org/x/net v0.53.0 // indirect
	golang.org/x/perf v0.0.0-20250813145418-2f7363a06fe1 // indirect
	golang.org/x/sync v0.20.0 // indirect
	gopkg.in/yaml.v3 v3.0.0 // indirect
)

replace ipvs.test/checkout => ../..

tool golang.org/x/perf/cmd/benchstat
