package tests

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// While somebody holds an old snapshot nothing can be vacuumed, and a queue whose
// rows are updated or deleted for each delivery reads past all that were. Ours are
// not: the last look touches no more pages than the first did. Field case F69.
//
// On a server of its own: a position's xmin stays behind while a transaction of
// anybody's, in whatever database, goes on, and a look passes over what is behind.
func TestOldSnapshotSlowsNothing(t *testing.T) {
	t.Parallel()

	f, _ := newOwnFixture(t, pgtest.Options{})
	snapshot, err := f.connect(t).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	_, err = snapshot.Exec(t.Context(), "SELECT pg_current_snapshot()")
	require.NoError(t, err)
	const rounds, batch = 40, 500
	publisher := f.publisher(outbox.PublisherConfig{})
	// Polling: what is acked is covered at once.
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode = outbox.ModePoll })
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{Ordering: outbox.OrderingUnordered}, "topic")
	conn := f.connect(t)
	for name, value := range consumerSettings {
		_, err := conn.Exec(t.Context(), "SELECT set_config($1, $2, false)", name, value)
		require.NoError(t, err)
	}
	f.prepare(t, conn, "internal/window/queries/open.sql", false)
	look := func() int {
		var p string
		var floor int64
		require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT p::text, floor FROM outbox.cursors")).Scan(&p, &floor))
		var text string
		require.NoError(t, conn.QueryRow(t.Context(), "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE hot('topic', 'group', "+
			quote(p)+", "+f.text("SELECT floor::text FROM outbox.cursors")+", 1000, 1000000, 0, 1, 9223372036854775807)", pgx.QueryExecModeSimpleProtocol).Scan(&text))
		return buffers(t, text)
	}
	var first, last int
	for round := range rounds {
		require.NoError(t, publisher.Publish("topic", newMessages(batch)...))
		receive(t, messages, batch)
		if round != 0 && round != rounds-1 {
			continue
		}
		// Until the position covers all of it, a look finds what is new to it.
		require.Eventually(t, func() bool {
			return f.number("SELECT count(*)::int FROM outbox.messages m, outbox.cursors c WHERE NOT pg_visible_in_snapshot(m.xid, c.p)") == 0
		}, waitFor, waitFor/1000)
		if round == 0 {
			first = look()
		} else {
			last = look()
		}
	}
	t.Logf("buffers of a look: %d at first, %d after %d messages", first, last, rounds*batch)
	require.LessOrEqual(t, last, first+20)
	require.NoError(t, snapshot.Rollback(t.Context()))
}
