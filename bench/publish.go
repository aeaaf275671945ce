package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	publishTurn = time.Second
	// publishTurns is how many turns a round has: many short ones see the same
	// machine.
	publishTurns = 3
	publishMin   = 0.85
	perCall      = 100
	manyPerCall  = 100_000

	payloadBytes = 200
)

var columns = []string{"topic", "key", "uuid", "metadata", "payload"}

// publishScenario: the same rows in the same table, in a transaction each call,
// with everything that bare pgx sends made beforehand.
func publishScenario(ctx context.Context, b *bench) error {
	b.options.rounds *= publishTurns
	d, err := b.database(ctx)
	if err != nil {
		return err
	}
	publisher, err := outbox.NewPublisher(nil, outbox.PublisherConfig{RequireTx: true}, nil)
	if err != nil {
		return err
	}
	publish := func(n int) work {
		return func() func(context.Context, pgx.Tx) error {
			messages := newMessages(n)
			return func(ctx context.Context, tx pgx.Tx) error {
				ctx = outbox.ContextWithTx(ctx, tx)
				for _, msg := range messages {
					msg.SetContext(ctx)
				}
				return publisher.Publish("orders", messages...)
			}
		}
	}
	rate := func(conns, n int, w work) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) {
			calls, err := callsPerSecond(ctx, d.pool, conns, b.duration(publishTurn), w)
			return calls * float64(n), err
		}
	}

	for _, conns := range []int{1, 8, 16} {
		metric := fmt.Sprintf("1 per transaction, connections: %d", conns)
		if err := b.compare(ctx, metric, "messages/s", minRatio(publishMin), rate(conns, 1, insertOne), rate(conns, 1, publish(1))); err != nil {
			return err
		}
	}

	metric := fmt.Sprintf("%d per call", perCall)
	results, err := b.rounds(ctx, metric,
		contender{"bare VALUES", rate(1, perCall, insertValues(perCall))},
		contender{"bare COPY", rate(1, perCall, copyRows(perCall, payloadBytes))},
		contender{"outbox", rate(1, perCall, publish(perCall))})
	if err != nil {
		return err
	}
	best := results[0]
	if results[1].median() > best.median() {
		best = results[1]
	}
	b.add(newFigure(b.scenario, metric, "messages/s", results[2], best, minRatio(publishMin)))

	n := b.count(manyPerCall)
	once := func(w work) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) {
			call := w()
			start := time.Now()
			err := pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error { return call(ctx, tx) })
			return time.Since(start).Seconds(), err
		}
	}
	return b.compare(ctx, fmt.Sprintf("one call of %d, against COPY", n), "s", nil, once(copyRows(n, payloadBytes)), once(publish(n)))
}

// duration scales the length of a turn.
func (o options) duration(d time.Duration) time.Duration {
	return max(time.Duration(float64(d)*o.scale), 10*time.Millisecond)
}

// work makes what one connection does in each of its transactions.
type work func() func(context.Context, pgx.Tx) error

// callsPerSecond runs the work on conns connections for the duration.
func callsPerSecond(ctx context.Context, pool *pgxpool.Pool, conns int, d time.Duration, w work) (float64, error) {
	group, ctx := errgroup.WithContext(ctx)
	var calls atomic.Int64
	var start time.Time
	var warm sync.WaitGroup // statements are prepared
	warm.Add(conns)
	begin := make(chan struct{})
	for range conns {
		group.Go(func() error {
			conn, err := pool.Acquire(ctx)
			if err != nil {
				warm.Done()
				return err
			}
			defer conn.Release()
			call := w()
			once := func() error {
				return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error { return call(ctx, tx) })
			}
			err = once()
			warm.Done()
			if err != nil {
				return err
			}
			<-begin
			for time.Since(start) < d {
				if err := once(); err != nil {
					return err
				}
				calls.Add(1)
			}
			return nil
		})
	}
	warm.Wait()
	start = time.Now()
	close(begin)
	err := group.Wait()
	return float64(calls.Load()) / time.Since(start).Seconds(), err
}

// newMessages returns messages as in newRows, to be published many times over:
// making them is the application's work.
func newMessages(n int) []*message.Message {
	messages := make([]*message.Message, n)
	for i := range messages {
		messages[i] = message.NewMessage(watermill.NewUUID(), newPayload(payloadBytes))
		messages[i].Metadata.Set("correlation_id", "6f8c4f0e-9a0e-4a53-8f0c-2d3f0f7f2b11")
		messages[i].Metadata.Set("event_name", "order.placed")
	}
	return messages
}

// newRows returns rows of the columns.
func newRows(n, size int) [][]any {
	rows := make([][]any, n)
	for i := range rows {
		rows[i] = []any{"orders", (*string)(nil), watermill.NewUUID(), metadata, newPayload(size)}
	}
	return rows
}

// newPayload returns what does not compress.
func newPayload(size int) []byte {
	payload := make([]byte, size)
	_, _ = rand.Read(payload) // never fails
	return payload
}

func insertOne() func(context.Context, pgx.Tx) error {
	row := newRows(1, payloadBytes)[0]
	return func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "INSERT INTO outbox.messages (topic, key, uuid, metadata, payload) VALUES ($1, $2, $3, $4, $5)", row...)
		return err
	}
}

func insertValues(n int) work {
	return func() func(context.Context, pgx.Tx) error {
		args := slices.Concat(newRows(n, payloadBytes)...)
		tuples := make([]string, n)
		for i := range tuples {
			p := i * len(columns)
			tuples[i] = fmt.Sprintf("($%d, $%d, $%d, $%d, $%d)", p+1, p+2, p+3, p+4, p+5)
		}
		sql := "INSERT INTO outbox.messages (topic, key, uuid, metadata, payload) VALUES " + strings.Join(tuples, ", ")
		return func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, sql, args...)
			return err
		}
	}
}

func copyRows(n, size int) work {
	return func() func(context.Context, pgx.Tx) error {
		rows := newRows(n, size)
		return func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"outbox", "messages"}, columns, pgx.CopyFromRows(rows))
			return err
		}
	}
}

// insertArrays is how the outbox publishes few messages in one call.
func insertArrays(n, size int) work {
	return func() func(context.Context, pgx.Tx) error {
		keys, uuids, metas, payloads := make([]*string, n), make([]string, n), make([]string, n), make([][]byte, n)
		for i, row := range newRows(n, size) {
			uuids[i], metas[i], payloads[i] = row[2].(string), metadata, row[4].([]byte)
		}
		return func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO outbox.messages (topic, key, uuid, metadata, payload)
				SELECT $1::text, m.key, m.uuid, m.metadata::json, m.payload
				FROM unnest($2::text[], $3::text[], $4::text[], $5::bytea[]) AS m (key, uuid, metadata, payload)`,
				"orders", keys, uuids, metas, payloads)
			return err
		}
	}
}
