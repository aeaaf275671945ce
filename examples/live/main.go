// Command live shows the two ways in which messages are read: from the
// write-ahead log (WAL) of the server while that is possible, and by polling the
// table while it is not.
//
//	go run ./examples/live
//
// It publishes a message every 20 ms, each in a transaction, and measures how
// long it takes from the COMMIT to the handler. After a while it cuts the
// stream: messages are polled until there is another one. It tells when the
// source of the messages changes, and why. The last line sums up:
//
//	published=183 delivered=183 lost=0 duplicated=0 live=83% median_wal=0.6ms median_table=12.9ms
//
// It needs no set-up: without a PostgreSQL in OUTBOX_DATABASE_URL it starts a
// throw-away one. Where the WAL cannot be read it says what to change, and polls.
//
// In phases.go is what happens and when, in status.go how the source is known, in
// ticks.go what is published, in book.go what is measured, and here what connects
// them.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/examples/internal/program"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	// liveFor is how long the program stays live, before the cut and after it.
	liveFor = 1500 * time.Millisecond
	// conns is one connection for the publisher and one to cut the stream with.
	conns = 2
)

func main() {
	program.Main("live", func(ctx context.Context) (fmt.Stringer, bool, error) {
		r, err := program.OnDatabase(ctx, conns, func(ctx context.Context, db *pgxpool.Pool) (result, error) {
			return run(ctx, db, liveFor, os.Stdout)
		})
		return r, r.ok(), err
	})
}

// run connects the parts, goes through the phases and closes the parts. The
// deferred calls are the order of a shutdown: first who publishes, then the
// Router, which ends the subscriptions, then what they used.
func run(ctx context.Context, db *pgxpool.Pool, liveFor time.Duration, out io.Writer) (_ result, err error) {
	logger := watermill.NewSlogLogger(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))
	// Who cannot go on ends the others.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	if err := schema.Migrate(ctx, db, schema.Config{}); err != nil {
		return result{}, err
	}
	// What somebody has to change before the WAL can be read; the consumer finds
	// it by itself. A service that would rather not start then sets ModeWAL.
	problems, err := schema.CheckLive(ctx, db, schema.Config{})
	if err != nil {
		return result{}, err
	}

	publisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{RequireTx: true}, logger)
	if err != nil {
		return result{}, err
	}
	defer program.Closing(&err, "publisher", publisher.Close)

	// ModeAuto is the default: the WAL whenever it can be read, else the table.
	consumer, err := outbox.NewConsumer(db.Config(), outbox.ConsumerConfig{Mode: outbox.ModeAuto}, logger)
	if err != nil {
		return result{}, err
	}
	defer program.Closing(&err, "consumer", consumer.Close)
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: "clock"}, logger)
	if err != nil {
		return result{}, err
	}

	book := newBook()
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		return result{}, err
	}
	router.AddConsumerHandler("clock", topic, subscriber, func(msg *message.Message) error {
		now := time.Now()
		book.arrived(msg.UUID, subscription(consumer.Status()).Source, now)
		return nil
	})
	var routerErr error
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		routerErr = router.Run(ctx)
		cancel(errors.New("the router stopped"))
	}()
	select {
	case <-router.Running():
	case <-stopped:
		return result{}, routerErr
	}
	defer program.Closing(&err, "router", func() error {
		err := router.Close() // also closes the subscriber
		<-stopped
		return errors.Join(err, routerErr)
	})

	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		t := ticker{db: db, publisher: publisher, book: book}
		if err := t.run(ctx, stop); err != nil {
			cancel(err)
		}
	}()
	endPublishing := sync.OnceFunc(func() {
		close(stop)
		<-ended
	})
	defer endPublishing()

	p := &phases{
		db: db, consumer: consumer, book: book, liveFor: liveFor, endPublishing: endPublishing,
		out: out, began: time.Now(),
	}
	if len(problems) == 0 {
		err = p.both(ctx)
	} else {
		err = p.polling(ctx)
	}
	if err != nil {
		return result{}, err
	}
	r := book.result()
	r.cannotBeLive = len(problems) > 0
	return r, nil
}
