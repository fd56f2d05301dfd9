package ipvs

import (
	"errors"
	"io/fs"
	"math"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A setting is one number.
func TestReadSysctl(t *testing.T) {
	path := filepath.Join(t.TempDir(), "setting")
	for text, want := range map[string]int{"42\n": 42, "-1\n": -1, "0": 0} {
		must(t, os.WriteFile(path, []byte(text), 0o644))
		if got, err := readSysctl(path); err != nil || got != want {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
	must(t, os.WriteFile(path, []byte("3\t50\n"), 0o644))
	if got, err := readSysctl(path); err == nil || err.Error() != `its value "3\t50" is not one number` || got != 0 {
		t.Errorf("two numbers: %d, %v", got, err)
	}
	if got, err := readSysctl(path + "x"); !errors.Is(err, fs.ErrNotExist) || got != 0 {
		t.Errorf("not there: %d, %v", got, err)
	}
}

// An invalid name never reaches the file system.
func TestSysctlNames(t *testing.T) {
	i, _ := newFake(t, nil)
	for _, name := range []string{"", ".", "..", "../ip_forward", "vs/am_droprate", "/etc/passwd", "am_droprate/", "am.droprate",
		"am_droprate\x00", "am_droprate\n", "Am_droprate", "am-droprate", "ä"} {
		_, getErr := i.GetSysctl(name)
		setErr := i.SetSysctl(name, 0)
		for _, err := range []error{getErr, setErr} {
			if err == nil || !strings.Contains(err.Error(), "is not the name of a setting") {
				t.Errorf("%q: %v", name, err)
			}
		}
	}
	for _, name := range []string{"am_droprate", "a1"} {
		if !isSysctlName(name) {
			t.Errorf("%q is not taken for a name", name)
		}
	}
}

// A value of more than 32 bits has the error that the kernel would return.
func TestSetSysctlRange(t *testing.T) {
	if math.MaxInt == math.MaxInt32 {
		t.Skip("SKIP: no int has more than 32 bits here")
	}
	i, _ := newFake(t, nil)
	for _, value := range []int{math.MaxInt32, math.MinInt32} {
		value += value / math.MaxInt32 // one beyond
		if err := i.SetSysctl("am_droprate", value); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%d: %v, want EINVAL", value, err)
		}
	}
}

// The largest and the smallest values are not rejected for their size.
func TestSetSysctlLimits(t *testing.T) {
	i, _ := newFake(t, nil)
	i.Close()
	for _, value := range []int{math.MinInt32, math.MaxInt32} {
		if err := i.SetSysctl("am_droprate", value); err != ErrClosed {
			t.Errorf("%d: %v", value, err)
		}
	}
}

// After Close, and on a handle that never was open, calls end with ErrClosed.
func TestBesideNetlinkClosed(t *testing.T) {
	closed, _ := newFake(t, nil)
	closed.Close()
	for name, i := range map[string]*Handle{"nil": nil, "zero": {}, "closed": closed} {
		_, getErr := i.GetSysctl("am_droprate")
		_, totalsErr := i.GetTotals()
		for _, err := range []error{getErr, i.SetSysctl("am_droprate", 1), totalsErr} {
			if !errors.Is(err, ErrClosed) || !errors.Is(err, net.ErrClosed) {
				t.Errorf("%s: %v, want ErrClosed", name, err)
			}
		}
	}
}

func TestParseTotals(t *testing.T) {
	const head = "   Total Incoming Outgoing         Incoming         Outgoing\n   Conns  Packets  Packets            Bytes            Bytes\n"
	const heads = "\n Conns/s   Pkts/s   Pkts/s          Bytes/s          Bytes/s\n"
	got, err := parseTotals(strings.NewReader(head + "       A       1F       20       FFFFFFFFFF 1234567890ABCDEF\n" + heads +
		"       1        2        3                4                5\n"))
	want := Stats64{Connections: 10, PacketsIn: 31, PacketsOut: 32, BytesIn: 0xFFFFFFFFFF, BytesOut: 0x1234567890ABCDEF,
		CPS: 1, PPSIn: 2, PPSOut: 3, BPSIn: 4, BPSOut: 5}
	if err != nil || *got != want {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
	for _, bad := range []string{"", head, head + "1 2 3 4 5\n", "1 2 3 4 5\n1 2 3 4 5\n1 2 3 4 5\n", "1 2 3 4\n1 2 3 4 5\n", "1 2 3 4 12345678901234567\n1 2 3 4 5\n",
		strings.Repeat("1 ", 100_000)} {
		if got, err := parseTotals(strings.NewReader(bad)); err == nil {
			t.Errorf("%.60q: %+v, want an error", bad, got)
		}
	}
}

// A Fake has no files of /proc: the calls fail, and never read the machine's own.
func TestBesideNetlinkFake(t *testing.T) {
	i := NewFake().Handle()
	defer i.Close()
	_, getErr := i.GetSysctl("expire_nodest_conn")
	_, totalsErr := i.GetTotals()
	errs := []error{getErr, i.SetSysctl("expire_nodest_conn", 1), totalsErr}
	for c, err := range i.Connections() {
		if c != nil {
			t.Errorf("a connection: %+v", c)
		}
		errs = append(errs, err)
	}
	if len(errs) != 4 {
		t.Errorf("Connections yields %d times", len(errs)-3)
	}
	for _, err := range errs {
		if !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "a Fake has no") {
			t.Errorf("%v, want ErrUnsupported", err)
		}
	}
}
