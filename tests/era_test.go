package tests

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// moveToAnotherCluster makes the tables what they would be if they had been
// written on another cluster, older or newer by its system identifier, dumped
// there, and restored on this one: the rows and positions belong to that one,
// whose transaction ids were far ahead, and the ids begin again.
func (f *fixture) moveToAnotherCluster(by int) {
	f.t.Helper()
	const ahead = 1_000_000
	f.exec("UPDATE outbox.messages SET era = era + $1, xid = (xid::text::bigint + $2)::text::xid8", by, ahead)
	for _, column := range []string{"p", "c", "until"} {
		f.exec(fmt.Sprintf(`UPDATE outbox.cursors SET %[1]s = (
			SELECT ((pg_snapshot_xmin(%[1]s)::text::bigint + $1) || ':' || (pg_snapshot_xmax(%[1]s)::text::bigint + $1) || ':'
			       || coalesce((SELECT string_agg((x::text::bigint + $1)::text, ',' ORDER BY x) FROM pg_snapshot_xip(%[1]s) x), ''))::pg_snapshot)
			WHERE %[1]s::text <> '1:1:'`, column), ahead)
	}
	f.exec("UPDATE outbox.cursors SET era = era + $1, at_era = at_era + $1 * sign(at_era)::int, until_era = until_era + $1 * sign(until_era)::int", by)
	f.exec(`UPDATE outbox.cursors c SET holes = (
		SELECT coalesce(jsonb_agg(h || jsonb_build_object('era', (h->>'era')::bigint + $1)), '[]') FROM jsonb_array_elements(c.holes) h)`, by)
	f.exec("ALTER TABLE outbox.messages ALTER COLUMN id RESTART WITH 1")
}

// After the tables were restored into a new cluster, whose transaction ids are
// far behind, a position that is a transaction id waits until the new cluster
// has caught up, in years perhaps; what it had not delivered on the old cluster
// is skipped, or what it had is repeated. The old cluster's rest comes first, and
// then all of the new one's. Field case F04.
func TestTablesRestoredOnAnotherCluster(t *testing.T) {
	t.Parallel()

	for direction, by := range map[string]int{"from an older": -1, "from a newer": 1} {
		for at, pageSize := range map[string]int{"between windows": 100, "in a window": 2} {
			t.Run(direction+" "+at, func(t *testing.T) {
				t.Parallel()

				f := newFixture(t)
				publisher := f.publisher(outbox.PublisherConfig{})
				open := &lateTransaction{f: f, t: t}
				open.begin()
				open.exec("INSERT INTO outbox.messages (topic, uuid) VALUES ('topic', 'late')")
				old, fresh := newMessages(9), newMessages(4)
				require.NoError(t, publisher.Publish("topic", old[:6]...))
				config := outbox.SubscriberConfig{PageSize: pageSize}
				subscriber, messages := f.subscribe(f.consumer(nil), config, "topic")
				delivered := 6
				if pageSize == 2 {
					delivered = 3
				}
				requireNext(t, messages, old[:delivered]...)
				require.NoError(t, subscriber.Close())
				step := "SELECT count(*)::int FROM outbox.cursors WHERE step IN ('late', 'main')"
				require.Equal(t, pageSize == 2, f.number(step) == 1, "the position is not where the test wants it")
				require.NoError(t, publisher.Publish("topic", old[6:]...))
				open.commit()

				f.moveToAnotherCluster(by)
				require.NoError(t, publisher.Publish("topic", fresh[:2]...))
				want := append([]string{"late"}, uuids(old[delivered:])...)
				want = append(want, uuids(fresh[:2])...)
				subscriber, messages = f.subscribe(f.consumer(nil), config, "topic")
				require.Equal(t, want, uuids(receive(t, messages, len(want))))
				require.NoError(t, publisher.Publish("topic", fresh[2]))
				requireNext(t, messages, fresh[2])

				// And nothing of it again.
				require.NoError(t, subscriber.Close())
				require.NoError(t, publisher.Publish("topic", fresh[3]))
				_, messages = f.subscribe(f.consumer(nil), config, "topic")
				requireNext(t, messages, fresh[3])
			})
		}
	}
}

// A group that begins on the new cluster has everything that was restored, in the
// order of the clusters and of the ids on each, before what is new; a cluster that
// no position knows of counts as undelivered for all groups.
func TestRowsOfManyClusters(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	var want []string
	for _, by := range []int{-2, -1, 1, 2} {
		for id := 1; id <= 5; id++ {
			uuid := fmt.Sprintf("cluster %d, id %d", by, id)
			f.exec(`INSERT INTO outbox.messages (id, xid, era, topic, uuid) OVERRIDING SYSTEM VALUE
				VALUES ($1, ($2::bigint)::text::xid8, outbox.era() + $3, 'topic', $4)`, id, 5_000_000+10*by-id, by, uuid)
			want = append(want, uuid)
		}
	}
	sent := newMessages(4)
	require.NoError(t, publisher.Publish("topic", sent[:3]...))
	want = append(want, uuids(sent[:3])...)
	consumer := f.consumer(nil)
	_, latest := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "latest", StartFrom: outbox.StartLatest}, "topic")
	for _, pageSize := range []int{1, 3, 5, 100} {
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: fmt.Sprint(pageSize), PageSize: pageSize}, "topic")
		for i, msg := range receive(t, messages, len(want)) {
			require.Equal(t, want[i], msg.UUID, "message %d in pages of %d", i, pageSize)
			delivery, ok := outbox.DeliveryFromCtx(msg.Context())
			require.True(t, ok)
			require.Equal(t, f.number("SELECT (era - outbox.era())::int FROM outbox.messages WHERE uuid = $1", msg.UUID),
				int(delivery.Era-f.era(t)))
		}
	}
	require.NoError(t, publisher.Publish("topic", sent[3]))
	requireNext(t, latest, sent[3])
}

func (f *fixture) era(t testing.TB) int64 {
	t.Helper()
	var era int64
	require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT outbox.era()")).Scan(&era))
	return era
}

// The new cluster is given up, and the old one comes back with what it had: its
// positions are still known, and hold.
func TestBackOnTheFirstCluster(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(8)
	require.NoError(t, publisher.Publish("topic", sent[:3]...))
	subscriber, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{PageSize: 2}, "topic")
	requireNext(t, messages, sent[:3]...)
	require.NoError(t, subscriber.Close())
	require.NoError(t, publisher.Publish("topic", sent[3:5]...))

	// What a time on another cluster leaves behind: the position of this one put
	// aside, one message of the other delivered, one not.
	other := func(id int, xid, uuid string) {
		f.exec(`INSERT INTO outbox.messages (id, xid, era, topic, uuid) OVERRIDING SYSTEM VALUE
			VALUES ($1, $2::xid8, outbox.era() + 1, 'topic', $3)`, id, xid, uuid)
	}
	other(1, "100", sent[5].UUID)
	other(2, "101", sent[6].UUID)
	f.exec(`UPDATE outbox.cursors SET past = jsonb_build_object(era::text, jsonb_build_object('p', p::text, 'floor', floor)),
		era = era + 1, p = '101:101:', floor = 1, step = 'idle', c = NULL, top = 0, at = 0, at_era = 0`)

	subscriber, messages = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{PageSize: 2}, "topic")
	requireNext(t, messages, sent[6], sent[3], sent[4])
	require.NoError(t, subscriber.Close())
	require.NoError(t, publisher.Publish("topic", sent[7]))
	_, messages = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{PageSize: 2}, "topic")
	requireNext(t, messages, sent[7])
}

// A row that was not acked is remembered with its cluster.
func TestHoleOfAnotherCluster(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.insertRows("topic", [2]string{"bad", "{}"}, [2]string{"1", "{}"})
	config := outbox.SubscriberConfig{Ordering: outbox.OrderingUnordered, CloseTimeout: -1}
	subscriber, messages := f.subscribe(f.consumer(nil), config, "topic")
	require.True(t, inFlight(t, messages, 2)["1"].Ack())
	require.NoError(t, subscriber.Close())
	require.Len(t, f.holes(t, "topic"), 1)

	f.moveToAnotherCluster(-1)
	sent := newMessages(1)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...)) // has the id of the bad one
	subscriber, messages = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
	require.Equal(t, []string{"bad", sent[0].UUID}, uuids(receive(t, messages, 2)))
	require.NoError(t, subscriber.Close())
	require.Empty(t, f.holes(t, "topic"))
}
