package tests

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// keyedMessages returns messages with these ordering keys, and their number as
// the UUID, from 1.
func keyedMessages(keys ...string) []*message.Message {
	messages := make([]*message.Message, len(keys))
	for i, key := range keys {
		messages[i] = message.NewMessage(fmt.Sprint(i+1), []byte(key))
		if key != "" {
			messages[i].Metadata.Set(outbox.DefaultKeyMetadata, key)
		}
	}
	return messages
}

// inFlight receives n messages without an ack.
func inFlight(t testing.TB, messages <-chan *message.Message, n int) map[string]*message.Message {
	t.Helper()
	received := map[string]*message.Message{}
	for range n {
		msg := nextMessage(t, messages)
		require.NotContains(t, received, msg.UUID)
		received[msg.UUID] = msg
	}
	return received
}

func attemptOf(t testing.TB, msg *message.Message) int {
	t.Helper()
	delivery, ok := outbox.DeliveryFromCtx(msg.Context())
	require.True(t, ok)
	return delivery.Attempt
}

// quick is a retry policy with so many attempts and short pauses.
func quick(attempts int) outbox.RetryConfig {
	return outbox.RetryConfig{MaxAttempts: attempts, MinBackoff: 5 * time.Millisecond, MaxBackoff: 20 * time.Millisecond}
}

// deadUUIDs returns the UUIDs of a group's dead letters, in the order of death.
func (f *fixture) deadUUIDs(t testing.TB, group string) (list []string) {
	t.Helper()
	require.NoError(t, f.pool.QueryRow(t.Context(), f.sql(
		"SELECT coalesce(array_agg(uuid ORDER BY id), '{}') FROM outbox.dead_letters WHERE consumer_group = $1"), group).Scan(&list))
	return list
}

// failed returns how many attempts of a message are stored as failed.
func (f *fixture) failed(t testing.TB, uuid string) int {
	t.Helper()
	return f.number(`SELECT coalesce(
		(SELECT d.attempts FROM outbox.dead_letters d WHERE d.uuid = $1),
		(SELECT (h ->> 'attempts')::int FROM outbox.cursors c, jsonb_array_elements(c.holes) h, outbox.messages m
			WHERE m.id = (h ->> 'id')::bigint AND m.uuid = $1), 0)`, uuid)
}

// A relay that takes up whatever is due next, or runs the rows of a key in
// parallel, lets the followers of a failed message overtake it. Its key waits for
// it; another key does not, nor does what has no key. Field case F06.
func TestRetryHoldsItsKeyAlone(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", keyedMessages("k", "k", "k", "l", "l", "", "")...))
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{
		Ordering: outbox.OrderingByKey, Retry: outbox.RetryConfig{MinBackoff: 300 * time.Millisecond},
	}, "topic")
	first := inFlight(t, messages, 4)
	require.Contains(t, first, "1")
	require.Contains(t, first, "4")
	require.True(t, first["1"].Nack())
	require.True(t, first["4"].Ack())
	require.Equal(t, "5", nextMessage(t, messages).UUID, "the other key waits for it")
	for attempt, uuid := range []string{"1", "2", "3"} {
		msg := nextMessage(t, messages)
		require.Equal(t, uuid, msg.UUID)
		if attempt == 0 {
			require.Equal(t, 2, attemptOf(t, msg))
		}
		require.True(t, msg.Ack())
	}
}

// Attempts are bounded, and counted across restarts: each message is a dead
// letter after exactly three tries. What a shutdown cuts off is no try. Field
// case F58.
func TestRetryAttemptsSurviveRestarts(t *testing.T) {
	t.Parallel()

	for _, ordering := range []outbox.Ordering{outbox.OrderingStrict, outbox.OrderingByKey, outbox.OrderingUnordered} {
		t.Run(string(ordering), func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", keyedMessages("k", "l")...))
			config := outbox.SubscriberConfig{Ordering: ordering, Retry: quick(3), CloseTimeout: -1}
			tries := map[string][]int{}
			consumer := f.consumer(nil)
			_, messages := f.subscribe(consumer, config, "topic")
			for n := 1; n <= 6; n++ {
				msg := nextMessage(t, messages)
				tries[msg.UUID] = append(tries[msg.UUID], attemptOf(t, msg))
				require.True(t, msg.Nack())
				require.Eventually(t, func() bool { return f.failed(t, msg.UUID) == len(tries[msg.UUID]) }, waitFor, time.Millisecond)
				if n == 2 || n == 5 { // others may be with their handlers, which counts for nothing
					require.NoError(t, consumer.Close())
					consumer = f.consumer(nil)
					_, messages = f.subscribe(consumer, config, "topic")
				}
			}
			require.Equal(t, map[string][]int{"1": {1, 2, 3}, "2": {1, 2, 3}}, tries)
			require.ElementsMatch(t, []string{"1", "2"}, f.deadUUIDs(t, outbox.DefaultConsumerGroup))
			require.Empty(t, f.holes(t, "topic"))
		})
	}
}

// A policy that gives up lets the key go on, and one that does not holds it,
// which can be seen, until somebody does. Field case F07.
func TestRetryGivesUpOrHolds(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	require.NoError(t, publisher.Publish("topic", keyedMessages("k", "k", "k")...))
	skip := outbox.SubscriberConfig{ConsumerGroup: "skip", Ordering: outbox.OrderingByKey, Retry: quick(2)}
	_, messages := f.subscribe(f.consumer(nil), skip, "topic")
	for range 2 {
		msg := nextMessage(t, messages)
		require.Equal(t, "1", msg.UUID)
		require.True(t, msg.Nack())
	}
	require.Equal(t, []string{"2", "3"}, uuids(receive(t, messages, 2)))
	require.Equal(t, []string{"1"}, f.deadUUIDs(t, "skip"))

	consumer := f.consumer(nil)
	hold := outbox.SubscriberConfig{ConsumerGroup: "hold", Ordering: outbox.OrderingByKey, Retry: outbox.RetryConfig{MinBackoff: 20 * time.Millisecond}}
	_, messages = f.subscribe(consumer, hold, "topic")
	msg := nextMessage(t, messages)
	outbox.SetError(msg.Context(), context.DeadlineExceeded)
	require.True(t, msg.Nack())
	require.Eventually(t, func() bool {
		status := consumer.Status().Subscriptions[0]
		return status.RetryingCount == 1 && status.Retrying[0].UUID == "1" && status.Retrying[0].OrderingKey == "k" &&
			status.Retrying[0].Attempts == 1 && errors.Is(status.Retrying[0].Err, context.DeadlineExceeded)
	}, waitFor, time.Millisecond, "the blocked key does not show")
	f.exec(`INSERT INTO outbox.dead_letters (consumer_group, topic, key, uuid, origin_era, origin_id, created_at, attempts, error)
		SELECT 'hold', topic, key, uuid, era, id, created_at, 1, 'buried' FROM outbox.messages WHERE uuid = '1'`)
	for {
		msg = nextMessage(t, messages)
		if msg.UUID != "1" {
			break
		}
		require.True(t, msg.Nack()) // handed out before it was buried
	}
	require.Equal(t, "2", msg.UUID)
	require.True(t, msg.Ack())
	requireNext(t, messages, keyedMessages("", "", "k")[2])
}

// One message that fails for as long as it likes, under load, neither grows its
// cursor nor keeps it from moving on, so that what is behind can be dropped.
func TestRetryOfOneMessageKeepsTheCursorSmall(t *testing.T) {
	t.Parallel()

	for _, mode := range []outbox.Mode{outbox.ModePoll, outbox.ModeWAL} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			publisher := f.publisher(outbox.PublisherConfig{})
			consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode = mode })
			_, messages := f.subscribe(consumer, outbox.SubscriberConfig{
				Ordering: outbox.OrderingByKey, Retry: outbox.RetryConfig{MinBackoff: 50 * time.Millisecond},
			}, "topic")
			if mode == outbox.ModeWAL {
				awaitLive(t, consumer)
			}
			require.NoError(t, publisher.Publish("topic", message.NewMessage("blocked", nil)))
			const rounds, batch = 20, 200
			for range rounds {
				require.NoError(t, publisher.Publish("topic", newMessages(batch)...))
				for n := 0; n < batch; {
					msg := nextMessage(t, messages)
					if msg.UUID == "blocked" {
						require.True(t, msg.Nack())
						continue
					}
					require.True(t, msg.Ack())
					n++
				}
			}
			last := f.number("SELECT max(id)::int FROM outbox.messages")
			require.Eventually(t, func() bool {
				for drained := false; !drained; {
					select {
					case msg := <-messages:
						require.Equal(t, "blocked", msg.UUID)
						require.True(t, msg.Nack())
					default:
						drained = true
					}
				}
				// Everything but the blocked one is covered by the position.
				return f.number(`SELECT count(*)::int FROM outbox.messages m, outbox.cursors c
					WHERE m.id <= $1 AND NOT pg_visible_in_snapshot(m.xid, c.p)`, last) == 0 && len(f.holes(t, "topic")) == 1
			}, waitFor, 5*time.Millisecond, "the position stays behind")
			holes := f.holes(t, "topic")
			require.Len(t, holes, 1)
			require.Positive(t, holes[0].Attempts)
			require.Less(t, f.number("SELECT pg_column_size(c.*)::int FROM outbox.cursors c"), 1000)
		})
	}
}

// Retries inside the handler chain take longer than any lease, and the lease is
// renewed meanwhile: nobody else gets the message. A deadline, if there is one,
// ends the handler's context, and the message comes again after that. Field cases
// F61 and F64.
func TestRetryAfterTheAckDeadline(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(1)...))
	slow := outbox.SubscriberConfig{ConsumerGroup: "slow"}
	consumers := []*outbox.Consumer{}
	var channels []<-chan *message.Message
	for range 3 {
		consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
		_, messages := f.subscribe(consumer, slow, "topic")
		consumers, channels = append(consumers, consumer), append(channels, messages)
	}
	var msg *message.Message
	select {
	case msg = <-channels[0]:
	case msg = <-channels[1]:
	case msg = <-channels[2]:
	}
	select {
	case <-channels[0]:
		require.FailNow(t, "handled twice at once")
	case <-channels[1]:
		require.FailNow(t, "handled twice at once")
	case <-channels[2]:
		require.FailNow(t, "handled twice at once")
	case <-time.After(3 * outbox.MinLease):
	}
	require.NoError(t, msg.Context().Err())
	require.True(t, msg.Ack())
	for _, consumer := range consumers {
		require.NoError(t, consumer.Close())
	}
	require.Empty(t, f.holes(t, "topic"))

	// With a deadline: the context's end is told apart, and an endless handler's
	// message becomes a dead letter.
	consumer := f.consumer(nil)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{
		ConsumerGroup: "deadline", AckDeadline: 100 * time.Millisecond, CloseTimeout: 50 * time.Millisecond, Retry: quick(2),
	}, "topic")
	for attempt := 1; attempt <= 2; attempt++ {
		msg := nextMessage(t, messages)
		require.Equal(t, attempt, attemptOf(t, msg))
		select {
		case <-msg.Context().Done():
			require.ErrorIs(t, context.Cause(msg.Context()), outbox.ErrAckDeadline)
		case <-time.After(waitFor):
			require.FailNow(t, "the deadline does not end the context")
		}
	}
	require.Eventually(t, func() bool { return len(f.deadUUIDs(t, "deadline")) == 1 }, waitFor, 5*time.Millisecond)
	var reason string
	require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT error FROM outbox.dead_letters")).Scan(&reason))
	require.Contains(t, reason, "deadline")
}

// What an end fails has not failed: after a shutdown whose handlers nack, and
// after a lost lease, each message is on its first attempt.
func TestRetryDoesNotCountTheEnd(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	const n = 5
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(n)...))
	config := outbox.SubscriberConfig{Ordering: outbox.OrderingUnordered, Retry: quick(1), CloseTimeout: waitFor}
	consumer := f.consumer(nil)
	subscriber, err := outbox.NewSubscriber(consumer, config, nil)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	messages, err := subscriber.Subscribe(ctx, "topic")
	require.NoError(t, err)
	first := inFlight(t, messages, n)
	cancel()
	for _, msg := range first {
		require.True(t, msg.Nack())
	}
	require.NoError(t, subscriber.Close())

	_, messages = f.subscribe(consumer, config, "topic")
	second := inFlight(t, messages, n)
	f.exec("UPDATE outbox.cursors SET epoch = epoch + 1, holder = NULL") // somebody took it
	for _, msg := range second {
		require.Equal(t, 1, attemptOf(t, msg))
		select {
		case <-msg.Context().Done():
			require.ErrorIs(t, context.Cause(msg.Context()), outbox.ErrLeaseLost)
		case <-time.After(waitFor):
			require.FailNow(t, "the context outlives the lease")
		}
		require.True(t, msg.Nack())
	}
	for range n {
		msg := nextMessage(t, messages)
		require.Equal(t, 1, attemptOf(t, msg))
		require.True(t, msg.Ack())
	}
	require.NoError(t, consumer.Close())
	require.Empty(t, f.deadUUIDs(t, outbox.DefaultConsumerGroup))
}
