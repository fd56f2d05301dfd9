// Package bench measures the checkout around it against the module that it
// replaces (github.com/moby/ipvs v1.1.0), against github.com/cloudflare/ipvs,
// and against the limit: a program that sends prebuilt messages and parses
// nothing. It has only benchmarks.
//
// testdata/scripts/bench runs them in a virtual machine whose clock counts
// instructions, and writes RESULTS.md. Elsewhere they need root and IPVS. Each
// runs in its own network namespace:
//
//	go test -run='^$' -bench='^BenchmarkUpdateBatch$' -benchtime=10000x -args -lib=this
//
// The comment of each benchmark defines its op. If a benchmark makes many ops at
// once, a whole table of them, -benchtime must be a multiple of their number.
package bench
