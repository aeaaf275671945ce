package tests

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// A partition goes when everybody has it, and not before anybody has subscribed.
func TestRetentionFreesWhatEverybodyHas(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(nil)
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1", "2", "3")
	p := f.requireState(m, name, outbox.PartitionSealed)
	require.Equal(t, "no group has ever subscribed to anything", p.HeldBy.String())
	require.False(t, p.HeldSince.IsZero())
	require.Equal(t, 3, f.rowsOf(name))

	// The first subscriber gets what was there before it.
	f.consumed("a", "orders", 3)
	f.passUntil(m, "it goes", func(s outbox.MaintenanceStatus) bool { return partitionOf(s, name) == nil })
	require.Equal(t, 0, f.number("SELECT count(*) FROM pg_class WHERE relname = $1", name))
	require.Equal(t, 0, f.number("SELECT count(*) FROM outbox.messages WHERE uuid IN ('1', '2', '3')"))
	require.Empty(t, errorsOf(f.check(f.pool)))
}

// What was delivered stays for the retention.
func TestRetentionIsKept(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = time.Hour })
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	f.requireState(m, name, outbox.PartitionSealed)
	f.consumed("a", "orders", 1)
	p := f.requireState(m, name, outbox.PartitionSealed)
	require.Nil(t, p.HeldBy)
	require.False(t, p.DeliveredAt.IsZero())
	f.requireState(m, name, outbox.PartitionSealed)
	f.exec("UPDATE outbox.partitions SET delivered_at = delivered_at - interval '1 hour' WHERE name = $1", name)
	f.requireState(m, name, outbox.PartitionFreed)
}

// A group that stopped keeps what it has not got, and is named. Idle groups and
// those of other topics keep nothing.
func TestRetentionOfAGroupThatStopped(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(nil)
	old, inside := f.past(5)
	f.insertAt(f.pool, "orders", inside, "1")
	f.insertAt(f.pool, "payments", inside, "2")
	f.requireState(m, old, outbox.PartitionSealed)
	f.consumed("a", "orders", 1)
	f.consumed("stopped", "orders", 1)
	f.consumed("a", "payments", 1)
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "3")
	other, inside := f.past(2)
	f.insertAt(f.pool, "payments", inside, "4")
	f.requireState(m, name, outbox.PartitionSealed)
	require.Equal(t, outbox.PartitionSealed, partitionOf(m.Status(), other).State)
	f.consumed("a", "orders", 1)
	f.consumed("a", "payments", 1)

	f.passUntil(m, "what all have goes", func(s outbox.MaintenanceStatus) bool {
		return partitionOf(s, old) == nil && partitionOf(s, other) == nil
	})
	f.passUntil(m, "it is reported", func(s outbox.MaintenanceStatus) bool {
		return len(s.Problems) > 0
	})
	status := m.Status()
	p := partitionOf(status, name)
	require.Equal(t, outbox.PartitionSealed, p.State)
	require.Equal(t, &outbox.PartitionHold{ConsumerGroup: "stopped", Topic: "orders", Reason: "the group has not been handed out all of it"}, p.HeldBy)
	require.Contains(t, problems(status), name)
	require.Contains(t, problems(status), `group "stopped", topic "orders", shard 0`)
	require.Equal(t, 1, f.rowsOf(name))

	f.consumed("stopped", "orders", 1)
	f.passUntil(m, "it goes", func(s outbox.MaintenanceStatus) bool { return partitionOf(s, name) == nil })
}

// A message that was handed out and not acknowledged keeps its partition, although
// the position is long past it.
func TestRetentionKeepsHoles(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(nil)
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "hole", "2", "3")
	f.requireState(m, name, outbox.PartitionSealed)
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode = outbox.ModePoll })
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "a", Ordering: outbox.OrderingUnordered, MaxInFlight: 10}, "orders")
	var hole *message.Message
	for range 3 {
		msg := <-messages
		if msg.UUID == "hole" {
			hole = msg
		} else {
			require.True(t, msg.Ack())
		}
	}
	now := f.text("SELECT pg_current_snapshot()::text")
	require.Eventually(t, func() bool {
		f.insertAt(f.pool, "orders", time.Now(), "more")
		require.True(t, (<-messages).Ack())
		return f.covers("a", "orders", now)
	}, waitFor, time.Millisecond)
	require.Equal(t, 1, f.number("SELECT jsonb_array_length(holes) FROM outbox.cursors"))
	p := f.requireState(m, name, outbox.PartitionSealed)
	require.Equal(t, "the group has not acknowledged all of it", p.HeldBy.Reason)
	f.requireState(m, name, outbox.PartitionSealed)

	require.True(t, hole.Ack())
	f.passUntil(m, "it goes", func(s outbox.MaintenanceStatus) bool { return partitionOf(s, name) == nil })
}

// What a cursor says of a partition, in each of its steps.
func TestRetentionByTheStepsOfACursor(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = time.Hour })
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	f.requireState(m, name, outbox.PartitionSealed)
	const cursor = "INSERT INTO outbox.cursors (consumer_group, topic, shard, shards, era, p, floor, c, top, step, until, until_era, patterns, holes) "
	for what, test := range map[string]struct {
		rows string
		held string
	}{
		"in an open window": {
			rows: "SELECT 'g', 'orders', 0, 1, outbox.era(), '1:1:', 0, pg_current_snapshot(), 100, 'main', NULL, 0, NULL, '[]'", held: "handed out all",
		},
		"idle": {
			rows: "SELECT 'g', 'orders', 0, 1, outbox.era(), pg_current_snapshot(), 100, NULL, 0, 'idle', NULL, 0, NULL, '[]'",
		},
		"in another window": {
			rows: "SELECT 'g', 'orders', 0, 1, outbox.era(), pg_current_snapshot(), 100, '900000000:900000000:', 200, 'late', NULL, 0, NULL, '[]'",
		},
		"one shard behind": {
			rows: "SELECT 'g', 'orders', n, 2, outbox.era(), CASE n WHEN 0 THEN pg_current_snapshot() ELSE '1:1:' END, 0, NULL, 0, 'idle', NULL, 0, NULL, '[]' FROM generate_series(0, 1) n",
			held: "handed out all",
		},
		"at its end": {
			rows: "SELECT 'g', 'orders', 0, 1, outbox.era(), '3:3:', 1, NULL, 0, 'idle', '3:3:', outbox.era(), NULL, '[]'",
		},
		"before its end": {
			rows: "SELECT 'g', 'orders', 0, 1, outbox.era(), '3:3:', 1, NULL, 0, 'idle', '5:5:', outbox.era(), NULL, '[]'", held: "handed out all",
		},
		"with what other clusters wrote": {
			rows: "SELECT 'g', 'orders', 0, 1, outbox.era(), pg_current_snapshot(), 0, NULL, 0, 'past', NULL, 0, NULL, '[]'", held: "other clusters",
		},
		"on another cluster": {
			rows: "SELECT 'g', 'orders', 0, 1, 1, pg_current_snapshot(), 0, NULL, 0, 'idle', NULL, 0, NULL, '[]'", held: "since the move",
		},
		"of many topics": {
			rows: "SELECT 'g', '', 0, 1, outbox.era(), '1:1:', 0, NULL, 0, 'idle', NULL, 0, '{ord%}'::text[], '[]'", held: "handed out all",
		},
		"of other topics": {
			rows: "SELECT 'g', '', 0, 1, outbox.era(), '1:1:', 0, NULL, 0, 'idle', NULL, 0, '{pay%}'::text[], '[]'", held: "no group has ever subscribed to the topic",
		},
		"with a hole of no known time": {
			rows: `SELECT 'g', 'orders', 0, 1, outbox.era(), pg_current_snapshot(), 100, NULL, 0, 'idle', NULL, 0, NULL, '[{"era": 1, "id": 1, "created_at": "0001-01-01T00:00:00Z"}]'`,
			held: "not acknowledged",
		},
		"with a hole elsewhere": {
			rows: `SELECT 'g', 'orders', 0, 1, outbox.era(), pg_current_snapshot(), 100, NULL, 0, 'idle', NULL, 0, NULL, '[{"era": 1, "id": 1, "created_at": "2020-01-01T00:00:00Z"}]'`,
		},
	} {
		f.exec("DELETE FROM outbox.cursors")
		f.exec(cursor + test.rows)
		p := f.requireState(m, name, outbox.PartitionSealed)
		if test.held == "" {
			require.Nil(t, p.HeldBy, what)
			require.False(t, p.DeliveredAt.IsZero(), what)
			continue
		}
		require.NotNil(t, p.HeldBy, what)
		require.Contains(t, p.HeldBy.Reason, test.held, what)
		require.True(t, p.DeliveredAt.IsZero(), what)
	}
}

// A topic that nobody reads is kept, and named, unless the configuration says for
// how long; where nobody reads anything it is kept in any case.
func TestRetentionOfATopicThatNobodyReads(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	keeps, drops := f.maintenance(nil), f.maintenance(func(c *outbox.MaintenanceConfig) { c.UnreadRetention = time.Hour })
	name, inside := f.past(3)
	f.insertAt(f.pool, "nobody's", inside, "1")
	for range 2 {
		f.requireState(drops, name, outbox.PartitionSealed)
	}
	f.insertAt(f.pool, "orders", time.Now(), "2")
	f.consumed("a", "orders", 1)
	p := f.requireState(keeps, name, outbox.PartitionSealed)
	require.Equal(t, `topic "nobody's": no group has ever subscribed to the topic`, p.HeldBy.String())
	f.passUntil(drops, "it goes", func(s outbox.MaintenanceStatus) bool { return partitionOf(s, name) == nil })
}

// Whatever happens between emptying a partition and noting it, both are done or
// neither.
func TestRetentionKilledWhileEmptying(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = time.Hour })
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	f.requireState(m, name, outbox.PartitionSealed)
	f.consumed("a", "orders", 1)
	f.requireState(m, name, outbox.PartitionSealed)
	conn := f.connect(t)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	var word string
	require.NoError(t, tx.QueryRow(t.Context(), f.sql("SELECT outbox.upkeep_free($1, 0, 0, false)"), name).Scan(&word))
	require.Equal(t, "freed", word)
	f.exec("SELECT pg_terminate_backend($1)", conn.PgConn().PID())
	f.requireState(m, name, outbox.PartitionSealed)
	require.Equal(t, 1, f.rowsOf(name))
}
