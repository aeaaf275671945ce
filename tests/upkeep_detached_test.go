package tests

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// While a partition is detached groups go past what is in it. Attached again it has
// rows that every position sees and that nobody was handed out, so its seal would say
// that all were delivered: nothing of it goes before somebody says so.
func TestPartitionThatWasDetached(t *testing.T) {
	t.Parallel()

	for name, sealed := range map[string]bool{"before its seal": false, "after its seal": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newUpkeep(newFixture(t))
			m := f.maintenance(func(c *outbox.MaintenanceConfig) {
				if !sealed {
					c.SealDelay = 24 * time.Hour
				}
			})
			name, inside := f.past(3)
			f.insertAt(f.pool, "orders", inside, "1", "2", "3")
			f.consumed("gone on", "orders", 3)
			f.pass(m)
			require.Equal(t, sealed, partitionOf(m.Status(), name).State == outbox.PartitionSealed)

			detach := "ALTER TABLE outbox.messages DETACH PARTITION outbox." + name
			bounds := "FOR VALUES FROM ('" + inside.Truncate(time.Hour).Format(time.RFC3339) + "') TO ('" + inside.Truncate(time.Hour).Add(time.Hour).Format(time.RFC3339) + "')"
			attach := "ALTER TABLE outbox.messages ATTACH PARTITION outbox." + name + " " + bounds
			f.exec(detach)
			require.Contains(t, problems(f.pass(m)), name+": was detached by somebody else: the messages in it are not read")
			require.Equal(t, outbox.PartitionDetached, partitionOf(m.Status(), name).State)
			f.consumed("late", "orders", 0)
			f.exec(attach)
			m = f.maintenance(nil)
			for range 3 {
				require.Contains(t, problems(f.pass(m)), name+": was detached by somebody else and attached again")
				require.Equal(t, outbox.PartitionDetached, partitionOf(m.Status(), name).State)
			}
			require.Equal(t, 3, f.rowsOf(name))

			// Nor is that forgotten when it comes back with another range, or was out of sight.
			f.exec(detach)
			f.exec("ALTER TABLE outbox.messages ATTACH PARTITION outbox." + name + " FOR VALUES FROM ('" + inside.Truncate(time.Hour).Format(time.RFC3339) + "') TO ('" + inside.Truncate(time.Hour).Add(50*time.Minute).Format(time.RFC3339) + "')")
			f.pass(m)
			require.Equal(t, outbox.PartitionDetached, partitionOf(m.Status(), name).State)
			f.exec(detach)
			f.exec("ALTER TABLE outbox." + name + " RENAME TO away")
			require.NotContains(t, problems(f.pass(m)), name)
			f.exec("ALTER TABLE outbox.away RENAME TO " + name)
			f.exec(attach)
			require.Contains(t, problems(f.pass(m)), name+": was detached by somebody else and attached again")

			consumer := f.consumer(nil)
			_, err := consumer.Seek(t.Context(), "late", "orders", outbox.SeekEarliest(), outbox.SeekOptions{})
			require.NoError(t, err)
			require.NoError(t, consumer.Close())
			f.exec("UPDATE outbox.partitions SET state = 'open' WHERE name = $1", name)
			held := f.requireState(m, name, outbox.PartitionSealed)
			require.NotNil(t, held.HeldBy)
			require.NotContains(t, problems(m.Status()), "detached")
			consumer = f.consumer(nil)
			_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "late"}, "orders")
			got := map[string]bool{}
			for _, msg := range receive(t, messages, 4) {
				got[msg.UUID] = true
			}
			require.Subset(t, got, map[string]bool{"1": true, "2": true, "3": true})
			require.NoError(t, consumer.Close())
			f.consumed("gone on", "orders", 0)
			f.passUntil(m, "it goes", func(s outbox.MaintenanceStatus) bool { return partitionOf(s, name) == nil })
		})
	}
}
