package ipvs

import (
	"bytes"
	"cmp"
	"encoding/hex"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// The Fake's replies are those of the recorded kernels, byte for byte.
func TestFakeGolden(t *testing.T) {
	for _, series := range []string{"5.10", "6.1", "6.12", "7.2"} {
		t.Run(series, func(t *testing.T) {
			var recordings [][]datagram
			for n, step := range goldenScenario() {
				text, err := goldenFiles.ReadFile(goldenDir + "/" + series + "/" + step.file(n))
				must(t, err)
				recordings = append(recordings, readDatagrams(t, string(text)))
			}
			f := NewFake()
			f.table.salt = recordedSalt(t, recordings)
			other := f.Handle()
			for n, step := range goldenScenario() {
				t.Run(step.name, func(t *testing.T) {
					if step.prepare != nil {
						must(t, step.prepare(other))
					}
					fakeReplay(t, f, recordings[n], series == "7.2")
				})
			}
		})
	}
}

// fakeReplay sends the recorded requests to the Fake, and compares what comes back. The
// order of a list does not matter where the kernel's is random.
func fakeReplay(t *testing.T, f *Fake, recording []datagram, random bool) {
	t.Helper()
	s := f.open()
	s.prepareDump()
	var got, want [][]byte
	for _, d := range recording {
		if !d.sent {
			want = append(want, comparableMessages(t, d.data)...)
			continue
		}
		request := bytes.Clone(d.data)
		if !isFamilyRequest(request) {
			setFamily(request, fakeFamilyID)
		}
		must(t, s.send(request, 0))
		for {
			reply, err := s.receive()
			if err == unix.EAGAIN {
				break
			}
			must(t, err)
			got = append(got, comparableMessages(t, reply)...)
		}
	}
	if random {
		slices.SortFunc(got, bytes.Compare)
		slices.SortFunc(want, bytes.Compare)
	}
	if !slices.EqualFunc(got, want, bytes.Equal) {
		t.Errorf("got\n%s\nwant\n%s", dump(got), dump(want))
	}
}

func dump(messages [][]byte) (s string) {
	for _, m := range messages {
		s += hex.Dump(m)
	}
	return s
}

// comparableMessages returns the messages of a datagram without the port id and the
// family id. Of an error only the number is compared, not the request that it echoes,
// and of the reply about the family only that there is one.
func comparableMessages(t *testing.T, datagram []byte) (messages [][]byte) {
	t.Helper()
	for len(datagram) > 0 {
		var m message
		rest, err := parseMessage(datagram, &m)
		must(t, err)
		b := bytes.Clone(datagram[:msgHdrLen+len(m.body)])
		datagram = rest
		native.PutUint32(b[12:], 0)
		switch {
		case m.typ == unix.NLMSG_ERROR:
			b = b[:msgHdrLen+4]
			setLength(b)
			setFlags(b, 0)
		case m.typ == unix.GENL_ID_CTRL:
			b = b[:msgHdrLen+genlHdrLen] // the Fake does not describe the commands
			setLength(b)
		case m.typ >= unix.NLMSG_MIN_TYPE:
			setFamily(b, fakeFamilyID)
		}
		messages = append(messages, b)
	}
	return messages
}

// recordedSalt determines the salt of the recorded kernel's hash.
func recordedSalt(t *testing.T, recordings [][]datagram) uint8 {
	t.Helper()
	var lists [][]*Service
	for _, recording := range recordings {
		if recording[0].data[msgHdrLen] != cmdGetService {
			continue
		}
		var list serviceList
		for _, d := range recording[1:] {
			for b := d.data; len(b) > 0; {
				var m message
				rest, err := parseMessage(b, &m)
				must(t, err)
				b = rest
				if m.typ >= unix.NLMSG_MIN_TYPE {
					must(t, list.parse(&m))
				}
			}
		}
		lists = append(lists, list.items)
	}
	return saltOf(lists...)
}

// saltOf returns a salt with which the hash tables have the services in the order of
// all the lists, or 0 if there is none.
func saltOf(lists ...[]*Service) uint8 {
	for salt := range fakeBuckets {
		if !slices.ContainsFunc(lists, func(list []*Service) bool {
			return !slices.IsSortedFunc(list, func(a, b *Service) int {
				return cmp.Compare(saltedBucket(a, uint8(salt)), saltedBucket(b, uint8(salt)))
			})
		}) {
			return uint8(salt)
		}
	}
	return 0
}

// saltedBucket numbers the buckets of both tables; it is an independent implementation
// of the kernel's hash.
func saltedBucket(s *Service, salt uint8) int {
	if s.FWMark != 0 {
		return fakeBuckets + int(uint8(s.FWMark)^salt)
	}
	sum := uint8(0)
	for n := len(s.Address) - 1; n > 0; n -= 4 {
		sum ^= s.Address[n]
	}
	return int(sum ^ uint8(s.Protocol) ^ uint8(s.Port) ^ uint8(s.Port>>8) ^ salt)
}
