package main

import (
	"context"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	// topic is where the messages go.
	topic = "ticks"
	// interval is the time between two of them.
	interval = 20 * time.Millisecond
)

// ticker publishes messages.
type ticker struct {
	db        *pgxpool.Pool
	publisher message.Publisher
	book      *book
}

// run publishes until stop is closed, or something fails.
func (t *ticker) run(ctx context.Context, stop <-chan struct{}) error {
	next := time.NewTicker(interval)
	defer next.Stop()
	for {
		select {
		case <-stop:
			return nil
		case <-next.C:
		}
		if err := t.tick(ctx); err != nil {
			return fmt.Errorf("publish: %w", err)
		}
	}
}

// tick publishes a message in a transaction.
func (t *ticker) tick(ctx context.Context) error {
	return pgx.BeginFunc(ctx, t.db, func(tx pgx.Tx) error {
		msg := message.NewMessageWithContext(outbox.ContextWithTx(ctx, tx), watermill.NewUUID(), nil)
		if err := t.publisher.Publish(topic, msg); err != nil {
			return err
		}
		t.book.committing(msg.UUID, time.Now())
		return nil // commits
	})
}
