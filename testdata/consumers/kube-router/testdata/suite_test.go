// Package proxy: this file and fixture.patch are added to a copy of the package
// of that name in kube-router v2.1.0, which declares specs and never runs them:
// the module's only RunSpecs is in the package above. Meanwhile, the specs were
// left behind by the controller, which reads EndpointSlices since and relies on
// the defaults that an API server fills in. What they expect is not changed.
package proxy

import (
	"strings"
	"sync"
	"testing"

	"github.com/onsi/ginkgo"
	"github.com/onsi/ginkgo/config"
	"github.com/onsi/ginkgo/types"
	"github.com/onsi/gomega"
	v1core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// TestSuite runs the specs and reports each as a subtest.
func TestSuite(t *testing.T) {
	gomega.RegisterFailHandler(ginkgo.Fail)
	specs := &recorder{}
	passed := ginkgo.RunSpecsWithCustomReporters(&verdict{}, "proxy", []ginkgo.Reporter{specs})
	failed := false
	for _, spec := range specs.done {
		failed = failed || spec.HasFailureState()
		// The first of the texts is that of ginkgo's own root.
		t.Run(strings.Join(spec.ComponentTexts[1:], ": "), func(t *testing.T) {
			switch {
			case spec.HasFailureState():
				t.Errorf("%s\n%s\n%s", spec.Failure.Location, spec.Failure.Message, spec.Failure.ForwardedPanic)
			case !spec.Passed():
				t.Skip("pending or skipped")
			}
		})
	}
	if !passed && !failed {
		t.Error("the suite failed, although none of its specs did")
	}
}

// verdict is told that the suite failed; RunSpecs returns that as well.
type verdict struct{}

func (*verdict) Fail() {}

// recorder keeps the result of each spec.
type recorder struct{ done []*types.SpecSummary }

func (r *recorder) SpecDidComplete(spec *types.SpecSummary) { r.done = append(r.done, spec) }

func (*recorder) SpecSuiteWillBegin(config.GinkgoConfigType, *types.SuiteSummary) {}
func (*recorder) BeforeSuiteDidRun(*types.SetupSummary)                           {}
func (*recorder) SpecWillRun(*types.SpecSummary)                                  {}
func (*recorder) AfterSuiteDidRun(*types.SetupSummary)                            {}
func (*recorder) SpecSuiteDidEnd(*types.SuiteSummary)                             {}

// complete sets what the constructor sets and the specs do not.
func complete(nsc *NetworkServicesController) {
	nsc.nphc = NewNodePortHealthCheck()
	nsc.ipsetMutex = &sync.Mutex{}
}

// endpointSlice returns what Kubernetes makes of IPv4 endpoints.
func endpointSlice(from *v1core.Endpoints) *discovery.EndpointSlice {
	slice := &discovery.EndpointSlice{ObjectMeta: from.ObjectMeta, AddressType: discovery.AddressTypeIPv4}
	slice.Labels = map[string]string{discovery.LabelServiceName: from.Name}
	ready := true
	for _, subset := range from.Subsets {
		for _, port := range subset.Ports {
			slice.Ports = append(slice.Ports, discovery.EndpointPort{Name: &port.Name, Port: &port.Port, Protocol: &port.Protocol})
		}
		for _, address := range subset.Addresses {
			slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{
				Addresses:  []string{address.IP},
				NodeName:   address.NodeName,
				Conditions: discovery.EndpointConditions{Ready: &ready, Serving: &ready},
			})
		}
	}
	return slice
}

// withDefaults fills in what an API server does.
func withDefaults(service *v1core.Service) *v1core.Service {
	internal := v1core.ServiceInternalTrafficPolicyCluster
	service.Spec.InternalTrafficPolicy = &internal
	service.Spec.ExternalTrafficPolicy = v1core.ServiceExternalTrafficPolicyCluster
	return service
}
