package tests

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// Whoever may create functions in the schema, as the role of the upkeep once might,
// could have one called with the owner's rights: a literal of no type goes to a function
// of text, and a whole number to one of integers, before those that were meant.
func TestUpkeepCallsNoFunctionOfSomebodyElse(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	for _, signature := range []string{
		"upkeep_setting(text, integer, integer)", "upkeep_setting(text, integer, numeric)", "upkeep_lockers(text)", "upkeep_seal(text, integer)",
		"upkeep_partition(character varying)", "upkeep_holder(character varying, double precision)", "upkeep_unseen(text, pg_snapshot, bigint, bigint)",
		"upkeep_move(text, pg_snapshot, bigint, bigint)",
	} {
		f.exec("CREATE FUNCTION outbox." + signature + " RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'called in place of another'; END $$")
	}
	m := f.maintenance(nil)
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	f.requireState(m, name, outbox.PartitionSealed)
	f.insertAt(f.pool, "orders", inside, "late")
	require.Contains(t, problems(f.pass(m)), "1 messages came after")
	f.requireState(m, name, outbox.PartitionSealed)
	f.consumed("a", "orders", 2)
	f.passUntil(m, "it goes", func(s outbox.MaintenanceStatus) bool {
		require.NotContains(t, problems(s), "called in place of another")
		return partitionOf(s, name) == nil
	})
}

// The clock was ahead for a while, when a partition was found delivered: it would have
// stayed until that time came again.
func TestRetentionAfterAClockThatWasAhead(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(nil)
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	f.requireState(m, name, outbox.PartitionSealed)
	f.consumed("a", "orders", 1)
	f.exec("UPDATE outbox.partitions SET delivered_at = now() + interval '1 year' WHERE name = $1", name)
	f.passUntil(m, "it goes", func(s outbox.MaintenanceStatus) bool { return partitionOf(s, name) == nil })
}

// Times as some settings of a session write them mean others where they are read:
// IST is the time of India there, and that of Israel here. The archive missed what was
// in the hours between, and the partition was emptied.
func TestRetentionArchivesWhateverTimesLookLike(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	config := f.pool.Config()
	config.ConnConfig.RuntimeParams["datestyle"] = "SQL, DMY"
	config.ConnConfig.RuntimeParams["timezone"] = "Asia/Kolkata"
	var archived []string
	m, err := outbox.NewMaintenance(config, oddSchema, outbox.MaintenanceConfig{
		Interval: outbox.MinMaintenanceInterval, Retention: time.Second, SealDelay: time.Nanosecond,
		Archive: func(_ context.Context, _ outbox.PartitionStatus, in io.Reader) error {
			content, err := io.ReadAll(in)
			archived = append(archived, string(content))
			return err
		},
	}, testLogger(t))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "the message")
	f.requireState(m, name, outbox.PartitionSealed)
	f.consumed("a", "orders", 1)
	f.passUntil(m, "it goes", func(s outbox.MaintenanceStatus) bool { return partitionOf(s, name) == nil })
	require.Equal(t, 1, strings.Count(strings.Join(archived, ""), "the message"), archived)
}

// A partition without an end that has a name as upkeep gives is nobody's of upkeep's;
// its end could not be read, and all upkeep stood still.
func TestPartitionWithoutAnEnd(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	lower := time.Now().UTC().Truncate(time.Hour).Add(1000 * time.Hour)
	name := "messages_" + lower.Format("20060102t150405")
	f.exec(fmt.Sprintf("CREATE TABLE outbox.%s PARTITION OF outbox.messages FOR VALUES FROM ('%s') TO (MAXVALUE)", name, lower.Format(time.RFC3339)))
	m := f.maintenance(nil)
	status := f.pass(m)
	require.Contains(t, problems(status), name+": is a partition that upkeep did not make")
	require.Nil(t, partitionOf(status, name))
}
