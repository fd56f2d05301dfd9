package ipvs

import (
	"bytes"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
)

// A datagram's messages are taken one by one, and what follows them is counted.
func TestParseMessageLeft(t *testing.T) {
	first, second := netlinkMessage(1, 2, 3, []byte{1, 2, 3, 4, 5}), netlinkMessage(4, 5, 6, nil)
	var m message
	rest, err := parseMessage(append(first, second...), &m)
	if err != nil || !bytes.Equal(rest, second) || m.left != len(second) || !bytes.Equal(m.body, []byte{1, 2, 3, 4, 5}) {
		t.Errorf("%v, rest %x, %+v", err, rest, m)
	}
	rest, err = parseMessage(rest, &m)
	if err != nil || len(rest) != 0 || m.left != 0 || m.typ != 4 || m.flags != 5 || m.seq != 6 || m.portID != fakePortID {
		t.Errorf("%v, rest %x, %+v", err, rest, m)
	}
}

// The kernel's words are found after the request, of which it echoes all or only
// the header.
func TestErrorText(t *testing.T) {
	request := newGenlRequest(nil, fakeFamily, cmdNewService, genlVersion, unix.NLM_F_ACK)
	request = append(request, attr(1, []byte("not the text\x00"))...)
	setLength(request)
	text := attr(unix.NLMSGERR_ATTR_MSG, []byte("the text\x00"))
	for _, c := range []struct {
		flags uint16
		echo  []byte
		want  string
	}{
		{unix.NLM_F_ACK_TLVS | unix.NLM_F_CAPPED, request[:msgHdrLen], "the text"},
		{unix.NLM_F_ACK_TLVS, request, "the text"},
		{unix.NLM_F_CAPPED, request[:msgHdrLen], ""},
		{unix.NLM_F_ACK_TLVS, nil, ""},
	} {
		m := message{flags: c.flags, body: append(ne32(^uint32(0)), c.echo...)}
		if c.echo != nil {
			m.body = append(m.body, text...)
		}
		if got := m.errorText(); got != c.want {
			t.Errorf("flags %#x: got %q, want %q", c.flags, got, c.want)
		}
	}
}

// Replies to requests that were not yet made are none to this one.
func TestReplyToAnotherRequest(t *testing.T) {
	for _, off := range []uint32{1, 2, 1 << 20, 1 << 31, ^uint32(0)} {
		i, _ := newFake(t, func(r []byte) []fakeReply {
			other := bytes.Clone(r)
			setSequence(other, seqOf(r)+off)
			return append(one(errorReply(other, syscall.EPERM)), one(errorReply(r, syscall.EEXIST))...)
		})
		i.seq = 1000
		if err := i.NewService(ipv4Service(1)); err != syscall.EEXIST {
			t.Errorf("%#x later: %v", off, err)
		}
	}
}

// What cannot be read of a reply that is no list is an error.
func TestMalformedSingleReplies(t *testing.T) {
	short := attr(infoAttrVersion, []byte{1}) // and cmdAttrTimeoutTCP has another number
	i, _ := newFake(t, func(r []byte) []fakeReply {
		if cmdOf(r) == cmdGetConfig {
			return one(dataReply(r, 0, cmdSetConfig, attr(cmdAttrTimeoutTCP, []byte{1})))
		}
		return one(dataReply(r, 0, cmdSetInfo, short))
	})
	if c, err := i.GetConfig(); err == nil || c != nil {
		t.Errorf("GetConfig: %+v, %v", c, err)
	}
	if info, err := i.GetInfo(); err == nil || info != nil {
		t.Errorf("GetInfo: %+v, %v", info, err)
	}
}

// A handle whose process knows the family asks for nothing, and waits 3 s.
func TestNewHandle(t *testing.T) {
	known := knownFamily.Swap(fakeFamily)
	t.Cleanup(func() { knownFamily.Store(known) })
	from, k := newFake(t, func(r []byte) []fakeReply { return one(familyReply(r, fakeFamily)) })
	i, err := newHandle(from.socket, nil)
	if err != nil || i.family != fakeFamily || len(k.requests) != 0 {
		t.Errorf("%v, family %d, %d requests", err, i.family, len(k.requests))
	}
	if i.receiveTimeout() != defaultTimeout || i.answerTimeout() != 10*defaultTimeout {
		t.Errorf("waits %v, and %v for all", i.receiveTimeout(), i.answerTimeout())
	}
	knownFamily.Store(0)
	i, err = newHandle(from.socket, nil)
	if err != nil || i.family != fakeFamily || len(k.requests) != 1 || knownFamily.Load() != fakeFamily {
		t.Errorf("%v, family %d, %d requests", err, i.family, len(k.requests))
	}
	if i, err := newHandle(nil, unix.EMFILE); err != unix.EMFILE || i != nil {
		t.Errorf("got %v, %v", i, err)
	}
}

// A missing IPVS is logged once, until there is one.
func TestMissingIPVSIsLoggedOnce(t *testing.T) {
	if !mayLoadModules() {
		t.Skip("SKIP: needs the right to load modules, without which nothing is logged")
	}
	countModprobe(t)
	var log bytes.Buffer
	out := logrus.StandardLogger().Out
	logrus.SetOutput(&log)
	was := warned.Swap(false)
	t.Cleanup(func() { logrus.SetOutput(out); warned.Store(was) })
	there := false
	i, _ := newFake(t, func(r []byte) []fakeReply {
		if there {
			return one(familyReply(r, fakeFamily))
		}
		return one(errorReply(r, syscall.ENOENT))
	})
	for turn, step := range []struct {
		there bool
		lines int
	}{{true, 0}, {false, 1}, {false, 0}, {true, 0}, {false, 1}} {
		log.Reset()
		there = step.there
		if err := i.setup(i.socket); (err == nil) != there {
			t.Errorf("turn %d: %v", turn, err)
		}
		if got := strings.Count(log.String(), "\n"); got != step.lines || got > 0 && !strings.Contains(log.String(), "not here") {
			t.Errorf("turn %d: logged %q", turn, log.String())
		}
	}
}

// Only the capability to load modules counts.
func TestMayLoadModules(t *testing.T) {
	effective := func() uint64 {
		status, err := os.ReadFile("/proc/thread-self/status")
		must(t, err)
		_, after, _ := strings.Cut(string(status), "CapEff:")
		caps, err := strconv.ParseUint(strings.Fields(after)[0], 16, 64)
		must(t, err)
		return caps
	}
	set := func(caps uint64) {
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		must(t, unix.Capget(&hdr, &data[0]))
		data[0].Effective, data[1].Effective = uint32(caps), uint32(caps>>32)
		must(t, unix.Capset(&hdr, &data[0]))
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		const module = 1 << unix.CAP_SYS_MODULE
		all := effective()
		for _, caps := range []uint64{all, all & module, all &^ module, 0} {
			set(caps)
			if got, want := mayLoadModules(), caps&module != 0; got != want {
				t.Errorf("capabilities %#x: %v", caps, got)
			}
		}
	}()
	<-done
}

// A reply that fills the buffer to the last byte is a whole one.
func TestReplyFillsBuffer(t *testing.T) {
	i, k := newFake(t, func(r []byte) []fakeReply {
		return one(dataReply(r, 0, cmdSetInfo, attr(infoAttrVersion, ne32(0x010201))))
	})
	for missing, requests := range map[int]int{0: 1, 1: 2} { // what does not fit is requested again
		i.socket.in, k.requests = make([]byte, msgHdrLen+genlHdrLen+8-missing), nil
		if info, err := i.GetInfo(); err != nil || info.Version != 0x010201 || len(k.requests) != requests {
			t.Errorf("%+v, %v after %d requests", info, err, len(k.requests))
		}
	}
}

// Only acknowledgements answer a request that is sent with a fence.
func TestFenceTakesAcknowledgements(t *testing.T) {
	i, _ := newFake(t, nil)
	i.seq = 7
	f := &fenced{handle: i, err: syscall.ESRCH}
	for _, typ := range []uint16{fakeFamily, unix.NLMSG_DONE} {
		if done, err := f.take(&message{typ: typ, seq: 7, body: ne32(0)}); done || err != nil || f.err != syscall.ESRCH {
			t.Errorf("type %d: %v, %v", typ, done, err)
		}
	}
	if done, err := f.take(&message{typ: unix.NLMSG_ERROR, seq: 7, body: ne32(0)}); !done || err != syscall.ESRCH {
		t.Errorf("the fence: %v, %v", done, err)
	}
}
