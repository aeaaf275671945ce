package tests

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// An outbox that was moved to another cluster has partitions whose seals are
// snapshots of the old one, and rows in the DEFAULT partition that were marked there.
// Nothing of them goes before every group has looked at what other clusters wrote, and
// all of it then.
func TestRestoreWithSealsOfAnotherCluster(t *testing.T) {
	t.Parallel()

	old, _ := newOwnFixture(t, dumping)
	newUpkeep(old)
	m := old.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = time.Hour })
	name, inside := old.past(3)
	old.insertAt(old.pool, "orders", inside, "1", "2", "3")
	old.fillDefault("orders", 4)
	old.exec("UPDATE outbox.messages_default SET uuid = 'default ' || uuid")
	old.pass(m)
	old.consumed("has it", "orders", 7)
	consumer := old.consumer(nil)
	_, messages := old.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "half", PageSize: 1}, "orders")
	had := receive(t, messages, 2)
	require.NoError(t, consumer.Close())
	old.pass(m)
	require.Equal(t, outbox.PartitionSealed, partitionOf(m.Status(), name).State)
	require.Equal(t, outbox.PartitionSealed, partitionOf(m.Status(), "messages_default").State)

	moved := emptyCluster(t, dumping)
	dumpFormats["custom"](old, moved)
	m = moved.maintenance(nil)
	requireAll := func(reason string) {
		t.Helper()
		for range 3 {
			moved.pass(m)
			for _, n := range []string{name, "messages_default"} {
				p := partitionOf(m.Status(), n)
				require.NotNil(t, p, n)
				if p.State == outbox.PartitionOpen {
					continue // of the DEFAULT one: it is marked anew
				}
				require.Equal(t, outbox.PartitionSealed, p.State, n)
				require.NotNil(t, p.HeldBy, n)
				require.Contains(t, p.HeldBy.String(), reason, n)
			}
		}
		require.Equal(t, 3, moved.rowsOf(name))
		require.Equal(t, 4, moved.number("SELECT count(*) FROM outbox.messages_default WHERE uuid LIKE 'default%'"))
	}
	requireAll("the group has not read since the move to this cluster")
	moved.consumed("has it", "orders", 0)
	requireAll(`group "half", topic "orders", shard 0: the group has not read since the move to this cluster`)
	consumer = moved.consumer(nil)
	_, messages = moved.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "half", PageSize: 1}, "orders")
	got := map[string]bool{had[0].UUID: true, had[1].UUID: true}
	msg := nextMessage(t, messages)
	requireAll(`group "half", topic "orders", shard 0`)
	got[msg.UUID] = true
	require.True(t, msg.Ack())
	for _, msg := range receive(t, messages, 4) {
		got[msg.UUID] = true
	}
	require.NoError(t, consumer.Close())
	for _, uuid := range []string{"1", "2", "3", "default 1", "default 2", "default 3", "default 4"} {
		require.Contains(t, got, uuid)
	}
	moved.consumed("half", "orders", 0)
	moved.passUntil(m, "all goes", func(s outbox.MaintenanceStatus) bool {
		return partitionOf(s, name) == nil && moved.number("SELECT count(*) FROM outbox.messages_default WHERE uuid LIKE 'default%'") == 0
	})
}

// The upkeep of an installation in which nobody is a superuser and PUBLIC may do
// nothing, in a session whose search_path is empty, or leads to somebody else's
// functions first; beside another outbox, which it does not touch.
func TestLeastPrivilegeOfTheUpkeepWhereNobodyIsASuperuser(t *testing.T) {
	t.Parallel()

	managed := newManaged(t)
	f := newUpkeep(managed.fixture)
	owner := managed.poolAs(managed.roles.Owner)
	require.NoError(t, schema.Migrate(t.Context(), owner, schema.Config{Name: "second"}))
	f.execRaw(`CREATE SCHEMA hostile; GRANT USAGE ON SCHEMA hostile TO PUBLIC;
		CREATE FUNCTION hostile.count(text) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
		CREATE FUNCTION hostile.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
		CREATE FUNCTION hostile.make_interval(double precision) RETURNS interval LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
		CREATE FUNCTION hostile.pg_current_snapshot() RETURNS pg_snapshot LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
		CREATE TABLE hostile.partitions (name text); CREATE TABLE hostile.upkeep (holder text)`)
	second := func() (text string) {
		for _, query := range []string{
			"SELECT string_agg(c.relname || ' ' || c.relkind::text, ' ' ORDER BY c.relname) FROM pg_class c WHERE c.relnamespace = 'second'::regnamespace",
			"SELECT string_agg(p::text, ' ' ORDER BY p.name) FROM second.partitions p", "SELECT string_agg(u::text, ' ') FROM second.upkeep u",
		} {
			text += f.text(query) + "\n"
		}
		return text
	}
	before := second()
	for i, path := range []string{"", "hostile, pg_catalog"} {
		config := f.pool.Config()
		config.ConnConfig.User, config.ConnConfig.Password = managed.roles.Upkeep, rolePassword
		config.ConnConfig.RuntimeParams["search_path"] = path
		m, err := outbox.NewMaintenance(config, oddSchema, outbox.MaintenanceConfig{Retention: time.Second, SealDelay: time.Nanosecond, DeadLetterRetention: time.Hour}, testLogger(t))
		require.NoError(t, err)
		name, inside := f.past(3 + i)
		f.exec("ALTER TABLE outbox." + name + " OWNER TO " + quoteIdentifier(managed.roles.Owner))
		f.insertAt(f.pool, "orders", inside, "1")
		f.fillDefault("orders", 3)
		f.requireState(m, name, outbox.PartitionSealed)
		f.insertAt(f.pool, "orders", inside, "late")
		require.Contains(t, problems(f.pass(m)), "1 messages came after")
		f.passUntil(m, "sealed again", func(s outbox.MaintenanceStatus) bool { return partitionOf(s, name).State == outbox.PartitionSealed })
		f.consumed("a", "orders", 5)
		f.passUntil(m, "it goes", func(s outbox.MaintenanceStatus) bool {
			f.consumed("a", "orders", 0) // of what is marked anew, too
			return partitionOf(s, name) == nil && f.number("SELECT count(*) FROM outbox.messages_default WHERE created_at < now() - interval '30 minutes'") == 0
		})
		require.NotEmpty(t, f.attached(), "it makes some, too")
		require.NoError(t, m.Close())
	}
	require.Equal(t, before, second())
}

// A partition is sealed on the cluster that the outbox was moved to, and then it moves
// back. The rows that were written at home are none that came after the seal, which
// knows nothing of them: published again they would all come again.
func TestRestoreBackHomeWithSealsOfTheOtherCluster(t *testing.T) {
	t.Parallel()

	home, server := newOwnFixture(t, dumping)
	newUpkeep(home)
	name, inside := home.past(3)
	home.insertAt(home.pool, "orders", inside, "1", "2", "3")
	home.consumed("a", "orders", 3)
	away := emptyCluster(t, dumping)
	dumpFormats["custom"](home, away)
	away.requireState(away.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = time.Hour }), name, outbox.PartitionSealed)
	back := &fixture{t: t, url: pgtest.DatabaseOn(t, server)}
	back.pool = pgtest.Pool(t, back.url)
	dumpFormats["custom"](away, back)
	require.Equal(t, home.era(t), back.era(t))
	m := back.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = time.Hour })
	for range 3 {
		require.NotContains(t, problems(back.pass(m)), "came after the partition was sealed")
	}
	require.Equal(t, outbox.PartitionSealed, partitionOf(m.Status(), name).State, "anew")
	require.Equal(t, []string{"1", "2", "3"}, back.texts("SELECT uuid FROM outbox.messages WHERE uuid <> 'one more' ORDER BY id"))
	m = back.maintenance(nil)
	back.consumed("a", "orders", 0)
	back.passUntil(m, "it goes", func(s outbox.MaintenanceStatus) bool { return partitionOf(s, name) == nil })
}

// A message came behind a seal, every group went past it, and before the upkeep found
// it the outbox was moved. The seal is of another cluster now, and the only thing that
// knows.
func TestRestoreWithAMessageBehindASealOfAnotherCluster(t *testing.T) {
	t.Parallel()

	old, _ := newOwnFixture(t, dumping)
	newUpkeep(old)
	name, inside := old.past(3)
	old.insertAt(old.pool, "orders", inside, "1")
	m := old.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = time.Hour })
	old.requireState(m, name, outbox.PartitionSealed)
	old.insertAt(old.pool, "orders", inside, "late")
	old.consumed("a", "orders", 2) // it happened to have it; others that leave sealed partitions out have not
	moved := emptyCluster(t, dumping)
	dumpFormats["custom"](old, moved)
	m = moved.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = time.Hour })
	moved.passUntil(m, "sealed anew", func(s outbox.MaintenanceStatus) bool {
		return moved.number("SELECT count(*) FROM outbox.partitions WHERE name = $1 AND state = 'sealed' AND seal_era = outbox.era()", name) == 1
	})
	require.Equal(t, []string{"late"}, moved.texts("SELECT uuid FROM outbox.messages WHERE uuid = 'late' AND created_at > now() - interval '1 hour' AND era = outbox.era()"))
	require.Equal(t, 1, moved.rowsOf(name))
	moved.consumed("a", "orders", 1)
}
