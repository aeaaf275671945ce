package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	drainBacklog = 500_000
	drainMin     = 0.6
	drainAutoMin = 0.9
	drainTurns   = 3 // in a round
	barePage     = 1000
)

// drainScenario: a backlog through a channel, from Subscribe to the last Ack,
// against keyset pages whose metadata are decoded. In ModeAuto a backlog is read
// from the table, too; the stream that is opened beside it must not cost much.
func drainScenario(ctx context.Context, b *bench) (err error) {
	b.options.rounds *= drainTurns
	n := b.backlog
	if n == 0 {
		n = b.count(drainBacklog)
	}
	d, err := b.database(ctx)
	if err != nil {
		return err
	}
	if err := errors.Join(d.load(ctx, "orders", n, payload200), d.settle(ctx)); err != nil {
		return err
	}
	poll, err := d.consumer(outbox.ModePoll)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, poll.Close()) }()
	auto, err := d.consumer(outbox.ModeAuto)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, auto.Close()) }()
	rate := func(read func(context.Context) error) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) {
			start := time.Now()
			err := read(ctx)
			return float64(n) / time.Since(start).Seconds(), err
		}
	}
	metric := fmt.Sprintf("backlog of %d", n)
	results, err := b.rounds(ctx, metric,
		contender{"bare", rate(func(ctx context.Context) error { return readBare(ctx, d.pool, "orders", n, barePage) })},
		contender{"polling", rate(func(ctx context.Context) error { return drain(ctx, poll, newGroup(), "orders", n) })},
		contender{"ModeAuto", rate(func(ctx context.Context) error { return drain(ctx, auto, newGroup(), "orders", n) })})
	if err != nil {
		return err
	}
	b.add(newFigure(b.scenario, metric+", polling", "messages/s", results[1], results[0], minRatio(drainMin)))
	b.add(newFigure(b.scenario, metric+", ModeAuto against polling", "messages/s", results[2], results[1], minRatio(drainAutoMin)))
	return nil
}

// consumer returns one with the default configuration.
func (d *database) consumer(mode outbox.Mode) (*outbox.Consumer, error) {
	config, err := d.config()
	if err != nil {
		return nil, err
	}
	return outbox.NewConsumer(config, outbox.ConsumerConfig{Mode: mode}, nil)
}

// newGroup returns the name of a group that nobody else has.
func newGroup() string { return "group " + rand.Text() }

// drain subscribes, acks n messages and leaves.
func drain(ctx context.Context, consumer *outbox.Consumer, group, topic string, n int) error {
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: group}, nil)
	if err != nil {
		return err
	}
	defer func() { _ = subscriber.Close() }() // always nil
	messages, err := subscriber.Subscribe(ctx, topic)
	if err != nil {
		return err
	}
	for received := range n {
		msg, ok := <-messages
		if !ok {
			return fmt.Errorf("the channel was closed after %d of %d messages: %w", received, n, context.Cause(ctx))
		}
		msg.Ack()
	}
	return nil
}

// readBare reads n rows of a topic in pages.
func readBare(ctx context.Context, pool *pgxpool.Pool, topic string, n, page int) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	var last int64
	for read := 0; read < n; {
		rows, err := barePageAfter(ctx, conn, topic, last, page)
		if err != nil {
			return err
		}
		if len(rows) == 0 {
			return fmt.Errorf("found %d of %d rows", read, n)
		}
		read += len(rows)
		last = rows[len(rows)-1].id
	}
	return nil
}

// bareRow is a message as somebody without the library would read it.
type bareRow struct {
	id        int64
	key       *string
	uuid      string
	metadata  map[string]string
	payload   []byte
	createdAt time.Time
}

// querier is a connection or a pool.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// barePageAfter reads a page by keyset, with the columns of the table's index.
func barePageAfter(ctx context.Context, db querier, topic string, after int64, limit int) ([]bareRow, error) {
	rows, err := db.Query(ctx, `SELECT id, key, uuid, metadata, payload, created_at FROM outbox.messages
		WHERE topic = $1 AND era = outbox.era() AND id > $2 ORDER BY id LIMIT $3`, topic, after, limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (r bareRow, err error) {
		var meta []byte
		if err := row.Scan(&r.id, &r.key, &r.uuid, &meta, &r.payload, &r.createdAt); err != nil {
			return r, err
		}
		return r, json.Unmarshal(meta, &r.metadata)
	})
}
