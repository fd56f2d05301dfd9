#!/bin/sh
# Runs in the virtual machine: the kernel tests of each mutant listed in
# /mutants/list, as lines of a name, a program, the mutant's number in it, and
# patterns of tests with the seconds they may take. Prints how each ended.
set -f
run() {
	limit=${3%%:*}
	IPVS_MUTANT=$2 timeout -s KILL $((limit + 20)) "/mutants/$1" -test.run "${3#*:}" -test.failfast -test.timeout "${limit}s" >/tmp/log 2>&1
	status=$?
	killall -q -9 "$1" exe
	return $status
}
# failed prints which test failed, or did not end.
failed() {
	sed -n -e 's/^--- FAIL: \([^ ]*\) .*/\1/p' -e '/^panic: test timed out/,/^$/s/^\t*\(Test[^ ]*\) (.*/\1/p' /tmp/log | head -n 1
}
while read -r name binary number patterns; do
	echo "began $name"
	for tests in $patterns; do
		run "$binary" "$number" "$tests" && continue
		test=$(failed)
		# A mutant may leave the machine in a state in which all tests fail.
		again=$tests
		[ -z "$test" ] || again="${tests%%:*}:^$test\$"
		grep -m 2 '_test\.go:[0-9]' /tmp/log | cut -c 1-300 | sed 's/^ */why /'
		if run all 0 "$again"; then
			echo "noticed $name ${test:-a crash}"
			continue 2
		fi
		echo "unclear $name ${test:-a crash}"
		exit
	done
	echo "survived $name"
done </mutants/list
echo finished
