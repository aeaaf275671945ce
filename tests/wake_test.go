package tests

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// A message that commits while a window of several pages is being read belongs
// to the next window. A reader that took the watcher's wake for answered when
// it read a later page of the old window slept on it, until it looked by itself
// half a minute later.
func TestMessageCommittedInMidWindowIsNotSleptOn(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	looks := &statementCounter{text: watchStatement}
	db := f.pool.Config()
	db.ConnConfig.Tracer = looks
	_, messages := f.subscribe(f.consumerOn(db, func(c *outbox.ConsumerConfig) { c.Mode = outbox.ModePoll }), outbox.SubscriberConfig{PageSize: 10}, "topic")
	for range 20 {
		require.NoError(t, publisher.Publish("topic", newMessages(45)...))
		// The window is open; its third page is not yet read.
		received := receive(t, messages, 5)
		last := message.NewMessage(watermill.NewUUID(), nil)
		require.NoError(t, publisher.Publish("topic", last))
		// The watcher has seen it: of two looks that began since, one ended.
		before := looks.n.Load()
		require.Eventually(t, func() bool { return looks.n.Load() >= before+2 }, waitFor, time.Millisecond)
		received = append(received, receive(t, messages, 40)...)
		require.Len(t, received, 45)
		select {
		case msg := <-messages:
			require.Equal(t, last.UUID, msg.UUID)
			msg.Ack()
		case <-time.After(10 * time.Second): // a third of what sleeping on it takes
			require.FailNow(t, "the message was slept on")
		}
	}
}
