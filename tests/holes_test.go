package tests

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/window"
)

// holes returns the holes that the group's cursor has stored.
func (f *fixture) holes(t testing.TB, topic string) []window.Hole {
	t.Helper()
	var text string
	require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT holes::text FROM outbox.cursors WHERE topic = $1"), topic).Scan(&text))
	var holes []window.Hole
	require.NoError(t, json.Unmarshal([]byte(text), &holes))
	return holes
}

// Holes are what was handed out and not acked when the position moved over it.
// They go out first after a restart, by id, each with the attempts it had, and
// the holes of one group are none of another's. One whose row is gone is waited
// for no longer.
func TestHolesGoOutFirst(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", keyedMessages("", "", "", "", "")...))
	config := outbox.SubscriberConfig{ConsumerGroup: "a", Ordering: outbox.OrderingUnordered, CloseTimeout: -1, Retry: quick(0)}
	subscriber, messages := f.subscribe(f.consumer(nil), config, "topic")
	first := inFlight(t, messages, 5)
	require.True(t, first["2"].Nack())
	second := nextMessage(t, messages)
	require.Equal(t, "2", second.UUID)
	require.True(t, first["5"].Ack())
	require.True(t, first["3"].Ack())
	require.NoError(t, subscriber.Close())
	holes := f.holes(t, "topic")
	require.Len(t, holes, 3)
	require.Equal(t, []int{0, 1, 0}, []int{holes[0].Attempts, holes[1].Attempts, holes[2].Attempts})

	f.exec("DELETE FROM outbox.messages WHERE uuid = '4'")
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", message.NewMessage("6", nil)))
	consumer, book := f.loggedConsumer(f.pool.Config(), nil)
	config.Ordering = outbox.OrderingStrict
	subscriber, messages = f.subscribe(consumer, config, "topic")
	var attempts []int
	received := receiveWith(t, messages, 3, func(_ int, msg *message.Message) { attempts = append(attempts, attemptOf(t, msg)) })
	require.Equal(t, []string{"1", "2", "6"}, uuids(received))
	require.Equal(t, []int{1, 2, 1}, attempts)
	book.await(t, 1, "A row that was not acked no longer exists")
	require.NoError(t, subscriber.Close())
	require.Empty(t, f.holes(t, "topic"))

	_, messages = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{ConsumerGroup: "b"}, "topic")
	require.Equal(t, []string{"1", "2", "3", "5", "6"}, uuids(receive(t, messages, 5)))
}

// A hole that is delivered again is delivered as any message: nacked, it comes
// again before the others, and after another restart.
func TestHoleThatIsNacked(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", keyedMessages("", "")...))
	config := outbox.SubscriberConfig{CloseTimeout: -1, Retry: quick(0)}
	for attempt := 1; attempt <= 4; attempt += 2 {
		subscriber, messages := f.subscribe(f.consumer(nil), config, "topic")
		for i := range 2 {
			msg := nextMessage(t, messages)
			require.Equal(t, "1", msg.UUID)
			require.Equal(t, attempt+i, attemptOf(t, msg))
			require.True(t, msg.Nack())
		}
		require.Eventually(t, func() bool {
			holes := f.holes(t, "topic")
			return len(holes) > 0 && holes[0].Attempts == attempt+1
		}, waitFor, time.Millisecond)
		require.NoError(t, subscriber.Close())
	}
	_, messages := f.subscribe(f.consumer(nil), config, "topic")
	require.Equal(t, []string{"1", "2"}, uuids(receive(t, messages, 2)))
}

// What waits behind a message that failed is bounded, and so are the holes: at
// the bound nothing more is taken in, though its key need not wait.
func TestHolesAreBounded(t *testing.T) {
	t.Parallel()

	const pending = 1000 // the least that is taken in
	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	blocked := make([]string, pending+100)
	for i := range blocked {
		blocked[i] = "k"
	}
	require.NoError(t, publisher.Publish("topic", keyedMessages(append(blocked, "other")...)...))
	consumer := f.consumer(nil)
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{
		Ordering: outbox.OrderingByKey, Retry: outbox.RetryConfig{MinBackoff: time.Hour, MaxBackoff: time.Hour},
	}, "topic")
	require.True(t, nextMessage(t, messages).Nack())
	require.Eventually(t, func() bool { return len(f.holes(t, "topic")) > 0 }, waitFor, time.Millisecond)
	select {
	case msg := <-messages:
		require.FailNow(t, "more was taken in than the bound", "message %s", msg.UUID)
	case <-time.After(100 * time.Millisecond):
	}
	require.NoError(t, subscriber.Close())
	require.LessOrEqual(t, len(f.holes(t, "topic")), pending)
}
