// Package kubernetes imports the packages whose tests testdata/scripts/consumers runs,
// so that go.mod and go.sum hold what they need. It has nothing else.
package kubernetes

import (
	_ "github.com/moby/ipvs"
	_ "k8s.io/kubernetes/pkg/proxy/ipvs"
	_ "k8s.io/kubernetes/pkg/proxy/ipvs/ipset"
	_ "k8s.io/kubernetes/pkg/proxy/ipvs/ipset/testing"
	_ "k8s.io/kubernetes/pkg/proxy/ipvs/testing"
	_ "k8s.io/kubernetes/pkg/proxy/ipvs/util"
	_ "k8s.io/kubernetes/pkg/proxy/ipvs/util/testing"
)
