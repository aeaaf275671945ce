package tests

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// Where a new group begins must not depend on when its row happens to be
// written: "earliest" has all, "latest" what commits after Subscribe returned,
// and neither repeats anything after a restart. Field case F110.
func TestStartPosition(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	publisher := f.publisher(outbox.PublisherConfig{})
	earliest := outbox.SubscriberConfig{ConsumerGroup: "a", StartFrom: outbox.StartEarliest}
	latest := outbox.SubscriberConfig{ConsumerGroup: "b", StartFrom: outbox.StartLatest}
	old, fresh := newMessages(10), newMessages(4)
	require.NoError(t, publisher.Publish("topic", old...))
	tx, err := f.connect(t).Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, publishIn(t.Context(), publisher, tx, "topic", fresh[0]))

	_, all := f.subscribe(consumer, earliest, "topic")
	requireNext(t, all, old...)
	subscriber, some := f.subscribe(consumer, latest, "topic")
	require.NoError(t, publisher.Publish("topic", fresh[1]))
	requireNext(t, some, fresh[1])
	requireNext(t, all, fresh[1])
	// It commits after Subscribe returned, so it counts, although it was
	// written before.
	require.NoError(t, tx.Commit(t.Context()))
	requireNext(t, some, fresh[0])
	requireNext(t, all, fresh[0])

	// A group that has begun goes on where it was, whatever it asks for.
	require.NoError(t, subscriber.Close())
	require.NoError(t, publisher.Publish("topic", fresh[2]))
	subscriber, some = f.subscribe(consumer, latest, "topic")
	requireNext(t, some, fresh[2])
	require.NoError(t, subscriber.Close())
	require.NoError(t, publisher.Publish("topic", fresh[3]))
	latest.StartFrom = outbox.StartEarliest
	_, some = f.subscribe(consumer, latest, "topic")
	requireNext(t, some, fresh[3])
	requireNext(t, all, fresh[2:]...)
}

// Watermill calls SubscribeInitialize wherever it likes; it fixes the position as
// Subscribe does, once, and whoever comes later changes nothing.
func TestSubscribeInitialize(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumers := []*outbox.Consumer{f.consumer(nil), f.consumer(nil)}
	publisher := f.publisher(outbox.PublisherConfig{})
	config := outbox.SubscriberConfig{StartFrom: outbox.StartLatest}
	sent := newMessages(2)
	require.NoError(t, publisher.Publish("topic", sent[0]))
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 20 {
		subscriber, err := outbox.NewSubscriber(consumers[i%2], config, nil)
		require.NoError(t, err)
		wg.Go(func() {
			<-start
			assert.NoError(t, subscriber.SubscribeInitialize("topic"))
		})
	}
	close(start)
	wg.Wait()
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.cursors WHERE topic = 'topic'"))

	require.NoError(t, publisher.Publish("topic", sent[1]))
	subscriber, messages := f.subscribe(consumers[0], config, "topic")
	require.NoError(t, subscriber.SubscribeInitialize("topic"))
	requireNext(t, messages, sent[1])
}
