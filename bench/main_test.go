package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	if isChild() { // of TestEveryScenarioRuns
		os.Exit(childMain(os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// runWith runs the program with a scenario that works, one that misses its
// requirement and one that fails after a figure.
func runWith(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	measure := func(value float64) func(context.Context) (float64, error) {
		return func(context.Context) (float64, error) { return value, nil }
	}
	var out, log bytes.Buffer
	code = run(t.Context(), []scenario{
		{name: "good", about: "is as required", run: func(ctx context.Context, b *bench) error {
			return b.compare(ctx, "rate", "1/s", minRatio(0.5), measure(10), measure(9))
		}},
		{name: "slow", about: "is not", run: func(ctx context.Context, b *bench) error {
			return b.compare(ctx, "rate", "1/s", minRatio(0.5), measure(10), measure(4))
		}},
		{name: "broken", about: "fails", run: func(_ context.Context, b *bench) error {
			b.add(newFigure(b.scenario, "before", "1/s", series{1}, nil, nil))
			return errors.New("it broke")
		}},
	}, args, &out, &log)
	return code, out.String(), log.String()
}

func TestCheckSetsTheExitCode(t *testing.T) {
	t.Parallel()

	code, out, _ := runWith(t, "good", "slow")
	require.Equal(t, 0, code, "only -check looks at requirements")
	require.Contains(t, out, "0.40")

	code, _, _ = runWith(t, "-check", "good")
	require.Equal(t, 0, code)

	code, out, log := runWith(t, "-check", "good", "slow")
	require.Equal(t, 1, code)
	require.Contains(t, out, "NO")
	require.Contains(t, log, "missed: slow, rate: ratio >= 0.5")
}

func TestFiguresOfBeforeAnErrorArePrinted(t *testing.T) {
	t.Parallel()

	code, out, log := runWith(t, "all")
	require.Equal(t, 1, code)
	require.Contains(t, out, "good")
	require.Contains(t, out, "before")
	require.Contains(t, log, "broken: it broke")
}

func TestJSONIsOneObjectPerLine(t *testing.T) {
	t.Parallel()

	code, out, _ := runWith(t, "-json", "good", "slow")
	require.Equal(t, 0, code)
	require.Contains(t, out, "ratio >= 0.5")
	decoder := json.NewDecoder(bytes.NewBufferString(out))
	var names []any
	for {
		var f map[string]any
		err := decoder.Decode(&f)
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		names = append(names, f["scenario"])
	}
	require.Equal(t, []any{"good", "slow"}, names)
}

func TestTheCommandLineIsChecked(t *testing.T) {
	t.Parallel()

	code, out, _ := runWith(t)
	require.Equal(t, 0, code)
	require.Contains(t, out, "is as required")
	code, _, log := runWith(t, "-h")
	require.Equal(t, 0, code)
	require.Contains(t, log, "-rounds")
	for _, args := range [][]string{
		{"unknown"}, {"-unknown"}, {"-rounds", "0", "good"}, {"-check", "-rounds", "2", "good"}, {"-scale", "0", "good"}, {"-n", "-1", "good"},
	} {
		code, _, log := runWith(t, args...)
		require.Equal(t, 2, code, "%q", args)
		require.NotEmpty(t, log)
	}
}

func TestContendersTakeTurns(t *testing.T) {
	t.Parallel()

	turns := ""
	turn := func(name string, err error) contender {
		return contender{name, func(context.Context) (float64, error) {
			turns += name
			return float64(len(turns)), err
		}}
	}
	b := &bench{options: options{rounds: 3, profile: t.TempDir()}, progress: io.Discard}
	results, err := b.rounds(t.Context(), "turns", turn("a", nil), turn("b", nil))
	require.NoError(t, err)
	require.Equal(t, "ababab", turns)
	require.Equal(t, []series{{1, 3, 5}, {2, 4, 6}}, results)
	profiles, err := os.ReadDir(b.profile)
	require.NoError(t, err)
	require.Len(t, profiles, 6)

	_, err = b.rounds(t.Context(), "turns", turn("a", io.ErrUnexpectedEOF))
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

// The figures mean nothing at this size; that each scenario works does, and that
// soak and spare lose nothing.
func TestEveryScenarioRuns(t *testing.T) {
	var out bytes.Buffer
	code := run(t.Context(), scenarios, []string{"-json", "-rounds", "1", "-scale", "0.005", "all"}, &out, os.Stderr)
	require.Equal(t, 0, code)
	seen := map[string]bool{}
	checked := 0
	for decoder := json.NewDecoder(&out); ; {
		var f struct {
			Scenario, Metric, Unit string
			Value                  float64
		}
		err := decoder.Decode(&f)
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		seen[f.Scenario] = true
		if f.Scenario != "soak" && f.Scenario != "spare" {
			continue
		}
		for _, fault := range []string{": lost", ": out of order", "rolled back"} {
			if strings.HasSuffix(f.Metric, fault) && f.Unit == "messages" {
				require.Zero(t, f.Value, f.Metric)
				checked++
			}
		}
	}
	for _, s := range scenarios {
		require.True(t, seen[s.name], s.name)
	}
	require.Equal(t, 4*2+1+1, checked, "what four groups have lost, and what is out of order, and what was rolled back; what was lost in the DEFAULT partition")
}
