// Command router shows a Watermill Router with retries, a poison queue and a
// throttle around the handler, in the order that works.
//
//	go run ./examples/router
//
// Five orders are to be paid. The payment of one fails twice before it works, that
// of another one never does: it is tried four times, published to the poison topic
// with the reason, and acked, so that the orders after it go on. The last line
// sums up:
//
//	orders=5 paid=4 calls=10 poisoned=1 reason="card expired" calls_of_it=4 redelivered=0
//
// It needs no set-up: without a PostgreSQL in OUTBOX_DATABASE_URL it starts a
// throw-away one.
//
// In middlewares.go is the order of the middlewares, and why; in payments.go the
// handlers and what they keep book of; and here what connects them.
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
	ordersTopic = "orders"
	poisonTopic = "orders.poison"
	// patience is how long what is waited for may take.
	patience = time.Minute
	// conns is one connection for the service and one for the poison queue.
	conns = 2
)

func main() {
	program.Main("router", func(ctx context.Context) (fmt.Stringer, bool, error) {
		r, err := program.OnDatabase(ctx, conns, func(ctx context.Context, db *pgxpool.Pool) (result, error) {
			return run(ctx, db, os.Stdout)
		})
		return r, r.ok(), err
	})
}

// run publishes the orders, lets a Router pay them, and then looks whether
// anything comes again.
func run(ctx context.Context, db *pgxpool.Pool, out io.Writer) (_ result, err error) {
	// The Router logs each error of a handler; they are expected here.
	logger := watermill.NewSlogLogger(slog.New(slog.NewTextHandler(io.Discard, nil)))

	if err := schema.Migrate(ctx, db, schema.Config{}); err != nil {
		return result{}, err
	}
	publisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{RequireTx: true}, logger)
	if err != nil {
		return result{}, err
	}
	defer program.Closing(&err, "publisher", publisher.Close)
	consumer, err := outbox.NewConsumer(db.Config(), outbox.ConsumerConfig{}, logger)
	if err != nil {
		return result{}, err
	}
	defer program.Closing(&err, "consumer", consumer.Close)

	orders := []string{"order-1", "order-2", "order-3", "order-4", "order-5"}
	for _, order := range orders {
		if err := place(ctx, db, publisher, order); err != nil {
			return result{}, err
		}
	}

	p := newPayments(len(orders), out)
	if err := pay(ctx, db, consumer, p, logger); err != nil {
		return result{}, err
	}
	// Whatever was not acked would come again before an order that is new.
	const last = "order-6"
	if err := place(ctx, db, publisher, last); err != nil {
		return result{}, err
	}
	redelivered, err := before(ctx, consumer, last)
	if err != nil {
		return result{}, err
	}
	r := p.result()
	r.redelivered = redelivered
	return r, nil
}

// place publishes an order. A service would write the order in the same
// transaction.
func place(ctx context.Context, db *pgxpool.Pool, publisher message.Publisher, order string) error {
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		msg := message.NewMessageWithContext(outbox.ContextWithTx(ctx, tx), watermill.NewUUID(), []byte(order))
		return publisher.Publish(ordersTopic, msg)
	})
}

// pay runs a Router until each order is paid or in the poison topic.
func pay(ctx context.Context, db *pgxpool.Pool, consumer *outbox.Consumer, p *payments, logger watermill.LoggerAdapter) (err error) {
	// A publisher of its own: what the poison queue publishes comes without a
	// transaction, which the service's publisher refuses.
	poisonPublisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{}, logger)
	if err != nil {
		return err
	}
	defer program.Closing(&err, "publisher of the poison queue", poisonPublisher.Close)
	payer, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: "payments"}, logger)
	if err != nil {
		return err
	}
	watcher, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: "support"}, logger)
	if err != nil {
		return err
	}
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		return err
	}
	if err := addHandlers(router, payer, watcher, poisonPublisher, p); err != nil {
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
	case <-p.complete:
		return nil
	case <-stopped:
		return errors.New("the router stopped too early")
	case <-time.After(patience):
		return fmt.Errorf("the orders were not through within %s", patience)
	}
}

// before returns how many orders are delivered to the payments before the given
// one.
func before(ctx context.Context, consumer *outbox.Consumer, order string) (n int, err error) {
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: "payments"}, nil)
	if err != nil {
		return 0, err
	}
	defer program.Closing(&err, "subscriber", subscriber.Close)
	messages, err := subscriber.Subscribe(ctx, ordersTopic)
	if err != nil {
		return 0, err
	}
	timeout := time.After(patience)
	for {
		select {
		case msg, ok := <-messages:
			if !ok {
				return n, errors.New("the subscription ended too early")
			}
			msg.Ack()
			if string(msg.Payload) == order {
				return n, nil
			}
			n++
		case <-timeout:
			return n, fmt.Errorf("%s did not arrive within %s", order, patience)
		}
	}
}
