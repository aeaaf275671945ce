package tests

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// subscribeBatches subscribes to topics with a Subscriber of its own.
func (f *fixture) subscribeBatches(consumer *outbox.Consumer, config outbox.SubscriberConfig, topics outbox.Topics) (*outbox.Subscriber, <-chan []*message.Message) {
	f.t.Helper()
	subscriber, err := outbox.NewSubscriber(consumer, config, nil)
	require.NoError(f.t, err)
	batches, err := subscriber.SubscribeBatches(context.Background(), topics, 10)
	require.NoError(f.t, err)
	return subscriber, batches
}

// publishTo publishes n messages with a key to a topic, in one call.
func (f *fixture) publishTo(topic, key string, n int) {
	f.t.Helper()
	var messages []*message.Message
	for i := range n {
		msg := message.NewMessage(watermill.NewUUID(), fmt.Append(nil, i))
		msg.Metadata.Set(outbox.DefaultKeyMetadata, key)
		messages = append(messages, msg)
	}
	require.NoError(f.t, f.publisher(outbox.PublisherConfig{}).Publish(topic, messages...))
}

// nextBatch returns the next batch, un-acked.
func nextBatch(t testing.TB, batches <-chan []*message.Message) []*message.Message {
	t.Helper()
	select {
	case batch, ok := <-batches:
		require.True(t, ok)
		return batch
	case <-time.After(waitFor):
		require.FailNow(t, "no batch came")
		return nil
	}
}

// Topics that are selected come by one cursor, those that are new while it runs
// too, each key of each topic in order; others do not.
func TestManyTopicsByOneCursor(t *testing.T) {
	t.Parallel()

	for _, mode := range []outbox.Mode{outbox.ModePoll, outbox.ModeAuto} {
		for name, test := range map[string]struct {
			topics outbox.Topics
			want   func(i int) bool
		}{
			"all":     {outbox.AllTopics(), func(int) bool { return true }},
			"pattern": {outbox.MatchTopics("100%_*7"), func(i int) bool { return i%10 == 7 }},
			"list":    {outbox.ListTopics("100%_3", "100%_50", "none"), func(i int) bool { return i == 3 || i == 50 }},
		} {
			t.Run(string(mode)+" "+name, func(t *testing.T) {
				t.Parallel()

				f := newFixture(t)
				consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode = mode })
				want, got := 0, map[string]int{}
				publish := func(from, to int) {
					for i := from; i < to; i++ {
						f.publishTo(fmt.Sprint("100%_", i), "k", 3)
						if test.want(i) {
							want += 3
						}
					}
				}
				publish(0, 60)
				subscriber, batches := f.subscribeBatches(consumer, outbox.SubscriberConfig{Ordering: outbox.OrderingByKey}, test.topics)
				read := func() {
					t.Helper()
					for want > 0 {
						batch := nextBatch(t, batches)
						want -= len(batch)
						for _, msg := range batch {
							delivery, ok := outbox.DeliveryFromCtx(msg.Context())
							require.True(t, ok)
							require.True(t, test.topics.Match(delivery.Topic))
							require.Equal(t, fmt.Sprint(got[delivery.Topic]%3), string(msg.Payload), "in order")
							got[delivery.Topic]++
							msg.Ack()
						}
					}
					require.Zero(t, want)
				}
				read()
				if mode == outbox.ModeAuto {
					awaitLive(t, consumer)
				}
				publish(50, 80)
				read()
				require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.cursors"))
				require.NoError(t, subscriber.Close())
				_, again := f.subscribeBatches(consumer, outbox.SubscriberConfig{Ordering: outbox.OrderingByKey}, test.topics)
				f.publishTo("100%_3", "k", 1)
				f.publishTo("100%_7", "k", 1)
				batch := nextBatch(t, again)
				require.Len(t, batch, 1, "after a clean stop nothing comes twice")
				require.Equal(t, "0", string(batch[0].Payload))
				batch[0].Ack()
			})
		}
	}
}

// One that fails in the middle of a batch comes again with what is behind it, which
// has not failed; a permanent failure makes a dead letter at once.
func TestManyTopicsBatchThatFails(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	_, batches := f.subscribeBatches(consumer, outbox.SubscriberConfig{
		Ordering: outbox.OrderingByKey, Retry: outbox.RetryConfig{MaxAttempts: 5, MinBackoff: time.Millisecond},
	}, outbox.AllTopics())
	// A line goes out with what there is of it, which is less if a worker is quick: then
	// another one is tried.
	var topic string
	var first []*message.Message
	for try := 0; len(first) < 5; try++ {
		require.Less(t, try, 100)
		topic = fmt.Sprint("orders ", try)
		f.publishTo(topic, "k", 5)
		for got := 0; got < 5; got += len(first) {
			if first = nextBatch(t, batches); len(first) == 5 {
				break
			}
			for _, msg := range first {
				msg.Ack()
			}
		}
	}
	attempts := func(batch []*message.Message) (list []int) {
		for _, msg := range batch {
			delivery, _ := outbox.DeliveryFromCtx(msg.Context())
			list = append(list, delivery.Attempt)
		}
		return list
	}
	next := func(want string, attempt ...int) []*message.Message {
		t.Helper()
		var payloads string
		var all []*message.Message
		for len(payloads) < len(want) {
			batch := nextBatch(t, batches)
			for _, msg := range batch {
				payloads += string(msg.Payload)
			}
			all = append(all, batch...)
		}
		require.Equal(t, want, payloads)
		require.Equal(t, attempt, attempts(all))
		return all
	}
	require.Equal(t, []int{1, 1, 1, 1, 1}, attempts(first))
	batch := first
	batch[0].Ack()
	batch[3].Ack() // what is acked stays acked
	outbox.SetError(batch[1].Context(), errors.New("not now"))
	batch[1].Nack()
	for _, behind := range batch[2:] {
		<-behind.Context().Done()
		behind.Nack()
	}
	batch = next("124", 2, 1, 1)
	batch[0].Ack()
	outbox.SetError(batch[1].Context(), fmt.Errorf("it is odd: %w", outbox.Permanent(errors.New("never"))))
	batch[1].Nack()
	batch[2].Nack()
	next("4", 1)[0].Ack()
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.dead_letters WHERE topic = $1 AND convert_from(payload, 'UTF8') = '2' AND error = 'it is odd: never'", topic))
}

// A message of a group that reads many topics can be buried, and comes again when
// it is requeued; what the group does not select cannot.
func TestManyTopicsDeadLetters(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	_, batches := f.subscribeBatches(consumer, outbox.SubscriberConfig{ConsumerGroup: "g"}, outbox.MatchTopics("orders.*"))
	f.publishTo("orders.new", "k", 1)
	f.publishTo("invoices", "k", 1)
	batch := nextBatch(t, batches)
	delivery, _ := outbox.DeliveryFromCtx(batch[0].Context())
	batch[0].Ack()
	letters := f.deadLetters(f.pool)
	require.ErrorIs(t, letters.Bury(t.Context(), "g", "invoices", delivery.Era, delivery.ID+1, "not selected"), outbox.ErrMessageNotFound)
	require.NoError(t, letters.Bury(t.Context(), "g", "orders.new", delivery.Era, delivery.ID, "again"))
	require.NoError(t, letters.Requeue(t.Context(), int64(f.number("SELECT id::int FROM outbox.dead_letters")), "now"))
	again := nextBatch(t, batches)
	require.Equal(t, batch[0].UUID, again[0].UUID)
	again[0].Ack()
}

// A group has one selection. Another would pass over what only one of them selects.
func TestManyTopicsOfAGroupAreFixed(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	f.subscribeBatches(consumer, outbox.SubscriberConfig{}, outbox.ListTopics("a", "b"))
	f.subscribeBatches(consumer, outbox.SubscriberConfig{}, outbox.ListTopics("b", "a", "a"))
	for _, same := range [][]outbox.Topics{
		{outbox.AllTopics(), outbox.MatchTopics("*"), outbox.MatchTopics("**"), outbox.MatchTopics("***")},
		{outbox.MatchTopics("a*b"), outbox.MatchTopics("a**b")},
		{outbox.MatchTopics("*a*"), outbox.MatchTopics("**a**")},
		{outbox.MatchTopics("a"), outbox.ListTopics("a"), outbox.ListTopics("a", "a")},
	} {
		for _, topics := range same {
			f.subscribeBatches(consumer, outbox.SubscriberConfig{ConsumerGroup: same[0].String()}, topics)
		}
	}
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	require.NoError(t, err)
	_, err = subscriber.SubscribeBatches(t.Context(), outbox.ListTopics("a", "b", "c"), 1)
	require.ErrorIs(t, err, outbox.ErrOtherTopics)
	var names [outbox.MaxTopics + 1]string
	for i := range names {
		names[i] = fmt.Sprint("topic ", i)
	}
	require.NoError(t, outbox.ListTopics(slices.Concat(names[:outbox.MaxTopics], names[:1])...).Validate(), "none counts twice")
	for name, topics := range map[string]outbox.Topics{
		"none": {}, "no list": outbox.ListTopics(), "an empty name": outbox.ListTopics("a", ""), "no pattern": outbox.MatchTopics(""),
		"too many": outbox.ListTopics(names[:]...),
	} {
		_, err := subscriber.SubscribeBatches(t.Context(), topics, 1)
		require.Error(t, err, name)
		require.NotErrorIs(t, err, outbox.ErrOtherTopics, name)
	}
	_, err = subscriber.SubscribeBatches(t.Context(), outbox.AllTopics(), 0)
	require.ErrorContains(t, err, "limit")
}

// A message that is being retried could have been any topic's.
func TestManyTopicsStatusNamesTheTopicOfARetry(t *testing.T) {
	t.Parallel()

	everyMode(t, func(t *testing.T, mode outbox.Mode) {
		f := newFixture(t)
		consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode = mode })
		_, batches := f.subscribeBatches(consumer, outbox.SubscriberConfig{
			Ordering: outbox.OrderingByKey, Retry: outbox.RetryConfig{MinBackoff: time.Hour, MaxBackoff: time.Hour},
		}, outbox.MatchTopics("orders.*"))
		if mode != outbox.ModePoll {
			awaitLive(t, consumer)
		}
		for _, topic := range []string{"orders.new", "orders.paid"} {
			f.publishTo(topic, "k", 1)
			nextBatch(t, batches)[0].Nack()
		}
		require.Eventually(t, func() bool { return consumer.Status().Subscriptions[0].RetryingCount == 2 }, waitFor, time.Millisecond)
		var topics []string
		for _, retrying := range consumer.Status().Subscriptions[0].Retrying {
			topics = append(topics, retrying.Topic)
		}
		require.Equal(t, []string{"orders.new", "orders.paid"}, topics)
	})
}
