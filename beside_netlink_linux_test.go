package ipvs

import (
	"errors"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
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

// The largest and the smallest values are not refused for their size.
func TestSetSysctlLimits(t *testing.T) {
	i, _ := newFake(t, nil)
	i.Close()
	for _, value := range []int{math.MinInt32, math.MaxInt32} {
		if err := i.SetSysctl("am_droprate", value); err != ErrClosed {
			t.Errorf("%d: %v", value, err)
		}
	}
}

// A last line that is cut says so, and of several things that are wrong with a
// line the error names the first.
func TestParseConnectionsErrors(t *testing.T) {
	const line = "TCP C0000202 C3A4 CB007101 0050 C6336402 1F90 ESTABLISHED     899"
	if _, err := allConnections(strings.NewReader(connectionHead + line)); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut: %v", err)
	}
	bad := strings.Replace(strings.Replace(line, "C3A4", "xxxx", 1), "899", "yyy", 1) + "\n"
	if _, err := allConnections(strings.NewReader(connectionHead + bad)); err == nil ||
		!strings.Contains(err.Error(), `"xxxx" is not a port`) || strings.Contains(err.Error(), `"yyy" is not`) {
		t.Errorf("two errors: %v", err)
	}
}

// In the socket's own namespace what is called says how it ended, with privileges
// and without.
func TestInNamespaceOfOwn(t *testing.T) {
	s := netlinkSocket(t)
	defer s.close()
	broken := errors.New("broken")
	check := func(doing string) {
		called := 0
		if err := inNamespaceOf(s, func() error { called++; return broken }); err != broken || called != 1 {
			t.Errorf("%s: called %d times, %v", doing, called, err)
		}
		if err := inNamespaceOf(s, func() error { called++; return nil }); err != nil || called != 2 {
			t.Errorf("%s: called %d times, %v", doing, called, err)
		}
		if !isOpenHere(s) {
			t.Errorf("%s: the socket is not found", doing)
		}
	}
	check("as it is")
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&hdr, &none[0]); err != nil {
			t.Error(err)
			return
		}
		check("without privileges")
		if err := modprobe(); err == nil || !strings.Contains(err.Error(), "it needs CAP_SYS_MODULE") {
			t.Errorf("modprobe without privileges: %v", err)
		}
	}()
	<-done
	other, _ := newFake(t, nil) // whose socket is none of netlink's
	if isOpenHere(other.socket) {
		t.Error("another socket is taken for one of this namespace")
	}
	s.close()
	if isOpenHere(s) {
		t.Error("a closed socket is taken for one of this namespace")
	}
}

// A handle that is closed while the socket for getsockopt is opened leaves none open.
func TestQuickReadClosedMeanwhile(t *testing.T) {
	s := netlinkSocket(t)
	defer s.close()
	i := &Handle{socket: s, kernel: true}
	r := &optReader{getsockopt: func(int, int, []byte) error { return nil }}
	i.closed.Store(true)
	if table := r.open(i, 1); table != nil {
		t.Error("a closed handle reads")
	}
	if opened := r.socket.Load(); opened == nil || !opened.closed.Load() {
		t.Error("the socket stays open")
	}
}

// What is called in another namespace runs there, says how it ended, and leaves
// no thread behind.
func TestInNamespaceOfAnother(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIP: needs root, to make a network namespace")
	}
	netlinkSocket(t).close() // or skips
	ns := newNamespace(t)
	broken := errors.New("broken")
	var there string
	visitThere := func() error {
		there, _ = os.Readlink("/proc/thread-self/ns/net")
		return broken
	}
	if err := inNamespace(ns, visitThere); err != broken || there == "" || there == homeNamespace {
		t.Errorf("in %q: %v", there, err)
	}
	s, err := openSocketAt(ns)
	must(t, err)
	defer s.close()
	there = ""
	if err := inNamespaceOf(s, visitThere); err != broken || there == "" || there == homeNamespace {
		t.Errorf("of a socket, in %q: %v", there, err)
	}
	if isOpenHere(s) {
		t.Error("the socket is taken for one of this namespace")
	}
}

// An entry of the kernel's older interface is a service's if all that identifies
// it is the same.
func TestOptServiceIs(t *testing.T) {
	e := make(optService, optServiceSize)
	native.PutUint16(e, unix.IPPROTO_TCP)
	copy(e[4:], []byte{10, 0, 0, 1})
	copy(e[8:], be16(80))
	same := Service{AddressFamily: unix.AF_INET, Address: []byte{10, 0, 0, 1}, Protocol: unix.IPPROTO_TCP, Port: 80}
	if !e.is(&same) || e.isEmpty() {
		t.Error("the service is not recognized")
	}
	for name, change := range map[string]func(s *Service){
		"address":  func(s *Service) { s.Address = []byte{10, 0, 0, 2} },
		"length":   func(s *Service) { s.Address = append([]byte{10, 0, 0, 1}, make([]byte, 12)...) },
		"port":     func(s *Service) { s.Port = 81 },
		"protocol": func(s *Service) { s.Protocol = unix.IPPROTO_UDP },
		"mark":     func(s *Service) { s.FWMark = 1 },
	} {
		other := same
		change(&other)
		if e.is(&other) {
			t.Errorf("another %s is taken for the same", name)
		}
	}
	mark := make(optService, optServiceSize)
	native.PutUint32(mark[12:], 7)
	if !mark.is(&Service{FWMark: 7}) || mark.is(&Service{FWMark: 8}) || mark.is(&same) || mark.isEmpty() {
		t.Error("firewall marks")
	}
}
