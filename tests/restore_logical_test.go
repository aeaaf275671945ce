package tests

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// sequences sets the sequences that logical replication leaves at their start, as
// docs/restore.md says.
const sequences = `
SELECT setval(pg_get_serial_sequence(t.name, 'id'), t.last)
FROM (
    SELECT %[1]s || '.deferred' AS name, max(id) AS last FROM outbox.deferred
    UNION ALL SELECT %[1]s || '.dead_letters', max(id) FROM outbox.dead_letters
    UNION ALL SELECT %[1]s || '.dead_letter_log', max(id) FROM outbox.dead_letter_log
    UNION ALL SELECT %[1]s || '.group_log', max(id) FROM outbox.group_log
) AS t
WHERE t.last IS NOT NULL`

// The tables are replicated into another cluster, row by row with their
// transaction ids and eras, and then it takes over. Its sequence is at its start:
// new messages have ids that old ones have, too.
func TestRestoreByLogicalReplication(t *testing.T) {
	t.Parallel()

	old, _ := newOwnFixture(t, pgtest.Options{})
	moved := fixtureAt(t, emptyCluster(t, pgtest.Options{}).url)
	// Replication begins in the middle of things.
	early := keyed(5)
	require.NoError(t, old.publisher(outbox.PublisherConfig{}).Publish("early", early...))
	consumer := old.consumer(nil)
	_, messages := old.subscribe(consumer, outbox.SubscriberConfig{}, "early")
	requireNext(t, messages, early[:2]...)
	require.NoError(t, consumer.Close())

	old.exec(`CREATE PUBLICATION move_log FOR TABLE outbox.messages WITH (publish = 'insert', publish_via_partition_root = true)`)
	old.exec(`CREATE PUBLICATION move_rest FOR TABLE outbox.cursors, outbox.deferred, outbox.dead_letters, outbox.dead_letter_log, outbox.group_log, outbox.inbox`)
	moved.execRaw("CREATE SUBSCRIPTION move CONNECTION '" + strings.ReplaceAll(old.url, "'", "''") + "' PUBLICATION move_log, move_rest")
	packed := old.pack()
	// Nobody writes to the old one any more; the new one is to have all of it.
	lsn := old.text("SELECT pg_current_wal_lsn()::text")
	require.Eventually(t, func() bool {
		return moved.number("SELECT count(*) FROM pg_catalog.pg_subscription_rel WHERE srsubstate <> 'r'") == 0 &&
			old.number("SELECT count(*) FROM pg_catalog.pg_replication_slots WHERE slot_name = 'move' AND confirmed_flush_lsn >= $1::text::pg_lsn", lsn) == 1
	}, waitFor, 10*time.Millisecond, "the replica does not follow")
	moved.execRaw("DROP SUBSCRIPTION move")
	require.Equal(t, 1, moved.number("SELECT last_value FROM outbox.messages_id_seq"))
	require.Equal(t, old.number("SELECT count(*) FROM outbox.messages"), moved.number("SELECT count(*) FROM outbox.messages"))
	// So are the others, and those are keys: what is scheduled would be refused.
	err := moved.publisher(outbox.PublisherConfig{}).Publish("later", dueIn(time.Hour))
	require.ErrorContains(t, err, "deferred_pkey")
	literal := "'" + strings.ReplaceAll(quoteIdentifier(oddSchema), "'", "''") + "'"
	moved.exec(strings.ReplaceAll(sequences, "%[1]s", literal))
	require.Empty(t, moved.check(moved.pool))

	_, messages = moved.subscribe(moved.consumer(nil), outbox.SubscriberConfig{}, "early")
	moved.requireAll(messages, "early", early[2:]...)
	require.Positive(t, moved.number("SELECT count(*) FROM (SELECT FROM outbox.messages GROUP BY id HAVING count(*) > 1) AS twice"),
		"no id was issued again")
	moved.unpack(packed)
}
