package ipvs

// This file has the settings below net.ipv4.vs and the counters of a whole network
// namespace, which are only in /proc.

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// sysctlDir is where the settings of the calling thread's network namespace are.
const sysctlDir = "/proc/sys/net/ipv4/vs/"

// GetSysctl returns the setting net.ipv4.vs.NAME, such as "expire_nodest_conn", of
// the handle's network namespace, whichever thread calls. It needs no privilege on a
// thread in that namespace, and CAP_SYS_ADMIN elsewhere.
//
// The error matches fs.ErrNotExist if the kernel has no such setting. Settings that
// are not a single number, sync_threshold and est_cpulist, are errors.
//
// Three settings matter to destinations that a Reconciler drains or deletes:
//
//   - expire_quiescent_template: if 1, a persistent client whose destination has
//     weight 0 is sent to another one with its next connection. If 0, the default, the
//     draining destination keeps getting its persistent clients' new connections.
//   - conn_reuse_mode: if 1, the default, a client that reuses the port of a finished
//     connection is scheduled again. If 0, it is sent to the old connection's
//     destination, even a draining one.
//   - expire_nodest_conn: if 1, the first packet of a connection whose destination is
//     deleted expires the connection, so that the client's next attempt reaches another
//     destination. If 0, the default, its packets are dropped until it times out.
func (i *Handle) GetSysctl(name string) (value int, err error) {
	err = i.sysctl("reading", name, func(path string) error {
		value, err = readSysctl(path)
		return err
	})
	return value, err
}

// SetSysctl sets the setting net.ipv4.vs.NAME of the handle's network namespace, see
// GetSysctl. The process must be root or have CAP_NET_ADMIN in that namespace.
//
// The error matches fs.ErrNotExist if the kernel has no such setting, syscall.EROFS if
// /proc/sys is mounted read-only, as in most containers, fs.ErrPermission if the
// process may not write it, and syscall.EINVAL if the kernel rejects the value. Most
// settings accept any 32-bit number.
func (i *Handle) SetSysctl(name string, value int) error {
	if value < math.MinInt32 || value > math.MaxInt32 {
		return fmt.Errorf("ipvs: setting net.ipv4.vs.%q: %d has more than 32 bits: %w", name, value, unix.EINVAL)
	}
	return i.sysctl("setting", name, func(path string) error {
		if _, err := readSysctl(path); err != nil && !errors.Is(err, fs.ErrPermission) {
			return err // for example, not a single number
		}
		file, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		defer file.Close()
		_, err = file.WriteString(strconv.Itoa(value) + "\n")
		return err
	})
}

// sysctl calls f with the file of a setting, in the handle's network namespace.
func (i *Handle) sysctl(doing, name string, f func(path string) error) error {
	if !isSysctlName(name) {
		return fmt.Errorf("ipvs: %q is not the name of a setting below net.ipv4.vs", name)
	}
	if i == nil || i.socket == nil || i.closed.Load() {
		return ErrClosed
	}
	err := inNamespaceOf(i.socket, func() error {
		err := f(sysctlDir + name)
		if errors.Is(err, fs.ErrNotExist) {
			if _, dirErr := os.Stat(sysctlDir); dirErr != nil {
				return missingInProc("/proc/sys/net", err)
			}
		}
		return err
	})
	hint := ""
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrNotSupported):
	case errors.Is(err, fs.ErrNotExist):
		hint = " (this kernel has no such setting, or hides it from this network namespace)"
	case errors.Is(err, unix.EROFS):
		hint = " (/proc/sys is mounted read-only, as in a container)"
	case errors.Is(err, unix.EINVAL):
		hint = " (the kernel does not take this value)"
	}
	return fmt.Errorf("ipvs: %s net.ipv4.vs.%s: %w%s", doing, name, err, hint)
}

// isSysctlName reports whether name has only characters of a setting's name, and so
// none with a meaning in a path.
func isSysctlName(name string) bool {
	for _, c := range []byte(name) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' {
			return false
		}
	}
	return name != ""
}

func readSysctl(path string) (int, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	text := strings.TrimSpace(string(data))
	value, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("its value %q is not one number", text)
	}
	return value, nil
}

// GetTotals returns the counters of the handle's network namespace
// (/proc/net/ip_vs_stats): the sum over all services, including deleted ones, since
// the namespace was created or Zero was called. It needs no privilege on a thread in
// that namespace, and CAP_SYS_ADMIN elsewhere.
//
// The kernel updates these counters every two seconds.
func (i *Handle) GetTotals() (*Stats64, error) {
	if i == nil || i.socket == nil || i.closed.Load() {
		return nil, ErrClosed
	}
	file, err := openProc(i.socket, "ip_vs_stats")
	if err != nil {
		return nil, fmt.Errorf("ipvs: reading the totals: %w", err)
	}
	defer file.Close()
	totals, err := parseTotals(file)
	if err != nil {
		return nil, fmt.Errorf("ipvs: reading the totals: %w", err)
	}
	return totals, nil
}

// parseTotals parses ip_vs_stats: headings, and two lines of five hexadecimal
// numbers each, the counters and the rates.
func parseTotals(r io.Reader) (*Stats64, error) {
	var numbers []uint64
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if row, ok := hexRow(lines.Text()); ok {
			numbers = append(numbers, row...)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(numbers) != 10 {
		return nil, fmt.Errorf("ip_vs_stats has %d numbers, want 10", len(numbers))
	}
	return &Stats64{
		Connections: numbers[0], PacketsIn: numbers[1], PacketsOut: numbers[2], BytesIn: numbers[3], BytesOut: numbers[4],
		CPS: numbers[5], PPSIn: numbers[6], PPSOut: numbers[7], BPSIn: numbers[8], BPSOut: numbers[9],
	}, nil
}

// hexRow parses a line of five hexadecimal numbers.
func hexRow(line string) (row []uint64, ok bool) {
	for _, text := range strings.Fields(line) {
		n, err := strconv.ParseUint(text, 16, 64)
		if err != nil {
			return nil, false
		}
		row = append(row, n)
	}
	return row, len(row) == 5
}
