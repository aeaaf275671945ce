package tests

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// startBatches is replicas.start for a group that reads many topics.
func (r *replicas) startBatches(topics outbox.Topics) *replica {
	r.t.Helper()
	consumer := r.f.consumer(r.change)
	_, batches := r.f.subscribeBatches(consumer, r.config, topics)
	one := &replica{consumer: consumer, done: make(chan struct{})}
	go func() {
		defer close(one.done)
		for batch := range batches {
			for _, msg := range batch {
				r.record(msg)
				msg.Ack()
			}
		}
	}()
	return one
}

// The division of many topics' cursors is changed while much is written and three
// replicas work: one shard becomes eight, three, and one again. Nothing is lost or
// repeated, and the order per key stands. It was not done at all: the new cursors
// were to have no topics, which the table refuses.
func TestManyTopicsShardsAreChangedUnderLoad(t *testing.T) {
	t.Parallel()

	everyMode(t, func(t *testing.T, mode outbox.Mode) {
		const writers = 3
		f := newFixture(t)
		w := newWorkload(t, f, "changes", 30, writers)
		w.also = []string{"changes.a", "changes.b"}
		l := newLedgers(w)
		group := &replicas{
			t: t, f: f, config: outbox.SubscriberConfig{PageSize: 20, Ordering: outbox.OrderingByKey},
			change: func(c *outbox.ConsumerConfig) { c.Mode, c.Lease = mode, 3*time.Second },
			record: func(msg *message.Message) { l.record(t, msg) },
		}
		writing, stopWriting := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer stopWriting()
		seed := uint64(time.Now().UnixNano())
		wg.Go(func() { w.run(t, writing, writers, seed) })
		var running []*replica
		for range 3 {
			running = append(running, group.startBatches(outbox.MatchTopics("changes*")))
		}
		for _, shards := range []int{8, 3, 1} {
			for n := l.len(); l.len() < n+100; time.Sleep(time.Millisecond) {
				require.NoError(t, t.Context().Err())
			}
			began := time.Now()
			require.NoError(t, running[shards%3].consumer.ReshardBatches(t.Context(), "", shards))
			require.Eventually(t, func() bool {
				return f.number("SELECT count(*)::int FROM outbox.cursors WHERE shards = $1 AND until IS NULL AND reshard IS NULL AND holder IS NOT NULL", shards) == shards &&
					f.number("SELECT count(*)::int FROM outbox.cursors WHERE patterns = '{changes%}'") == shards
			}, waitFor, 5*time.Millisecond, "the change to %d shards was not made", shards)
			t.Logf("%d shards after %s", shards, time.Since(began))
		}
		stopWriting()
		wg.Wait()
		l.settled(t, w)
		for _, one := range running {
			one.stop(t)
		}
		l.requireOnceInOrder(t, w, fmt.Sprintf("seed=%d", seed))
	})
}

// Messages of several topics that fail again and again stay holes. A change of the
// number of shards takes them along, each to where its key belongs.
func TestManyTopicsShardsAreChangedInSpiteOfHoles(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	for i := range 6 {
		f.exec("INSERT INTO outbox.messages (topic, uuid, key, payload) VALUES ($1, 'u', $2, 'bad')", fmt.Sprint("topic ", i%3), fmt.Sprint("bad ", i))
	}
	f.publishTo("topic 0", "good", 1)
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	_, batches := f.subscribeBatches(consumer, outbox.SubscriberConfig{
		Ordering: outbox.OrderingByKey, Retry: outbox.RetryConfig{MinBackoff: 50 * time.Millisecond, MaxBackoff: 50 * time.Millisecond},
	}, outbox.AllTopics())
	good := make(chan string, 10)
	go func() {
		for batch := range batches {
			for _, msg := range batch {
				if string(msg.Payload) == "bad" {
					msg.Nack()
					continue
				}
				delivery, _ := outbox.DeliveryFromCtx(msg.Context())
				good <- delivery.Topic
				msg.Ack()
			}
		}
	}()
	next := func() string {
		t.Helper()
		select {
		case topic := <-good:
			return topic
		case <-time.After(waitFor):
			require.FailNow(t, "a message is missing")
			return ""
		}
	}
	require.Equal(t, "topic 0", next())
	require.Eventually(t, func() bool {
		return f.number("SELECT coalesce(sum(jsonb_array_length(holes)), 0)::int FROM outbox.cursors") == 6
	}, waitFor, 5*time.Millisecond)
	require.NoError(t, consumer.ReshardBatches(t.Context(), "", 3))
	f.publishTo("topic 1", "good", 1)
	require.Equal(t, "topic 1", next())
	require.Eventually(t, func() bool { return f.number("SELECT count(*)::int FROM outbox.cursors") == 3 }, waitFor, 5*time.Millisecond)
	require.Equal(t, 6, f.number(`SELECT count(*)::int FROM outbox.cursors c, jsonb_array_elements(c.holes) h
		JOIN outbox.messages m ON m.id = (h->>'id')::bigint
		WHERE c.shard = c.base + outbox.shard(m.key, m.id, c.shards) AND (h->>'attempts')::int > 0`))
}

// What cannot be is refused by name, and no other cursors are concerned.
func TestManyTopicsShardsAreRefused(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	for _, shards := range []int{-1, 0, outbox.MaxShards + 1} {
		require.ErrorContains(t, consumer.ReshardBatches(t.Context(), "group", shards), "shards must be")
	}
	f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "group"}, "topic")
	err := consumer.ReshardBatches(t.Context(), "group", 2)
	require.ErrorIs(t, err, outbox.ErrUnknownGroup)
	require.ErrorContains(t, err, `group "group", many topics`)
	f.subscribeBatches(consumer, outbox.SubscriberConfig{ConsumerGroup: "group"}, outbox.AllTopics())
	require.NoError(t, consumer.ReshardBatches(t.Context(), "group", 2))
	require.Eventually(t, func() bool {
		return f.number("SELECT count(*)::int FROM outbox.cursors WHERE topic = '' AND shards = 2 AND holder IS NOT NULL") == 2
	}, waitFor, 5*time.Millisecond)
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.cursors WHERE topic = 'topic' AND shards = 1"))
}

// What a pooler makes of a statement's parameters and answers, lists of patterns
// among them, is no matter.
func TestManyTopicsShardsInEachQueryMode(t *testing.T) {
	t.Parallel()

	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			db := f.pool.Config()
			db.ConnConfig.DefaultQueryExecMode = mode
			consumer := f.consumerOn(db, func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
			_, batches := f.subscribeBatches(consumer, outbox.SubscriberConfig{Shards: 3, PageSize: 4}, outbox.ListTopics(`a"b`, `c\d`, "e,f"))
			for _, shards := range []int{2, 4} {
				for _, topic := range []string{`a"b`, `c\d`, "e,f", "other"} {
					f.publishTo(topic, "k", 5)
				}
				require.Equal(t, map[string]string{`a"b`: "01234", `c\d`: "01234", "e,f": "01234"}, payloadsByTopic(t, batches, 15))
				require.NoError(t, consumer.ReshardBatches(t.Context(), "", shards))
				require.Eventually(t, func() bool {
					return f.number("SELECT count(*)::int FROM outbox.cursors WHERE shards = $1 AND holder IS NOT NULL", shards) == shards
				}, waitFor, 5*time.Millisecond)
			}
		})
	}
}
