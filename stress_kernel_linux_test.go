package ipvs

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Tests under load on a real kernel. IPVS_TEST_LONG=1 runs their long forms; CI runs
// the short ones.

// times returns the number of repetitions.
func times(short, long int) int {
	if os.Getenv("IPVS_TEST_LONG") != "" {
		return long
	}
	return short
}

// 32 goroutines make all calls, on one handle and on handles of other namespaces, and
// Close at random moments: each call ends with a right result or with ErrClosed, and
// nothing leaks.
func TestKernelStress(t *testing.T) {
	needKernel(t)
	shared, others := newNamespace(t), []netns.NsHandle{newNamespace(t), newNamespace(t), newNamespace(t)}
	fds, goroutines := descriptors(t), runtime.NumGoroutine()
	for round := range times(3, 30) {
		i, err := NewAt(shared)
		must(t, err)
		handles := []*Handle{i}
		for _, ns := range others {
			i, err := NewAt(ns)
			must(t, err)
			handles = append(handles, i)
		}
		for _, i := range handles { // what the round before left when it was cut off
			must(t, i.Flush())
		}
		var wg sync.WaitGroup
		for g := range 32 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				r := rand.New(rand.NewPCG(uint64(round), uint64(g)))
				i := handles[max(0, g-28)] // 29 of them on the shared one
				for {
					if err := stressCall(i, r, g); err == ErrClosed {
						return
					} else if err != nil {
						t.Errorf("round %d, goroutine %d: %v", round, g, err)
						return
					}
				}
			}()
		}
		for _, i := range handles {
			time.Sleep(time.Duration(50+rand.IntN(100)) * time.Millisecond)
			i.Close()
		}
		wg.Wait()
	}
	if left := opened(t, fds); len(left) > 0 {
		t.Errorf("descriptors left open: %v", left)
	}
	if n := settled(goroutines); n > goroutines {
		t.Errorf("%d goroutines at the start, %d at the end", goroutines, n)
	}
}

// settled returns the number of goroutines when it has fallen to n, or after a while.
func settled(n int) int {
	for range 100 {
		if runtime.NumGoroutine() <= n {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	return runtime.NumGoroutine()
}

// stressCall makes a random call with goroutine g's own service, and checks the result.
func stressCall(i *Handle, r *rand.Rand, g int) error {
	s, d := ipv4Service(1000+g), ipv4Destination(g)
	closed := func(err error) bool { return errors.Is(err, ErrClosed) }
	switch r.IntN(5) {
	case 0: // alone with its service: exact results
		if err := i.NewService(s); err != nil {
			return closedOr(err)
		}
		if err := i.NewDestination(s, d); err != nil {
			return closedOr(err)
		}
		dests, err := i.GetDestinations(s)
		if err != nil {
			return closedOr(err)
		}
		if len(dests) != 1 || keyOfDestination(dests[0]) != keyOfDestination(must2(sentDestination(d))) {
			return fmt.Errorf("destinations %v, want %v", dests, d)
		}
		return closedOr(i.DelService(s))
	case 1:
		if _, err := i.GetService(s); err != syscall.ESRCH {
			return closedOr(fmt.Errorf("GetService of a service that is not there: %w", err))
		}
	case 2:
		services, err := i.GetServices()
		if err != nil {
			return closedOr(err)
		}
		seen := map[serviceKey]bool{}
		for _, s := range services {
			if seen[keyOfService(s)] {
				return fmt.Errorf("%v comes twice", s)
			}
			seen[keyOfService(s)] = true
		}
	case 3:
		var b Batch
		b.NewService(s)
		for n := range 200 {
			b.NewDestination(s, ipv4Destination(n))
		}
		b.NewDestination(s, ipv4Destination(7)) // fails
		b.DelService(s)
		err := i.Do(&b)
		var failed *BatchError
		switch {
		case closed(err):
			return ErrClosed
		case !errors.As(err, &failed) || len(failed.Errors) != 1 || failed.Errors[0].Index != 201 || failed.Errors[0].Err != syscall.EEXIST:
			return fmt.Errorf("batch: %w", err)
		}
	case 4:
		if c, err := i.GetConfig(); err != nil {
			return closedOr(err)
		} else if c.TimeoutTCP <= 0 {
			return fmt.Errorf("config %+v", c)
		}
	}
	return nil
}

func closedOr(err error) error {
	if errors.Is(err, ErrClosed) {
		return ErrClosed
	}
	return err
}

func sentDestination(d *Destination) (*Destination, error) {
	n := normalisedDest(d)
	return &n, nil
}

func must2[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// runIn starts a helper whose descriptor 3 is the namespace.
func runIn(t *testing.T, ns netns.NsHandle, name string, env ...string) *exec.Cmd {
	t.Helper()
	c := helperWith(t, name, ns)
	c.Env = append(c.Env, env...)
	c.Stderr = os.Stderr
	must(t, c.Start())
	c.ExtraFiles[0].Close() // now: some tests start hundreds
	return c
}

// killTables returns the tables that the killed process goes from and to.
func killTables(seed uint64) (have, want []TableEntry) {
	r := rand.New(rand.NewPCG(seed, 1))
	table := func() (table []TableEntry) {
		for n := range 100 {
			if r.IntN(4) == 0 {
				continue
			}
			e := TableEntry{Service: ipv4Service(n)}
			if r.IntN(2) == 0 {
				e.Service.SchedName = WeightedRoundRobin
			}
			for m := range 8 {
				if r.IntN(3) > 0 {
					d := ipv4Destination(m)
					d.Weight = 1 + r.IntN(3)
					e.Destinations = append(e.Destinations, d)
				}
			}
			table = append(table, e)
		}
		return table
	}
	return table(), table()
}

func init() {
	addHelper("kill", func() error {
		seed, err := strconv.ParseUint(os.Getenv("IPVS_TEST_SEED"), 10, 64)
		if err != nil {
			return err
		}
		have, want := killTables(seed)
		i, err := NewAt(netns.NsHandle(3))
		if err != nil {
			return err
		}
		if seed%2 == 0 {
			_, err = (&Reconciler{Handle: i}).Reconcile(want)
			return err
		}
		b, err := Diff(have, want)
		if err != nil {
			return err
		}
		return i.Do(b)
	})

	addHelper("churn", func() error {
		i, err := NewAt(netns.NsHandle(3))
		if err != nil {
			return err
		}
		for n := 0; ; n++ {
			s := ipv4Service(2000 + n*7%400)
			if err := i.NewService(s); err == syscall.EEXIST {
				if err = i.DelService(s); err != nil {
					return err
				}
			} else if err != nil {
				return err
			} else if err := i.NewDestination(s, ipv4Destination(n%5)); err != nil {
				return err
			}
			// Destinations of a service that others list, too.
			d := ipv4Destination(100 + n*3%100)
			if err := i.NewDestination(ipv4Service(0), d); err == syscall.EEXIST {
				err = i.DelDestination(ipv4Service(0), d)
				if err != nil {
					return err
				}
			} else if err != nil {
				return err
			}
		}
	})
}

// A process is killed in the middle of Do and Reconcile: the table is then the result
// of the first changes, in their order, and the next Reconcile repairs it.
func TestKernelKilled(t *testing.T) {
	i, ns := newKernelHandle(t)
	partial := 0
	for n := range times(20, 200) {
		seed := uint64(n)
		have, want := killTables(seed)
		must(t, i.Flush())
		must(t, second((&Reconciler{Handle: i}).Reconcile(have)))
		checkTable(t, i, have)
		from := have // as the process takes it: the order of the changes depends on it
		if seed%2 == 0 {
			// While their table grows, Linux 7 and later list it incompletely.
			time.Sleep(50 * time.Millisecond)
			eventually(func() bool { from = mustGet(i.GetTable())(t); return len(from) == len(have) })
		}
		b := mustGet(Diff(from, want))(t)
		c := runIn(t, ns, "kill", fmt.Sprintf("IPVS_TEST_SEED=%d", seed))
		// Wait until it has begun, then a random moment.
		first := b.blocks[0].messages
		for c.ProcessState == nil {
			s, d := decode(first[:native.Uint32(first)])
			if begun, err := isMade(i, first, s, d); err != nil || begun {
				must(t, err)
				break
			}
			if err := c.Process.Signal(syscall.Signal(0)); err != nil {
				break
			}
		}
		time.Sleep(time.Duration(rand.IntN(8000)) * time.Microsecond)
		c.Process.Kill()
		c.Wait()

		made := -1
		eventually(func() bool {
			made = prefixMade(t, have, b, mustGet(i.GetTable())(t))
			return made >= 0
		})
		if made < 0 {
			t.Fatalf("seed %d: the table is no prefix of\n%s", seed, b)
		}
		if made > 0 && made < b.Len() {
			partial++
		}
		must(t, second((&Reconciler{Handle: i}).Reconcile(want)))
		checkTable(t, i, want)
	}
	t.Logf("killed in the middle %d times", partial)
	if partial == 0 {
		t.Error("never killed in the middle: the test shows nothing")
	}
}

// isMade reports whether a change that creates something was made.
func isMade(i *Handle, msg []byte, s *Service, d *Destination) (bool, error) {
	switch commandOf(msg) {
	case cmdNewService:
		_, err := i.GetService(s)
		if err == syscall.ESRCH {
			return false, nil
		}
		return err == nil, err
	case cmdNewDest:
		dests, err := i.GetDestinations(s)
		return slices.ContainsFunc(dests, func(o *Destination) bool { return keyOfDestination(o) == keyOfDestination(d) }), err
	}
	return true, nil
}

// prefixMade returns the number of first changes of the batch that lead from have to
// is, or -1 if there is none.
func prefixMade(t *testing.T, have []TableEntry, b *Batch, is []TableEntry) int {
	m, goal := modelOf(t, have), modelOf(t, is)
	for n, msg := range b.messages {
		if m.equal(goal) {
			return n
		}
		s, d := decode(msg)
		must(t, m.apply(commandOf(msg), s, d))
	}
	if m.equal(goal) {
		return b.Len()
	}
	return -1
}

// One process adds and deletes as fast as it can while others list and reconcile: no
// error, nothing listed twice, and other entries are neither deleted nor made again.
func TestKernelChurn(t *testing.T) {
	i, ns := newKernelHandle(t)
	stable := wantedTable(150, 3)
	r := &Reconciler{Handle: i, Owned: func(s *Service) bool {
		n := int(s.Address.To4()[2])<<8 | int(s.Address.To4()[3])
		return n > 0 && n < 150
	}}
	must(t, i.NewService(ipv4Service(0)))
	must(t, second(r.Reconcile(stable[1:])))
	c := runIn(t, ns, "churn")
	defer c.Wait()
	defer c.Process.Kill()

	missing, lists := 0, 0
	for end := time.Now().Add(time.Duration(times(3, 60)) * time.Second); time.Now().Before(end); lists++ {
		services := mustGet(i.GetServices())(t)
		seen := map[serviceKey]bool{}
		for _, s := range services {
			if seen[keyOfService(s)] {
				t.Fatalf("service %v comes twice", s)
			}
			seen[keyOfService(s)] = true
		}
		for _, e := range stable {
			if key, _ := sentServiceKey(e.Service); !seen[key] {
				missing++
			}
		}
		dests := mustGet(i.GetDestinations(ipv4Service(0)))(t)
		seenDest := map[destinationKey]bool{}
		for _, d := range dests {
			if seenDest[keyOfDestination(d)] {
				t.Fatalf("destination %v comes twice", d)
			}
			seenDest[keyOfDestination(d)] = true
		}
		if got, err := r.Reconcile(stable[1:]); err != nil || got != (Changes{}) {
			t.Fatalf("reconciled %+v, %v", got, err)
		}
	}
	t.Logf("%d lists; an entry that was there throughout was missing %d times", lists, missing)
	if err := c.Process.Signal(syscall.Signal(0)); err != nil {
		t.Error("the other process ended early")
	}
}

func init() {
	// Makes all calls that need CAP_NET_ADMIN, with the privileges that the environment
	// names, and prints the results.
	addHelper("unprivileged", func() error {
		runtime.LockOSThread()
		programs := 0
		loadModule = func() error { programs++; return errors.New("not in this test") }
		if os.Getenv("IPVS_TEST_DROP") != "" {
			if err := dropNetAdmin(); err != nil {
				return err
			}
		}
		i, err := New("")
		if err != nil {
			return err
		}
		defer i.Close()
		var b Batch
		b.NewService(&someService)
		doErr := i.Do(&b)
		var failed *BatchError
		if errors.As(doErr, &failed) {
			doErr = failed.Errors[0].Err
		}
		for _, err := range []error{i.NewService(&someService), i.Flush(), second(i.GetServices()), second(i.GetService(&someService)),
			second(i.GetConfig()), second(i.GetInfo()), second(i.GetDaemons()), i.Zero(), doErr} {
			if err != syscall.EPERM {
				return fmt.Errorf("%v, want the bare EPERM", err)
			}
		}
		if _, err := New("/proc/1/ns/net"); !errors.Is(err, syscall.EPERM) && !errors.Is(err, syscall.EACCES) && !errors.Is(err, syscall.EINVAL) && os.Getenv("IPVS_TEST_DROP") == "" {
			return fmt.Errorf("another namespace: %v", err)
		}
		fmt.Printf("%d programs\n", programs)
		return nil
	})
}

// dropNetAdmin takes CAP_NET_ADMIN from the calling thread.
func dropNetAdmin() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return err
	}
	data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	return unix.Capset(&hdr, &data[0])
}

// As an ordinary user, in a user namespace, and as root without CAP_NET_ADMIN: the
// kernel's error is returned, nothing is logged, and no program is run.
func TestKernelPrivileges(t *testing.T) {
	needKernel(t)
	dir := t.TempDir()
	must(t, os.Chmod(filepath.Dir(dir), 0o755))
	must(t, os.Chmod(dir, 0o755))
	binary := filepath.Join(dir, "test")
	copyFile(t, "/proc/self/exe", binary)
	for name, setUp := range map[string]func(c *exec.Cmd){
		"ordinary user": func(c *exec.Cmd) {
			c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		},
		"user namespace": func(c *exec.Cmd) {
			c.SysProcAttr = &syscall.SysProcAttr{
				Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
				UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 65534, Size: 1}},
				GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 65534, Size: 1}},
			}
		},
		"root without CAP_NET_ADMIN": func(c *exec.Cmd) { c.Env = append(c.Env, "IPVS_TEST_DROP=1") },
	} {
		t.Run(name, func(t *testing.T) {
			c := helper("unprivileged")
			c.Path = binary
			c.Dir = "/"
			setUp(c)
			out, err := c.CombinedOutput()
			// A helper that is built for coverage prints a line about that, too.
			if err != nil || !strings.HasPrefix(string(out), "0 programs\n") || strings.Contains(string(out), "level=") {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}
