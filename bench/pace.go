package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	outbox "github.com/millrace/watermill-outbox"
)

// pace publishes numbered messages at a steady rate, one per transaction, and
// knows when the commit of each began. It does not wait for deliveries.
type pace struct {
	start   time.Time
	every   time.Duration
	conns   int
	began   []atomic.Int64 // since start, by number
	commits series         // how long each took, in ms
}

func newPace(perSecond, conns, n int) *pace {
	return &pace{
		start: time.Now(), every: time.Second / time.Duration(perSecond), conns: conns,
		began: make([]atomic.Int64, n), commits: make(series, n),
	}
}

// run publishes all of it.
func (p *pace) run(ctx context.Context, d *database, topic string) error {
	publisher, err := outbox.NewPublisher(nil, outbox.PublisherConfig{RequireTx: true}, nil)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	var next atomic.Int64
	first := time.Now()
	for range p.conns {
		group.Go(func() error {
			conn, err := d.pool.Acquire(ctx)
			if err != nil {
				return err
			}
			defer conn.Release()
			for {
				i := int(next.Add(1)) - 1
				if i >= len(p.began) {
					return nil
				}
				time.Sleep(time.Until(first.Add(time.Duration(i) * p.every)))
				if err := p.publish(ctx, conn.Conn(), publisher, topic, i); err != nil {
					return err
				}
			}
		})
	}
	return group.Wait()
}

// publish publishes message number i. The time is taken around the commit alone:
// nobody can be told of a message before.
func (p *pace) publish(ctx context.Context, conn *pgx.Conn, publisher *outbox.Publisher, topic string, i int) error {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) //nolint:errcheck // nothing after Commit
	payload := newPayload(payloadBytes)
	binary.BigEndian.PutUint64(payload, uint64(i))
	msg := message.NewMessageWithContext(outbox.ContextWithTx(ctx, tx), watermill.NewUUID(), payload)
	msg.Metadata.Set("correlation_id", "6f8c4f0e-9a0e-4a53-8f0c-2d3f0f7f2b11")
	msg.Metadata.Set("event_name", "order.placed")
	if err := publisher.Publish(topic, msg); err != nil {
		return err
	}
	begin := time.Since(p.start)
	p.began[i].Store(int64(begin))
	if err := tx.Commit(ctx); err != nil {
		return err
	}
	p.commits[i] = (time.Since(p.start) - begin).Seconds() * 1000
	return nil
}

// problem says that the pace was not kept, for which the publishers' connections
// must have been too slow.
func (p *pace) problem() string {
	last := len(p.began) - 1
	took, should := time.Duration(p.began[last].Load()-p.began[0].Load()), time.Duration(last)*p.every
	if took > should+should/20+50*time.Millisecond {
		return fmt.Sprintf("%d messages were published in %s instead of %s", last+1, took, should)
	}
	return ""
}

// age returns the number of a message, and how long ago its commit began, in ms.
func (p *pace) age(payload []byte) (i int, age float64, err error) {
	now := time.Since(p.start)
	if len(payload) != payloadBytes {
		return 0, 0, fmt.Errorf("a message of %d bytes", len(payload))
	}
	n := binary.BigEndian.Uint64(payload)
	if n >= uint64(len(p.began)) {
		return 0, 0, fmt.Errorf("a message with number %d", n)
	}
	return int(n), (now - time.Duration(p.began[n].Load())).Seconds() * 1000, nil
}
