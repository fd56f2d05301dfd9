package ipvs

import "testing"

// Lists that were long, and those like the last one, are expected to be long.
func TestLengths(t *testing.T) {
	a, b, c := serviceKey{port: 1}, serviceKey{port: 2}, serviceKey{port: 3}
	var l sizeHints
	guess := func(cmd uint8, k serviceKey, want int) {
		t.Helper()
		if got := l.predict(cmd, k); got != want {
			t.Errorf("guess %d, want %d", got, want)
		}
	}
	guess(cmdGetService, serviceKey{}, 0)
	l.record(cmdGetService, serviceKey{}, 2000)
	guess(cmdGetService, serviceKey{}, 2000)
	guess(cmdGetDest, a, 0)
	l.record(cmdGetDest, a, longList)
	guess(cmdGetDest, b, 0) // nothing is remembered as long as all are short
	l.record(cmdGetDest, b, longList+1)
	guess(cmdGetDest, b, longList+1)
	guess(cmdGetDest, a, longList+1)
	l.record(cmdGetDest, a, 0)
	guess(cmdGetDest, a, 0)
	guess(cmdGetDest, b, longList+1)
	guess(cmdGetDest, c, 0)
	l.record(cmdGetDest, b, 1<<20)
	guess(cmdGetDest, b, 1<<16-2)
	guess(cmdGetDest, c, 1<<20)
	l.record(cmdGetDaemon, serviceKey{}, 2)
	guess(cmdGetDaemon, serviceKey{}, 0)
	guess(cmdGetService, serviceKey{}, 2000)
	guess(cmdGetDest, c, 1<<20)
}

// A list that was empty is expected to be empty, whatever others had.
func TestPredictEmptyList(t *testing.T) {
	var l sizeHints
	a, b := serviceKey{port: 1}, serviceKey{port: 2}
	l.record(cmdGetDest, a, longList+1)
	l.record(cmdGetDest, b, 0)
	l.record(cmdGetDest, a, longList+1)
	if got := l.predict(cmdGetDest, b); got != 0 {
		t.Errorf("got %d", got)
	}
}
