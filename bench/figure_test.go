package main

import (
	"bytes"
	"encoding/json"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMedian(t *testing.T) {
	t.Parallel()

	require.True(t, math.IsNaN(series{}.median()))
	require.InDelta(t, 7.0, series{7}.median(), 0)
	require.InDelta(t, 3.0, series{4, 2}.median(), 0)
	measured := series{100, 1, 3}
	require.InDelta(t, 3.0, measured.median(), 0)
	require.Equal(t, series{100, 1, 3}, measured, "the order of the rounds is kept")
}

func TestQuantile(t *testing.T) {
	t.Parallel()

	require.True(t, math.IsNaN(series{}.quantile(0.5)))
	measured := series{5, 1, 4, 2, 3}
	require.InDelta(t, 3.0, measured.quantile(0.5), 0)
	require.InDelta(t, 5.0, measured.quantile(0.99), 0)
	require.InDelta(t, 1.0, measured.quantile(0), 0)
	require.Equal(t, series{5, 1, 4, 2, 3}, measured, "the order of the rounds is kept")
}

// A machine that is slow for one round is slow for both contenders: the ratio
// of the medians would be 2 here.
func TestRatioIsComputedRoundByRound(t *testing.T) {
	t.Parallel()

	f := newFigure("drain", "rate", "1/s", series{10, 20, 30}, series{10, 10, 30}, minRatio(0.6))
	require.InDelta(t, 20.0, f.Value, 0)
	require.InDelta(t, 10.0, *f.Baseline, 0)
	require.InDelta(t, 1.0, *f.Ratio, 0)
	require.True(t, f.OK)
}

func TestRatioLeavesOutAZeroBaseline(t *testing.T) {
	t.Parallel()

	f := newFigure("memory", "peak", "MB", series{4, 6, 8}, series{0, 3, 2}, nil)
	require.InDelta(t, 3.0, *f.Ratio, 0)
	f = newFigure("memory", "peak", "MB", series{4}, series{0}, minRatio(0.5))
	require.Nil(t, f.Ratio)
	require.False(t, f.OK, "a ratio that is not there satisfies nothing")
}

func TestRequirement(t *testing.T) {
	t.Parallel()

	ratio := func(x float64) *float64 { return &x }
	for _, c := range []struct {
		required *requirement
		text     string
		value    float64
		ratio    *float64
		met      bool
	}{
		{nil, "", 1, nil, true},
		{minRatio(0.85), "ratio >= 0.85", 0, ratio(0.85), true},
		{minRatio(0.85), "ratio >= 0.85", 100, ratio(0.84), false},
		{maxRatio(1.3), "ratio <= 1.3", 100, ratio(1.3), true},
		{maxRatio(1.3), "ratio <= 1.3", 0, ratio(1.31), false},
		{maxValue(100), "value <= 100", 100, ratio(9), true},
		{maxValue(100), "value <= 100", 101, nil, false},
		{maxValue(100).or(maxRatio(2)), "value <= 100 or ratio <= 2", 100, nil, true},
		{maxValue(100).or(maxRatio(2)), "value <= 100 or ratio <= 2", 101, ratio(2), true},
		{maxValue(100).or(maxRatio(2)), "value <= 100 or ratio <= 2", 101, ratio(2.1), false},
	} {
		require.Equal(t, c.text, c.required.String())
		require.Equal(t, c.met, c.required.met(c.value, c.ratio), "%s of %v", c.required, c)
	}
}

func TestFigureAsJSON(t *testing.T) {
	t.Parallel()

	text, err := json.Marshal(newFigure("growth", "page", "ms", series{3}, series{2}, nil))
	require.NoError(t, err)
	require.JSONEq(t, `{"scenario": "growth", "metric": "page", "value": 3, "unit": "ms", "baseline": 2, "ratio": 1.5, "required": null, "ok": true}`, string(text))
	text, err = json.Marshal(newFigure("idle", "CPU", "%", series{3}, nil, maxValue(2)))
	require.NoError(t, err)
	require.JSONEq(t, `{"scenario": "idle", "metric": "CPU", "value": 3, "unit": "%", "baseline": null, "ratio": null, "required": "value <= 2", "ok": false}`, string(text))
}

func TestTable(t *testing.T) {
	t.Parallel()

	var out bytes.Buffer
	printTable(&out, []figure{
		newFigure("drain", "backlog", "messages/s", series{50_000}, series{100_000}, minRatio(0.6)),
		newFigure("idle", "CPU", "% of a core", series{0.5}, nil, maxValue(2)),
		newFigure("copy", "COPY", "ms", series{1.5}, series{1}, nil),
	})
	require.Equal(t, `SCENARIO  METRIC   VALUE   BASELINE  UNIT         RATIO  REQUIRED      OK
drain     backlog  50,000  100,000   messages/s   0.50   ratio >= 0.6  NO
idle      CPU      0.500             % of a core         value <= 2    yes
copy      COPY     1.50    1.00      ms           1.50                 
`, out.String())
	out.Reset()
	void := newFigure("latency", "p99", "ms", series{1}, nil, maxValue(2))
	void.invalidate("it was not live")
	printTable(&out, []figure{void})
	require.Contains(t, out.String(), "INVALID: it was not live")
	require.Equal(t, []figure{void}, missed([]figure{void}))
	out.Reset()
	printTable(&out, nil)
	require.Empty(t, out.String())
}

func TestNumber(t *testing.T) {
	t.Parallel()

	for x, text := range map[float64]string{
		0: "0.0000", 0.01234: "0.0123", 0.5: "0.500", 1.5: "1.50", 12.34: "12.3", 123.4: "123",
		999.6: "1,000", 1234: "1,234", 1234567: "1,234,567", -1234: "-1,234",
	} {
		require.Equal(t, text, number(x))
	}
}
