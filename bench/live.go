package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	liveMin = 0.7
	// liveTurns is how many turns a round has: short ones see the same machine.
	liveTurns   = 2
	liveWriters = 2

	// liveBurst is how many rows are held back at a time. A subscription polls
	// when it is half a second behind, and these take a fraction of that.
	liveBurst  = 2000
	liveBursts = 12 // in a turn
	// liveSettle lets a subscription store its position after a burst: that
	// commit flushes the log, and would let the next burst go.
	liveSettle = 300 * time.Millisecond

	liveSustained = 60_000 // in a turn
	// liveChunk is what a writer writes before it looks how far the reader is,
	// liveWindow how many rows may be on their way.
	liveChunk  = 100
	liveWindow = 1000
)

// liveScenario: one-row transactions as they commit, against a bare reader of
// the same stream under the same load. There are two loads, since neither says
// all.
//
// Held back: rows are written first, and come to the reader when nobody writes
// any more. Only the stream and its reader work then, and the slower of the two
// makes the rate. The server streams what is flushed to disk, and leaves the
// flushing of asynchronous commits to its WAL writer, which is told to take its
// time. (To stop the server's sender or the reader would do for a bare reader
// only: a subscription that is behind for half a second reads the table.)
//
// Sustained: writers beside the reader, as fast as it lets them: they wait while
// too many rows are on their way. Without that they outrun the stream where
// there are few cores, whoever reads it, and subscriptions read the table, as
// they should. They commit synchronously on a server that does not sync its
// files, so that each commit is streamed at once. All share the machine, so this
// is how much the whole of it does; how long the writers have waited says whether
// they or the reader was slower.
func liveScenario(ctx context.Context, b *bench) error {
	b.options.rounds *= liveTurns
	d, err := b.database(ctx)
	if err != nil {
		return err
	}
	if !d.server.Owned() {
		b.logf("nothing is held back: that takes settings of a server of its own")
	} else if err := liveHeldBack(ctx, b, d); err != nil {
		return err
	}
	return liveBeside(ctx, b, d)
}

// liveHeldBack is the load that is written first.
func liveHeldBack(ctx context.Context, b *bench, d *database) (err error) {
	defer func() { err = errors.Join(err, d.configure(context.WithoutCancel(ctx), "RESET ALL")) }()
	if err := d.configure(ctx, "SET wal_writer_delay = '10s'", "SET wal_writer_flush_after = '1GB'"); err != nil {
		return err
	}
	config, err := d.config()
	if err != nil {
		return err
	}
	config.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()

	n := b.count(liveBurst)
	w := writers{pool: pool, topic: "orders", payload: payload200, conns: 1, rows: n, chunk: n}
	burst := func(ctx context.Context, m *meter) (rate float64, err error) {
		last := m.received() + int64(n)
		if _, err := w.run(ctx); err != nil {
			return 0, err
		}
		// The time says nothing of those that are there already, since something
		// flushed the log.
		first := m.received() + 1
		m.time(first, last)
		// It flushes, and begins a segment into which the next burst fits.
		if _, err := d.pool.Exec(ctx, "SELECT pg_switch_wal()"); err != nil {
			return 0, err
		}
		if first >= last {
			return 0, nil
		}
		took, err := m.await(ctx)
		return float64(last-first) / took.Seconds(), err
	}
	return compareLive(ctx, b, d, fmt.Sprintf("held back, %d at a time", n), func(ctx context.Context, m *meter) (float64, error) {
		var rates series
		for range liveBursts {
			rate, err := burst(ctx, m)
			if err != nil {
				return 0, err
			}
			if rate > 0 {
				rates = append(rates, rate)
			}
			time.Sleep(b.duration(liveSettle))
		}
		if len(rates) == 0 {
			return 0, errors.New("nothing could be held back")
		}
		return rates.median(), nil
	})
}

// liveBeside is the sustained load, written beside the reader.
func liveBeside(ctx context.Context, b *bench, d *database) error {
	chunk := b.count(liveChunk)
	n := b.count(liveSustained) / chunk * chunk
	var waited series
	metric := fmt.Sprintf("sustained, %d writers", liveWriters)
	err := compareLive(ctx, b, d, metric, func(ctx context.Context, m *meter) (float64, error) {
		w := writers{
			pool: d.pool, topic: "orders", payload: payload200, conns: liveWriters, rows: n, chunk: chunk,
			wait: func(written int) bool { return int64(written)-m.received() > liveWindow },
		}
		m.time(1, int64(n))
		share, err := w.run(ctx)
		if err != nil {
			return 0, err
		}
		waited = append(waited, 100*share)
		took, err := m.await(ctx)
		return float64(n-1) / took.Seconds(), err
	})
	if err != nil {
		return err
	}
	var bare, ours series // the turns alternate
	for i, share := range waited {
		if i%2 == 0 {
			bare = append(bare, share)
		} else {
			ours = append(ours, share)
		}
	}
	b.add(newFigure(b.scenario, metric+": they waited", "% of the time", ours, bare, nil))
	return nil
}

// compareLive lets a bare reader and a subscription take turns under a load,
// which returns the rate at which messages came, and adds the figures.
func compareLive(ctx context.Context, b *bench, d *database, metric string, load func(context.Context, *meter) (float64, error)) error {
	var live series
	left, why := 0, ""
	results, err := b.rounds(ctx, metric,
		contender{"bare", func(ctx context.Context) (float64, error) {
			m := newMeter()
			closeIt, err := openBare(d, bareReadPause)(ctx, func([]byte) { m.row() }, m.fail)
			if err != nil {
				return 0, err
			}
			rate, err := load(ctx, m)
			return rate, errors.Join(err, closeIt())
		}},
		contender{"outbox", func(ctx context.Context) (float64, error) {
			m := newMeter()
			l, err := listen(ctx, d.pool.Config(), outbox.ModeWAL, "orders", func([]byte) { m.row() })
			if err != nil {
				return 0, err
			}
			seen := l.watch(m)
			rate, err := load(ctx, m)
			seen.stop()
			live = append(live, 100*float64(seen.live)/float64(max(seen.all, 1)))
			if seen.left > 0 {
				left, why = left+seen.left, seen.why
			}
			return rate, errors.Join(err, l.close())
		}})
	if err != nil {
		return err
	}
	f := newFigure(b.scenario, metric, "messages/s", results[1], results[0], minRatio(liveMin))
	if left > 0 {
		f.invalidate(fmt.Sprintf("the WAL was left %d times in %d turns: %s", left, len(live), why))
	}
	b.add(f)
	b.add(newFigure(b.scenario, metric+": came from the WAL", "% of them", live, nil, nil))
	return nil
}
