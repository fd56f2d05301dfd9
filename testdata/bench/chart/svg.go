package main

import (
	"fmt"
	"math"
	"strings"
)

// bar is one bar of a group: a workload as one library does it.
type bar struct{ workload, library, series string }

// groups are compared with the limit of their first workload.
var groups = []struct {
	title string
	bars  []bar
}{
	{"create", []bar{{"create", "this", "this"}, {"create-batch", "this", "batch"}, {"create", "moby", "moby"}, {"create", "cloudflare", "cloudflare"}}},
	{"update", []bar{{"update", "this", "this"}, {"update-batch", "this", "batch"}, {"update", "moby", "moby"}, {"update", "cloudflare", "cloudflare"}}},
	{"delete", []bar{{"delete", "this", "this"}, {"delete-batch", "this", "batch"}, {"delete", "moby", "moby"}, {"delete", "cloudflare", "cloudflare"}}},
	{"list services", []bar{{"list-services", "this", "this"}, {"list-services", "moby", "moby"}, {"list-services", "cloudflare", "cloudflare"}}},
	{"list 5 destinations", []bar{{"list-5", "this", "this"}, {"list-5", "moby", "moby"}, {"list-5", "cloudflare", "cloudflare"}}},
	{"list 500 destinations", []bar{{"list-500", "this", "this"}, {"list-500", "moby", "moby"}, {"list-500", "cloudflare", "cloudflare"}}},
	{"read the whole table", []bar{{"table", "this", "this"}, {"table", "moby", "moby"}, {"table", "cloudflare", "cloudflare"}}},
}

// series in the order of the legend.
var series = []struct{ name, color string }{
	{"this", "#0b6e4f"}, {"batch", "#7cc6a4"}, {"moby", "#5b6c8f"}, {"cloudflare", "#d98e4a"},
}

// Measures of the chart.
const (
	width     = 820
	left      = 170 // of the bars
	right     = 90  // room for the figures after the longest bar
	top       = 96
	barHeight = 14
	groupGap  = 16
	bottom    = 34
)

// draw returns the chart: bars as long as the cost is a multiple of the limit's.
func draw(r *results) (string, error) {
	label := map[string]string{
		"this": "this library", "batch": "this library, in a batch",
		"moby": "moby/ipvs " + r.versions["moby"], "cloudflare": "cloudflare/ipvs " + r.versions["cloudflare"],
	}
	color := map[string]string{}
	for _, s := range series {
		color[s.name] = s.color
	}
	longest, height := 0.0, top+bottom
	for _, g := range groups {
		limit := r.instructions[g.bars[0].workload]["limit"]
		for _, b := range g.bars {
			v, ok := r.instructions[b.workload][b.library]
			if !ok || limit <= 0 {
				return "", fmt.Errorf("workload %q with library %q or its limit is missing", b.workload, b.library)
			}
			longest = max(longest, v/limit)
		}
		height += len(g.bars)*barHeight + groupGap
	}
	scale := (width - left - right) / math.Ceil(longest)
	at := func(multiple float64) float64 { return left + multiple*scale }

	var s strings.Builder
	printf := func(format string, args ...any) { fmt.Fprintf(&s, format+"\n", args...) }
	printf(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="DejaVu Sans, Verdana, sans-serif" font-size="12" role="img" aria-labelledby="title">`, width, height, width, height)
	printf(`<title id="title">Instructions for each operation with three libraries, as a multiple of the limit</title>`)
	printf(`<rect width="%d" height="%d" rx="6" fill="#ffffff"/>`, width, height)
	printf(`<text x="20" y="28" font-size="15" font-weight="bold" fill="#222222">Cost as a multiple of the limit (shorter is better)</text>`)
	printf(`<text x="20" y="48" fill="#555555">Limit: sending prebuilt messages without parsing replies. Program and kernel together; figures are instructions, kernel %s.</text>`, r.kernel)
	x := 20
	for _, entry := range series {
		printf(`<rect x="%d" y="62" width="12" height="12" fill="%s"/><text x="%d" y="72" fill="#222222">%s</text>`, x, entry.color, x+18, label[entry.name])
		x += 38 + 8*len(label[entry.name])
	}
	for multiple := 0.0; multiple <= math.Ceil(longest); multiple++ {
		style := `stroke="#e3e3e3"`
		if multiple == 1 {
			style = `stroke="#222222" stroke-dasharray="4 3"`
		}
		printf(`<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" %s/>`, at(multiple), top-8, at(multiple), height-bottom, style)
		text := fmt.Sprintf("%.0f", multiple)
		if multiple == 1 {
			text = "limit"
		}
		printf(`<text x="%.1f" y="%d" text-anchor="middle" fill="#555555">%s</text>`, at(multiple), height-bottom+16, text)
	}
	y := top
	for _, g := range groups {
		limit := r.instructions[g.bars[0].workload]["limit"]
		printf(`<text x="%d" y="%.1f" text-anchor="end" fill="#222222">%s</text>`, left-10, float64(y)+float64(len(g.bars)*barHeight)/2+4, g.title)
		for _, b := range g.bars {
			v := r.instructions[b.workload][b.library]
			printf(`<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>`, left, y, v/limit*scale, barHeight-2, color[b.series])
			// The figure hides the lines behind it.
			printf(`<rect x="%.1f" y="%d" width="%d" height="%d" fill="#ffffff"/>`, at(v/limit)+3, y, 7*len(number(v))+2, barHeight-2)
			printf(`<text x="%.1f" y="%d" font-size="11" fill="#222222">%s</text>`, at(v/limit)+5, y+barHeight-4, number(v))
			y += barHeight
		}
		y += groupGap
	}
	printf(`</svg>`)
	return s.String(), nil
}
