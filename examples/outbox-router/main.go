// Command outbox-router relays messages from the outbox to NATS JetStream with a
// Watermill Router, over an outage of the broker.
//
//	go run ./examples/outbox-router
//
// A hundred versions of ten orders are published to the outbox. A handler publishes
// each to a stream. Half-way the broker goes down, with all its connections, and
// comes back only when the relay has failed more often than its retries allow: the
// message stays in the outbox meanwhile, and those after it behind it. One message is
// bigger than the stream takes; it is put into a poison topic of the outbox. The last
// line compares the stream with what was published:
//
//	published=100 in_stream=99 lost=0 repeated=0 out_of_order=0 outage_errors=9 poisoned=1 poisoned_again=0
//
// It needs no set-up: without a PostgreSQL in OUTBOX_DATABASE_URL it starts a
// throw-away one, and the broker is in this process.
//
// In relay.go are the handler and its middlewares, in broker.go the broker, in book.go
// what is counted, and here what connects them.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/examples/internal/program"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	topic       = "orders"
	poisonTopic = "orders.poison"
	orders      = 10
	versions    = 10
	// patience is how long all of it may take.
	patience = time.Minute
	// conns is one connection for the service and one for the poison queue.
	conns = 2
)

func main() {
	program.Main("outbox-router", func(ctx context.Context) (fmt.Stringer, bool, error) {
		r, err := program.OnDatabase(ctx, conns, func(ctx context.Context, db *pgxpool.Pool) (result, error) {
			return run(ctx, db, os.Stdout)
		})
		return r, r.ok(), err
	})
}

// run publishes the orders, relays them until all are in the stream or the poison
// topic, and compares.
func run(ctx context.Context, db *pgxpool.Pool, out io.Writer) (_ result, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	// The Router logs each error of a handler; they are expected here.
	logger := watermill.NewSlogLogger(slog.New(slog.NewTextHandler(io.Discard, nil)))

	if err := schema.Migrate(ctx, db, schema.Config{}); err != nil {
		return result{}, err
	}
	b, err := startBroker()
	if err != nil {
		return result{}, err
	}
	defer program.Closing(&err, "broker", b.close)

	published, err := publish(ctx, db, logger)
	if err != nil {
		return result{}, err
	}
	fmt.Fprintf(out, "  %d messages are in the outbox\n", len(published))
	book := newBook(len(published), b, out)
	if err := relay(ctx, db, b, book, logger); err != nil {
		return result{}, err
	}
	stored, err := b.stored(ctx)
	if err != nil {
		return result{}, err
	}
	return book.compare(published, stored), nil
}

// publish publishes the orders, one version of all after the other. A service would
// write the order in the same transaction.
func publish(ctx context.Context, db *pgxpool.Pool, logger watermill.LoggerAdapter) (published []order, err error) {
	publisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{RequireTx: true}, logger)
	if err != nil {
		return nil, err
	}
	defer program.Closing(&err, "publisher", publisher.Close)
	for version := range versions {
		for id := range orders {
			o := order{id: id, version: version}
			err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
				return publisher.Publish(topic, o.message(outbox.ContextWithTx(ctx, tx)))
			})
			if err != nil {
				return nil, err
			}
			published = append(published, o)
		}
	}
	return published, nil
}

// relay runs the Router until all messages are through.
func relay(ctx context.Context, db *pgxpool.Pool, b *broker, book *book, logger watermill.LoggerAdapter) (err error) {
	destination, err := b.publisher(logger)
	if err != nil {
		return err
	}
	defer program.Closing(&err, "publisher to the broker", destination.Close)
	poisonPublisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{}, logger)
	if err != nil {
		return err
	}
	defer program.Closing(&err, "publisher of the poison queue", poisonPublisher.Close)
	consumer, err := outbox.NewConsumer(db.Config(), outbox.ConsumerConfig{}, logger)
	if err != nil {
		return err
	}
	defer program.Closing(&err, "consumer", consumer.Close)
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		return err
	}
	if err := addHandlers(router, consumer, destination, poisonPublisher, book, logger); err != nil {
		return err
	}

	var routerErr error
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		routerErr = router.Run(ctx)
	}()
	defer program.Closing(&err, "router", func() error {
		err := router.Close() // also closes the subscribers
		<-stopped
		return errors.Join(err, routerErr)
	})
	select {
	case <-book.complete:
		return book.failure()
	case <-stopped:
		return errors.New("the router stopped too early")
	case <-ctx.Done():
		return fmt.Errorf("the messages were not through: %w", ctx.Err())
	}
}
