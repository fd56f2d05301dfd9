//go:build linux

// Command proxier is a complete small proxier, to be copied: it keeps the kernel's IPVS
// table as a YAML file says, whatever else happens to either of them.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/moby/ipvs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"gopkg.in/yaml.v3"
)

// config is the file: services with their destinations.
type config struct {
	Services []struct {
		Address, Protocol, Scheduler string
		Port                         uint16
		Destinations                 []struct {
			Address string
			Port    uint16
			Weight  *int // 1 if left out
		}
	}
}

// Counters only grow; gauges say what is now.
var (
	changesMade = promauto.NewCounterVec(prometheus.CounterOpts{Name: "proxier_changes_total", Help: "Changes made to the IPVS table."}, []string{"object", "change"})
	failures    = promauto.NewCounterVec(prometheus.CounterOpts{Name: "proxier_failures_total", Help: "Attempts that failed, at least in part."}, []string{"step"})
	failing     = promauto.NewGauge(prometheus.GaugeOpts{Name: "proxier_failing_changes", Help: "Changes that the last attempt could not make."})
	draining    = promauto.NewGauge(prometheus.GaugeOpts{Name: "proxier_draining_destinations", Help: "Destinations that finish their connections."})
	lastSuccess = promauto.NewGauge(prometheus.GaugeOpts{Name: "proxier_last_success_timestamp_seconds", Help: "When the table was last as wanted."})
)

// load reads the file. An entry that makes no sense is left for Reconcile to report:
// it harms only itself.
func load(path string) ([]ipvs.TableEntry, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var c config
	if err := yaml.Unmarshal(data, &c); err != nil {
		return nil, err
	}
	protocols := map[string]uint16{"": syscall.IPPROTO_TCP, "tcp": syscall.IPPROTO_TCP, "udp": syscall.IPPROTO_UDP, "sctp": 132}
	table := []ipvs.TableEntry{}
	for _, s := range c.Services {
		protocol, ok := protocols[s.Protocol]
		if !ok {
			return nil, fmt.Errorf("service %s: unknown protocol %q", s.Address, s.Protocol)
		}
		e := ipvs.TableEntry{Service: &ipvs.Service{Address: net.ParseIP(s.Address), Protocol: protocol, Port: s.Port, SchedName: cmp.Or(s.Scheduler, ipvs.RoundRobin)}}
		for _, d := range s.Destinations {
			weight := 1
			if d.Weight != nil {
				weight = *d.Weight
			}
			e.Destinations = append(e.Destinations, &ipvs.Destination{Address: net.ParseIP(d.Address), Port: d.Port, Weight: weight})
		}
		table = append(table, e)
	}
	return table, nil
}

// reconcile brings the table to what is wanted, tells of it, and returns when to look
// again because something drains; 0 for never.
func reconcile(r *ipvs.Reconciler, want []ipvs.TableEntry) time.Duration {
	changes, err := r.Reconcile(want)
	for _, c := range []struct {
		object, change string
		n              int
	}{
		{"service", "added", changes.ServicesAdded}, {"service", "updated", changes.ServicesUpdated}, {"service", "deleted", changes.ServicesDeleted},
		{"destination", "added", changes.DestinationsAdded}, {"destination", "updated", changes.DestinationsUpdated}, {"destination", "deleted", changes.DestinationsDeleted},
	} {
		changesMade.WithLabelValues(c.object, c.change).Add(float64(c.n))
	}
	draining.Set(float64(changes.Draining))
	if changes.Total() > 0 {
		slog.Info("table changed", "changes", changes)
	}
	if err == nil {
		failing.Set(0)
		lastSuccess.SetToCurrentTime()
		return changes.RequeueAfter
	}
	failures.WithLabelValues("reconcile").Inc()
	slog.Error("reconcile", "error", err)
	var failed *ipvs.BatchError
	if errors.As(err, &failed) {
		failing.Set(float64(len(failed.Errors)))
	}
	return changes.RequeueAfter
}

func run() error {
	path := flag.String("config", "/etc/proxier/services.yaml", "the `file` with the services")
	owned := flag.String("owned", "10.96.0.0/12", "the `network` of the services that are ours; others are not touched")
	drain := flag.Duration("drain", 10*time.Minute, "how long connections may go on after their destination left the file")
	every := flag.Duration("every", 30*time.Second, "how often to look for changes that others made")
	listen := flag.String("listen", "127.0.0.1:9100", "the `address` for metrics")
	flag.Parse()
	network, err := netip.ParsePrefix(*owned)
	if err != nil {
		return err
	}
	handle, err := ipvs.New("")
	if err != nil {
		return err
	}
	defer handle.Close()
	r := &ipvs.Reconciler{Handle: handle, Drain: *drain, Owned: func(s *ipvs.Service) bool {
		address, ok := netip.AddrFromSlice(s.Address)
		return ok && network.Contains(address.Unmap())
	}}

	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer watcher.Close()
	// The directory, since the file is replaced rather than written.
	if err := watcher.Add(filepath.Dir(*path)); err != nil {
		return err
	}
	http.Handle("/metrics", promhttp.Handler())
	listener, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	go http.Serve(listener, nil)
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer cancel()
	drift := time.NewTicker(*every)
	defer drift.Stop()

	var want []ipvs.TableEntry // nil until the file was read once: nothing is deleted for want of it
	for changed := true; ; {
		// Several events at once are worth one look.
		for more := true; more; {
			select {
			case <-watcher.Events:
				changed = true
			case <-time.After(50 * time.Millisecond):
				more = false
			}
		}
		if table, err := load(*path); err == nil {
			want = table
		} else if changed { // what was read last stays in force
			failures.WithLabelValues("load").Inc()
			slog.Error("file not taken", "error", err)
		}
		var requeue <-chan time.Time
		if want != nil {
			if after := reconcile(r, want); after > 0 {
				requeue = time.After(after)
			}
		}
		changed = false
		select {
		case <-watcher.Events:
			changed = true
		case err := <-watcher.Errors:
			slog.Error("watching", "error", err)
		case <-drift.C:
		case <-requeue:
		case <-stop.Done():
			slog.Info("ends; the table stays as it is, and goes on to serve")
			return nil
		}
	}
}

func main() {
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err := run(); err != nil {
		slog.Error("proxier", "error", err)
		os.Exit(1)
	}
}
