# The commands of the project; `make help` lists them. The scripts have the details.
# KERNEL chooses the kernel of the virtual machine: 5.10, 6.1, 6.12 or 7.2.

.PHONY: help demo proxier test test-kernels test-arch race fuzz soak mutation bench scale consumers lint fmt

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 15

demo: ## real connections through real services, on a real kernel
	testdata/scripts/demo

proxier: ## a small sample proxier: its unit tests, then a day on a real kernel
	testdata/scripts/proxier

test: ## unit tests here, kernel tests here or in a VM
	testdata/scripts/test

test-kernels: ## kernel tests on each of the four kernels
	testdata/scripts/test-kernels

test-arch: ## unit tests as 386, arm64 and s390x code
	testdata/scripts/test-arch

race: ## unit and kernel tests with the race detector
	testdata/scripts/race

fuzz: ## each fuzz target for FUZZTIME (30s)
	testdata/scripts/fuzz

soak: ## a long run, with and without memory pressure; LONG=1 for a million operations
	testdata/scripts/soak

mutation: ## break the library in many small ways, and check that the tests notice
	testdata/scripts/mutation

bench: ## instruction counts of this library, other libraries and the limit
	testdata/scripts/bench

scale: ## 10,000 services with 10 destinations each
	testdata/scripts/scale

consumers: ## the tests of programs that use moby/ipvs, with it and with this library
	testdata/scripts/consumers

lint: ## format, vet, staticcheck
	testdata/scripts/lint

fmt: ## format all Go code
	gofmt -w .
