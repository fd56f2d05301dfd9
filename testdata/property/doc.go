// Package property checks the library around it with generated tables, on a
// real kernel and against ipvsadm. It holds nothing but tests: see README.md.
package property
