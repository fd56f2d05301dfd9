// Package kuberouter imports the packages whose tests testdata/scripts/consumers runs,
// so that go.mod and go.sum hold what they need. It has nothing else.
package kuberouter

import (
	_ "github.com/cloudnativelabs/kube-router/v2/pkg/controllers/proxy"
	_ "github.com/moby/ipvs"
)
