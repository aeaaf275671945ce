package tests

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// A message that is put off lets all others pass, comes again to its own group
// alone, with what it was and the attempts it had, and ends as a dead letter that
// names the message it was in the end.
func TestRetryDeferred(t *testing.T) {
	t.Parallel()

	for _, mode := range []outbox.Mode{outbox.ModePoll, outbox.ModeWAL} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode = mode })
			retry := quick(3)
			retry.Mode = outbox.RetryDeferred
			_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "a", Retry: retry}, "topic")
			_, others := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "b"}, "topic")
			if mode == outbox.ModeWAL {
				awaitLive(t, consumer)
			}
			sent := keyedMessages("k", "k")
			sent[0].Metadata.Set("a", "b")
			require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
			msg := nextMessage(t, messages)
			first, _ := outbox.DeliveryFromCtx(msg.Context())
			outbox.SetError(msg.Context(), errPoison)
			require.True(t, msg.Nack())
			requireNext(t, messages, sent[1])
			last := first
			for attempt := 2; attempt <= 3; attempt++ {
				msg = nextMessage(t, messages)
				require.Equal(t, content{sent[0].UUID, sent[0].Metadata, sent[0].Payload}, contents([]*message.Message{msg})[0])
				delivery, _ := outbox.DeliveryFromCtx(msg.Context())
				require.Equal(t, attempt, delivery.Attempt)
				require.Equal(t, "k", delivery.OrderingKey)
				require.Greater(t, delivery.ID, last.ID, "a new stored message")
				last = delivery
				outbox.SetError(msg.Context(), errPoison)
				require.True(t, msg.Nack())
			}
			require.Eventually(t, func() bool { return len(f.deadUUIDs(t, "a")) == 1 }, waitFor, 5*time.Millisecond)
			require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.dead_letters WHERE origin_id = $1 AND attempts = 3 AND error = $2", last.ID, errPoison.Error()))
			require.Zero(t, f.number("SELECT count(*)::int FROM outbox.deferred"))
			requireNext(t, others, sent...)
			require.NoError(t, consumer.Close())
			select {
			case _, open := <-others:
				require.False(t, open, "a retry of the other group came")
			default:
			}
		})
	}
}

// What somebody buries while it is with its handler does not come again, wherever
// failures wait.
func TestRetryDeferredOfABuriedMessage(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	retry := quick(3)
	retry.Mode = outbox.RetryDeferred
	subscriber, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{ConsumerGroup: "a", Retry: retry}, "topic")
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(2)...))
	msg := nextMessage(t, messages)
	d, _ := outbox.DeliveryFromCtx(msg.Context())
	require.NoError(t, f.deadLetters(nil).Bury(t.Context(), "a", "topic", d.Era, d.ID, ""))
	require.True(t, msg.Nack())
	receive(t, messages, 1)
	require.NoError(t, subscriber.Close())
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.deferred"))
	require.Equal(t, 2, f.number("SELECT count(*)::int FROM outbox.messages"))
	require.Equal(t, []string{msg.UUID}, f.deadUUIDs(t, "a"))
	require.Empty(t, f.holes(t, "topic"))
}

// Watermill's DelayOnError middleware puts a message off by changing its metadata
// and letting the error through. That is honoured, with its own pauses, whatever
// the policy is, and never early.
func TestRetryDelayOnError(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{
		Retry: outbox.RetryConfig{MinBackoff: time.Hour, MaxBackoff: time.Hour, MaxAttempts: 4},
	}, nil)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, testLogger(t))
	require.NoError(t, err)
	onError := middleware.DelayOnError{InitialInterval: 1100 * time.Millisecond, MaxInterval: 5 * time.Second, Multiplier: 1}
	router.AddMiddleware(outbox.KeepError, onError.Middleware)
	var mu sync.Mutex
	var early []string
	handled := make(chan string, 100)
	router.AddConsumerHandler("handler", "topic", subscriber, func(msg *message.Message) error {
		if until := msg.Metadata.Get(delay.DelayedUntilKey); until != "" {
			due, err := time.Parse(time.RFC3339, until)
			if err != nil || f.number("SELECT (clock_timestamp() < $1::timestamptz)::int", due) == 1 {
				mu.Lock()
				early = append(early, until)
				mu.Unlock()
			}
		}
		handled <- msg.UUID
		if string(msg.Payload) == "bad" {
			return errors.New("not yet")
		}
		return nil
	})
	go func() { _ = router.Run(t.Context()) }()
	t.Cleanup(func() { require.NoError(t, router.Close()) })
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic",
		message.NewMessage("1", []byte("bad")), message.NewMessage("2", []byte("good"))))
	var order []string
	for range 5 {
		select {
		case uuid := <-handled:
			order = append(order, uuid)
		case <-time.After(waitFor):
			require.FailNow(t, "a message is missing", "handled: %v", order)
		}
	}
	require.Equal(t, []string{"1", "2", "1", "1", "1"}, order)
	require.Eventually(t, func() bool { return len(f.deadUUIDs(t, outbox.DefaultConsumerGroup)) == 1 }, waitFor, 5*time.Millisecond)
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.dead_letters WHERE attempts = 4 AND error = 'not yet'"))
	mu.Lock()
	defer mu.Unlock()
	require.Empty(t, early)
}
