package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/pprof"
	"strings"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// bench is what a scenario works with: the options, databases, and where figures
// go.
type bench struct {
	options
	scenario string
	progress io.Writer
	add      func(figure)
	// server returns the server, started when it is first asked for.
	server func(context.Context) (*pgtest.Server, error)

	databases []*database // in use by the scenario
}

// runAll runs the scenarios and returns the figures, also those of before an
// error. JSON is printed as it comes.
func runAll(ctx context.Context, o options, chosen []scenario, stdout, stderr io.Writer) (figures []figure, err error) {
	var running servers
	defer func() { err = errors.Join(err, running.stop()) }()
	var printing error
	encoder := json.NewEncoder(stdout)
	encoder.SetEscapeHTML(false) // "ratio >= 0.85"
	for _, s := range chosen {
		b := &bench{
			options: o, scenario: s.name, progress: stderr,
			add: func(f figure) {
				figures = append(figures, f)
				if o.json {
					printing = errors.Join(printing, encoder.Encode(f))
				}
			},
			server: func(ctx context.Context) (*pgtest.Server, error) { return running.get(ctx, s.durable) },
		}
		if err := errors.Join(s.run(ctx, b), b.close(ctx), printing); err != nil {
			return figures, fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return figures, nil
}

// close drops the scenario's databases.
func (b *bench) close(ctx context.Context) error {
	var err error
	for _, d := range b.databases {
		err = errors.Join(err, d.drop(ctx))
	}
	return err
}

func (b *bench) logf(format string, args ...any) {
	fmt.Fprintf(b.progress, b.scenario+": "+format+"\n", args...)
}

// A contender is one way of doing the same work; run returns one measurement.
type contender struct {
	name string
	run  func(context.Context) (float64, error)
}

// rounds lets the contenders take turns and returns the measurements of each.
func (b *bench) rounds(ctx context.Context, metric string, contenders ...contender) ([]series, error) {
	results := make([]series, len(contenders))
	for round := range b.options.rounds {
		line := ""
		for i, c := range contenders {
			value, err := b.turn(ctx, fmt.Sprintf("%s-%s-%s-%d", b.scenario, metric, c.name, round+1), c)
			if err != nil {
				return nil, fmt.Errorf("%s: %s: %w", metric, c.name, err)
			}
			results[i] = append(results[i], value)
			line += fmt.Sprintf(", %s %s", c.name, number(value))
		}
		b.logf("%s, round %d%s", metric, round+1, line)
	}
	return results, nil
}

// turn is one measurement, profiled if wanted.
func (b *bench) turn(ctx context.Context, name string, c contender) (value float64, err error) {
	if b.profile == "" {
		return c.run(ctx)
	}
	file, err := os.Create(filepath.Join(b.profile, strings.ReplaceAll(name, " ", "_")+".pprof"))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if err := pprof.StartCPUProfile(file); err != nil {
		return 0, err
	}
	defer pprof.StopCPUProfile()
	return c.run(ctx)
}

// compare lets a baseline and the outbox take turns and adds the figure.
func (b *bench) compare(ctx context.Context, metric, unit string, required *requirement, bare, outbox func(context.Context) (float64, error)) error {
	results, err := b.rounds(ctx, metric, contender{"bare", bare}, contender{"outbox", outbox})
	if err != nil {
		return err
	}
	b.add(newFigure(b.scenario, metric, unit, results[1], results[0], required))
	return nil
}
