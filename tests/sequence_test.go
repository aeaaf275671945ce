package tests

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// Somebody gives the sequence a cache, for speed. From then on each session
// draws blocks of ids, and a session that publishes later may have the lower
// ones: readers that go by id skip them. A running consumer loses nothing; a new
// one refuses, since the order of messages follows their ids. Field case F08.
func TestSequenceWithACache(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{PageSize: 7}, "topic")
	first := newMessages(1)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", first...))
	requireNext(t, messages, first...)

	f.exec("ALTER TABLE outbox.messages ALTER COLUMN id SET CACHE 50")
	sessions := []*outbox.Publisher{
		publisherOn(t, f.connect(t), outbox.PublisherConfig{}),
		publisherOn(t, f.connect(t), outbox.PublisherConfig{}),
	}
	var sent [2][]*message.Message
	session := map[string]int{}
	for i, msg := range newMessages(200) {
		require.NoError(t, sessions[i%2].Publish("topic", msg))
		sent[i%2] = append(sent[i%2], msg)
		session[msg.UUID] = i % 2
	}
	var received [2][]*message.Message
	for _, msg := range receive(t, messages, 200) {
		received[session[msg.UUID]] = append(received[session[msg.UUID]], msg)
	}
	for i := range sent {
		require.Equal(t, uuids(sent[i]), uuids(received[i]), "a session's own order")
	}
	require.Greater(t, f.number(`SELECT count(*)::int FROM (
		SELECT id < lag(id) OVER (ORDER BY created_at) AS back FROM outbox.messages) AS m WHERE back`), 50, "the ids did not jump")

	_, err := outbox.NewConsumer(f.pool.Config(), outbox.ConsumerConfig{Schema: oddSchema}, nil)
	require.ErrorContains(t, err, "sequence of messages.id")
	require.ErrorContains(t, err, "CACHE 50")
}
