package tests

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// A message's context carries the values of the one given to Subscribe, and is
// its own: it lives until the message is acked, nacked or given up, and no
// longer.
func TestMessageContext(t *testing.T) {
	t.Parallel()

	type keyType struct{}
	f := newFixture(t)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(5)...))
	consumer := f.consumer(nil)
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{
		CloseTimeout: time.Second, Retry: outbox.RetryConfig{MinBackoff: time.Millisecond},
	}, nil)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), keyType{}, "value"), 100*waitFor)
	defer cancel()
	messages, err := subscriber.Subscribe(ctx, "topic")
	require.NoError(t, err)

	alive := func(msg *message.Message) {
		t.Helper()
		require.NoError(t, msg.Context().Err())
		require.Equal(t, "value", msg.Context().Value(keyType{}))
	}
	acked := nextMessage(t, messages)
	alive(acked)
	require.True(t, acked.Ack())
	await(t, acked.Context().Done())

	nacked := nextMessage(t, messages)
	alive(nacked)
	require.True(t, nacked.Nack())
	await(t, nacked.Context().Done())
	require.Equal(t, "value", nacked.Context().Value(keyType{}), "the values stay")

	again := nextMessage(t, messages)
	require.Equal(t, nacked.UUID, again.UUID)
	alive(again)
	require.Error(t, nacked.Context().Err())
	require.True(t, again.Ack())
	await(t, again.Context().Done())

	// Somebody replaces the context, as the Router does: his ends by itself.
	replaced := nextMessage(t, messages)
	inner, cancelInner := context.WithCancel(replaced.Context())
	replaced.SetContext(inner)
	require.True(t, replaced.Ack())
	await(t, inner.Done())
	cancelInner()

	givenUp := nextMessage(t, messages)
	alive(givenUp)
	cancel()
	begin := time.Now()
	require.NoError(t, givenUp.Context().Err(), "it has the grace period")
	await(t, givenUp.Context().Done())
	require.Less(t, time.Since(begin), waitFor)
	_, open := <-messages
	require.False(t, open)
}

// What is known of a delivery is in the context, for that message alone.
func TestDeliveryFromCtx(t *testing.T) {
	t.Parallel()

	type keyType struct{}
	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	keyed := message.NewMessage("keyed", nil)
	keyed.Metadata.Set(outbox.DefaultKeyMetadata, "order 7")
	require.NoError(t, publisher.Publish("topic", keyed))
	require.NoError(t, publisher.Publish("topic", message.NewMessage("without a key", nil)))
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{
		ConsumerGroup: "group", Retry: outbox.RetryConfig{MinBackoff: time.Millisecond},
	}, "topic")

	stored := func(uuid string) (d outbox.Delivery) {
		var key *string
		require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT id, era, key, created_at FROM outbox.messages WHERE uuid = $1"), uuid).
			Scan(&d.ID, &d.Era, &key, &d.PublishedAt))
		if key != nil {
			d.OrderingKey = *key
		}
		d.Topic, d.ConsumerGroup = "topic", "group"
		return d
	}
	check := func(uuid string, attempt int) *message.Message {
		t.Helper()
		msg := nextMessage(t, messages)
		require.Equal(t, uuid, msg.UUID)
		got, ok := outbox.DeliveryFromCtx(context.WithValue(msg.Context(), keyType{}, "value"))
		require.True(t, ok)
		want := stored(uuid)
		want.Attempt = attempt
		require.True(t, want.PublishedAt.Equal(got.PublishedAt))
		got.PublishedAt = want.PublishedAt
		require.Equal(t, want, got)
		return msg
	}
	require.Equal(t, "order 7", stored("keyed").OrderingKey)
	require.True(t, check("keyed", 1).Nack())
	require.True(t, check("keyed", 2).Nack())
	require.True(t, check("keyed", 3).Ack())
	require.True(t, check("without a key", 1).Ack())

	_, ok := outbox.DeliveryFromCtx(t.Context())
	require.False(t, ok)
}
