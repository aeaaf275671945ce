package examples_test

import (
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/forwarder"
	"github.com/millrace/watermill-outbox/forwarder/jetstream"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// What docs/forwarder.md shows, block by block.

func forward(ctx context.Context, consumer *outbox.Consumer, publisher message.Publisher, logger watermill.LoggerAdapter) error {
	f, err := forwarder.New(forwarder.Config{
		Source:       forwarder.FromOutbox(consumer, outbox.SubscriberConfig{}, outbox.AllTopics()),
		Destinations: []forwarder.Destination{{Publisher: publisher, DeduplicationKey: forwarder.NATSMessageID}},
	}, logger)
	if err != nil {
		return err
	}
	return f.Run(ctx)
}

func forwardByRoute(source forwarder.Source, kafka, webhook message.Publisher) (*forwarder.Forwarder, error) {
	route := func(msg *message.Message, topic string) ([]forwarder.Target, error) {
		if topic == "invoices" {
			return []forwarder.Target{{Destination: "kafka"}, {Destination: "webhook", Topic: "billing"}}, nil
		}
		return []forwarder.Target{{Destination: "kafka"}}, nil
	}
	return forwarder.New(forwarder.Config{
		Source: source, Route: route,
		Destinations: []forwarder.Destination{{Name: "kafka", Publisher: kafka}, {Name: "webhook", Publisher: webhook}},
	}, nil)
}

func forwardInBatches(ctx context.Context, url string, source forwarder.Source) error {
	conn, err := nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectBufSize(-1))
	if err != nil {
		return err
	}
	defer conn.Close()
	publisher, err := jetstream.NewPublisher(conn, jetstream.PublisherConfig{})
	if err != nil {
		return err
	}
	destination := forwarder.Destination{
		Publisher: publisher, DeduplicationKey: forwarder.NATSMessageID, Classify: jetstream.Classify,
	}
	f, err := forwarder.New(forwarder.Config{Source: source, Destinations: []forwarder.Destination{destination}}, nil)
	if err != nil {
		return err
	}
	return f.Run(ctx)
}

func newSource(newSubscriber func(group string) (message.Subscriber, error)) forwarder.Source {
	source := forwarder.FromSubscribers(func(destination string) (message.Subscriber, error) {
		return newSubscriber("forwarder." + destination)
	}, "orders", "invoices")
	return source
}

func watch(f *forwarder.Forwarder, report func(string)) {
	for _, d := range f.Status().Destinations {
		if d.Breaker != forwarder.BreakerClosed {
			report(fmt.Sprintf("%s is %s since %s: %v", d.Name, d.Breaker, d.Since.Format(time.TimeOnly), d.Err))
		}
	}
}

func TestForwarderDocShowsThisCode(t *testing.T) {
	t.Parallel()

	requireShown(t, "../docs/forwarder.md", "forwarder_doc_test.go")
}

func TestForwarderDocForwards(t *testing.T) {
	t.Parallel()

	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	pool := pgtest.Pool(t, pgtest.Database(t))
	publisher, err := setUp(ctx, pool, nil)
	require.NoError(t, err)
	defer publisher.Close()
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		return publisher.Publish("orders", message.NewMessageWithContext(outbox.ContextWithTx(ctx, tx), "first", []byte("paid")))
	})
	require.NoError(t, err)
	consumer, err := outbox.NewConsumer(pool.Config(), outbox.ConsumerConfig{}, nil)
	require.NoError(t, err)
	defer consumer.Close()
	broker := gochannel.NewGoChannel(gochannel.Config{}, nil)
	defer broker.Close()
	messages, err := broker.Subscribe(ctx, "orders")
	require.NoError(t, err)

	forwarding, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- forward(forwarding, consumer, broker, nil) }()
	select {
	case msg := <-messages:
		require.Equal(t, "first", msg.UUID)
		require.Equal(t, "paid", string(msg.Payload))
		require.NotEmpty(t, msg.Metadata.Get(forwarder.NATSMessageID))
		msg.Ack()
	case err := <-ended:
		require.Fail(t, "the forwarder ended", err)
	case <-ctx.Done():
		require.NoError(t, ctx.Err())
	}
	stop()
	require.NoError(t, <-ended)
}

// failing is a publisher to a broker that is away.
type failing struct{}

func (failing) Publish(string, ...*message.Message) error { return io.EOF }

func (failing) Close() error { return nil }

func TestForwarderDocRoutesAndReports(t *testing.T) {
	t.Parallel()

	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	in := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, nil)
	require.NoError(t, in.Publish("invoices", message.NewMessage("invoice", nil)))
	require.NoError(t, in.Publish("orders", message.NewMessage("order", nil)))
	kafka := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, nil)
	defer kafka.Close()
	var groups []string
	f, err := forwardByRoute(newSource(func(group string) (message.Subscriber, error) {
		groups = append(groups, group)
		return in, nil
	}), kafka, failing{})
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- f.Run(ctx) }()
	for _, topic := range []string{"invoices", "orders"} {
		messages, err := kafka.Subscribe(ctx, topic)
		require.NoError(t, err)
		select {
		case msg := <-messages:
			require.Equal(t, topic, msg.UUID+"s")
			msg.Ack()
		case <-ctx.Done():
			require.NoError(t, ctx.Err())
		}
	}
	var reports []string
	require.Eventually(t, func() bool {
		watch(f, func(report string) { reports = append(reports, report) })
		return len(reports) > 0
	}, 30*time.Second, time.Millisecond)
	require.Contains(t, reports[0], `topic "billing" of destination "webhook": EOF`)
	require.NoError(t, f.Close())
	require.NoError(t, <-ended)
	require.Equal(t, []string{"forwarder.kafka", "forwarder.webhook"}, groups)
}

func TestForwarderDocBatchesNeedAServer(t *testing.T) {
	t.Parallel()

	err := forwardInBatches(t.Context(), "nats://127.0.0.1:1", nil)
	require.ErrorIs(t, err, nats.ErrNoServers)
}
