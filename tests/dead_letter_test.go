package tests

import (
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

var errPoison = errors.New("it is poison")

// insertRows writes rows around the library, as their owner can.
func (f *fixture) insertRows(topic string, rows ...[2]string) {
	f.t.Helper()
	for _, row := range rows {
		f.exec("INSERT INTO outbox.messages (topic, uuid, metadata, payload) VALUES ($1, $2, $3::json, '\\x00ff')", topic, row[0], row[1])
	}
}

// A row that cannot become a message would block its topic for ever, or be lost
// in silence. It becomes a dead letter at once, with its bytes as they are and
// the reason, and what follows goes on; one without a payload is a message. Field
// case F59.
func TestDeadLetterOfAnUndecodableRow(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	bad := map[string]string{"array": "[1,  2]", "number": `{"a": 1}`, "null": "null", "nested": `{"a": {"b":  "c"}}`}
	f.insertRows("topic",
		[2]string{"1", "{}"}, [2]string{"array", bad["array"]}, [2]string{"2", "{}"}, [2]string{"number", bad["number"]},
		[2]string{"null", bad["null"]}, [2]string{"3", `{"a": "b"}`}, [2]string{"nested", bad["nested"]})
	f.exec("INSERT INTO outbox.messages (topic, uuid) VALUES ('topic', 'empty')")
	consumer, book := f.loggedConsumer(f.pool.Config(), nil)
	var told []outbox.DeadLetter
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{
		PageSize: 3, OnDeadLetter: func(d outbox.DeadLetter) { told = append(told, d) },
	}, "topic")
	received := receive(t, messages, 4)
	require.Equal(t, []string{"1", "2", "3", "empty"}, uuids(received))
	require.Empty(t, received[3].Payload)
	require.NoError(t, subscriber.Close())

	require.Len(t, told, len(bad))
	for _, d := range told {
		require.Nil(t, d.Metadata)
		require.Equal(t, bad[d.UUID], string(d.RawMetadata))
		require.Equal(t, []byte{0, 0xff}, d.Payload)
		require.Contains(t, d.Error, "metadata")
		require.Zero(t, d.Attempts)
		require.Equal(t, 1, f.number(`SELECT count(*)::int FROM outbox.dead_letters d JOIN outbox.messages m ON m.era = d.origin_era AND m.id = d.origin_id
			WHERE d.uuid = $1 AND d.metadata::text = m.metadata::text AND d.payload = m.payload AND d.error = $2 AND d.consumer_group = $3`,
			d.UUID, d.Error, outbox.DefaultConsumerGroup))
	}
	require.Len(t, book.find("Message became a dead letter"), len(bad))
	require.Empty(t, f.holes(t, "topic"))
}

// A poison message is acked if, and only if, its dead letter is stored: while that
// fails, the message stays where it is. Field case F60.
func TestDeadLetterThatCannotBeStored(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.exec(`CREATE FUNCTION outbox.refuse() RETURNS trigger LANGUAGE plpgsql AS $body$ BEGIN RAISE EXCEPTION 'no room'; END $body$`)
	f.exec(`CREATE TRIGGER refuse BEFORE INSERT ON outbox.dead_letters FOR EACH ROW EXECUTE FUNCTION outbox.refuse()`)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", keyedMessages("k", "k")...))
	consumer, book := f.loggedConsumer(f.pool.Config(), nil)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{Retry: quick(1)}, "topic")
	msg := nextMessage(t, messages)
	outbox.SetError(msg.Context(), errPoison)
	require.True(t, msg.Nack())
	for _, entry := range book.await(t, 2, "Cannot store what becomes of a message") {
		require.ErrorContains(t, entry.Err, "no room")
	}
	select {
	case <-messages:
		require.FailNow(t, "what follows was delivered although the dead letter is not stored")
	default:
	}
	f.exec("DROP TRIGGER refuse ON outbox.dead_letters")
	requireNext(t, messages, keyedMessages("k", "k")[1])
	require.Equal(t, []string{"1"}, f.deadUUIDs(t, outbox.DefaultConsumerGroup))
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.dead_letter_log WHERE action = 'died' AND reason = $1", errPoison.Error()))
}

// Whoever has lost the cursor, asleep for longer than its lease, adds no dead
// letters when it wakes, and defers nothing: the check of the epoch is in the
// same statement.
func TestDeadLetterIsFenced(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", keyedMessages("k", "k")...))
	for name, retry := range map[string]outbox.RetryConfig{
		"dead":     quick(1),
		"deferred": {Mode: outbox.RetryDeferred, MinBackoff: time.Hour, MaxBackoff: time.Hour},
	} {
		// The checkpoints would notice before the nack does.
		consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) {
			c.CheckpointInterval, c.Lease = time.Minute, time.Minute
		})
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: name, Retry: retry}, "topic")
		msg := nextMessage(t, messages)
		f.exec("UPDATE outbox.cursors SET epoch = epoch + 1, holder = NULL WHERE consumer_group = $1", name)
		require.True(t, msg.Nack())
		book.await(t, 1, "Topic lost")
		require.Zero(t, f.number("SELECT (SELECT count(*) FROM outbox.dead_letters)::int + (SELECT count(*) FROM outbox.deferred)::int"))
		again := nextMessage(t, messages) // taken again, with nothing counted
		require.Equal(t, msg.UUID, again.UUID)
		require.Equal(t, 1, attemptOf(t, again))
		require.True(t, again.Ack())
	}
}

// A dead letter has the keys of Watermill's poison queue, beside the metadata.
func TestDeadLetterHasThePoisonKeys(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	require.NoError(t, publisher.Publish("topic", withMetadata("uuid", []byte("payload"), message.Metadata{"a": "b"})))
	consumer := f.consumer(nil)
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{Retry: quick(2)}, nil)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, testLogger(t))
	require.NoError(t, err)
	router.AddConsumerHandler("handler", "topic", subscriber, func(msg *message.Message) error {
		outbox.SetError(msg.Context(), errPoison)
		return errPoison
	})
	go func() { _ = router.Run(t.Context()) }()
	t.Cleanup(func() { require.NoError(t, router.Close()) })
	require.Eventually(t, func() bool { return len(f.deadUUIDs(t, outbox.DefaultConsumerGroup)) == 1 }, waitFor, 5*time.Millisecond)
	var metadata map[string]string
	require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT metadata FROM outbox.dead_letters")).Scan(&metadata))
	require.Equal(t, map[string]string{
		"a": "b", middleware.ReasonForPoisonedKey: errPoison.Error(), middleware.PoisonedTopicKey: "topic",
		middleware.PoisonedHandlerKey: "handler", middleware.PoisonedSubscriberKey: "outbox.Subscriber",
	}, metadata)
}
