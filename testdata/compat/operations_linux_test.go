//go:build linux

package compat

import (
	"fmt"
	"slices"
	"strings"
	"time"

	original "github.com/moby/ipvs"
)

// operation is one call with its arguments.
type operation struct {
	method      string
	service     *original.Service
	destination *original.Destination
	config      *original.Config
	path        string // of New
	closed      bool   // on a handle that is closed
	foreign     bool   // by the checkout on both sides, as if by another program
}

func (op operation) String() string {
	text := op.method
	switch {
	case takesService(op.method):
		text += " " + show(op.service)
	case op.method == "SetConfig":
		text += fmt.Sprintf(" %+v", op.config)
	case op.method == "New":
		text += fmt.Sprintf(" %q", op.path)
	}
	if op.closed {
		text = "after Close: " + text
	}
	if takesDestination(op.method) {
		text += " -> " + show(op.destination)
	}
	if op.foreign {
		text = "by another program: " + text
	}
	return text
}

func show[T any](v *T) string {
	if v == nil {
		return "nil"
	}
	return line(v)
}

func takesService(method string) bool {
	return method != "GetServices" && strings.HasSuffix(strings.TrimSuffix(method, "s"), "Service") ||
		method == "IsServicePresent" || method == "GetDestinations" || takesDestination(method)
}

func takesDestination(method string) bool {
	return strings.HasSuffix(method, "Destination") || method == "SetTunnel"
}

// changes reports whether the method is meant to change the kernel's state.
func changes(method string) bool {
	return method == "Flush" || method == "SetConfig" ||
		!strings.HasPrefix(method, "Get") && (takesDestination(method) || strings.HasSuffix(method, "Service"))
}

// outcome is the result of a call as a caller sees it.
type outcome struct {
	value    any // what it returns beside the error
	err      error
	panicked any
}

func (o outcome) String() string {
	if o.panicked != nil {
		return fmt.Sprintf("panic: %v", o.panicked)
	}
	text := describe(o.err)
	switch v := o.value.(type) {
	case nil:
	case []*original.Service:
		text = fmt.Sprintf("%d services (nil: %t)", len(v), v == nil)
		for _, s := range v {
			text += "\n\t\t" + line(s)
		}
		text += "\n\t" + describe(o.err)
	case []*original.Destination:
		text = fmt.Sprintf("%d destinations (nil: %t)", len(v), v == nil)
		for _, d := range v {
			text += "\n\t\t" + line(d)
		}
		text += "\n\t" + describe(o.err)
	case *original.Service:
		text = show(v) + ", " + text
	default:
		text = fmt.Sprintf("%+v, %s", v, text)
	}
	return text
}

// hangs is how long a call may take. Nothing waits for packets here.
const hangs = 2 * time.Minute

// call makes the call and catches a panic. A call that hangs ends the program.
func (op operation) call(l library) (o outcome) {
	watchdog := time.AfterFunc(hangs, func() { panic(fmt.Sprintf("no return within %v: %v", hangs, op)) })
	defer func() {
		watchdog.Stop()
		if o.panicked = recover(); o.panicked != nil {
			o.value = nil
		}
	}()
	switch op.method {
	case "NewService":
		o.err = l.NewService(op.service)
	case "UpdateService":
		o.err = l.UpdateService(op.service)
	case "DelService":
		o.err = l.DelService(op.service)
	case "NewDestination":
		o.err = l.NewDestination(op.service, op.destination)
	case "UpdateDestination":
		o.err = l.UpdateDestination(op.service, op.destination)
	case "DelDestination":
		o.err = l.DelDestination(op.service, op.destination)
	case "Flush":
		o.err = l.Flush()
	case "SetConfig":
		o.err = l.SetConfig(op.config)
	case "GetConfig":
		o.value, o.err = l.GetConfig()
	case "GetService":
		o.value, o.err = l.GetService(op.service)
	case "GetServices":
		o.value, o.err = l.GetServices()
	case "GetDestinations":
		o.value, o.err = l.GetDestinations(op.service)
	case "IsServicePresent":
		o.value = l.IsServicePresent(op.service)
	case "SetTunnel":
		o.err = l.(converted).SetTunnel(op.service, op.destination, 6080)
	case "New":
		o.value, o.err = l.Open(op.path)
	case "RewriteService":
		o.err = l.RewriteService(op.service)
	case "RewriteDestination":
		o.err = l.RewriteDestination(op.service, op.destination)
	default:
		panic("no method " + op.method)
	}
	return o
}

// clone copies what an operation points to, so that a correction or a library
// that writes into its arguments changes no other.
func (op operation) clone() operation {
	if op.service != nil {
		op.service = with(op.service, func(s *original.Service) { s.Address = slices.Clone(s.Address) })
	}
	if op.destination != nil {
		op.destination = with(op.destination, func(d *original.Destination) { d.Address = slices.Clone(d.Address) })
	}
	if op.config != nil {
		op.config = with(op.config, func(*original.Config) {})
	}
	return op
}
