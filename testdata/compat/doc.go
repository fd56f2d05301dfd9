// Package compat compares the checkout around it with the module that it
// replaces, github.com/moby/ipvs v1.1.0. It holds nothing but tests: see
// README.md.
package compat
