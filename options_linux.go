package ipvs

// This file splits a line of ipvsadm's text into its options.

import (
	"fmt"
	"strings"
)

// columnError is an error at a column of a line, counted in bytes from 1.
type columnError struct {
	column int
	err    error
}

func (e *columnError) Error() string { return fmt.Sprintf("column %d: %v", e.column, e.err) }

func errColumn(column int, format string, args ...any) error {
	return &columnError{column, fmt.Errorf(format, args...)}
}

// word is a word of a line and its column, counted from 1.
type word struct {
	text   string
	column int
}

// splitWords splits a line at white space, since ipvsadm -R knows no quoting.
func splitWords(line string) (words []word) {
	isSpace := func(c byte) bool { return c == ' ' || c >= '\t' && c <= '\r' }
	for n := 0; n < len(line); {
		if isSpace(line[n]) {
			n++
			continue
		}
		start := n
		for n < len(line) && !isSpace(line[n]) {
			n++
		}
		words = append(words, word{line[start:n], start + 1})
	}
	return words
}

// optionID identifies an option, whichever of its names is used.
type optionID int

const (
	_ optionID = iota

	optAddService // the commands
	optEditService
	optDeleteService
	optClear
	optAddServer
	optEditServer
	optDeleteServer

	optTCP
	optUDP
	optSCTP
	optFWMark
	optIPv6
	optScheduler
	optPersistent
	optNetmask
	optPE
	optOnePacket
	optSchedFlags
	optRealServer
	optGatewaying
	optIPIP
	optMasquerading
	optWeight
	optUpperThreshold
	optLowerThreshold
	optTunType
	optTunPort
	optTunNoCsum
	optTunCsum
	optTunRemCsum
)

func (id optionID) isCommand() bool { return id >= optAddService && id <= optDeleteServer }

// tableOptions lists the options that describe a table; ipvsadm has others.
var tableOptions = []struct {
	id    optionID
	long  string
	short byte // 0 for none
	value bool // takes a value; that of -p is optional
}{
	{optAddService, "add-service", 'A', false},
	{optEditService, "edit-service", 'E', false},
	{optDeleteService, "delete-service", 'D', false},
	{optClear, "clear", 'C', false},
	{optAddServer, "add-server", 'a', false},
	{optEditServer, "edit-server", 'e', false},
	{optDeleteServer, "delete-server", 'd', false},
	{optTCP, "tcp-service", 't', true},
	{optUDP, "udp-service", 'u', true},
	{optSCTP, "sctp-service", 0, true},
	{optFWMark, "fwmark-service", 'f', true},
	{optIPv6, "ipv6", '6', false},
	{optScheduler, "scheduler", 's', true},
	{optPersistent, "persistent", 'p', true},
	{optNetmask, "netmask", 'M', true},
	{optPE, "pe", 0, true},
	{optOnePacket, "ops", 'o', false},
	{optSchedFlags, "sched-flags", 'b', true},
	{optRealServer, "real-server", 'r', true},
	{optGatewaying, "gatewaying", 'g', false},
	{optIPIP, "ipip", 'i', false},
	{optMasquerading, "masquerading", 'm', false},
	{optWeight, "weight", 'w', true},
	{optUpperThreshold, "u-threshold", 'x', true},
	{optLowerThreshold, "l-threshold", 'y', true},
	{optTunType, "tun-type", 0, true},
	{optTunPort, "tun-port", 0, true},
	{optTunNoCsum, "tun-nocsum", 0, false},
	{optTunCsum, "tun-csum", 0, false},
	{optTunRemCsum, "tun-remcsum", 0, false},
}

// parsedOption is an option of a line.
type parsedOption struct {
	id          optionID
	name        string // as written, such as "-t" or "--tcp-service"
	column      int
	value       string
	valueColumn int
	noValue     bool // the value was left out
}

// parseOptions parses the words of a line; the first option is the command.
func parseOptions(words []word) (options []parsedOption, err error) {
	s := optionScanner{words: words}
	for len(s.words) > 0 && err == nil {
		w := s.words[0]
		s.words = s.words[1:]
		switch {
		case strings.HasPrefix(w.text, "--") && len(w.text) > 2:
			err = s.long(w)
		case strings.HasPrefix(w.text, "-") && len(w.text) > 1 && w.text != "--":
			err = s.short(w)
		default:
			err = errColumn(w.column, "%q is not an option", w.text)
		}
	}
	return s.options, err
}

// optionScanner parses options from words.
type optionScanner struct {
	words   []word // not parsed yet
	options []parsedOption
}

// long parses a word such as --tcp-service or --tcp-service=VALUE.
func (s *optionScanner) long(w word) error {
	name, value, hasValue := strings.Cut(w.text[2:], "=")
	for _, known := range tableOptions {
		if known.long != name {
			continue
		}
		p := parsedOption{id: known.id, name: "--" + name, column: w.column}
		switch {
		case hasValue && !known.value:
			return errColumn(w.column, "%s has no value", p.name)
		case hasValue:
			p.value, p.valueColumn = value, w.column+len(p.name)+1
		case known.value:
			if err := s.value(&p); err != nil {
				return err
			}
		}
		return s.add(p)
	}
	return errUnknownOption(w.column, "--"+name)
}

// short parses the options of a word such as -A, -At, -t10.0.0.1:80 or -p=300.
func (s *optionScanner) short(w word) error {
next:
	for n := 1; n < len(w.text); n++ {
		for _, known := range tableOptions {
			if known.short != w.text[n] {
				continue
			}
			p := parsedOption{id: known.id, name: "-" + w.text[n:n+1], column: w.column}
			if !known.value {
				if err := s.add(p); err != nil {
					return err
				}
				continue next
			}
			if rest := w.text[n+1:]; rest != "" {
				p.value = strings.TrimPrefix(rest, "=")
				p.valueColumn = w.column + len(w.text) - len(p.value)
			} else if err := s.value(&p); err != nil {
				return err
			}
			return s.add(p)
		}
		return errUnknownOption(w.column+n, "-"+w.text[n:n+1])
	}
	return nil
}

// value takes the next word as the value of p.
func (s *optionScanner) value(p *parsedOption) error {
	p.valueColumn = p.column
	switch {
	case p.id == optPersistent && (len(s.words) == 0 || strings.HasPrefix(s.words[0].text, "-")):
		p.noValue = true
	case p.id == optSchedFlags && len(s.words) == 0: // schedulerFlags reports whether that is allowed
		p.noValue = true
	case len(s.words) == 0:
		return errColumn(p.column, "%s needs a value", p.name)
	default:
		p.value, p.valueColumn = s.words[0].text, s.words[0].column
		s.words = s.words[1:]
	}
	return nil
}

// add appends an option. The first must be a command, and no other may be.
func (s *optionScanner) add(p parsedOption) error {
	switch {
	case len(s.options) == 0 && !p.id.isCommand():
		return errColumn(p.column, "%s comes before a command such as -A or -a", p.name)
	case len(s.options) > 0 && p.id.isCommand():
		return errColumn(p.column, "%s is a second command after %s", p.name, s.options[0].name)
	}
	s.options = append(s.options, p)
	return nil
}

func errUnknownOption(column int, name string) error {
	return errColumn(column, "%q is no option of a table", name)
}
