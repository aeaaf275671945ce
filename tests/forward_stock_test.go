package tests

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// startForwarder runs Watermill's own Forwarder until the test stops it.
func startForwarder(t *testing.T, in message.Subscriber, out message.Publisher, config forwarder.Config) (stop func()) {
	t.Helper()
	config.ForwarderTopic, config.CloseTimeout = forwarderTopic, waitFor
	stock, err := forwarder.NewForwarder(in, out, watermill.NopLogger{}, config)
	require.NoError(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		assert.NoError(t, stock.Run(context.WithoutCancel(t.Context())))
	}()
	await(t, stock.Running())
	return func() {
		require.NoError(t, stock.Close())
		await(t, ended)
	}
}

// failingPublisher fails the first calls.
type failingPublisher struct {
	message.Publisher
	failures atomic.Int32
}

func (p *failingPublisher) Publish(topic string, messages ...*message.Message) error {
	if p.failures.Add(-1) >= 0 {
		return errors.New("the broker is away")
	}
	return p.Publisher.Publish(topic, messages...)
}

// Who has Watermill's Forwarder running keeps it: envelopes are stored as they
// are, and it subscribes to them. What cannot be unwrapped it nacks, so with
// attempts counted it becomes a dead letter, and what follows gets through.
func TestForwardStockForwarderSubscribesToUs(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := variety(50)
	require.NoError(t, forwarding(publisher).Publish("orders", sent[:25]...))
	require.NoError(t, publisher.Publish(forwarderTopic, message.NewMessage("no envelope", []byte("hello"))))
	require.NoError(t, forwarding(publisher).Publish("orders", sent[25:]...))
	require.Len(t, f.stored(t, forwarderTopic), 51)
	require.Empty(t, f.stored(t, "orders"))

	broker := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: 100, BlockPublishUntilSubscriberAck: true}, nil)
	out := &failingPublisher{Publisher: broker}
	out.failures.Store(2)
	orders, err := broker.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	subscriber, err := outbox.NewSubscriber(f.consumer(nil), outbox.SubscriberConfig{
		ConsumerGroup: "forwarder", Retry: outbox.RetryConfig{MaxAttempts: 3, MinBackoff: 1, MaxBackoff: 1},
	}, nil)
	require.NoError(t, err)
	stop := startForwarder(t, subscriber, out, forwarder.Config{})
	requireDelivered(t, orders, sent)
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.dead_letters WHERE uuid = 'no envelope'"))
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.dead_letters"))
	stop()
	require.NoError(t, broker.Close())
}
