package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

const copyTurn = time.Second

// copyScenario compares the two ways in which the outbox publishes several
// messages in one call; the constants in insert.go choose between them. The
// time is that of the call alone, without begin and commit. A network adds the
// same round trip to both.
func copyScenario(ctx context.Context, b *bench) error {
	d, err := b.database(ctx)
	if err != nil {
		return err
	}
	each := func(w work) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) {
			conn, err := d.pool.Acquire(ctx)
			if err != nil {
				return 0, err
			}
			defer conn.Release()
			call := w()
			var times series
			for end := time.Now().Add(b.duration(copyTurn)); len(times) == 0 || time.Now().Before(end); {
				err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
					if _, err := tx.Exec(ctx, "SET LOCAL synchronous_commit = off"); err != nil {
						return err
					}
					start := time.Now()
					err := call(ctx, tx)
					times = append(times, time.Since(start).Seconds()*1000)
					return err
				})
				if err != nil {
					return 0, err
				}
			}
			return times.median(), nil
		}
	}
	for _, c := range []struct {
		size   int
		counts []int
	}{
		{payloadBytes, []int{2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 4000}},
		{64 << 10, []int{2, 4, 8, 16, 64}},
		{1 << 20, []int{2, 8}},
	} {
		for _, n := range c.counts {
			metric := fmt.Sprintf("COPY against INSERT, %d of %d B per call", n, c.size)
			results, err := b.rounds(ctx, metric, contender{"INSERT", each(insertArrays(n, c.size))}, contender{"COPY", each(copyRows(n, c.size))})
			if err != nil {
				return err
			}
			b.add(newFigure(b.scenario, metric, "ms", results[1], results[0], nil))
		}
	}
	return nil
}
