package tests

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/cursor"
)

// cursorOf puts a cursor over other topics, which nobody holds, in the place of
// the group's, as if it had been removed and another process with another
// selection had subscribed next; with others, in one step with these statements.
func (f *fixture) cursorOf(t *testing.T, pattern string, others ...string) {
	t.Helper()
	tx, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()                                        // after a commit it does nothing
	statements := append([]string{"LOCK TABLE outbox.cursors IN ACCESS EXCLUSIVE MODE"}, others...) // not raised to that later: a deadlock
	for _, statement := range append(statements, "DELETE FROM outbox.cursors", "ALTER TABLE outbox.cursors ALTER COLUMN epoch SET DEFAULT 0") {
		_, err = tx.Exec(t.Context(), f.sql(statement))
		require.NoError(t, err)
	}
	shards, err := cursor.NewStore(oddSchema, "somebody").Ensure(t.Context(), tx, cursor.Topic{Group: outbox.DefaultConsumerGroup}, []string{pattern}, 1, false)
	require.NoError(t, err)
	require.Equal(t, 1, shards)
	require.NoError(t, tx.Commit(t.Context()))
}

// awaitOtherTopics waits until the only subscription of the consumer says that
// the cursor is one over other topics.
func awaitOtherTopics(t *testing.T, consumer *outbox.Consumer) {
	t.Helper()
	require.Eventually(t, func() bool {
		sub := consumer.Status().Subscriptions[0]
		return errors.Is(sub.Err, outbox.ErrOtherTopics) && !sub.Holding
	}, waitFor, 2*time.Millisecond, "%+v", consumer.Status())
	require.ErrorIs(t, consumer.Status().Ready(), outbox.ErrOtherTopics)
}

// payloadsByTopic acks the next n messages, and returns what each topic's say.
func payloadsByTopic(t *testing.T, batches <-chan []*message.Message, n int) map[string]string {
	t.Helper()
	got := map[string]string{}
	for n > 0 {
		for _, msg := range nextBatch(t, batches) {
			delivery, ok := outbox.DeliveryFromCtx(msg.Context())
			require.True(t, ok)
			got[delivery.Topic] += string(msg.Payload)
			require.True(t, msg.Ack())
			n--
		}
	}
	return got
}

// A process had subscribed to topic a when the group was removed, and made again
// with topic b by another. The first, which still wanted "its" cursor, took that
// and read a from b's position: what was published to b meanwhile was passed
// over.
func TestManyTopicsCursorOfAnotherSelectionIsNotTaken(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	first, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	_, a := f.subscribeBatches(first, outbox.SubscriberConfig{}, outbox.ListTopics("a"))
	f.publishTo("a", "k", 1)
	payloadsByTopic(t, a, 1)

	f.cursorOf(t, "b")
	f.publishTo("b", "k", 2)
	f.publishTo("a", "k", 3)
	awaitOtherTopics(t, first)
	said := book.await(t, 1, "The cursor of the group is over other topics")
	require.ErrorIs(t, said[0].Err, outbox.ErrOtherTopics)
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.cursors WHERE holder IS NULL AND epoch = 0"), "it was taken")

	// Whoever selects b has all of b, here in the same process as who does not.
	b, messages := f.subscribeBatches(first, outbox.SubscriberConfig{}, outbox.ListTopics("b"))
	require.Equal(t, map[string]string{"b": "01"}, payloadsByTopic(t, messages, 2))
	// And in another, which shares with nobody who cannot have it.
	second := f.consumer(func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	require.NoError(t, b.Close())
	b, messages = f.subscribeBatches(second, outbox.SubscriberConfig{}, outbox.ListTopics("b"))
	f.publishTo("b", "k", 3)
	require.Equal(t, map[string]string{"b": "012"}, payloadsByTopic(t, messages, 3))
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.members"), "members that have no part in it")
	require.NoError(t, b.Close())

	// With its own cursor back the first goes on.
	f.cursorOf(t, "a")
	require.Equal(t, map[string]string{"a": "0012"}, payloadsByTopic(t, a, 4))
	require.NoError(t, first.Status().Ready())
}

// A life of the server ended, and the next one has another process's cursor over
// other topics. It is not taken either, and it is no failure to be tried again.
func TestManyTopicsCursorOfAnotherSelectionInAnotherLife(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	subscriber, a := f.subscribeBatches(consumer, outbox.SubscriberConfig{}, outbox.ListTopics("a"))
	f.publishTo("a", "k", 1)
	payloadsByTopic(t, a, 1)

	f.cursorOf(t, "b", "UPDATE outbox.boot SET life = gen_random_uuid()")
	f.publishTo("a", "k", 1)
	f.publishTo("b", "k", 1)
	awaitOtherTopics(t, consumer)
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.cursors WHERE holder IS NULL AND epoch = 0"), "it was taken")
	require.NoError(t, subscriber.Close())
	require.Empty(t, book.find("Cannot see whether the cursor outlived the server"))
}

// The row may become another's between a look and the claim that follows, so the
// claim compares by itself.
func TestManyTopicsClaimComparesTheTopics(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.cursorOf(t, "b%_\\\"")
	store := cursor.NewStore(oddSchema, "claimer")
	claim := func(patterns ...string) int {
		t.Helper()
		held, err := store.Claim(t.Context(), f.pool, []cursor.Wanted{
			{Key: cursor.Key{Group: outbox.DefaultConsumerGroup}, Patterns: patterns},
			{Key: cursor.Key{Group: outbox.DefaultConsumerGroup, Topic: "none"}},
		}, nil)
		require.NoError(t, err)
		return len(held)
	}
	require.Zero(t, claim("a"))
	require.Zero(t, claim("a", "b%_\\\""))
	require.Zero(t, claim("b%_\\\"", "c"))
	require.Zero(t, claim(), "as one topic")
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.cursors WHERE holder IS NULL AND epoch = 0"), "it was taken")
	require.Equal(t, 1, claim("b%_\\\""))
}

// Somebody gives the cursor that is being read other topics. The reader notices
// with its next beat, and gives it up.
func TestManyTopicsCursorThatIsGivenOtherTopics(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	_, a := f.subscribeBatches(consumer, outbox.SubscriberConfig{}, outbox.ListTopics("a"))
	f.publishTo("a", "k", 1)
	payloadsByTopic(t, a, 1)
	f.exec("UPDATE outbox.cursors SET patterns = '{a,b}'")
	awaitOtherTopics(t, consumer)
	require.Eventually(t, func() bool {
		return f.number("SELECT count(*)::int FROM outbox.cursors WHERE holder IS NULL") == 1
	}, waitFor, 2*time.Millisecond)
}

// Shards that were removed were made again by a Subscribe that was refused, at
// its start position.
func TestManyTopicsRefusedSubscribeMakesNothing(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	subscriber, _ := f.subscribeBatches(consumer, outbox.SubscriberConfig{Shards: 3}, outbox.ListTopics("a"))
	require.NoError(t, subscriber.Close())
	f.exec("DELETE FROM outbox.cursors WHERE shard = 1")
	other, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{StartFrom: outbox.StartLatest}, nil)
	require.NoError(t, err)
	_, err = other.SubscribeBatches(t.Context(), outbox.ListTopics("b"), 1)
	require.ErrorIs(t, err, outbox.ErrOtherTopics)
	require.Equal(t, 2, f.number("SELECT count(*)::int FROM outbox.cursors"))
}
