module ipvs.test/bench

go 1.24.0

require (
	github.com/cloudflare/ipvs v0.10.1
	github.com/moby/ipvs v1.1.0
	github.com/vishvananda/netlink v1.3.1
	golang.org/x/sys v0.35.0
	ipvs.test/checkout v0.0.0
)

require (
	github.com/aclements/go-moremath v0.0.0-20210112150236-f10218a38794 // indirect
	github.com/google/go-cmp v0.6.0 // indirect
	github.com/josharian/native v1.0.0 // indirect
	github.com/mdlayher/genetlink v1.3.1 // indirect
	github.com/mdlayher/netlink v1.7.1 // indirect
	github.com/mdlayher/socket v0.4.0 // indirect
	github.com/remyoudompheng/bigfft v0.0.0-20200410134404-eec4a21b6bb0 // indirect
	github.com/sirupsen/logrus v1.9.3 // indirect
	github.com/tj/go-spin v1.1.0 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	github.com/xlab/c-for-go v0.0.0-20230906092656-a1822f0a09c1 // indirect
	github.com/xlab/pkgconfig v0.0.0-20170226114623-cea12a0fd245 // indirect
	golang.org/x/mod v0.13.0 // indirect
	golang.org/x/net v0.43.0 // indirect
	golang.org/x/perf v0.0.0-20250813145418-2f7363a06fe1 // indirect
	golang.org/x/sync v0.4.0 // indirect
	golang.org/x/tools v0.14.0 // indirect
	gopkg.in/yaml.v2 v2.4.0 // indirect
	modernc.org/cc/v4 v4.1.0 // indirect
	modernc.org/mathutil v1.5.0 // indirect
	modernc.org/opt v0.1.3 // indirect
	modernc.org/strutil v1.1.3 // indirect
	modernc.org/token v1.0.1 // indirect
)

replace ipvs.test/checkout => ../..

tool golang.org/x/perf/cmd/benchstat
