//go:build linux

package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/ipvs"
)

const patience = 60 * time.Second // the machine can be slow

// world is a running proxier and its environment, in a virtual machine.
type world struct {
	t      *testing.T
	file   string
	handle *ipvs.Handle
	proxy  *exec.Cmd
}

func (w *world) start() {
	w.t.Helper()
	w.proxy = exec.Command("proxier", "-config", w.file, "-drain", "20s", "-every", "1s")
	w.proxy.Stderr = os.Stderr
	if err := w.proxy.Start(); err != nil {
		w.t.Fatal(err)
	}
}

// write replaces the file, as a careful program does.
func (w *world) write(text string) {
	w.t.Helper()
	if err := os.WriteFile(w.file+".new", []byte(text), 0o644); err != nil {
		w.t.Fatal(err)
	}
	if err := os.Rename(w.file+".new", w.file); err != nil {
		w.t.Fatal(err)
	}
}

// wantTable waits until the kernel's table is this, in the notation of ipvsadm -Sn.
func (w *world) wantTable(step string, want ...string) {
	w.t.Helper()
	slices.Sort(want)
	var got []string
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		var err error
		if got, err = tableLines(w.handle); err != nil {
			w.t.Fatal(err)
		}
		if slices.Equal(got, want) {
			return
		}
	}
	w.t.Fatalf("%s: the table is\n%s\nwant\n%s", step, strings.Join(got, "\n"), strings.Join(want, "\n"))
}

// tableLines returns the sorted lines of the table in the notation of ipvsadm -Sn, since
// the kernel's order is not fixed.
func tableLines(handle *ipvs.Handle) (lines []string, err error) {
	table, err := handle.GetTable()
	if err != nil {
		return nil, err
	}
	var text strings.Builder
	if err := ipvs.WriteTable(&text, table); err != nil {
		return nil, err
	}
	for line := range strings.Lines(text.String()) {
		lines = append(lines, strings.TrimSuffix(line, "\n"))
	}
	slices.Sort(lines)
	return lines, nil
}

// metric waits until a metric has a value for which ok is true.
func (w *world) metric(step, name string, ok func(v float64) bool) {
	w.t.Helper()
	var text string
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		r, err := http.Get("http://127.0.0.1:9100/metrics")
		if err != nil {
			continue
		}
		data, _ := io.ReadAll(r.Body)
		r.Body.Close()
		text = string(data)
		if v, found := metricValue(text, name); found && ok(v) {
			return
		}
	}
	w.t.Fatalf("%s: %s is not as expected in\n%s", step, name, text)
}

// metricValue finds a metric on the page that Prometheus reads.
func metricValue(page, name string) (value float64, found bool) {
	m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (\S+)$`).FindStringSubmatch(page)
	if m == nil {
		return 0, false
	}
	value, err := strconv.ParseFloat(m[1], 64)
	return value, err == nil
}

// serve answers each line with its address.
func serve(t *testing.T, address string) {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for lines := bufio.NewScanner(c); lines.Scan(); {
					fmt.Fprintln(c, address)
				}
			}()
		}
	}()
}

// ask asks for the server's name over a connection, or over a new one if it is nil.
func ask(t *testing.T, c net.Conn, to string) (string, net.Conn) {
	t.Helper()
	if c == nil {
		var err error
		if c, err = net.DialTimeout("tcp", to, patience); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
	}
	c.SetDeadline(time.Now().Add(patience))
	fmt.Fprintln(c, "?")
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(line), c
}

const (
	both   = "services:\n- {address: 10.96.0.1, port: 80, destinations: [{address: 10.1.0.1, port: 8080}, {address: 10.1.0.2, port: 8080}]}\n"
	onlyA  = "services:\n- {address: 10.96.0.1, port: 80, destinations: [{address: 10.1.0.1, port: 8080}]}\n"
	broken = "services: [\n"
	bad    = both + `- {address: 10.96.0.3, port: 80, destinations: [{address: 10.1.0.1, port: 8080}, {address: 10.1.0.1, port: 8080, weight: 0}, {address: 10.1.0.2, port: 8080, weight: -1}]}
- {address: 192.0.2.1, port: 80}
- {address: 10.96.0.1, port: 80}
- {port: 80}
`

	serviceA = "-A -t 10.96.0.1:80 -s rr"
	lineA    = "-a -t 10.96.0.1:80 -r 10.1.0.1:8080 -m -w 1"
	lineB    = "-a -t 10.96.0.1:80 -r 10.1.0.2:8080 -m -w 1"
	drainB   = "-a -t 10.96.0.1:80 -r 10.1.0.2:8080 -m -w 0"

	serviceBad = "-A -t 10.96.0.3:80 -s rr" // its valid part
	lineBad    = "-a -t 10.96.0.3:80 -r 10.1.0.1:8080 -m -w 1"

	serviceForeign = "-A -t 192.0.2.9:80 -s rr"
	lineForeign    = "-a -t 192.0.2.9:80 -r 10.1.0.1:8080 -m -w 1"
)

// The changes of another writer: to the service of the file, to one that is not ours, and
// to one that is ours, but not in the file.
var (
	mine     = &ipvs.Service{Address: net.ParseIP("10.96.0.1"), Protocol: syscall.IPPROTO_TCP, Port: 80, SchedName: "rr"}
	foreign  = &ipvs.Service{Address: net.ParseIP("192.0.2.9"), Protocol: syscall.IPPROTO_TCP, Port: 80, SchedName: "rr", Netmask: 0xFFFFFFFF}
	stray    = &ipvs.Service{Address: net.ParseIP("10.96.0.9"), Protocol: syscall.IPPROTO_TCP, Port: 80, SchedName: "rr"}
	backendA = &ipvs.Destination{Address: net.ParseIP("10.1.0.1"), Port: 8080, Weight: 1}
)

// TestProxier goes through a day of a proxier: file changes, broken files, invalid
// entries, another writer, kill -9, and the end. It needs a kernel and a machine for
// itself, as testdata/scripts/proxier starts; the tests in main_test.go need neither.
func TestProxier(t *testing.T) {
	if os.Getenv("IPVS_TEST_VM") == "" {
		t.Skip("SKIP: changes this machine's own IPVS table (testdata/scripts/proxier runs it in a VM)")
	}
	for _, address := range []string{"10.96.0.1", "10.96.0.3", "10.1.0.1", "10.1.0.2"} {
		if out, err := exec.Command("ip", "addr", "add", address+"/32", "dev", "lo").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	handle, err := ipvs.New("")
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	serve(t, "10.1.0.1:8080")
	serve(t, "10.1.0.2:8080")
	w := &world{t: t, file: filepath.Join(t.TempDir(), "services.yaml"), handle: handle}
	w.write(both)
	w.start()
	defer func() { w.proxy.Process.Kill() }()
	w.wantTable("begin", serviceA, lineA, lineB)
	const service = "10.96.0.1:80"
	first, connA := ask(t, nil, service)
	second, connB := ask(t, nil, service)
	if first == second {
		t.Errorf("both connections are answered by %s", first)
	}
	if first == "10.1.0.2:8080" {
		connA, connB = connB, connA
	}

	w.write(broken)
	w.metric("broken file", `proxier_failures_total{step="load"}`, func(v float64) bool { return v == 1 })
	w.wantTable("broken file", serviceA, lineA, lineB)
	ask(t, nil, service)

	w.write(bad)
	w.wantTable("bad entries", serviceA, lineA, lineB, serviceBad, lineBad)
	w.metric("bad entries", "proxier_failing_changes", func(v float64) bool { return v == 5 })
	ask(t, nil, "10.96.0.3:80")

	w.write(onlyA)
	w.wantTable("scale down", serviceA, lineA, drainB, serviceBad, strings.Replace(lineBad, "-w 1", "-w 0", 1))
	w.metric("scale down", "proxier_draining_destinations", func(v float64) bool { return v == 2 })
	w.metric("scale down", "proxier_failing_changes", func(v float64) bool { return v == 0 })
	if name, _ := ask(t, connB, ""); name != "10.1.0.2:8080" {
		t.Errorf("the connection that is to end is answered by %s", name)
	}
	for range 4 {
		if name, _ := ask(t, nil, service); name != "10.1.0.1:8080" {
			t.Errorf("a new client while B drains: %s", name)
		}
	}
	if err := w.proxy.Process.Kill(); err != nil { // kill -9, and the file changes meanwhile
		t.Fatal(err)
	}
	w.proxy.Wait()
	if name, _ := ask(t, connB, ""); name != "10.1.0.2:8080" {
		t.Errorf("without a proxier: %s", name)
	}
	w.write(both)
	w.start()
	w.wantTable("after kill -9", serviceA, lineA, lineB)
	w.write(onlyA)
	w.wantTable("drained", serviceA, lineA)

	var b ipvs.Batch
	b.DelService(mine)
	b.NewService(foreign)
	b.NewDestination(foreign, backendA)
	b.NewService(stray)
	if err := handle.Do(&b); err != nil {
		t.Fatal(err)
	}
	w.wantTable("another writer", serviceA, lineA, serviceForeign, lineForeign)
	w.metric("changes are counted", `proxier_changes_total{change="added",object="service"}`, func(v float64) bool { return v == 1 })
	if name, _ := ask(t, connA, ""); name != "10.1.0.1:8080" {
		t.Errorf("the first connection: %s", name)
	}

	if err := w.proxy.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := w.proxy.Wait(); err != nil {
		t.Errorf("SIGTERM: %v", err)
	}
	w.wantTable("after the end", serviceA, lineA, serviceForeign, lineForeign)
	ask(t, nil, service)
}
