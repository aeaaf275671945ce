package tests

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/cursor"
)

// The tables are moved to another cluster while the number of shards is being
// changed: before the change is made, or after it and before the old shards are
// through. The old ones deliver what was theirs on the old cluster, the new ones
// the rest of it and all of the new cluster's, each message once.
func TestShardsAreChangedAcrossClusters(t *testing.T) {
	t.Parallel()

	for direction, by := range map[string]int{"from an older": -1, "from a newer": 1} {
		for _, before := range []bool{true, false} {
			for _, pageSize := range []int{2, 100} {
				t.Run(fmt.Sprintf("%s, before the change %t, pages of %d", direction, before, pageSize), func(t *testing.T) {
					t.Parallel()

					f := newFixture(t)
					publisher := f.publisher(outbox.PublisherConfig{})
					sent := newMessages(20)
					for i, msg := range sent {
						msg.Metadata.Set(outbox.DefaultKeyMetadata, fmt.Sprint("key ", i%4))
					}
					topic := cursor.Topic{Group: outbox.DefaultConsumerGroup, Topic: "topic"}
					config := outbox.SubscriberConfig{PageSize: pageSize}
					require.NoError(t, publisher.Publish("topic", sent[:8]...))
					consumer := f.consumer(nil)
					subscriber, messages := f.subscribe(consumer, config, "topic")
					requireNext(t, messages, sent[:3]...)
					require.NoError(t, subscriber.Close())
					require.NoError(t, consumer.Close())

					store := cursor.NewStore(oddSchema, "test")
					require.NoError(t, store.Reshard(t.Context(), f.pool, topic, 3))
					if !before {
						made, err := store.Switch(t.Context(), f.pool, topic, nil)
						require.NoError(t, err)
						require.True(t, made)
					}
					require.NoError(t, publisher.Publish("topic", sent[8:14]...))
					f.moveToAnotherCluster(by)
					require.NoError(t, publisher.Publish("topic", sent[14:]...))

					_, messages = f.subscribe(f.consumer(nil), config, "topic")
					rest := receive(t, messages, len(sent)-3)
					require.ElementsMatch(t, uuids(sent[3:]), uuids(rest))
					last := map[string]byte{}
					for _, msg := range rest {
						key := msg.Metadata.Get(outbox.DefaultKeyMetadata)
						require.GreaterOrEqual(t, msg.Payload[2], last[key], "order of %s", key)
						last[key] = msg.Payload[2]
					}
					require.Equal(t, 3, f.number("SELECT count(*)::int FROM outbox.cursors WHERE shards = 3"))
					more := newMessages(5)
					require.NoError(t, publisher.Publish("topic", more...))
					require.ElementsMatch(t, uuids(more), uuids(receive(t, messages, len(more))))
				})
			}
		}
	}
}

// The number of shards is changed by a group that has been through a move to
// another cluster, and the tables are moved once more. That everything of the first
// cluster has been handed out was written into the new positions as a snapshot that
// the server could not read (its xmin had no number in its lower half), so nothing
// was delivered any more.
func TestShardsAreChangedBetweenTwoMoves(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(9)
	deliver := func(batch ...int) {
		subscriber, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
		var want []string
		for _, i := range batch {
			want = append(want, sent[i].UUID)
		}
		require.ElementsMatch(t, want, uuids(receive(t, messages, len(want))))
		require.NoError(t, subscriber.Close())
	}
	move := func() {
		f.moveToAnotherCluster(-1)
		f.exec(`UPDATE outbox.cursors c SET past = (SELECT jsonb_object_agg(e.key::bigint - 1, e.value) FROM jsonb_each(c.past) e) WHERE past <> '{}'`)
	}
	require.NoError(t, publisher.Publish("topic", sent[:3]...))
	deliver(0, 1, 2)
	move()
	require.NoError(t, publisher.Publish("topic", sent[3:5]...))
	deliver(3, 4)
	store := cursor.NewStore(oddSchema, "test")
	topic := cursor.Topic{Group: outbox.DefaultConsumerGroup, Topic: "topic"}
	require.NoError(t, store.Reshard(t.Context(), f.pool, topic, 2))
	made, err := store.Switch(t.Context(), f.pool, topic, nil)
	require.NoError(t, err)
	require.True(t, made)
	require.NoError(t, publisher.Publish("topic", sent[5:7]...))
	deliver(5, 6)
	move()
	require.NoError(t, publisher.Publish("topic", sent[7:]...))
	deliver(7, 8)
}
