// Command reminder schedules messages: an invoice is reminded of some time after
// it was written, unless it has been paid by then.
//
//	go run ./examples/reminder
//
// Four invoices are written, each in a transaction that also schedules its
// reminder; one of the transactions is rolled back, and its reminder with it. One
// invoice is paid in time. The reminders come when they are due by the database's
// clock, never before. The last line sums up:
//
//	scheduled=3 rolled_back=1 delivered=3 early=0 reminded=2 already_paid=1
//
// It needs no set-up: without a PostgreSQL in OUTBOX_DATABASE_URL it starts a
// throw-away one.
//
// In invoices.go is the service that schedules, in reminders.go the handler that
// receives, and here what connects them.
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
	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/examples/internal/program"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	// patience is how long the last reminder may take.
	patience = time.Minute
	// conns is one connection for the service and one for the handler.
	conns = 2
)

func main() {
	program.Main("reminder", func(ctx context.Context) (fmt.Stringer, bool, error) {
		r, err := program.OnDatabase(ctx, conns, func(ctx context.Context, db *pgxpool.Pool) (result, error) {
			return run(ctx, db, os.Stdout)
		})
		return r, r.ok(), err
	})
}

// run connects the parts, writes the invoices and waits for their reminders.
func run(ctx context.Context, db *pgxpool.Pool, out io.Writer) (_ result, err error) {
	logger := watermill.NewSlogLogger(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))

	if err := schema.Migrate(ctx, db, schema.Config{}); err != nil {
		return result{}, err
	}
	publisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{RequireTx: true}, logger)
	if err != nil {
		return result{}, err
	}
	// Watermill's decorator takes the delay from the context (delay.WithContext)
	// and writes it into the message's metadata, where the outbox finds it.
	// AllowNoDelay lets other messages through.
	delayed, err := delay.NewPublisher(publisher, delay.PublisherConfig{AllowNoDelay: true})
	if err != nil {
		return result{}, err
	}
	defer program.Closing(&err, "publisher", delayed.Close)
	service := &invoiceService{db: db, publisher: delayed}
	if err := service.createTable(ctx); err != nil {
		return result{}, err
	}

	consumer, err := outbox.NewConsumer(db.Config(), outbox.ConsumerConfig{}, logger)
	if err != nil {
		return result{}, err
	}
	defer program.Closing(&err, "consumer", consumer.Close)
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: "reminders"}, logger)
	if err != nil {
		return result{}, err
	}
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		return result{}, err
	}
	reminders := newReminders(db, out)
	router.AddConsumerHandler("reminders", topic, subscriber, reminders.handle)
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

	for _, invoice := range invoices {
		err := service.write(ctx, invoice.id, invoice.remindIn, invoice.declined)
		switch {
		case invoice.declined && errors.Is(err, errDeclined):
			fmt.Fprintf(out, "  invoice %d is rolled back\n", invoice.id)
			reminders.rolledBack++
		case err != nil:
			return result{}, err
		default:
			fmt.Fprintf(out, "  invoice %d is written, reminder in %s\n", invoice.id, invoice.remindIn)
			reminders.scheduled++
		}
	}
	if err := service.pay(ctx, paidInvoice); err != nil {
		return result{}, err
	}
	fmt.Fprintf(out, "  invoice %d is paid\n", paidInvoice)

	select {
	case <-reminders.last:
	case <-stopped:
		return result{}, errors.New("the router stopped before the last reminder came")
	case <-time.After(patience):
		fmt.Fprintf(out, "  the last reminder did not come within %s\n", patience)
	}
	return reminders.result(), nil
}
