//go:build linux

// Command proxier is a complete small proxier, to be copied: it keeps the kernel's IPVS
// table in the state that a YAML file describes, whatever happens to either of them.
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

// Counters only increase; gauges have the current state.
var (
	changesMade = promauto.NewCounterVec(prometheus.CounterOpts{Name: "proxier_changes_total", Help: "Changes made to the IPVS table."}, []string{"object", "change"})
	failures    = promauto.NewCounterVec(prometheus.CounterOpts{Name: "proxier_failures_total", Help: "Attempts that failed, at least in part."}, []string{"step"})
	failing     = promauto.NewGauge(prometheus.GaugeOpts{Name: "proxier_failing_changes", Help: "Changes that the last attempt could not make."})
	draining    = promauto.NewGauge(prometheus.GaugeOpts{Name: "proxier_draining_destinations", Help: "Destinations that finish their connections."})
	lastSuccess = promauto.NewGauge(prometheus.GaugeOpts{Name: "proxier_last_success_timestamp_seconds", Help: "When the table was last as wanted."})
)

// proxier keeps the IPVS table of a handle in the state that a file describes.
type proxier struct {
	path       string
	reconciler ipvs.Reconciler
	want       []ipvs.TableEntry // the file's last valid content; nil until it was read once
}

func newProxier(handle *ipvs.Handle, path string, network *net.IPNet, drain time.Duration) *proxier {
	owned := func(s *ipvs.Service) bool { return network.Contains(s.Address) }
	return &proxier{path: path, reconciler: ipvs.Reconciler{Handle: handle, Drain: drain, Owned: owned}}
}

// load reads the file; if that fails, its last valid content stays in force. An invalid
// entry is left for Reconcile to report: it does not affect the others.
func (p *proxier) load() error {
	data, err := os.ReadFile(p.path)
	if err != nil {
		return err
	}
	var c config
	if err := yaml.Unmarshal(data, &c); err != nil {
		return err
	}
	protocols := map[string]uint16{"": syscall.IPPROTO_TCP, "tcp": syscall.IPPROTO_TCP, "udp": syscall.IPPROTO_UDP, "sctp": 132}
	table := []ipvs.TableEntry{}
	for _, s := range c.Services {
		protocol, ok := protocols[s.Protocol]
		if !ok {
			return fmt.Errorf("service %s: unknown protocol %q", s.Address, s.Protocol)
		}
		e := ipvs.TableEntry{Service: &ipvs.Service{Address: net.ParseIP(s.Address), Protocol: protocol, Port: s.Port, SchedName: cmp.Or(s.Scheduler, ipvs.RoundRobin)}}
		if e.Service.Address.To4() != nil {
			e.Service.Netmask = 0xFFFFFFFF // like ipvsadm; with 0 and persistence all clients would be one group
		}
		for _, d := range s.Destinations {
			weight := 1
			if d.Weight != nil {
				weight = *d.Weight
			}
			e.Destinations = append(e.Destinations, &ipvs.Destination{Address: net.ParseIP(d.Address), Port: d.Port, Weight: weight})
		}
		table = append(table, e)
	}
	p.want = table
	return nil
}

// reconcile brings the table to the desired state, and counts the changes.
func (p *proxier) reconcile() (ipvs.Changes, error) {
	if p.want == nil { // without a file, nothing is deleted
		return ipvs.Changes{}, nil
	}
	changes, err := p.reconciler.Reconcile(p.want)
	count := func(object string, added, updated, deleted int) {
		changesMade.WithLabelValues(object, "added").Add(float64(added))
		changesMade.WithLabelValues(object, "updated").Add(float64(updated))
		changesMade.WithLabelValues(object, "deleted").Add(float64(deleted))
	}
	count("service", changes.ServicesAdded, changes.ServicesUpdated, changes.ServicesDeleted)
	count("destination", changes.DestinationsAdded, changes.DestinationsUpdated, changes.DestinationsDeleted)
	failed := &ipvs.BatchError{}
	if err == nil || errors.As(err, &failed) { // otherwise the table could not be read
		draining.Set(float64(changes.Draining))
		failing.Set(float64(len(failed.Errors)))
	}
	if err == nil {
		lastSuccess.SetToCurrentTime()
	}
	return changes, err
}

func run() error {
	path := flag.String("config", "/etc/proxier/services.yaml", "the `file` with the services")
	owned := flag.String("owned", "10.96.0.0/12", "the `network` of the services that are ours; others are not touched")
	drain := flag.Duration("drain", 10*time.Minute, "how long connections may go on after their destination left the file")
	every := flag.Duration("every", 30*time.Second, "how often to look for changes that others made")
	listen := flag.String("listen", "127.0.0.1:9100", "the `address` for metrics")
	flag.Parse()
	_, network, err := net.ParseCIDR(*owned)
	if err != nil {
		return err
	}
	handle, err := ipvs.New("")
	if err != nil {
		return err
	}
	defer handle.Close()
	p := newProxier(handle, *path, network, *drain)
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
	for changed := true; ; {
		// Several events in a row need only one reconciliation.
		for more := true; more; {
			select {
			case <-watcher.Events:
				changed = true
			case <-time.After(50 * time.Millisecond):
				more = false
			}
		}
		if err := p.load(); err != nil && changed {
			failures.WithLabelValues("load").Inc()
			slog.Error("file not taken", "error", err)
		}
		changes, err := p.reconcile()
		if err != nil {
			failures.WithLabelValues("reconcile").Inc()
			slog.Error("reconcile", "error", err)
		}
		if changes.Total() > 0 {
			slog.Info("table changed", "changes", changes)
		}
		pause := min(*every, cmp.Or(changes.RequeueAfter, *every)) // shorter while destinations drain
		changed = false
		select {
		case <-watcher.Events:
			changed = true
		case err := <-watcher.Errors:
			slog.Error("watching", "error", err)
		case <-time.After(pause):
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
