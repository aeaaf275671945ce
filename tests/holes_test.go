package tests

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/window"
)

// insertRows writes rows around the library, as their owner can.
func (f *fixture) insertRows(topic string, rows ...[2]string) {
	f.t.Helper()
	for _, row := range rows {
		f.exec("INSERT INTO outbox.messages (topic, uuid, metadata) VALUES ($1, $2, $3::json)", topic, row[0], row[1])
	}
}

// holes returns the holes that the group's cursor has stored.
func (f *fixture) holes(t testing.TB, topic string) []window.Hole {
	t.Helper()
	var text string
	require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT holes::text FROM outbox.cursors WHERE topic = $1"), topic).Scan(&text))
	var holes []window.Hole
	require.NoError(t, json.Unmarshal([]byte(text), &holes))
	return holes
}

const unreadable = "A stored row cannot become a message"

// A row that cannot become a message would block its topic for ever, or be lost
// in silence. It is reported, kept in the cursor's holes and passed over. When
// its owner has repaired it, it is delivered to whoever subscribes next, before
// everything else; when he has deleted it, nothing waits for it any more.
func TestRowThatCannotBecomeAMessage(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.insertRows("topic",
		[2]string{"1", "{}"}, [2]string{"array", "[]"}, [2]string{"2", "{}"}, [2]string{"number", `{"a": 1}`},
		[2]string{"null", "null"}, [2]string{"3", `{"a": "b"}`}, [2]string{"nested", `{"a": {"b": "c"}}`})
	subscribe := func() (*outbox.Consumer, *logBook, func(want ...string)) {
		consumer, book := f.loggedConsumer(f.pool.Config(), nil)
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{PageSize: 3}, "topic")
		return consumer, book, func(want ...string) {
			t.Helper()
			require.Equal(t, want, uuids(receive(t, messages, len(want))))
		}
	}
	bad := []string{"array", "number", "null", "nested"}

	consumer, book, requireUUIDs := subscribe()
	requireUUIDs("1", "2", "3")
	var reported []string
	for _, entry := range book.await(t, len(bad), unreadable) {
		require.Equal(t, "error", entry.Level)
		require.ErrorContains(t, entry.Err, "metadata")
		require.Equal(t, "topic", entry.Fields["topic"])
		require.Equal(t, outbox.DefaultConsumerGroup, entry.Fields["consumer_group"])
		uuid, _ := entry.Fields["message_uuid"].(string)
		require.Equal(t, f.number("SELECT id::int FROM outbox.messages WHERE uuid = $1", uuid), int(entry.Fields["outbox_id"].(int64)))
		reported = append(reported, uuid)
	}
	require.Equal(t, bad, reported)
	f.insertRows("topic", [2]string{"4", "{}"})
	requireUUIDs("4")
	require.NoError(t, consumer.Close())
	require.Len(t, f.holes(t, "topic"), len(bad))

	// As long as they are what they are, they are reported again, and no more.
	consumer, book, requireUUIDs = subscribe()
	book.await(t, len(bad), unreadable)
	f.insertRows("topic", [2]string{"5", "{}"})
	requireUUIDs("5")
	require.Len(t, book.find(unreadable), len(bad))
	require.NoError(t, consumer.Close())
	require.Len(t, f.holes(t, "topic"), len(bad))

	// Repaired, deleted, and neither.
	f.exec("UPDATE outbox.messages SET metadata = '{}' WHERE uuid IN ('array', 'nested')")
	f.exec("DELETE FROM outbox.messages WHERE uuid = 'number'")
	f.insertRows("topic", [2]string{"6", "{}"})
	consumer, book, requireUUIDs = subscribe()
	requireUUIDs("array", "nested", "6")
	require.Len(t, book.await(t, 1, "A row that was passed over earlier no longer exists"), 1)
	require.Len(t, book.await(t, 1, unreadable), 1)
	require.NoError(t, consumer.Close())
	holes := f.holes(t, "topic")
	require.Len(t, holes, 1)
	require.Equal(t, f.number("SELECT id::int FROM outbox.messages WHERE uuid = 'null'"), int(holes[0].ID))

	f.exec("UPDATE outbox.messages SET metadata = '{}' WHERE uuid = 'null'")
	consumer, _, requireUUIDs = subscribe()
	requireUUIDs("null")
	require.NoError(t, consumer.Close())
	require.Empty(t, f.holes(t, "topic"))
	f.insertRows("topic", [2]string{"7", "{}"})
	_, _, requireUUIDs = subscribe()
	requireUUIDs("7")
}

// The holes of one group are none of another's, and a hole that is delivered
// again is delivered as any message: nacked, it comes again before the others.
func TestHoleThatIsNacked(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.insertRows("topic", [2]string{"bad", "[]"}, [2]string{"1", "{}"})
	a, b := outbox.SubscriberConfig{ConsumerGroup: "a", CloseTimeout: -1}, outbox.SubscriberConfig{ConsumerGroup: "b"}
	subscriber, messages := f.subscribe(f.consumer(nil), a, "topic")
	require.Equal(t, "1", receive(t, messages, 1)[0].UUID)
	require.NoError(t, subscriber.Close())
	f.exec("UPDATE outbox.messages SET metadata = '{}'")

	_, messages = f.subscribe(f.consumer(nil), b, "topic")
	require.Equal(t, []string{"bad", "1"}, uuids(receive(t, messages, 2)))
	f.insertRows("topic", [2]string{"2", "{}"})
	subscriber, messages = f.subscribe(f.consumer(nil), a, "topic")
	msg := nextMessage(t, messages)
	require.Equal(t, "bad", msg.UUID)
	require.True(t, msg.Nack())
	msg = nextMessage(t, messages)
	require.Equal(t, "bad", msg.UUID)
	require.NoError(t, subscriber.Close()) // still not acked
	_, messages = f.subscribe(f.consumer(nil), a, "topic")
	require.Equal(t, []string{"bad", "2"}, uuids(receive(t, messages, 2)))
}

// What is passed over has its bound: beyond it somebody has to look, and the
// topic stops and says so, without losing anything.
func TestTooManyHoles(t *testing.T) {
	t.Parallel()

	const bound = 1000
	f := newFixture(t)
	f.exec("INSERT INTO outbox.messages (topic, uuid, metadata) SELECT 'topic', 'bad ' || g, '[]' FROM generate_series(1, $1::int) g", bound+1)
	f.insertRows("topic", [2]string{"good", "{}"})
	consumer, book := f.loggedConsumer(f.pool.Config(), nil)
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{PageSize: 70}, "topic")
	stopped := book.await(t, 1, "Too many rows were passed over")[0]
	require.Equal(t, "error", stopped.Level)
	require.ErrorContains(t, stopped.Err, fmt.Sprint(bound))
	require.NoError(t, subscriber.Close())
	requireClosed(t, messages)
	require.Len(t, f.holes(t, "topic"), bound)

	// Half of them repaired, the other half deleted.
	f.exec("UPDATE outbox.messages SET metadata = '{}' WHERE id % 2 = 0")
	f.exec("DELETE FROM outbox.messages WHERE metadata::text = '[]'")
	want := f.number("SELECT count(*)::int FROM outbox.messages")
	subscriber, messages = f.subscribe(consumer, outbox.SubscriberConfig{PageSize: 70}, "topic")
	received := receive(t, messages, want)
	for i, msg := range received[:want-1] {
		require.NotEqual(t, "good", msg.UUID, "message %d", i)
	}
	require.Equal(t, "good", received[want-1].UUID)
	require.NoError(t, subscriber.Close())
	require.Empty(t, f.holes(t, "topic"))
}
