// Package bench measures the checkout around it against the module that it
// replaces (github.com/moby/ipvs v1.1.0), against github.com/cloudflare/ipvs,
// and against the limit: a program that sends bytes prepared beforehand and
// parses nothing. It holds nothing but benchmarks.
//
// testdata/scripts/bench runs them in a virtual machine whose clock counts
// instructions, and writes RESULTS.md. Elsewhere they need root and IPVS, and
// run in network namespaces of their own:
//
//	go test -run='^$' -bench='^BenchmarkUpdateBatch$' -benchtime=10000x -args -lib=this
//
// An op is what the comment of each benchmark says. Where many ops are made
// at once, a table's worth of them, -benchtime must be a multiple of that.
package bench
