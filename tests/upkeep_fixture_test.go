package tests

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// maintenance returns one that makes passes when it is told to. Nothing stays, and
// nothing is waited for, unless the test changes that.
func (f *fixture) maintenance(change func(*outbox.MaintenanceConfig)) *outbox.Maintenance {
	f.t.Helper()
	config := outbox.MaintenanceConfig{Interval: outbox.MinMaintenanceInterval, Retention: time.Second, SealDelay: time.Nanosecond}
	if change != nil {
		change(&config)
	}
	m, err := outbox.NewMaintenance(f.pool.Config(), oddSchema, config, testLogger(f.t))
	require.NoError(f.t, err)
	f.t.Cleanup(func() { require.NoError(f.t, m.Close()) })
	return m
}

// newUpkeep is newFixture with partitions of a second, and as if those of the hours
// to come had never been made.
func newUpkeep(f *fixture) *fixture {
	f.t.Helper()
	f.dropPartitions()
	f.exec("DELETE FROM outbox.partitions WHERE name <> 'messages_default'")
	f.exec("UPDATE outbox.meta SET value = '1' WHERE key = 'partition_interval'")
	f.exec("UPDATE outbox.meta SET value = '30' WHERE key = 'look_ahead'")
	return f
}

// past makes a partition whose range is past: an hour, so many hours ago.
func (f *fixture) past(hours int) (name string, inside time.Time) {
	f.t.Helper()
	lower := time.Now().UTC().Truncate(time.Hour).Add(-time.Duration(hours) * time.Hour)
	name = "messages_" + lower.Format("20060102t150405")
	f.exec(fmt.Sprintf("CREATE TABLE outbox.%s PARTITION OF outbox.messages FOR VALUES FROM ('%s') TO ('%s')",
		name, lower.Format(time.RFC3339), lower.Add(time.Hour).Format(time.RFC3339)))
	return name, lower.Add(time.Minute)
}

// insertAt stores messages of a topic as of a moment.
func (f *fixture) insertAt(db pgxHandle, topic string, at time.Time, uuids ...string) {
	f.t.Helper()
	for _, uuid := range uuids {
		_, err := db.Exec(f.t.Context(), f.sql("INSERT INTO outbox.messages (topic, uuid, key, payload, created_at) VALUES ($1, $2, 'k', 'x', $3)"), topic, uuid, at)
		require.NoError(f.t, err)
	}
}

// pass makes a pass that must go through. The lease may be that of a connection
// that is just ending.
func (f *fixture) pass(m *outbox.Maintenance) outbox.MaintenanceStatus {
	f.t.Helper()
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		require.NoError(f.t, m.Pass(f.t.Context()))
		status := m.Status()
		require.NoError(f.t, status.Err)
		if status.Ran {
			return status
		}
		require.Less(f.t, time.Since(began), waitFor)
	}
}

// partitionOf is what a status says of a partition; nil if it is not there.
func partitionOf(status outbox.MaintenanceStatus, name string) *outbox.PartitionStatus {
	i := slices.IndexFunc(status.Partitions, func(p outbox.PartitionStatus) bool { return p.Name == name })
	if i < 0 {
		return nil
	}
	return &status.Partitions[i]
}

// passUntil makes passes until one has brought what is wanted.
func (f *fixture) passUntil(m *outbox.Maintenance, what string, wanted func(outbox.MaintenanceStatus) bool) outbox.MaintenanceStatus {
	f.t.Helper()
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		status := f.pass(m)
		if wanted(status) {
			return status
		}
		require.Less(f.t, time.Since(began), waitFor, "%s: %s", what, problems(status))
	}
}

// requireState makes a pass after which the partition is in a state.
func (f *fixture) requireState(m *outbox.Maintenance, name string, state outbox.PartitionState) outbox.PartitionStatus {
	f.t.Helper()
	status := f.pass(m)
	p := partitionOf(status, name)
	require.NotNil(f.t, p, name)
	require.Equal(f.t, state, p.State, "%+v %v", *p, status.Problems)
	return *p
}

// problems are those of a status as one text.
func problems(status outbox.MaintenanceStatus) string {
	lines := make([]string, len(status.Problems))
	for i, err := range status.Problems {
		lines[i] = err.Error()
	}
	return strings.Join(lines, "\n")
}

// rowsOf counts the rows of a partition.
func (f *fixture) rowsOf(name string) int {
	f.t.Helper()
	return f.number("SELECT count(*) FROM ONLY outbox." + quoteIdentifier(name))
}

// consumed subscribes a group, takes so many messages of the topic and leaves, with
// a position that sees all that was there before.
func (f *fixture) consumed(group, topic string, n int) {
	f.t.Helper()
	now := f.text("SELECT pg_current_snapshot()::text")
	for began := time.Now(); ; {
		consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode = outbox.ModePoll })
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: group}, topic)
		receive(f.t, messages, n)
		n = 0
		f.exec("INSERT INTO outbox.messages (topic, uuid, target_group) VALUES ($1, 'one more', $2)", topic, group)
		receive(f.t, messages, 1)
		require.NoError(f.t, consumer.Close())
		if f.covers(group, topic, now) {
			return
		}
		require.Less(f.t, time.Since(began), waitFor)
	}
}

// covers reports whether the stored position of a group has all that a snapshot
// sees.
func (f *fixture) covers(group, topic, snapshot string) bool {
	f.t.Helper()
	return f.text("SELECT coalesce(bool_and(outbox.upkeep_covers(c.p, $3::pg_snapshot)), false)::text FROM outbox.cursors c WHERE c.consumer_group = $1 AND c.topic = $2",
		group, topic, snapshot) == "true"
}

// begin begins a transaction on a connection of its own, rolled back at the end.
func (f *fixture) begin() pgx.Tx {
	f.t.Helper()
	conn := f.connect(f.t)
	tx, err := conn.Begin(f.t.Context())
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(f.t.Context())) }) // nil, or ended already
	return tx
}
