//go:build linux

package compat

import (
	"bytes"
	"encoding/gob"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unsafe"

	original "github.com/moby/ipvs"
	checkout "ipvs.test/checkout"
	checkoutcallers "ipvs.test/compat/testdata/callers/checkout"
	originalcallers "ipvs.test/compat/testdata/callers/original"
)

// pairs has the original's types beside the checkout's.
var pairs = []struct{ original, checkout reflect.Type }{
	{reflect.TypeFor[original.Service](), reflect.TypeFor[checkout.Service]()},
	{reflect.TypeFor[original.SvcStats](), reflect.TypeFor[checkout.SvcStats]()},
	{reflect.TypeFor[original.Destination](), reflect.TypeFor[checkout.Destination]()},
	{reflect.TypeFor[original.DstStats](), reflect.TypeFor[checkout.DstStats]()},
	{reflect.TypeFor[original.Config](), reflect.TypeFor[checkout.Config]()},
	{reflect.TypeFor[original.Handle](), reflect.TypeFor[checkout.Handle]()},
}

// lookedFor names the methods that packages look for in any value they are
// given: with one of these a type prints, compares or encodes in another way
// than before, and so does each struct that embeds it.
var lookedFor = map[string]string{
	"String": "fmt", "GoString": "fmt", "Format": "fmt", "Scan": "fmt, database/sql",
	"Error": "errors", "Unwrap": "errors", "Is": "errors", "As": "errors", "Timeout": "net", "Temporary": "net",
	"AppendText": "encoding", "MarshalText": "encoding", "UnmarshalText": "encoding",
	"AppendBinary": "encoding", "MarshalBinary": "encoding", "UnmarshalBinary": "encoding",
	"MarshalJSON": "encoding/json", "UnmarshalJSON": "encoding/json", "IsZero": "encoding/json",
	"MarshalJSONTo": "encoding/json/v2", "UnmarshalJSONFrom": "encoding/json/v2",
	"GobEncode": "encoding/gob", "GobDecode": "encoding/gob",
	"MarshalXML": "encoding/xml", "UnmarshalXML": "encoding/xml", "MarshalXMLAttr": "encoding/xml", "UnmarshalXMLAttr": "encoding/xml",
	"MarshalYAML": "yaml", "UnmarshalYAML": "yaml", "MarshalTOML": "toml", "UnmarshalTOML": "toml", "MarshalCBOR": "cbor", "UnmarshalCBOR": "cbor",
	"LogValue": "log/slog", "MarshalLogObject": "zap", "MarshalZerologObject": "zerolog", "MarshalLog": "logr",
	"Set": "flag", "Get": "flag", "IsBoolFlag": "flag", "Type": "pflag",
	"Value": "database/sql/driver", "Generate": "testing/quick",
	"Len": "sort", "Less": "sort", "Swap": "sort", "Push": "container/heap", "Pop": "container/heap",
	"Equal": "go-cmp", "Compare": "cmp", "Hash": "hash", "DeepCopy": "deepcopy", "DeepCopyInto": "deepcopy",
	"Read": "io", "Write": "io", "ReadFrom": "io", "WriteTo": "io", "Seek": "io", "WriteString": "io",
	"ReadByte": "io", "UnreadByte": "io", "WriteByte": "io", "ReadRune": "io", "UnreadRune": "io",
	"Lock": "sync", "Unlock": "sync", "ProtoMessage": "protobuf", "Reset": "protobuf",
}

// refused lists the methods of a type that other packages look for.
func refused(t reflect.Type) []string {
	var found []string
	for i := range t.NumMethod() {
		if name := t.Method(i).Name; lookedFor[name] != "" {
			found = append(found, name)
		}
	}
	return found
}

func hasMethod(t reflect.Type, name string) bool {
	_, ok := t.MethodByName(name)
	return ok
}

// TestMethodSets checks that no type of the original's got a method that changes
// what other packages do with it, and that none lost one.
func TestMethodSets(t *testing.T) {
	for _, pair := range pairs {
		for _, types := range [][2]reflect.Type{{pair.original, pair.checkout}, {reflect.PointerTo(pair.original), reflect.PointerTo(pair.checkout)}} {
			o, c := types[0], types[1]
			for _, name := range refused(c) {
				if !hasMethod(o, name) {
					t.Errorf("%v has %s, which %s looks for", c, name, lookedFor[name])
				}
			}
			for i := range o.NumMethod() {
				if name := o.Method(i).Name; !hasMethod(c, name) {
					t.Errorf("%v has no %s", c, name)
				}
			}
		}
	}
	if n := reflect.TypeFor[*original.Handle]().NumMethod(); n != 14 {
		t.Errorf("the original's handle has %d methods, want 14: the comparison would prove nothing", n)
	}
	t.Run("the check itself", func(t *testing.T) {
		for _, test := range []struct {
			t    reflect.Type
			want []string
		}{
			{reflect.TypeFor[json.Number](), []string{"String"}},
			{reflect.TypeFor[*json.Number](), []string{"String"}},
			{reflect.TypeFor[slog.Level](), []string{"AppendText", "MarshalJSON", "MarshalText", "String"}},
			{reflect.TypeFor[*slog.Level](), []string{"AppendText", "MarshalJSON", "MarshalText", "String", "UnmarshalJSON", "UnmarshalText"}},
			{reflect.TypeFor[struct{ slog.Value }](), []string{"Equal", "String"}},
		} {
			if got := refused(test.t); !slices.Equal(got, test.want) {
				t.Errorf("%v: %q, want %q", test.t, got, test.want)
			}
		}
	})
}

// fill sets all fields to random values, some of them unusual.
func (g generator) fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			g.fill(v.Field(i))
		}
	case reflect.Slice: // the addresses
		b := make([]byte, pick(g, 0, 4, 4, 16, 16, 16, 5))
		for i := range b {
			b[i] = byte(g.Uint32())
		}
		if len(b) > 0 {
			v.SetBytes(b)
		}
	case reflect.String:
		v.SetString(pick(g, "", "rr", "wlc", "a b", `"quoted" <&>`, "%d", "ü\n", "\xff\x00", "{}", "0"))
	case reflect.Int, reflect.Int64:
		v.SetInt(pick(g, 0, 1, -1, g.Int64()))
	default:
		v.SetUint(pick(g, 0, 1, g.Uint64()) & (1<<v.Type().Bits() - 1))
	}
}

// values is a value of each type.
type values struct {
	service     *checkout.Service
	destination *checkout.Destination
	config      *checkout.Config
}

// random makes values of the checkout's types. The fields that are new are zero,
// as in a program that does not know them, or random.
func (g generator) values(newFields bool) (c values, o map[string]any, addresses []unsafe.Pointer) {
	s, d, config := new(original.Service), new(original.Destination), new(original.Config)
	for _, v := range []any{s, d, config} {
		g.fill(reflect.ValueOf(v).Elem())
	}
	c = values{service(s), destination(d), convert[checkout.Config](config)}
	if newFields {
		for _, p := range []struct{ from, to any }{{s, c.service}, {d, c.destination}} {
			to := reflect.ValueOf(p.to).Elem()
			for i := reflect.ValueOf(p.from).Elem().NumField(); i < to.NumField(); i++ {
				g.fill(to.Field(i))
			}
		}
	}
	addresses = []unsafe.Pointer{unsafe.Pointer(s), unsafe.Pointer(d), unsafe.Pointer(config),
		unsafe.Pointer(c.service), unsafe.Pointer(c.destination), unsafe.Pointer(c.config)}
	return c, originalcallers.Values(s, d, config), addresses
}

// newPart makes of a value of the checkout a struct with its new fields alone.
func newPart(o, c any) any {
	v := reflect.ValueOf(c)
	var fields []reflect.StructField
	for i := reflect.TypeOf(o).NumField(); i < v.NumField(); i++ {
		fields = append(fields, v.Type().Field(i))
		fields[len(fields)-1].Offset, fields[len(fields)-1].Index = 0, nil
	}
	part := reflect.New(reflect.StructOf(fields)).Elem()
	for i := range fields {
		part.Field(i).Set(v.FieldByName(fields[i].Name))
	}
	return part.Interface()
}

// form is a way to make text of a value.
type form struct {
	name string
	text func(v any) string
	// between is what stands between two fields, and end what stands after the last
	// one, if the last is known by that.
	between, end string
}

func forms() []form {
	var all []form
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%d", "%q", "%x", "%X", "%#x", "%T", "%8.3v"} {
		f := form{name: verb, text: func(v any) string { return fmt.Sprintf(verb, v) }, between: " ", end: "}"}
		if verb == "%#v" {
			f.between = ", "
		}
		all = append(all, f)
	}
	encoded := func(b []byte, err error) string {
		if err != nil {
			return "error: " + err.Error()
		}
		return string(b)
	}
	all = append(all,
		form{name: "Sprintln", text: func(v any) string { return fmt.Sprintln(v) }, between: " ", end: "}"},
		form{name: "json.Marshal", text: func(v any) string { return encoded(json.Marshal(v)) }, between: ","},
		form{name: "json.MarshalIndent", text: func(v any) string {
			indented, err := json.MarshalIndent(v, "> ", "\t")
			// The new fields are indented as deep as they lie.
			var lines []string
			for _, l := range strings.Split(string(indented), "\n") {
				lines = append(lines, strings.TrimLeft(l, "> \t"))
			}
			return encoded([]byte(strings.Join(lines, "\n")), err)
		}, between: ",\n"},
		form{name: "slog text", text: func(v any) string {
			var b bytes.Buffer
			slog.New(slog.NewTextHandler(&b, &slog.HandlerOptions{ReplaceAttr: withoutTime})).Info("text", "value", v)
			return strings.ReplaceAll(b.String(), `\"`, `"`)
		}, between: " ", end: "}"},
		form{name: "slog JSON", text: func(v any) string {
			var b bytes.Buffer
			slog.New(slog.NewJSONHandler(&b, &slog.HandlerOptions{ReplaceAttr: withoutTime})).Info("text", "value", v)
			return b.String()
		}, between: ","},
	)
	return all
}

func withoutTime(groups []string, a slog.Attr) slog.Attr {
	if len(groups) == 0 && a.Key == slog.TimeKey {
		return slog.Attr{}
	}
	return a
}

// without removes the new fields from a text that has values of the checkout.
// What is left where they were keeps the next part from matching there, too.
func (f form) without(text string, parts ...any) string {
	const gone = "\x00new fields\x00"
	for _, part := range parts {
		for _, fields := range f.fields(part) {
			text = strings.ReplaceAll(text, f.between+fields+f.end, gone+f.end)
		}
	}
	return strings.ReplaceAll(text, gone, "")
}

// fields returns how the fields of a struct are written, without what is around
// them.
func (f form) fields(part any) (all []string) {
	texts := []string{f.text(part)}
	switch f.name {
	case "%T":
		return nil
	case "slog text":
		texts[0] = fmt.Sprintf("%+v", part)
	case "slog JSON":
		b, _ := json.Marshal(part)
		texts[0] = string(b)
	case "%#v":
		_, texts[0], _ = strings.Cut(texts[0], "}") // the type
	case "%s", "%q":
		texts = append(texts, fmt.Sprint(part)) // where the verb is wrong for a pointer
	}
	for _, text := range texts {
		begin, end := strings.Index(text, "{"), strings.LastIndex(text, "}")
		all = append(all, strings.Trim(text[begin+1:end], "\n"))
	}
	return all
}

// TestValues compares what printing and encoding make of values with what they
// make of the same values in the original: the same, but for the new fields at
// the end.
func TestValues(t *testing.T) {
	g := newGenerator(t)
	for n := range 30 {
		newFields := n%3 != 0
		c, ofOriginal, addresses := g.values(newFields)
		ofCheckout := checkoutcallers.Values(c.service, c.destination, c.config)
		parts := []any{
			// A service's new fields print as the end of a destination's do.
			newPart(original.Destination{}, *c.destination), newPart(original.Destination{}, checkout.Destination{}),
			newPart(original.Service{}, *c.service), newPart(original.Service{}, checkout.Service{}),
		}
		for _, name := range slices.Sorted(maps.Keys(ofOriginal)) {
			o, c := ofOriginal[name], ofCheckout[name]
			for _, f := range forms() {
				want := withoutAddresses(f.text(o), addresses)
				text := withoutAddresses(f.text(c), addresses)
				got := f.without(text, parts...)
				if f.name == "%T" || strings.Contains(name, "counters") || strings.Contains(name, "config") {
					got = text // there is nothing new in it
				}
				if got != want {
					t.Fatalf("%s of %s:\noriginal: %s\ncheckout: %s", f.name, name, want, text)
				}
			}
			// A few are enough for what depends on types more than on values. What is
			// decoded into an any has every field.
			if n < 3 && name != "anything" && name != "pointers" {
				sameDecoded(t, name, o, c)
			}
		}
	}
}

// withoutAddresses replaces pointers to the values by their number: those of the
// original and those of the checkout have the same.
func withoutAddresses(text string, addresses []unsafe.Pointer) string {
	for i, a := range addresses {
		for _, verb := range []string{"%x", "%X", "%d"} {
			text = strings.ReplaceAll(text, fmt.Sprintf(verb, uintptr(a)), fmt.Sprintf("POINTER%d", i%(len(addresses)/2)))
		}
	}
	return text
}

// sameDecoded encodes each of the two values, and decodes it as both types:
// what is shared comes back.
func sameDecoded(t *testing.T, name string, o, c any) {
	t.Helper()
	shared := func(v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			return err.Error()
		}
		// Decoded as the original's type it has no new field.
		back := reflect.New(reflect.TypeOf(o))
		if err := json.Unmarshal(b, back.Interface()); err != nil {
			return err.Error()
		}
		b, err = json.Marshal(back.Interface())
		return fmt.Sprintf("%s %v", b, err)
	}
	type result struct{ how, shared string }
	var results []result
	for _, from := range []any{o, c} {
		for _, to := range []any{o, c} {
			var how string
			into := reflect.New(reflect.TypeOf(to))
			b, err := json.Marshal(from)
			if err == nil {
				err = json.Unmarshal(b, into.Interface())
			}
			how = fmt.Sprint("JSON ", err, " ")
			text := shared(into.Interface())

			into = reflect.New(reflect.TypeOf(to))
			var stream bytes.Buffer
			err = gobEncode(&stream, from)
			if err == nil {
				err = gob.NewDecoder(&stream).Decode(into.Interface())
			}
			how += fmt.Sprint("gob ", err)
			results = append(results, result{how, text + " " + shared(into.Interface())})
		}
	}
	for i, way := range []string{"", "original as checkout", "checkout as original", "checkout as checkout"} {
		if results[i] != results[0] {
			t.Fatalf("%s, encoded and decoded: the original as it is:\n%s\n%s:\n%s", name, results[0], way, results[i])
		}
	}
}

// gobEncode turns the panic that gob makes of a nil pointer into an error.
func gobEncode(stream *bytes.Buffer, v any) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return gob.NewEncoder(stream).Encode(v)
}
