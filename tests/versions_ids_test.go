package tests

import (
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// A counter of 32 bits ends after two billion messages, and one that is a float in
// between loses its last digits at 2^53. Ids are whole up to the last one. Field
// case F77.
func TestIDsBeyond32Bits(t *testing.T) {
	t.Parallel()

	f, _ := newOwnFixture(t, pgtest.Options{})
	publisher := f.publisher(outbox.PublisherConfig{})
	consumer := f.consumer(readsWAL)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	awaitLive(t, consumer)
	for _, last := range []int64{1<<31 - 2, 1<<32 - 2, 1<<53 - 2, 1<<63 - 100} {
		f.exec("SELECT setval(pg_get_serial_sequence($1, 'id'), $2)", quoteIdentifier(oddSchema)+".messages", last)
		sent := newMessages(5)
		require.NoError(t, publisher.Publish("topic", sent...))
		var received []*message.Message
		receiveWith(t, messages, len(sent), func(i int, msg *message.Message) {
			delivery, ok := outbox.DeliveryFromCtx(msg.Context())
			require.True(t, ok)
			require.Equal(t, last+1+int64(i), delivery.ID)
			received = append(received, msg)
		})
		require.Equal(t, uuids(sent), uuids(received))
	}
	f.awaitStored(t, "topic")
	require.NoError(t, consumer.Close())
	// The next process goes on there, by the table.
	sent := newMessages(3)
	require.NoError(t, publisher.Publish("topic", sent...))
	_, messages = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent...)
}

// Transaction ids are 64 bits for us, and 32 for the server's tables and its
// stream, where they begin again. Positions from before go on behind 2^32, a
// transaction may be open meanwhile, and a stream crosses the limit. Field cases
// F77 and F108.
func TestTransactionsBeyond32Bits(t *testing.T) {
	t.Parallel()

	f, server := newOwnFixture(t, pgtest.Options{})
	publisher := f.publisher(outbox.PublisherConfig{})
	read := func(groups ...string) (closeAll func(), next func(sent ...*message.Message)) {
		var consumers []*outbox.Consumer
		var channels []<-chan *message.Message
		for _, group := range groups {
			consumer := f.consumer(func(c *outbox.ConsumerConfig) {
				if c.Mode = outbox.ModePoll; group == "wal" {
					c.Mode = outbox.ModeAuto
				}
			})
			_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: group, PageSize: 10}, "topic")
			consumers, channels = append(consumers, consumer), append(channels, messages)
		}
		return func() {
				for _, consumer := range consumers {
					require.NoError(t, consumer.Close())
				}
			}, func(sent ...*message.Message) {
				for i, messages := range channels {
					requireNext(t, messages, sent...)
					if groups[i] == "wal" {
						awaitLive(t, consumers[i])
					}
				}
			}
	}
	closeAll, next := read("poll", "wal")
	sent := newMessages(3)
	require.NoError(t, publisher.Publish("topic", sent...))
	next(sent...)
	closeAll()
	waiting := newMessages(30)
	require.NoError(t, publisher.Publish("topic", waiting...))
	f.pool.Reset()

	const limit = 1 << 32
	require.NoError(t, server.SkipTransactions(t.Context(), limit-60))
	require.Less(t, f.xid(t), uint64(limit))
	closeAll, next = read("poll", "wal")
	next(waiting...)
	// It takes its id before the limit, and publishes behind it.
	open, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = open.Exec(t.Context(), "SELECT pg_current_xact_id()")
	require.NoError(t, err)
	for range 80 {
		sent := newMessages(1)
		require.NoError(t, publisher.Publish("topic", sent...))
		next(sent...)
	}
	require.Greater(t, f.xid(t), uint64(limit))
	late := newMessages(2)
	require.NoError(t, publishIn(t.Context(), publisher, open, "topic", late...))
	require.NoError(t, open.Commit(t.Context()))
	next(late...)
	require.NoError(t, publisher.Publish("topic", sent...))
	next(sent...)
	closeAll()
}

// xid returns the id of a transaction of its own.
func (f *fixture) xid(t testing.TB) (xid uint64) {
	t.Helper()
	require.NoError(t, f.pool.QueryRow(t.Context(), "SELECT pg_current_xact_id()::text::bigint").Scan(&xid))
	return xid
}

// An identity column of a partitioned table is its partitions', too, since version
// 17, and only the table's before. All rows that there are have ids of one
// sequence on each version: what goes straight into a partition, which is nobody's
// business, gets one or is refused, and a partition may be detached and attached.
// Field case F112.
func TestIdentityOfPartitions(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	rows, err := f.pool.Query(t.Context(), f.sql(`SELECT c.relname::text, pg_get_expr(c.relpartbound, c.oid)
		FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
		WHERE i.inhparent = to_regclass($1) ORDER BY c.relname LIMIT 4`), quoteIdentifier(oddSchema)+".messages")
	require.NoError(t, err)
	type leaf struct{ Name, Bound string }
	leaves, err := pgx.CollectRows(rows, pgx.RowToStructByPos[leaf])
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(leaves), 3, "this hour's, the next one's, and the DEFAULT one")
	version := f.number("SELECT current_setting('server_version_num')::int") / 10000

	published := map[string]bool{}
	publish := func(n int) {
		t.Helper()
		sent := newMessages(n)
		require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
		requireNext(t, messages, sent...)
		for _, msg := range sent {
			published[msg.UUID] = true
		}
	}
	publish(1000)
	name := func(l leaf) string { return "outbox." + quoteIdentifier(l.Name) }
	for i, l := range leaves {
		_, err := f.pool.Exec(t.Context(), f.sql(`INSERT INTO `+name(l)+` (topic, uuid, created_at)
			SELECT 'another topic', $1 || g, coalesce((regexp_match($2, 'FROM \(''(.*)''\) TO'))[1]::timestamptz, '2000-01-01') FROM generate_series(1, 100) g`),
			fmt.Sprint(i, " "), l.Bound)
		if version >= 17 {
			require.NoError(t, err, l.Name)
		} else {
			require.ErrorContains(t, err, `null value in column "id"`, l.Name)
		}
	}
	last := leaves[len(leaves)-1]
	f.exec("ALTER TABLE outbox.messages DETACH PARTITION " + name(last))
	publish(50)
	f.exec("ALTER TABLE outbox.messages ATTACH PARTITION " + name(last) + " " + last.Bound)
	publish(50)

	total := len(published)
	if version >= 17 {
		_, others := f.subscribe(consumer, outbox.SubscriberConfig{}, "another topic")
		for _, msg := range receive(t, others, 100*len(leaves)) {
			require.False(t, published[msg.UUID])
			published[msg.UUID] = true
		}
		total += 100 * len(leaves)
	}
	require.Len(t, published, total)
	require.Equal(t, total, f.number("SELECT count(DISTINCT id)::int FROM outbox.messages WHERE id IS NOT NULL"))
	require.Equal(t, total, f.number("SELECT count(*)::int FROM outbox.messages"))
}
