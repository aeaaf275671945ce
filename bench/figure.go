package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// series are the measurements of one contender, one per round.
type series []float64

// quantile returns the least value that is not below the share q of them, and
// NaN of none.
func (s series) quantile(q float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[max(int(math.Ceil(q*float64(len(sorted))))-1, 0)]
}

// median returns the middle value, of an even number the mean of the two in the
// middle, and NaN of none.
func (s series) median() float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	middle := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[middle]
	}
	return (sorted[middle-1] + sorted[middle]) / 2
}

// over returns the ratios to the baseline, round by round, leaving out rounds
// whose baseline is 0.
func (s series) over(baseline series) series {
	var ratios series
	for i := range s {
		if baseline[i] != 0 {
			ratios = append(ratios, s[i]/baseline[i])
		}
	}
	return ratios
}

// requirement bounds a figure's ratio or value.
type requirement struct {
	quantity string // "ratio" or "value"
	relation string // ">=" or "<="
	bound    float64
	// other does as well, if there is one.
	other *requirement
}

func minRatio(bound float64) *requirement { return &requirement{"ratio", ">=", bound, nil} }
func maxRatio(bound float64) *requirement { return &requirement{"ratio", "<=", bound, nil} }
func minValue(bound float64) *requirement { return &requirement{"value", ">=", bound, nil} }
func maxValue(bound float64) *requirement { return &requirement{"value", "<=", bound, nil} }

// or returns a requirement that is met when one of the two is.
func (r *requirement) or(other *requirement) *requirement {
	return &requirement{r.quantity, r.relation, r.bound, other}
}

// String returns the requirement as in "ratio >= 0.85"; of none, "".
func (r *requirement) String() string {
	if r == nil {
		return ""
	}
	text := r.quantity + " " + r.relation + " " + strconv.FormatFloat(r.bound, 'f', -1, 64)
	if r.other != nil {
		text += " or " + r.other.String()
	}
	return text
}

// MarshalText implements encoding.TextMarshaler.
func (r *requirement) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// met reports whether the figures satisfy the requirement. One on a ratio that
// could not be computed is missed.
func (r *requirement) met(value float64, ratio *float64) bool {
	if r == nil || r.other != nil && r.other.met(value, ratio) {
		return true
	}
	x := value
	if r.quantity == "ratio" {
		if ratio == nil {
			return false
		}
		x = *ratio
	}
	if r.relation == "<=" {
		return x <= r.bound
	}
	return x >= r.bound
}

// figure is one line of the result.
type figure struct {
	Scenario string       `json:"scenario"`
	Metric   string       `json:"metric"`
	Value    float64      `json:"value"`
	Unit     string       `json:"unit"`
	Baseline *float64     `json:"baseline"`
	Ratio    *float64     `json:"ratio"` // value / baseline
	Required *requirement `json:"required"`
	OK       bool         `json:"ok"`
	// Invalid says why the figure is not what it ought to be.
	Invalid string `json:"invalid,omitempty"`
}

// invalidate says why the figure means nothing; it is not OK then.
func (f *figure) invalidate(why string) {
	f.Invalid, f.OK = why, false
}

// newFigure sums up the rounds of a contender and of its baseline, nil if it has
// none.
func newFigure(scenario, metric, unit string, values, baseline series, required *requirement) figure {
	f := figure{Scenario: scenario, Metric: metric, Value: values.median(), Unit: unit, Required: required}
	if baseline != nil {
		median := baseline.median()
		f.Baseline = &median
		if ratio := values.over(baseline).median(); !math.IsNaN(ratio) {
			f.Ratio = &ratio
		}
	}
	f.OK = required.met(f.Value, f.Ratio)
	return f
}

// missed returns the figures whose requirement is not met.
func missed(figures []figure) []figure {
	var missed []figure
	for _, f := range figures {
		if !f.OK {
			missed = append(missed, f)
		}
	}
	return missed
}

// printTable prints the figures for people.
func printTable(w io.Writer, figures []figure) {
	if len(figures) == 0 {
		return
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SCENARIO\tMETRIC\tVALUE\tBASELINE\tUNIT\tRATIO\tREQUIRED\tOK")
	for _, f := range figures {
		verdict := ""
		if f.Required != nil {
			verdict = map[bool]string{true: "yes", false: "NO"}[f.OK]
		}
		if f.Invalid != "" {
			verdict = "INVALID: " + f.Invalid
		}
		fmt.Fprintln(t, strings.Join([]string{
			f.Scenario, f.Metric, number(f.Value), optional(f.Baseline, number), f.Unit,
			optional(f.Ratio, func(x float64) string { return strconv.FormatFloat(x, 'f', 2, 64) }), f.Required.String(), verdict,
		}, "\t"))
	}
	_ = t.Flush()
}

func optional(x *float64, format func(float64) string) string {
	if x == nil {
		return ""
	}
	return format(*x)
}

// number writes a number with three significant digits or more, thousands
// separated.
func number(x float64) string {
	digits := 0
	for limit := 100.0; limit > 0.05 && math.Abs(x) < limit; limit /= 10 {
		digits++
	}
	text := strconv.FormatFloat(x, 'f', digits, 64)
	whole, fraction, _ := strings.Cut(text, ".")
	for i := len(whole) - 3; i > 0 && whole[i-1] != '-'; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if fraction != "" {
		whole += "." + fraction
	}
	return whole
}
