package tests

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// sqlState returns the server's code of an error, or "".
func sqlState(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// Field case F33. Somebody published all tables of the database, and from then
// on each update and delete of a table without a replica identity failed with
// 55000.
func TestSomebodyPublishesAllTables(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.execRaw("CREATE PUBLICATION everything FOR ALL TABLES")

	// What the library does by itself.
	sent := variety(10)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("orders", sent...))
	consumer := f.consumer(nil)
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "orders")
	requireDelivered(t, messages, sent)
	require.NoError(t, subscriber.Close())
	require.NoError(t, consumer.Close())

	// And every table changed in every way, one row at least each.
	f.exec(`
		INSERT INTO outbox.messages (topic, uuid, created_at) VALUES ('t', 'u', '1990-01-01');
		INSERT INTO outbox.deferred (due_at, topic, uuid) VALUES (now(), 't', 'u');
		INSERT INTO outbox.dead_letters (consumer_group, topic, uuid, origin_era, origin_id, created_at, attempts, error)
			VALUES ('g', 't', 'u', 1, 1, now(), 1, 'e');
		INSERT INTO outbox.dead_letter_log (action, dead_letter_id, consumer_group, topic, uuid, origin_era, origin_id, attempts)
			VALUES ('died', 1, 'g', 't', 'u', 1, 1, 1);
		INSERT INTO outbox.group_log (action, consumer_group, topic) VALUES ('moved', 'g', 't');
		INSERT INTO outbox.members (holder, consumer_group, topic) VALUES ('h', 'g', 't');
		INSERT INTO outbox.inbox (consumer_group, uuid) VALUES ('g', 'u');
		INSERT INTO outbox.processes (holder) VALUES ('h')`)
	tables := f.ordinaryTables()
	require.Subset(t, tables, []string{"messages_default", "cursors", "processes", "deferred", "dead_letters", "inbox", "meta", "boot"})
	changed := map[string]string{
		"messages_default": "attempt = attempt", "cursors": "floor = floor", "processes": "beat = beat", "deferred": "attempt = attempt",
		"dead_letters": "attempts = attempts", "dead_letter_log": "reason = reason", "group_log": "reason = reason", "members": "subscriptions = subscriptions", "inbox": "handled_at = now()", "meta": "value = value", "boot": "life = life",
		"partitions": "voided = voided", "upkeep": "until = until",
	}
	for _, table := range tables {
		set, known := changed[table]
		require.True(t, known, "table %s is new: it must have a replica identity, and a row here", table)
		for _, text := range []string{"UPDATE outbox." + table + " SET " + set, "DELETE FROM outbox." + table} {
			tag, err := f.pool.Exec(t.Context(), f.sql(text))
			require.NoError(t, err, text)
			require.Positive(t, tag.RowsAffected(), text)
		}
		f.exec("TRUNCATE outbox." + table)
	}
	// Partitions go as a whole.
	for _, partition := range f.partitions() {
		f.exec("TRUNCATE outbox." + partition)
	}
	f.dropPartitions()

	// The test sees what it is about.
	f.exec("ALTER TABLE outbox.messages_default REPLICA IDENTITY DEFAULT")
	f.exec("INSERT INTO outbox.messages (topic, uuid) VALUES ('t', 'u')")
	_, err := f.pool.Exec(t.Context(), f.sql("DELETE FROM outbox.messages_default"))
	require.Equal(t, "55000", sqlState(err), "%v", err)
}

// ordinaryTables returns the names of all tables but those partitions of the log
// that have bounds.
func (f *fixture) ordinaryTables() []string {
	f.t.Helper()
	rows, err := f.pool.Query(f.t.Context(), `SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relkind = 'r' AND coalesce(pg_catalog.pg_get_expr(c.relpartbound, c.oid), 'DEFAULT') = 'DEFAULT' ORDER BY 1`, oddSchema)
	require.NoError(f.t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(f.t, err)
	return names
}
