package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"
)

// writers write messages in one-row transactions, in loops on the server itself,
// so that no client is slower than what it measures.
type writers struct {
	pool    *pgxpool.Pool
	topic   string
	payload string // SQL, for message number i
	conns   int
	rows    int
	// chunk is how many rows a writer writes at a time; rows is a multiple.
	chunk int
	// wait says, before each chunk, whether there is too much already; nil for
	// never. It gets how many were written, or are being.
	wait func(written int) bool
}

// run writes, and returns which share of the time the writers have waited.
func (w *writers) run(ctx context.Context) (waited float64, err error) {
	group, ctx := errgroup.WithContext(ctx)
	var written, pauses atomic.Int64
	start := time.Now()
	for range w.conns {
		group.Go(func() error {
			conn, err := w.pool.Acquire(ctx)
			if err != nil {
				return err
			}
			defer conn.Release()
			for {
				after := int(written.Add(int64(w.chunk)))
				if after > w.rows {
					return nil
				}
				began := time.Now()
				for w.wait != nil && w.wait(after) {
					time.Sleep(500 * time.Microsecond)
				}
				pauses.Add(int64(time.Since(began)))
				_, err := conn.Exec(ctx, fmt.Sprintf(`DO $body$ BEGIN
						FOR i IN %d..%d LOOP
							INSERT INTO outbox.messages (topic, uuid, metadata, payload)
								VALUES ('%s', gen_random_uuid()::text, '%s', %s);
							COMMIT;
						END LOOP;
					END $body$`, after-w.chunk+1, after, w.topic, metadata, w.payload))
				if err != nil {
					return err
				}
			}
		})
	}
	err = group.Wait()
	return float64(pauses.Load()) / float64(w.conns) / float64(time.Since(start)), err
}
