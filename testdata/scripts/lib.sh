# Common to the scripts in this directory; they run in the checkout's root.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ROOT=$PWD
VM=$ROOT/testdata/vm/run
WORK=$(mktemp -d "${TMPDIR:-/tmp}/ipvs-test.XXXXXX")
trap 'rm -rf "$WORK"' EXIT

# KERNEL_TESTS matches the tests that need a kernel with IPVS; the others need no virtual machine.
KERNEL_TESTS='Kernel|Module|NoLeak'

say() { printf '\n== %s\n' "$*"; }

# kernel_tests builds the test binary for the VM; with coverage, and static.
kernel_tests() {
	CGO_ENABLED=0 go test -c -cover -o "$WORK/ipvs.test" .
}

# race_tests builds it with the race detector, which needs cgo but not in the guest.
race_tests() {
	CGO_ENABLED=1 go test -c -race -tags netgo,osusergo \
		-ldflags '-linkmode external -extldflags -static' -o "$WORK/race.test" .
}

# count PATTERN FILE: prints how many tests (not subtests) have this result.
count() { grep -c -- "^--- $1: " "$2" || true; }

# summary FILE...: prints the number of tests with each result in one line. Fails if no
# test passed, or any failed.
summary() {
	local passed failed skipped
	passed=$(cat "$@" | grep -c '^--- PASS: ' || true)
	failed=$(cat "$@" | grep -c '^--- FAIL: ' || true)
	skipped=$(cat "$@" | grep -c '^--- SKIP: ' || true)
	echo "$passed passed, $failed failed, $skipped skipped"
	[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
}
