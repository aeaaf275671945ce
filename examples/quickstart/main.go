// Command quickstart is a small order service with an outbox, and a check of
// what the outbox delivers.
//
//	go run ./examples/quickstart
//
// Eight workers run 10,000 transactions on 50 orders. Each changes an order and
// publishes an event in the same transaction, and every tenth is rolled back
// after that. Meanwhile a Watermill Router receives the events. The last line
// compares what was delivered with what was committed:
//
//	published=9000 rolled_back=1000 delivered=9000 lost=0 duplicated=0 out_of_order=0
//
// It needs no set-up: without a PostgreSQL in OUTBOX_DATABASE_URL it starts a
// throw-away one.
//
// In orders.go is the service that publishes, in audit.go the handler that
// receives, and here what connects them.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
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
	orders       = 50
	workers      = 8
	transactions = 10_000
	// rollbackEvery is which transactions are rolled back: every tenth.
	rollbackEvery = 10
	// progressEvery is how many transactions make a line of progress.
	progressEvery = 2000
	// patience is how long the last message may take.
	patience = time.Minute
)

func main() {
	program.Main("quickstart", func(ctx context.Context) (fmt.Stringer, bool, error) {
		r, err := program.OnDatabase(ctx, workers, run)
		return r, r.ok(), err
	})
}

// run connects the parts, lets them work and closes them. The deferred calls
// are the order of a shutdown: the Router, which ends the subscriptions, then
// what it used.
func run(ctx context.Context, db *pgxpool.Pool) (_ result, err error) {
	logger := watermill.NewSlogLogger(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))

	// The outbox's tables. Any number of processes may do this at once.
	if err := schema.Migrate(ctx, db, schema.Config{}); err != nil {
		return result{}, err
	}

	// One publisher for the life of the service; RequireTx refuses messages
	// that come without a transaction.
	publisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{RequireTx: true}, logger)
	if err != nil {
		return result{}, err
	}
	defer program.Closing(&err, "publisher", publisher.Close)
	service := &orderService{db: db, publisher: publisher}
	if err := service.createTable(ctx, orders); err != nil {
		return result{}, err
	}

	// One consumer for the process, one subscriber for each consumer group.
	consumer, err := outbox.NewConsumer(db.Config(), outbox.ConsumerConfig{}, logger)
	if err != nil {
		return result{}, err
	}
	defer program.Closing(&err, "consumer", consumer.Close)
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: "audit"}, logger)
	if err != nil {
		return result{}, err
	}

	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		return result{}, err
	}
	audit := newAudit()
	router.AddConsumerHandler("audit", topic, subscriber, audit.handle)
	var routerErr error
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		routerErr = router.Run(ctx)
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

	fmt.Printf("Running %d transactions on %d orders with %d workers, rolling back every %dth ...\n",
		transactions, orders, workers, rollbackEvery)
	began := time.Now()
	rolledBack, err := work(ctx, service, audit)
	if err != nil {
		return result{}, err
	}
	fmt.Printf("  done after %.1fs\n", time.Since(began).Seconds())

	fmt.Println("Waiting for the last message ...")
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		return publisher.Publish(topic, message.NewMessageWithContext(outbox.ContextWithTx(ctx, tx), endOfTest, nil))
	})
	if err != nil {
		return result{}, err
	}
	select {
	case <-audit.complete:
		fmt.Printf("  arrived after %.1fs\n", time.Since(began).Seconds())
	case <-stopped:
		return result{}, errors.New("the router stopped before the last message arrived")
	case <-time.After(patience):
		fmt.Printf("  did not arrive within %s\n", patience)
	}

	committed, err := service.versions(ctx)
	if err != nil {
		return result{}, err
	}
	r := audit.compare(committed)
	r.rolledBack = rolledBack
	return r, nil
}

// work runs the transactions and returns how many were rolled back. The first
// error ends it.
func work(ctx context.Context, service *orderService, audit *audit) (int, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next, done, rolledBack atomic.Int64
	var running sync.WaitGroup
	for range workers {
		running.Go(func() {
			for {
				i := int(next.Add(1))
				if i > transactions || ctx.Err() != nil {
					return
				}
				// Spread over the orders, rollbacks included.
				orderID := (i+i/rollbackEvery)%orders + 1
				err := service.addItem(ctx, orderID, i%rollbackEvery == 0)
				switch {
				case errors.Is(err, errDeclined):
					rolledBack.Add(1)
				case err != nil:
					cancel(fmt.Errorf("transaction %d on order %d: %w", i, orderID, err))
					return
				}
				if n := done.Add(1); n%progressEvery == 0 {
					fmt.Printf("  %5d transactions, %4d rolled back, %5d events delivered\n", n, rolledBack.Load(), audit.count())
				}
			}
		})
	}
	running.Wait()
	return int(rolledBack.Load()), context.Cause(ctx)
}
