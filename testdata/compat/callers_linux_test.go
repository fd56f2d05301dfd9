//go:build linux

package compat

import (
	"embed"
	"strings"
	"testing"

	checkoutcallers "ipvs.test/compat/testdata/callers/checkout"
	originalcallers "ipvs.test/compat/testdata/callers/original"
)

//go:embed testdata/callers
var callers embed.FS

// The callers are in a folder named testdata so that vet, run over the whole
// module, leaves them alone: it has something against literals without field
// names, and those are what callers write.

// TestCallersSource runs the same source against both: that it compiles is
// half of the test.
func TestCallersSource(t *testing.T) {
	t.Run("same source", func(t *testing.T) {
		for _, name := range []string{"callers.go", "values.go"} {
			o, err := callers.ReadFile("testdata/callers/original/" + name)
			if err != nil {
				t.Fatal(err)
			}
			c, err := callers.ReadFile("testdata/callers/checkout/" + name)
			if err != nil {
				t.Fatal(err)
			}
			want := strings.Replace(string(o), `"github.com/moby/ipvs"`, `"ipvs.test/checkout"`, 1)
			if want == string(o) || string(c) != want {
				t.Errorf("testdata/callers: checkout/%s is not original/%s with the other import", name, name)
			}
		}
	})
	t.Run("plain", func(t *testing.T) {
		o, c := originalcallers.Plain(), checkoutcallers.Plain()
		if o != c {
			t.Errorf("original: %s\ncheckout: %s", o, c)
		}
		if want := "route 5 service destination 1s 2s 3s false true\n"; c != want {
			t.Errorf("got %q, want %q", c, want)
		}
	})
	t.Run("sync", func(t *testing.T) {
		needKernel(t)
		// The namespace is empty again after each.
		ns := newNamespace(t)
		o, oErr := originalcallers.Sync(ns.path())
		c, cErr := checkoutcallers.Sync(ns.path())
		if oErr != nil || cErr != nil {
			t.Fatalf("original: %v\ncheckout: %v", oErr, cErr)
		}
		if o != c {
			t.Errorf("original:\n%s\ncheckout:\n%s", o, c)
		}
		t.Log(c)
	})
}
