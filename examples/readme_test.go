// Package examples_test holds the code that README.md and docs/forwarder.md show, so
// that it compiles and does what is said there.
package examples_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/forwarder"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func payOrder(ctx context.Context, pool *pgxpool.Pool, publisher message.Publisher, orderID string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// The row first: its lock puts the messages of this order in order.
		if _, err := tx.Exec(ctx, "UPDATE orders SET status = 'paid' WHERE id = $1", orderID); err != nil {
			return err
		}
		msg := message.NewMessageWithContext(outbox.ContextWithTx(ctx, tx), watermill.NewUUID(), []byte(`{"status":"paid"}`))
		msg.Metadata.Set(outbox.DefaultKeyMetadata, orderID)
		return publisher.Publish("orders", msg)
	})
}

func shipOrder(ctx context.Context, db *sql.DB, publisher message.Publisher, orderID string) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // nothing after Commit
	if _, err := tx.ExecContext(ctx, "UPDATE orders SET status = 'shipped' WHERE id = $1", orderID); err != nil {
		return err
	}
	msg := message.NewMessageWithContext(outbox.ContextWithTx(ctx, tx), watermill.NewUUID(), []byte(`{"status":"shipped"}`))
	msg.Metadata.Set(outbox.DefaultKeyMetadata, orderID)
	if err := publisher.Publish("orders", msg); err != nil {
		return err
	}
	return tx.Commit()
}

type OrderClosed struct{ OrderID string }

func newEventBus(publisher message.Publisher) (*cqrs.EventBus, error) {
	return cqrs.NewEventBusWithConfig(publisher, cqrs.EventBusConfig{
		GeneratePublishTopic: func(cqrs.GenerateEventPublishTopicParams) (string, error) { return "orders", nil },
		OnPublish: func(params cqrs.OnEventSendParams) error {
			if event, ok := params.Event.(OrderClosed); ok {
				params.Message.Metadata.Set(outbox.DefaultKeyMetadata, event.OrderID)
			}
			return nil
		},
		Marshaler: cqrs.JSONMarshaler{},
	})
}

func closeOrder(ctx context.Context, pool *pgxpool.Pool, bus *cqrs.EventBus, orderID string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "UPDATE orders SET status = 'closed' WHERE id = $1", orderID); err != nil {
			return err
		}
		return bus.Publish(outbox.ContextWithTx(ctx, tx), OrderClosed{OrderID: orderID})
	})
}

func setUp(ctx context.Context, pool *pgxpool.Pool, logger watermill.LoggerAdapter) (*outbox.Publisher, error) {
	// Creates the tables, or brings them up to date; many processes may do so at once.
	if err := schema.Migrate(ctx, pool, schema.Config{}); err != nil {
		return nil, err
	}
	return outbox.NewPublisher(pool, outbox.PublisherConfig{RequireTx: true}, logger)
}

func consume(ctx context.Context, pool *pgxpool.Pool, handle message.NoPublishHandlerFunc, logger watermill.LoggerAdapter) error {
	consumer, err := outbox.NewConsumer(pool.Config(), outbox.ConsumerConfig{}, logger)
	if err != nil {
		return err
	}
	defer consumer.Close() // after the Router

	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: "invoices"}, logger)
	if err != nil {
		return err
	}
	router := message.NewDefaultRouter(logger)
	router.AddConsumerHandler("invoices", "orders", subscriber, handle)
	return router.Run(ctx) // until ctx ends
}

func newParallelSubscriber(consumer *outbox.Consumer, logger watermill.LoggerAdapter) (*outbox.Subscriber, error) {
	return outbox.NewSubscriber(consumer, outbox.SubscriberConfig{
		ConsumerGroup: "invoices",
		Ordering:      outbox.OrderingByKey, // a key in order, keys in parallel
		MaxInFlight:   64,
		Shards:        8, // spread over the processes
		Retry:         outbox.RetryConfig{MaxAttempts: 10, Mode: outbox.RetryInPlace},
	}, logger)
}

func forwardToBoth(ctx context.Context, consumer *outbox.Consumer, nats, webhook message.Publisher, logger watermill.LoggerAdapter) error {
	f, err := forwarder.New(forwarder.Config{
		Source: forwarder.FromOutbox(consumer, outbox.SubscriberConfig{}, outbox.AllTopics()),
		Destinations: []forwarder.Destination{
			{Name: "nats", Publisher: nats, DeduplicationKey: forwarder.NATSMessageID},
			{Name: "audit", Publisher: webhook, Topic: "https://audit.example.com/{topic}"},
		},
	}, logger)
	if err != nil {
		return err
	}
	return f.Run(ctx) // until ctx ends
}

// topics is a publisher that tells where it was to publish to.
type topics chan string

func (p topics) Publish(topic string, messages ...*message.Message) error {
	for range messages {
		p <- topic
	}
	return nil
}

func (topics) Close() error { return nil }

func TestREADMEWorks(t *testing.T) {
	t.Parallel()

	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	pool := pgtest.Pool(t, pgtest.Database(t))
	publisher, err := setUp(ctx, pool, nil)
	require.NoError(t, err)
	defer publisher.Close()
	_, err = pool.Exec(ctx, "CREATE TABLE orders (id text PRIMARY KEY, status text); INSERT INTO orders VALUES ('42', 'new')")
	require.NoError(t, err)

	require.NoError(t, payOrder(ctx, pool, publisher, "42"))
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	require.NoError(t, shipOrder(ctx, db, publisher, "42"))
	bus, err := newEventBus(publisher)
	require.NoError(t, err)
	require.NoError(t, closeOrder(ctx, pool, bus, "42"))

	var received []string
	err = consume(ctx, pool, func(msg *message.Message) error {
		delivery, _ := outbox.DeliveryFromCtx(msg.Context())
		received = append(received, fmt.Sprintf("%s %s", delivery.OrderingKey, msg.Payload))
		if len(received) == 3 {
			cancel()
		}
		return nil
	}, nil)
	require.NoError(t, err)
	consumer, err := outbox.NewConsumer(pool.Config(), outbox.ConsumerConfig{}, nil)
	require.NoError(t, err)
	defer consumer.Close()
	_, err = newParallelSubscriber(consumer, nil)
	require.NoError(t, err)
	require.Equal(t, []string{`42 {"status":"paid"}`, `42 {"status":"shipped"}`, `42 {"OrderID":"42"}`}, received)

	ctx, cancel = context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	nats, webhook, done := make(topics, 3), make(topics, 3), make(chan error)
	go func() { done <- forwardToBoth(ctx, consumer, nats, webhook, nil) }()
	for range 3 {
		require.Equal(t, "orders", <-nats)
		require.Equal(t, "https://audit.example.com/orders", <-webhook)
	}
	cancel()
	require.NoError(t, <-done)
}

func TestREADMEShowsThisCode(t *testing.T) {
	t.Parallel()

	requireShown(t, "../README.md", "readme_test.go")
}

// requireShown requires that the blocks of code in a document are parts of a file here.
func requireShown(t *testing.T, document, file string) {
	t.Helper()
	source, err := os.ReadFile(file)
	require.NoError(t, err)
	text, err := os.ReadFile(document)
	require.NoError(t, err)
	blocks := strings.Split(string(text), "```go\n")[1:]
	require.NotEmpty(t, blocks)
	for _, block := range blocks {
		code, _, closed := strings.Cut(block, "```")
		require.True(t, closed)
		require.Contains(t, unindent(string(source)), unindent(code))
	}
}

// unindent takes the indentation from each line.
func unindent(code string) string {
	lines := strings.Split(code, "\n")
	for i, line := range lines {
		lines[i] = strings.TrimLeft(line, "\t")
	}
	return strings.Join(lines, "\n")
}
