package tests

import (
	"errors"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// Somebody gives up on a message that blocks its group: it becomes a dead letter
// with every byte of it, once, and goes back to the group alone when it is
// requeued.
func TestDeadLettersBury(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	letters := f.deadLetters(nil)
	consumer := f.consumer(nil)
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "a"}, "topic")
	_, others := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "b"}, "topic")
	sent := withMetadata("blocks", []byte("\x00payload"), message.Metadata{outbox.DefaultKeyMetadata: "key", "name": "value"})
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent))
	msg := nextMessage(t, messages)
	d, ok := outbox.DeliveryFromCtx(msg.Context())
	require.True(t, ok)
	require.True(t, msg.Ack())
	require.NoError(t, subscriber.Close())
	requireNext(t, others, sent)

	for range 2 { // the second time nothing happens
		require.NoError(t, letters.Bury(t.Context(), "a", "topic", d.Era, d.ID, "ticket 17"))
	}
	list := allDeadLetters(t, letters, outbox.DeadLetterFilter{}, 0)
	require.Len(t, list, 1)
	letter := list[0]
	require.Equal(t, outbox.DeadLetter{
		ID: letter.ID, ConsumerGroup: "a", Topic: "topic", OrderingKey: "key", UUID: "blocks",
		Metadata: sent.Metadata, RawMetadata: letter.RawMetadata, Payload: sent.Payload,
		Era: d.Era, MessageID: d.ID, PublishedAt: letter.PublishedAt, DiedAt: letter.DiedAt,
		Error: "buried by tester: ticket 17",
	}, letter)
	require.True(t, d.PublishedAt.Equal(letter.PublishedAt))
	events, err := letters.Log(t.Context(), outbox.DeadLetterEventFilter{}, outbox.DeadLetterPage{})
	require.NoError(t, err)
	require.Len(t, events, 1)
	require.Equal(t, outbox.DeadLetterEvent{
		ID: events[0].ID, At: events[0].At, Action: outbox.DeadLetterDied, Actor: "tester", Reason: "ticket 17", DeadLetterID: letter.ID,
		ConsumerGroup: "a", Topic: "topic", OrderingKey: "key", UUID: "blocks", Era: d.Era, MessageID: d.ID,
	}, events[0])

	require.NoError(t, letters.Requeue(t.Context(), letter.ID, ""))
	_, messages = f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "a"}, "topic")
	again := nextMessage(t, messages)
	require.True(t, again.Equals(sent))
	require.True(t, again.Ack())
	last := newMessages(1)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", last...))
	requireNext(t, messages, last...)
	requireNext(t, others, last...)
}

// What is not there, or not for the group, cannot be buried.
func TestDeadLettersBuryNothing(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	letters := f.deadLetters(nil)
	subscriber, _ := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{ConsumerGroup: "group"}, "topic")
	require.NoError(t, subscriber.Close())
	f.exec(`INSERT INTO outbox.messages (topic, uuid, target_group, attempt) VALUES
		('topic', 'all', NULL, 0), ('topic', 'other', 'other', 0), ('topic', 'own', 'group', 2)`)
	rows, era := f.stored(t, "topic"), f.era(t)
	all, other, own := rows[0].ID, rows[1].ID, rows[2].ID
	for name, err := range map[string]error{
		"no such id":    letters.Bury(t.Context(), "group", "topic", era, own+1, ""),
		"no such era":   letters.Bury(t.Context(), "group", "topic", era-1, all, ""),
		"no such topic": letters.Bury(t.Context(), "group", "another topic", era, all, ""),
		"no such group": letters.Bury(t.Context(), "another group", "topic", era, all, ""),
		"not for it":    letters.Bury(t.Context(), "group", "topic", era, other, ""),
	} {
		require.True(t, errors.Is(err, outbox.ErrMessageNotFound), "%s: %v", name, err)
	}
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.dead_letters"))
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.dead_letter_log"))

	require.NoError(t, letters.Bury(t.Context(), "group", "topic", era, all, ""))
	require.NoError(t, letters.Bury(t.Context(), "group", "topic", era, own, ""))
	list := allDeadLetters(t, letters, outbox.DeadLetterFilter{}, 0)
	require.Equal(t, []string{"all", "own"}, letterUUIDs(list))
	require.Equal(t, "buried by tester", list[0].Error)
	require.Equal(t, 2, list[1].Attempts, "those that the row counts")
}
