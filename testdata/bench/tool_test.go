//go:build linux

package bench

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	this "ipvs.test/checkout"
)

// The C programs that others use for the same. They run as processes of their
// own, so their start is part of what they cost.

func onlyTool(b *testing.B) *meter {
	if *library != "tool" {
		b.Skip("it is no program")
	}
	return newMeter(b)
}

// command prepares a program that runs in the namespace.
func (ns namespace) run(b *testing.B, stdin []byte, name string, args ...string) {
	b.Helper()
	err := ns.do(func() error {
		c := exec.Command(name, args...)
		c.Stdin, c.Stderr = bytes.NewReader(stdin), os.Stderr
		return c.Run()
	})
	if err != nil {
		b.Fatalf("%s: %v", name, err)
	}
}

// rules returns the table as ipvsadm writes it.
func rules(table []service) (text []byte) {
	for _, s := range table {
		vip := netip.AddrPortFrom(netip.AddrFrom4(s.address), servicePort)
		text = fmt.Appendf(text, "-A -t %v -s %s\n", vip, scheduler)
		for _, d := range s.destinations {
			text = fmt.Appendf(text, "-a -t %v -r %v -m -w %d\n", vip, netip.AddrPortFrom(netip.AddrFrom4(d.address), destinationPort), d.weight)
		}
	}
	return text
}

// The table from its rules. An op is the table.
func BenchmarkToolRestore(b *testing.B) {
	m := onlyTool(b)
	for range b.N {
		ns := newNamespace(b)
		m.start()
		ns.run(b, rules(standard()), "ipvsadm", "-R")
		m.stop()
		verify(b, ns, standard())
	}
	m.report()
}

// The rules of the table. An op is the table.
func BenchmarkToolSave(b *testing.B) {
	m := onlyTool(b)
	ns := newNamespace(b)
	fill(b, ns, standard())
	for range b.N {
		m.start()
		ns.run(b, nil, "ipvsadm", "-Sn")
		m.stop()
	}
	m.report()
}

// The start of keepalived with the table and no health checks, until all of the
// table is there. An op is the table. It waits at times, so its processor time counts.
func BenchmarkToolKeepalived(b *testing.B) {
	m := onlyTool(b)
	total := time.Duration(0)
	for range b.N {
		ns := newNamespace(b)
		total += keepalived(b, ns, standard())
	}
	m.report()
	b.ReportMetric(float64(total.Nanoseconds())/float64(b.N), "ns/op")
}

func keepalived(b *testing.B, ns namespace, table []service) time.Duration {
	folder := b.TempDir()
	config := filepath.Join(folder, "config")
	if err := os.WriteFile(config, keepalivedConfig(table), 0o644); err != nil {
		b.Fatal(err)
	}
	var c *exec.Cmd
	err := ns.do(func() error {
		c = exec.Command("/keepalived/keepalived", "--dont-fork", "--check", "--use-file", config,
			"--pid", filepath.Join(folder, "pid"), "--checkers_pid", filepath.Join(folder, "checkers"))
		c.Env = append(os.Environ(), "LD_LIBRARY_PATH=/keepalived")
		return c.Start()
	})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Wait()
	defer c.Process.Kill()
	h, err := this.New(ns.path())
	if err != nil {
		b.Fatal(err)
	}
	defer h.Close()
	want := len(table) * (1 + len(table[0].destinations))
	for range 1000 {
		time.Sleep(100 * time.Millisecond)
		entries, err := h.GetTable()
		if err != nil {
			b.Fatal(err)
		}
		have := len(entries)
		for _, e := range entries {
			have += len(e.Destinations)
		}
		if have == want {
			used := processorTime(b, c.Process.Pid)
			verify(b, ns, table) // before it ends: then it takes the table away
			return used
		}
	}
	b.Fatal("keepalived does not complete the table")
	return 0
}

func keepalivedConfig(table []service) (text []byte) {
	text = []byte("global_defs {\n}\n")
	for _, s := range table {
		text = fmt.Appendf(text, "virtual_server %v %d {\n lb_algo %s\n lb_kind NAT\n protocol TCP\n", netip.AddrFrom4(s.address), servicePort, scheduler)
		for _, d := range s.destinations {
			text = fmt.Appendf(text, " real_server %v %d {\n  weight %d\n }\n", netip.AddrFrom4(d.address), destinationPort, d.weight)
		}
		text = append(text, "}\n"...)
	}
	return text
}

// processorTime returns the time that a process and those that it started have used. The
// kernel counts it in hundredths of a second.
func processorTime(b *testing.B, pid int) (used time.Duration) {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		b.Fatal(err)
	}
	parents, times := map[int]int{}, map[int]int{}
	for _, name := range stats {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		// After the program's name, which may have blanks in it: state, parent, and so on.
		field := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
		process, _ := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		parents[process], _ = strconv.Atoi(field[1])
		user, _ := strconv.Atoi(field[11])
		system, _ := strconv.Atoi(field[12])
		times[process] = user + system
	}
	for process, ticks := range times {
		for p := process; p > 1; p = parents[p] {
			if p == pid {
				used += time.Duration(ticks) * 10 * time.Millisecond
				break
			}
		}
	}
	return used
}
