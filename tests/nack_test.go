package tests

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// nextMessage returns the channel's next message, neither acked nor nacked.
func nextMessage(t testing.TB, messages <-chan *message.Message) *message.Message {
	t.Helper()
	select {
	case msg, ok := <-messages:
		require.True(t, ok, "channel closed")
		return msg
	case <-time.After(waitFor):
		require.FailNow(t, "no message")
		panic("not reached")
	}
}

// A relay that takes up whatever is due next lets the followers of a failed
// message overtake it, and old state overwrites new. The failed one comes again
// before the next of its topic; another topic is not held up. Field case F06.
func TestNackedMessageComesAgainBeforeTheNext(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent, elsewhere := newMessages(3), newMessages(2)
	require.NoError(t, publisher.Publish("orders", sent...))
	require.NoError(t, publisher.Publish("payments", elsewhere...))
	config := outbox.SubscriberConfig{Retry: outbox.RetryConfig{MinBackoff: 20 * time.Millisecond}}
	_, orders := f.subscribe(consumer, config, "orders")
	_, payments := f.subscribe(consumer, config, "payments")

	first := nextMessage(t, orders)
	require.Equal(t, sent[0].UUID, first.UUID)
	require.True(t, first.Nack())
	requireNext(t, payments, elsewhere...)
	again := nextMessage(t, orders)
	require.Equal(t, sent[0].UUID, again.UUID)
	require.True(t, again.Nack())
	requireNext(t, orders, sent...)
}

// Close, and the position, while a nacked message waits out its backoff: a
// subscriber that sleeps it out keeps its process from ending. The message is
// another subscriber's at once, which does not wait for the rest of the backoff.
// Field case F55.
func TestCloseDuringABackoff(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(2)
	require.NoError(t, publisher.Publish("topic", sent...))
	config := outbox.SubscriberConfig{Retry: outbox.RetryConfig{MinBackoff: 2 * waitFor, MaxBackoff: 2 * waitFor}}
	book := newLogBook()
	subscriber, err := outbox.NewSubscriber(f.consumer(nil), config, book)
	require.NoError(t, err)
	messages, err := subscriber.Subscribe(t.Context(), "topic")
	require.NoError(t, err)
	require.True(t, nextMessage(t, messages).Nack())
	book.await(t, 1, "Message was nacked")

	begin := time.Now()
	require.NoError(t, subscriber.Close())
	require.Less(t, time.Since(begin), waitFor, "Close waited for the backoff")
	_, open := <-messages
	require.False(t, open)

	_, messages = f.subscribe(f.consumer(nil), config, "topic")
	requireNext(t, messages, sent...)
}

// A message that fails again and again must not burn the machine: the pause
// doubles, up to its bound, and a message that comes after it begins anew. Field
// cases F62 and F63.
func TestBackoffGrowsAndIsBounded(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(2)
	require.NoError(t, publisher.Publish("topic", sent...))
	const minBackoff, maxBackoff = 100 * time.Millisecond, 3 * time.Second
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{
		Retry: outbox.RetryConfig{MinBackoff: minBackoff, MaxBackoff: maxBackoff},
	}, "topic")

	// The pauses before the deliveries, by their order: 80 to 100 percent of
	// 100, 200, 400, 800, 1600 and 3000 ms. Only the lower bounds are sharp on a
	// machine that is busy with something else.
	msg := nextMessage(t, messages)
	for attempt, least := 1, minBackoff*8/10; attempt <= 6; attempt++ {
		require.Equal(t, sent[0].UUID, msg.UUID)
		delivery, ok := outbox.DeliveryFromCtx(msg.Context())
		require.True(t, ok)
		require.Equal(t, attempt, delivery.Attempt)
		nacked := time.Now()
		require.True(t, msg.Nack())
		msg = nextMessage(t, messages)
		require.GreaterOrEqual(t, time.Since(nacked), least, "pause %d", attempt)
		least = min(2*least, maxBackoff*8/10)
	}
	require.True(t, msg.Ack())

	// The next message's first pause is the shortest, not the longest.
	msg = nextMessage(t, messages)
	require.Equal(t, sent[1].UUID, msg.UUID)
	nacked := time.Now()
	require.True(t, msg.Nack())
	msg = nextMessage(t, messages)
	require.Less(t, time.Since(nacked), maxBackoff*8/10)
	require.Equal(t, sent[1].UUID, msg.UUID)
	require.True(t, msg.Ack())
}

// After some sixty failures a doubled pause overflows to nothing elsewhere, or,
// unbounded, lasts for ever.
func TestMessageThatFailsAHundredTimes(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	sent := newMessages(2)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	const pause = 10 * time.Millisecond
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{
		Retry: outbox.RetryConfig{MinBackoff: pause, MaxBackoff: pause},
	}, "topic")
	begin := time.Now()
	for range 100 {
		msg := nextMessage(t, messages)
		require.Equal(t, sent[0].UUID, msg.UUID)
		require.True(t, msg.Nack())
	}
	requireNext(t, messages, sent...)
	require.GreaterOrEqual(t, time.Since(begin), 100*pause*8/10)
}

// What a failed handler did to its message must not be in the next one: it is
// another object, with metadata of its own.
func TestRedeliveredMessageIsNew(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	sent := withMetadata("uuid", []byte("payload"), message.Metadata{"key": "value"})
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent))
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{
		Retry: outbox.RetryConfig{MinBackoff: time.Millisecond},
	}, "topic")

	first := nextMessage(t, messages)
	first.Metadata.Set("key", "changed")
	first.Metadata.Set("error", "failed")
	first.Payload = []byte("changed")
	first.UUID = "changed"
	require.True(t, first.Nack())
	require.False(t, first.Ack(), "the first word counts")

	second := nextMessage(t, messages)
	require.NotSame(t, first, second)
	require.Equal(t, contents([]*message.Message{sent}), contents([]*message.Message{second}))
	require.NoError(t, second.Context().Err(), "it has a context of its own")
	require.Error(t, first.Context().Err())
	require.True(t, second.Ack())
}
