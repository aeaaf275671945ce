// Package forwarding is what the examples of package forwarder have in common: an
// order service whose events are forwarded, an outage of the broker meanwhile, and a
// comparison of the broker with the database. What they show is in the examples
// themselves.
package forwarding

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/examples/internal/broker"
	"github.com/millrace/watermill-outbox/examples/internal/program"
	"github.com/millrace/watermill-outbox/forwarder"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	// patience is how long all of it may take. RabbitMQ needs some seconds to start.
	patience = 2 * time.Minute
	// beforeOutage is how many messages are in the broker when it goes away, at least.
	beforeOutage = committed / 10
	// look is the pause between two looks at the Status of the forwarder.
	look = 5 * time.Millisecond
)

// Example is what an example runs: on a database, with a broker of its own.
type Example func(ctx context.Context, db *pgxpool.Pool, out io.Writer) (Result, error)

// Main is the body of an example's main.
func Main(name string, run Example) {
	program.Main(name, func(ctx context.Context) (fmt.Stringer, bool, error) {
		r, err := program.OnDatabase(ctx, clerks, func(ctx context.Context, db *pgxpool.Pool) (Result, error) {
			return run(ctx, db, os.Stdout)
		})
		return r, r.OK(), err
	})
}

// Scenario is what an example brings along.
type Scenario struct {
	Broker *broker.Broker
	// Deduplicates says that the broker drops what it has already.
	Deduplicates bool
	// Forwarder makes a forwarder from Topic to the Broker, to one destination.
	Forwarder func(consumer *outbox.Consumer, logger watermill.LoggerAdapter) (*forwarder.Forwarder, error)
}

// Run lets the service work while the forwarder forwards and the broker goes away for a
// moment, and compares when all is through.
func (s Scenario) Run(ctx context.Context, db *pgxpool.Pool, out io.Writer) (_ Result, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	// The forwarder logs the failures; they are expected here.
	logger := watermill.NewSlogLogger(slog.New(slog.DiscardHandler))

	if err := schema.Migrate(ctx, db, schema.Config{}); err != nil {
		return Result{}, err
	}
	publisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{RequireTx: true}, logger)
	if err != nil {
		return Result{}, err
	}
	defer program.Closing(&err, "publisher", publisher.Close)
	shop := service{db: db, publisher: publisher}
	if err := shop.createTables(ctx); err != nil {
		return Result{}, err
	}
	if err := s.Broker.Declare(ctx, Topic); err != nil {
		return Result{}, err
	}
	if err := s.forward(ctx, shop, out, logger); err != nil {
		return Result{}, err
	}
	published, err := shop.committed(ctx)
	if err != nil {
		return Result{}, err
	}
	received, err := s.received(ctx)
	if err != nil {
		return Result{}, err
	}
	r := compare(published, received)
	r.Deduplicates = s.Deduplicates
	return r, nil
}

// forward runs the service and the forwarder until all is forwarded.
func (s Scenario) forward(ctx context.Context, shop service, out io.Writer, logger watermill.LoggerAdapter) (err error) {
	consumer, err := outbox.NewConsumer(shop.db.Config(), outbox.ConsumerConfig{}, logger)
	if err != nil {
		return err
	}
	defer program.Closing(&err, "consumer", consumer.Close)
	f, err := s.Forwarder(consumer, logger)
	if err != nil {
		return err
	}
	// Whichever ends too early ends all that waits for it.
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	forwarded := begin(fail, func() error { return f.Run(ctx) })
	defer func() { err = errors.Join(err, f.Close(), <-forwarded) }()
	worked := begin(fail, func() error { return shop.work(ctx) })
	defer func() { err = errors.Join(err, <-worked) }()

	if err := until(ctx, f, func(d forwarder.DestinationStatus) bool { return d.Published >= beforeOutage }); err != nil {
		return err
	}
	if err := s.Broker.TakeAway(ctx); err != nil {
		return err
	}
	fmt.Fprintln(out, "  the broker is away; orders go on")
	if err := until(ctx, f, func(d forwarder.DestinationStatus) bool { return d.Breaker != forwarder.BreakerClosed }); err != nil {
		return err
	}
	status := f.Status().Destinations[0]
	fmt.Fprintf(out, "  after %d messages the breaker is %s: %v\n", status.Published, status.Breaker, status.Err)
	if err := <-worked; err != nil {
		return err
	}
	if err := s.Broker.BringBack(ctx); err != nil {
		return err
	}
	fmt.Fprintf(out, "  %d changes are committed; the broker is back\n", committed)
	return until(ctx, f, func(d forwarder.DestinationStatus) bool { return d.Published >= committed })
}

// begin runs something, and hands out its error, if there is one, and then nil. An error
// is also the cause with which everything else ends.
func begin(fail context.CancelCauseFunc, run func() error) <-chan error {
	ended := make(chan error, 1)
	go func() {
		defer close(ended)
		if err := run(); err != nil {
			fail(err)
			ended <- err
		}
	}()
	return ended
}

// until waits for something that the Status of the forwarder says. It announces
// nothing, so one has to look.
func until(ctx context.Context, f *forwarder.Forwarder, reached func(forwarder.DestinationStatus) bool) error {
	ticker := time.NewTicker(look)
	defer ticker.Stop()
	for {
		status := f.Status().Destinations[0]
		if reached(status) {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			err := fmt.Errorf("after %d messages, with the breaker %s: %w", status.Published, status.Breaker, context.Cause(ctx))
			return errors.Join(err, status.Err)
		}
	}
}

// received returns the changes that are in the broker, in its order.
func (s Scenario) received(ctx context.Context) ([]change, error) {
	messages, err := s.Broker.Received(ctx, Topic)
	if err != nil {
		return nil, err
	}
	received := make([]change, len(messages))
	for i, msg := range messages {
		if err := json.Unmarshal(msg.Payload, &received[i]); err != nil {
			return nil, fmt.Errorf("message %d in the broker: %w", i, err)
		}
	}
	return received, nil
}
