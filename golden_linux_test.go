package ipvs

import (
	"bytes"
	"embed"
	"encoding/binary"
	"encoding/hex"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Golden messages: the requests of the library and the replies of kernels of four
// series in one scenario. TestRecordGolden runs the scenario on a real kernel and
// records them. TestGolden replays it on any machine: the library has to send the same
// requests again, and to return the expected results for the same replies. See
// testdata/golden/README.md.

//go:embed testdata/golden
var goldenFiles embed.FS

const goldenDir = "testdata/golden"

var recordDir = flag.String("record", "", "`folder` for what TestRecordGolden records")

// goldenStep is one call on the handle.
type goldenStep struct {
	name string
	call func(*Handle) (any, error)
	want any   // the call's result
	err  error // or its error
	// prepare changes the table before the step; it is not recorded.
	prepare func(*Handle) error
	// datagrams is the smallest number of datagrams in the answer.
	datagrams int
}

// check compares the result of the step's call with the wanted one. The order of a
// kernel's services depends on addresses in its memory, so it is not compared; that of
// destinations is.
func (step *goldenStep) check(t *testing.T, got any, err error) {
	t.Helper()
	if err != step.err { // what the kernel refuses comes back bare
		t.Errorf("error %v, want %v", err, step.err)
	}
	if err != nil {
		if v := reflect.ValueOf(got); v.IsValid() && !v.IsZero() {
			t.Errorf("a result with the error: %+v", got)
		}
		return
	}
	for _, v := range []any{got, step.want} {
		if services, ok := v.([]*Service); ok {
			slices.SortFunc(services, func(a, b *Service) int {
				return strings.Compare(fmt.Sprintf("%+v", *a), fmt.Sprintf("%+v", *b))
			})
		}
	}
	if !reflect.DeepEqual(got, step.want) {
		t.Errorf("got\n%s\nwant\n%s", show(got), show(step.want))
	}
}

// show formats a result, a slice with one element per line.
func show(v any) string {
	var lines []string
	switch v := v.(type) {
	case []*Service:
		for _, s := range v {
			lines = append(lines, fmt.Sprintf("%+v", *s))
		}
	case []*Destination:
		for _, d := range v {
			lines = append(lines, fmt.Sprintf("%+v", *d))
		}
	default:
		return fmt.Sprintf("%+v", v)
	}
	return strings.Join(lines, "\n")
}

// The scenario.

// goldenBulk is a number of services, and of destinations of one service, whose lists
// take several datagrams of 4096 bytes.
const goldenBulk = 20

func goldenScenario() []goldenStep {
	type call = func(*Handle) (any, error)
	newService := func(s Service) call {
		return func(i *Handle) (any, error) { return nil, i.NewService(&s) }
	}
	updateService := func(s Service) call {
		return func(i *Handle) (any, error) { return nil, i.UpdateService(&s) }
	}
	delService := func(s Service) call {
		return func(i *Handle) (any, error) { return nil, i.DelService(&s) }
	}
	isServicePresent := func(s Service) call {
		return func(i *Handle) (any, error) { return i.IsServicePresent(&s), nil }
	}
	getService := func(s Service) call {
		return func(i *Handle) (any, error) { return i.GetService(&s) }
	}
	getServices := func(i *Handle) (any, error) { return i.GetServices() }
	flush := func(i *Handle) (any, error) { return nil, i.Flush() }
	newDestination := func(s Service, d Destination) call {
		return func(i *Handle) (any, error) { return nil, i.NewDestination(&s, &d) }
	}
	updateDestination := func(s Service, d Destination) call {
		return func(i *Handle) (any, error) { return nil, i.UpdateDestination(&s, &d) }
	}
	delDestination := func(s Service, d Destination) call {
		return func(i *Handle) (any, error) { return nil, i.DelDestination(&s, &d) }
	}
	getDestinations := func(s Service) call {
		return func(i *Handle) (any, error) { return i.GetDestinations(&s) }
	}
	getConfig := func(i *Handle) (any, error) { return i.GetConfig() }
	setConfig := func(c Config) call {
		return func(i *Handle) (any, error) { return nil, i.SetConfig(&c) }
	}

	const (
		tcp, udp, sctp = unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP
		inet, inet6    = unix.AF_INET, unix.AF_INET6
		hashed         = ServiceFlagHashed
		persistent     = ServiceFlagPersistent
	)
	ip := net.ParseIP // 16 bytes, for IPv4 too
	v6 := net.ParseIP
	v4 := func(a, b, c, d byte) net.IP { return net.IP{a, b, c, d} }

	// What identifies the services, and the services as the kernel returns them.
	web := Service{Address: ip("10.0.0.1"), Protocol: tcp, Port: 80}
	wantWeb := Service{Address: v4(10, 0, 0, 1), Protocol: tcp, Port: 80, SchedName: "rr", Flags: hashed,
		Netmask: ipv4Mask(32), AddressFamily: inet}
	dns := Service{Address: v4(10, 0, 0, 1), Protocol: udp, Port: 53, AddressFamily: inet}
	wantDNS := Service{Address: v4(10, 0, 0, 1), Protocol: udp, Port: 53, SchedName: "wrr",
		Flags: hashed | ServiceFlagOnePacket, AddressFamily: inet}
	sticky := Service{Address: v4(10, 0, 0, 2), Protocol: tcp}
	wantSticky := Service{Address: v4(10, 0, 0, 2), Protocol: tcp, Port: 0, SchedName: "sh",
		Flags: hashed | persistent | ServiceFlagSHPort, Timeout: 360, Netmask: ipv4Mask(20), AddressFamily: inet}
	sip := Service{Address: v4(10, 0, 0, 3), Protocol: udp, Port: 5060}
	wantSIP := Service{Address: v4(10, 0, 0, 3), Protocol: udp, Port: 5060, SchedName: "wlc",
		Flags: hashed | persistent, Timeout: 60, Netmask: ipv4Mask(32), AddressFamily: inet, PEName: "sip"}
	web6 := Service{Address: v6("2001:db8::1"), Protocol: tcp, Port: 80}
	wantWeb6 := Service{Address: v6("2001:db8::1"), Protocol: tcp, Port: 80, SchedName: "lc", Flags: hashed,
		Netmask: 128, AddressFamily: inet6}
	sctp6 := Service{Address: v6("2001:db8::1"), Protocol: sctp, Port: 9, AddressFamily: inet6}
	wantSCTP6 := Service{Address: v6("2001:db8::1"), Protocol: sctp, Port: 9, SchedName: "wrr",
		Flags: hashed | persistent, Timeout: 100, Netmask: 64, AddressFamily: inet6}
	mark := Service{FWMark: 42, AddressFamily: inet}
	wantMark := Service{FWMark: 42, SchedName: "mh", Flags: hashed | ServiceFlagMHFallback | ServiceFlagMHPort,
		Netmask: ipv4Mask(32), AddressFamily: inet}
	mark6 := Service{FWMark: 0x01020304, AddressFamily: inet6}
	wantMark6 := Service{FWMark: 0x01020304, SchedName: "dh", Flags: hashed | persistent, Timeout: 30,
		Netmask: 96, AddressFamily: inet6}

	// An update of one of them.
	wantWebNow := wantWeb
	wantWebNow.SchedName, wantWebNow.Flags, wantWebNow.Timeout, wantWebNow.Netmask = "wlc", hashed|persistent, 77, ipv4Mask(24)

	absent := Service{Address: v4(10, 0, 0, 99), Protocol: tcp, Port: 80, SchedName: "rr"}
	noScheduler, noEngine := absent, absent
	noScheduler.SchedName, noEngine.PEName = "nosuch", "nosuch"

	// Destinations, of each forwarding method and tunnel.
	masq := Destination{Address: v4(10, 1, 0, 1), Port: 8080, Weight: 1, AddressFamily: inet,
		UpperThreshold: 100, LowerThreshold: 50}
	local := Destination{Address: v4(127, 0, 0, 1), Port: 80, Weight: 65537, ConnectionFlags: ConnectionFlagLocalNode, AddressFamily: inet}
	direct := Destination{Address: v4(10, 1, 0, 2), Port: 80, Weight: 1<<31 - 1, ConnectionFlags: ConnectionFlagDirectRoute, AddressFamily: inet}
	ipip := Destination{Address: v4(10, 1, 0, 3), Port: 80, Weight: 0, ConnectionFlags: ConnectionFlagTunnel, AddressFamily: inet}
	gue := Destination{Address: v4(10, 1, 0, 4), Port: 80, Weight: 2, ConnectionFlags: ConnectionFlagTunnel, AddressFamily: inet,
		TunnelType: TunnelGUE, TunnelPort: 6080, TunnelFlags: TunnelFlagRemoteChecksum}
	gre := Destination{Address: v4(10, 1, 0, 5), Port: 80, Weight: 3, ConnectionFlags: ConnectionFlagTunnel, AddressFamily: inet,
		TunnelType: TunnelGRE, TunnelFlags: TunnelFlagChecksum}
	mixed := Destination{Address: v6("2001:db8:1::1"), Port: 80, Weight: 4, ConnectionFlags: ConnectionFlagTunnel, AddressFamily: inet6}

	masq6 := Destination{Address: v6("2001:db8:1::1"), Port: 8080, Weight: 1, AddressFamily: inet6}
	direct6 := Destination{Address: v6("2001:db8:1::2"), Port: 80, Weight: 2, ConnectionFlags: ConnectionFlagDirectRoute, AddressFamily: inet6}
	mixed4 := Destination{Address: v4(10, 1, 0, 1), Port: 80, Weight: 3, ConnectionFlags: ConnectionFlagTunnel, AddressFamily: inet,
		TunnelType: TunnelGUE, TunnelPort: 1, TunnelFlags: TunnelFlagChecksum}
	marked := Destination{Address: v4(10, 1, 0, 1), Port: 0, Weight: 1, ConnectionFlags: ConnectionFlagDirectRoute, AddressFamily: inet}

	// Updates of them, and changes that fail.
	masqNow, gueNow := masq, gue
	masqNow.Weight, masqNow.UpperThreshold, masqNow.LowerThreshold = 0, 7, 0
	gueNow.TunnelType, gueNow.TunnelPort, gueNow.TunnelFlags = TunnelIPIP, 0, 0
	thresholds, mixedMasq, noTunnelPort := masq, mixed, gue
	thresholds.UpperThreshold, thresholds.LowerThreshold = 1, 2
	mixedMasq.ConnectionFlags = ConnectionFlagMasq
	mixedMasq.Port = 81
	noTunnelPort.Port, noTunnelPort.TunnelPort = 81, 0
	noDestination := Destination{Address: v4(10, 1, 9, 9), Port: 1}

	// Tables large enough for several datagrams.
	var services []*Service
	var destinations []*Destination
	for n := range uint16(goldenBulk) {
		services = append(services, &Service{Address: v4(10, 0, 1, 1), Protocol: tcp, Port: 1000 + n, SchedName: "rr",
			Flags: hashed, Netmask: ipv4Mask(32), AddressFamily: inet})
		destinations = append(destinations, &Destination{Address: v4(10, 1, 1, 1), Port: 1000 + n, Weight: int(n), AddressFamily: inet})
	}
	slices.Reverse(destinations) // the kernel puts each before those that it has
	bulk := func(i *Handle) error {
		for _, s := range services {
			if err := i.NewService(s); err != nil {
				return err
			}
		}
		for _, d := range slices.Backward(destinations) {
			if err := i.NewDestination(services[0], d); err != nil {
				return err
			}
		}
		return nil
	}

	// plain returns the service without the kernel's own flag.
	plain := func(s Service) Service { s.Flags &^= hashed; return s }
	// unmasked removes the netmask.
	unmasked := func(s Service) Service { s.Netmask = 0; return s }
	// unnamed removes the destination's address family.
	unnamed := func(d Destination) Destination { d.AddressFamily = 0; return d }
	long := func(d Destination) Destination { d.Address = d.Address.To16(); return d }

	const s = time.Second
	return []goldenStep{
		{name: "get-config-default", call: getConfig, want: &Config{900 * s, 120 * s, 300 * s}},
		{name: "set-config", call: setConfig(Config{901 * s, 121 * s, 301 * s})},
		{name: "set-config-one", call: setConfig(Config{TimeoutTCPFin: 33 * s})},
		{name: "get-config", call: getConfig, want: &Config{901 * s, 33 * s, 301 * s}},
		{name: "set-config-einval", call: setConfig(Config{TimeoutUDP: (1<<31 - 1) * s}), err: syscall.EINVAL},

		{name: "get-services-none", call: getServices, want: []*Service(nil)},
		{name: "new-service", call: newService(plain(wantWeb))},
		{name: "new-service-udp", call: newService(plain(wantDNS))},
		{name: "new-service-persistent", call: newService(plain(wantSticky))},
		{name: "new-service-engine", call: newService(plain(wantSIP))},
		{name: "new-service-v6", call: newService(unmasked(plain(wantWeb6)))},
		{name: "new-service-v6-persistent", call: newService(plain(wantSCTP6))},
		{name: "new-service-mark", call: newService(plain(wantMark))},
		{name: "new-service-mark-v6", call: newService(plain(wantMark6))},
		{name: "get-service", call: getService(web), want: &wantWeb},
		{name: "get-service-udp", call: getService(dns), want: &wantDNS},
		{name: "get-service-persistent", call: getService(sticky), want: &wantSticky},
		{name: "get-service-engine", call: getService(sip), want: &wantSIP},
		{name: "get-service-v6", call: getService(web6), want: &wantWeb6},
		{name: "get-service-v6-persistent", call: getService(sctp6), want: &wantSCTP6},
		{name: "get-service-mark", call: getService(mark), want: &wantMark},
		{name: "get-service-mark-v6", call: getService(mark6), want: &wantMark6},
		{name: "get-services", call: getServices, want: []*Service{
			&wantWeb, &wantDNS, &wantSticky, &wantSIP, &wantWeb6, &wantSCTP6, &wantMark, &wantMark6}},

		{name: "get-destinations-none", call: getDestinations(web), want: []*Destination(nil)},
		{name: "new-destination", call: newDestination(web, unnamed(long(masq)))},
		{name: "new-destination-local", call: newDestination(web, local)},
		{name: "new-destination-direct", call: newDestination(web, direct)},
		{name: "new-destination-ipip", call: newDestination(web, ipip)},
		{name: "new-destination-gue", call: newDestination(web, gue)},
		{name: "new-destination-gre", call: newDestination(web, gre)},
		{name: "new-destination-mixed", call: newDestination(web, unnamed(mixed))},
		{name: "get-destinations", call: getDestinations(web), want: []*Destination{
			&mixed, &gre, &gue, &ipip, &direct, &local, &masq}},
		{name: "new-destination-v6", call: newDestination(web6, masq6)},
		{name: "new-destination-v6-direct", call: newDestination(web6, direct6)},
		{name: "new-destination-v6-mixed", call: newDestination(web6, unnamed(mixed4))},
		{name: "get-destinations-v6", call: getDestinations(web6), want: []*Destination{&mixed4, &direct6, &masq6}},
		{name: "new-destination-mark", call: newDestination(mark, marked)},
		{name: "get-destinations-mark", call: getDestinations(mark), want: []*Destination{&marked}},

		{name: "new-service-eexist", call: newService(plain(wantWeb)), err: syscall.EEXIST},
		{name: "new-service-enoent-scheduler", call: newService(noScheduler), err: syscall.ENOENT},
		{name: "new-service-enoent-engine", call: newService(noEngine), err: syscall.ENOENT},
		{name: "update-service-esrch", call: updateService(absent), err: syscall.ESRCH},
		{name: "delete-service-esrch", call: delService(absent), err: syscall.ESRCH},
		{name: "get-service-esrch", call: getService(absent), err: syscall.ESRCH},
		{name: "is-service-absent", call: isServicePresent(absent), want: false},
		{name: "is-service-present", call: isServicePresent(mark6), want: true},
		{name: "new-destination-eexist", call: newDestination(web, masq), err: syscall.EEXIST},
		{name: "new-destination-esrch", call: newDestination(absent, masq), err: syscall.ESRCH},
		{name: "new-destination-einval-mixed", call: newDestination(web, mixedMasq), err: syscall.EINVAL},
		{name: "new-destination-einval-port", call: newDestination(web, noTunnelPort), err: syscall.EINVAL},
		{name: "update-destination-enoent", call: updateDestination(web, noDestination), err: syscall.ENOENT},
		{name: "update-destination-erange", call: updateDestination(web, thresholds), err: syscall.ERANGE},
		{name: "delete-destination-enoent", call: delDestination(web, noDestination), err: syscall.ENOENT},
		{name: "delete-destination-esrch", call: delDestination(absent, masq), err: syscall.ESRCH},
		{name: "get-destinations-absent", call: getDestinations(absent), want: []*Destination(nil)},

		{name: "update-service", call: updateService(wantWebNow)},
		{name: "get-service-updated", call: getService(web), want: &wantWebNow},
		{name: "update-service-unchanged", call: updateService(wantSIP)},
		{name: "get-service-unchanged", call: getService(sip), want: &wantSIP},
		{name: "update-destination", call: updateDestination(web, masqNow)},
		{name: "update-destination-ipip", call: updateDestination(web, gueNow)},
		{name: "update-destination-unchanged", call: updateDestination(web, mixed)},
		{name: "get-destinations-updated", call: getDestinations(web), want: []*Destination{
			&mixed, &gre, &gueNow, &ipip, &direct, &local, &masqNow}},
		{name: "delete-destination", call: delDestination(web6, masq6)},
		{name: "delete-destination-mixed", call: delDestination(web6, mixed4)},
		{name: "get-destinations-fewer", call: getDestinations(web6), want: []*Destination{&direct6}},
		{name: "delete-service", call: delService(web)},
		{name: "delete-service-mark-v6", call: delService(mark6)},
		{name: "get-services-fewer", call: getServices, want: []*Service{
			&wantDNS, &wantSticky, &wantSIP, &wantWeb6, &wantSCTP6, &wantMark}},
		{name: "flush", call: flush},
		{name: "get-services-flushed", call: getServices, want: []*Service(nil)},

		{name: "get-services-parts", prepare: bulk, call: getServices, want: services, datagrams: 3},
		{name: "get-destinations-parts", call: getDestinations(*services[0]), want: destinations, datagrams: 3},
	}
}

// file returns the name of the file in which the step is recorded.
func (step *goldenStep) file(n int) string { return fmt.Sprintf("%02d-%s.txt", n, step.name) }

// Recording.

func TestRecordGolden(t *testing.T) {
	if *recordDir == "" {
		t.Skip("SKIP: records " + goldenDir + " anew; " + goldenDir + "/record runs it on all kernels")
	}
	i, ns := newKernelHandle(t)
	other := openIn(t, ns)
	var uts unix.Utsname
	must(t, unix.Uname(&uts))
	var text strings.Builder
	i.socket.sendmsg = func(fd int, b []byte) error {
		writeDatagram(&text, '>', b)
		return sendmsg(fd, b)
	}
	i.socket.recvmsg = func(fd int, b []byte) (n int, from uint32, err error) {
		n, from, err = i.socket.source.recvmsg(fd, b)
		if err == nil {
			writeDatagram(&text, '<', b[:min(n, len(b))])
		}
		return n, from, err
	}
	for n, step := range goldenScenario() {
		t.Run(step.name, func(t *testing.T) {
			if step.prepare != nil {
				must(t, step.prepare(other))
			}
			text.Reset()
			fmt.Fprintf(&text, "# %s\n# Linux %s\n", step.name, unix.ByteSliceToString(uts.Release[:]))
			got, err := step.call(i)
			step.check(t, got, err)
			must(t, os.WriteFile(filepath.Join(*recordDir, step.file(n)), []byte(text.String()), 0o644))
		})
	}
}

// writeDatagram writes a datagram as lines of hexadecimal numbers after a mark.
func writeDatagram(w *strings.Builder, mark byte, b []byte) {
	for line := range slices.Chunk(b, 32) {
		w.WriteByte(mark)
		for group := range slices.Chunk(line, 4) {
			fmt.Fprintf(w, " %x", group)
		}
		w.WriteByte('\n')
		mark = ' ' // the datagram goes on
	}
}

// Replaying.

// datagram is one recorded datagram.
type datagram struct {
	sent bool
	data []byte
}

// readDatagrams reads what writeDatagram wrote, in the byte order of this machine.
func readDatagrams(t testing.TB, text string) (datagrams []datagram) {
	t.Helper()
	for line := range strings.Lines(text) {
		switch line[0] {
		case '#', '\n':
			continue
		case '>', '<':
			datagrams = append(datagrams, datagram{sent: line[0] == '>'})
		}
		last := &datagrams[len(datagrams)-1]
		last.data = append(last.data, fromHex(t, line[1:])...)
	}
	for _, d := range datagrams {
		if isBigEndian {
			must(t, swapMessages(d.data, binary.LittleEndian))
		}
	}
	return datagrams
}

// fromHex reads hexadecimal numbers with spaces between them.
func fromHex(t testing.TB, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(text), ""))
	must(t, err)
	return b
}

func TestGolden(t *testing.T) {
	series, err := goldenFiles.ReadDir(goldenDir)
	must(t, err)
	for _, dir := range series {
		if !dir.IsDir() {
			continue
		}
		t.Run(dir.Name(), func(t *testing.T) {
			steps := goldenScenario()
			for n, step := range steps {
				t.Run(step.name, func(t *testing.T) {
					text, err := goldenFiles.ReadFile(goldenDir + "/" + dir.Name() + "/" + step.file(n))
					must(t, err)
					replay(t, &step, readDatagrams(t, string(text)))
				})
			}
			if files, err := goldenFiles.ReadDir(goldenDir + "/" + dir.Name()); err != nil || len(files) != len(steps) {
				t.Errorf("%d files for %d steps, error %v", len(files), len(steps), err)
			}
		})
	}
}

// replay makes the call of a step on a kernel that has only the recording.
func replay(t *testing.T, step *goldenStep, recording []datagram) {
	if len(recording) < 2 || !recording[0].sent || recording[1].sent {
		t.Fatal("the recording does not begin with a request and a reply")
	}
	i, k := newFake(t, nil)
	i.seq = seqOf(recording[0].data) - 1
	i.family = native.Uint16(recording[0].data[4:])
	i.socket.portID = native.Uint32(recording[1].data[12:])
	i.socket.in = make([]byte, largeBuffer) // whatever it was recorded with
	replies := 0
	i.socket.sendmsg = func(_ int, b []byte) error {
		if len(recording) == 0 {
			t.Errorf("one request too many:\n%s", hex.Dump(b))
			return unix.ECONNREFUSED
		}
		if want := recording[0].data; !bytes.Equal(b, want) {
			t.Errorf("sent\n%swant\n%s", hex.Dump(b), hex.Dump(want))
		}
		for recording = recording[1:]; len(recording) > 0 && !recording[0].sent; recording = recording[1:] {
			k.push(fakeReply{data: recording[0].data})
			replies++
		}
		return nil
	}
	got, err := step.call(i)
	step.check(t, got, err)
	if len(recording) > 0 || len(k.queue) > 0 {
		t.Errorf("%d datagrams were not sent or asked for, %d replies not read", len(recording), len(k.queue))
	}
	if replies < step.datagrams {
		t.Errorf("the recording has %d replies, want %d or more", replies, step.datagrams)
	}
}
