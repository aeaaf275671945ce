package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/schema"
)

// attached are the ranges of the log, in order.
func (f *fixture) attached() [][2]time.Time {
	f.t.Helper()
	rows, err := f.pool.Query(f.t.Context(), f.sql("SELECT a.lower, a.upper FROM outbox.upkeep_attached(NULL) a WHERE isfinite(a.lower) ORDER BY 1"))
	require.NoError(f.t, err)
	ranges, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (r [2]time.Time, err error) { return r, row.Scan(&r[0], &r[1]) })
	require.NoError(f.t, err)
	return ranges
}

// Partitions are made up to the look-ahead, one after the other, none of them for
// the interval that has begun or the next, and each with what the others have.
func TestPartitionsAreMadeAhead(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	f.exec("UPDATE outbox.meta SET value = '3600' WHERE key = 'partition_interval'")
	f.exec("UPDATE outbox.meta SET value = '43200' WHERE key = 'look_ahead'")
	m := f.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = 0 })
	now := time.Now()
	status := f.pass(m)
	require.Empty(t, status.Problems)
	ranges := f.attached()
	require.InDelta(t, 11, len(ranges), 1)
	require.False(t, ranges[0][0].Before(now.Add(time.Hour)))
	require.True(t, ranges[0][0].Before(now.Add(2*time.Hour+time.Minute)))
	for i, r := range ranges {
		require.Equal(t, time.Hour, r[1].Sub(r[0]))
		require.Zero(t, r[0].Unix()%3600)
		if i > 0 {
			require.Equal(t, ranges[i-1][1], r[0])
		}
	}
	require.True(t, ranges[len(ranges)-1][1].After(now.Add(12*time.Hour)))
	name := status.Partitions[0].Name
	require.Equal(t, "messages_"+ranges[0][0].UTC().Format("20060102t150405"), name)
	indexes := "SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid WHERE c.relname = $1"
	require.Equal(t, f.number(indexes, "messages_default"), f.number(indexes, name))
	require.Equal(t, 1, f.number("SELECT count(*) FROM pg_class WHERE relname = $1 AND relreplident = 'f'", name))

	// Again there is nothing to do.
	f.pass(m)
	require.Equal(t, ranges, f.attached())

	// With another interval the next ones begin where the last one ends.
	f.exec("UPDATE outbox.meta SET value = '1800' WHERE key = 'partition_interval'")
	f.exec("UPDATE outbox.meta SET value = '50400' WHERE key = 'look_ahead'")
	f.pass(m)
	after := f.attached()
	require.Greater(t, len(after), len(ranges)+2)
	end := ranges[len(ranges)-1][1]
	require.Subset(t, after, ranges, "those that are there stay")
	require.Contains(t, after, [2]time.Time{end, end.Add(30 * time.Minute)})
	for i := range after[1:] {
		require.Equal(t, after[i][1], after[i+1][0])
	}
	require.Empty(t, errorsOf(f.check(f.pool)))

	// The partitions of the migrations are taken over.
	other := newFixture(t)
	other.pass(other.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = 0 }))
	require.Equal(t, len(other.partitions()), other.number("SELECT count(*) FROM outbox.partitions WHERE lower IS NOT NULL"))
}

// errorsOf are those differences that are more than warnings.
func errorsOf(differences []schema.Difference) (list []string) {
	for _, d := range differences {
		if d.Severity == schema.SeverityError {
			list = append(list, d.String())
		}
	}
	return list
}

// What somebody made by hand is in the way of its own range alone, is named, and
// left as it is.
func TestPartitionMadeByHandInTheWay(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	f.exec("UPDATE outbox.meta SET value = '3600' WHERE key = 'partition_interval'")
	f.exec("UPDATE outbox.meta SET value = '43200' WHERE key = 'look_ahead'")
	start := time.Now().UTC().Truncate(time.Hour)
	at := func(hours int) string { return start.Add(time.Duration(hours) * time.Hour).Format(time.RFC3339) }
	taken := "messages_" + start.Add(4*time.Hour).Format("20060102t150405")
	f.exec(fmt.Sprintf(`CREATE TABLE outbox.%s (mine text);
		CREATE TABLE outbox."By Hand" PARTITION OF outbox.messages FOR VALUES FROM ('%s') TO ('%s');
		CREATE TABLE outbox.old PARTITION OF outbox.messages FOR VALUES FROM (MINVALUE) TO ('%s');
		INSERT INTO outbox.messages (topic, uuid, created_at) VALUES ('orders', '1', '2001-01-01')`,
		taken, start.Add(6*time.Hour+20*time.Minute).Format(time.RFC3339), at(8), at(-9)))
	m := f.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = 0 })
	status := f.pass(m)
	require.Contains(t, problems(status), taken+" is in the way of the partition from ")
	require.Contains(t, problems(status), "By Hand: is a partition that upkeep did not make")
	require.Contains(t, problems(status), "old: is a partition that upkeep did not make")
	var lowers []string
	for _, r := range f.attached() {
		lowers = append(lowers, r[0].UTC().Format(time.RFC3339))
	}
	require.NotContains(t, lowers, at(4))
	for _, hours := range []int{3, 5, 6, 8, 9} {
		require.Contains(t, lowers, at(hours))
	}
	require.Equal(t, 1, f.number("SELECT count(*) FROM outbox.upkeep_attached(NULL) a WHERE a.lower = $1 AND a.upper = $2", at(6), start.Add(6*time.Hour+20*time.Minute)))
	f.consumed("a", "orders", 1)
	f.pass(m)
	require.Equal(t, 1, f.rowsOf("old"))
	require.Equal(t, 0, f.rowsOf(taken))
	f.exec("DROP TABLE outbox." + taken)
	require.NotContains(t, problems(f.pass(m)), taken)

	// What is detached by hand is no longer read, which somebody should know; what is
	// dropped is gone.
	f.exec("ALTER TABLE outbox.messages DETACH PARTITION outbox." + taken)
	require.Contains(t, problems(f.pass(m)), taken+": was detached by somebody else")
	f.exec("DROP TABLE outbox." + taken)
	require.NotContains(t, problems(f.pass(m)), "somebody else", "as it was told to")
	another := "messages_" + start.Add(5*time.Hour).Format("20060102t150405")
	f.exec("DROP TABLE outbox." + another)
	require.Contains(t, problems(f.pass(m)), another+": was dropped by somebody else")
	require.NotContains(t, problems(f.pass(m)), "somebody else")
}

// Settings that cannot be, in the database: named, and the rest goes on.
func TestPartitionSettingsThatCannotBe(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(nil)
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	for key, values := range map[string][]string{
		"partition_interval": {"-1", "0", "\"x\"", "1.5", "99999999"}, "look_ahead": {"-1", "null", "1001"},
	} {
		before := f.text("SELECT value::text FROM outbox.meta WHERE key = $1", key)
		for _, value := range values {
			f.exec("UPDATE outbox.meta SET value = $2::jsonb WHERE key = $1", key, value)
			require.Contains(t, problems(f.pass(m)), key+" in table meta must be whole seconds", value)
		}
		f.exec("UPDATE outbox.meta SET value = $2::jsonb WHERE key = $1", key, before)
	}
	require.Equal(t, outbox.PartitionSealed, partitionOf(m.Status(), name).State, "it was sealed all the same")
	f.consumed("a", "orders", 1)
	f.requireState(m, name, outbox.PartitionSealed)
	f.exec("UPDATE outbox.partitions SET delivered_at = delivered_at - interval '1 hour'")
	f.exec("UPDATE outbox.meta SET value = '3600' WHERE key = 'partition_interval'")
	require.Contains(t, problems(f.pass(m)), "retention: 1s is shorter than partition_interval in table meta (1h0m0s)")
	require.Equal(t, 1, f.rowsOf(name))
}

// pausedInsert begins an insert into a partition's past that stops before it has
// come to the partition, with the lock that every insert has by then.
func (f *fixture) pausedInsert(at time.Time) (release func() error) {
	f.t.Helper()
	gate := f.begin()
	var ignored any
	require.NoError(f.t, gate.QueryRow(f.t.Context(), "SELECT pg_advisory_xact_lock(42)::text").Scan(&ignored))
	conn := f.connect(f.t)
	inserted := make(chan error, 1)
	go func() {
		_, err := conn.Exec(context.WithoutCancel(f.t.Context()), f.sql(`INSERT INTO outbox.messages (topic, uuid, created_at)
			SELECT 'orders', 'paused', $1 FROM (SELECT pg_advisory_xact_lock(42)) AS wait`), at)
		inserted <- err
	}()
	require.Eventually(f.t, func() bool {
		return f.number("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 42 AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())") == 1
	}, waitFor, time.Millisecond)
	return func() error {
		require.NoError(f.t, gate.Rollback(f.t.Context()))
		return <-inserted
	}
}

// Field case of our own. A transaction that took its time within the range, and is
// paused before it inserts, is waited for; nobody else waits.
func TestPartitionSealWaitsForAPausedInsert(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(nil)
	name, inside := f.past(3)
	release := f.pausedInsert(inside)
	p := f.requireState(m, name, outbox.PartitionWaiting)
	require.Equal(t, 1, p.Writers)
	// Those who come later are not waited for.
	later := f.begin()
	f.insertAt(later, "orders", time.Now(), "later")
	require.Equal(t, 1, f.requireState(m, name, outbox.PartitionWaiting).Writers)
	f.insertAt(f.pool, "orders", time.Now(), "others")

	require.NoError(t, release())
	f.requireState(m, name, outbox.PartitionSealed)
	require.Equal(t, "true", f.text("SELECT pg_visible_in_snapshot(m.xid, p.seal)::text FROM outbox.messages m, outbox.partitions p WHERE m.uuid = 'paused' AND p.name = $1", name))
	require.NoError(t, later.Commit(t.Context()))
}

// A lock on the partition itself, such as that of a transaction which is just being
// rolled back or of a vacuum, puts the seal off and keeps nobody waiting.
func TestPartitionSealWaitsForNoLock(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(nil)
	name, _ := f.past(3)
	tx := f.begin()
	_, err := tx.Exec(t.Context(), f.sql("LOCK TABLE ONLY outbox."+name+" IN ROW EXCLUSIVE MODE"))
	require.NoError(t, err)
	f.requireState(m, name, outbox.PartitionOpen)
	require.Equal(t, []string{"partition " + name}, m.Status().Postponed)
	require.NoError(t, tx.Rollback(t.Context()))
	f.requireState(m, name, outbox.PartitionSealed)
}

// A message that comes into a partition after its seal, as after a clock that was
// set back, is published again: every reader gets it, although those whose
// position covers the seal would not look there. Somebody's publication of all
// tables must not be in the way (field case F33).
func TestPartitionMessageBehindTheSeal(t *testing.T) {
	t.Parallel()

	for name, hold := range map[string]bool{"before it was emptied": false, "after it was emptied": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newUpkeep(newFixture(t))
			f.execRaw("CREATE PUBLICATION somebodys FOR ALL TABLES")
			m := f.maintenance(func(c *outbox.MaintenanceConfig) { c.UnreadRetention = time.Hour })
			name, inside := f.past(3)
			f.insertAt(f.pool, "orders", inside, "1")
			f.requireState(m, name, outbox.PartitionSealed)
			if hold {
				f.consumed("a", "orders", 1)
				reader := f.begin() // keeps the shell
				_, err := reader.Exec(t.Context(), f.sql("LOCK TABLE ONLY outbox.messages IN ACCESS SHARE MODE"))
				require.NoError(t, err)
				f.passUntil(m, "it is emptied", func(s outbox.MaintenanceStatus) bool { return partitionOf(s, name).State == outbox.PartitionFreed })
				f.pass(m)
				require.Contains(t, m.Status().Postponed, "partition "+name)
			}
			_, err := f.pool.Exec(t.Context(), f.sql(`INSERT INTO outbox.messages (topic, uuid, key, metadata, payload, target_group, attempt, created_at)
				VALUES ('orders', 'late', 'k', '{"a": "b"}', 'content', NULL, 3, $1), ('orders', 'later', NULL, '{}', NULL, NULL, 0, $1)`), inside)
			require.NoError(t, err)
			status := f.pass(m)
			require.Contains(t, problems(status), name+": 2 messages came after the partition was sealed")
			require.Equal(t, 1, partitionOf(status, name).Voided)
			require.Equal(t, []string{"late", "later"}, f.texts("SELECT uuid FROM outbox.messages WHERE uuid LIKE 'late%' AND created_at > $1 ORDER BY id", inside), "as new rows, of now")
			require.Equal(t, 1, f.number(`SELECT count(*) FROM outbox.messages WHERE uuid = 'late' AND key = 'k' AND metadata::text = '{"a": "b"}' AND payload = 'content' AND attempt = 3`))
			require.Equal(t, 2, f.number("SELECT count(*) FROM outbox.messages WHERE uuid LIKE 'late%'"), "and the old one is gone")
			if !hold {
				f.consumed("a", "orders", 3)
			}
			f.requireState(m, name, outbox.PartitionSealed)
		})
	}
}

// A reader may have passed over each message that came behind a seal. If the seal
// ended before all of them were published again, the next one would see them, and
// so do positions, and those would be lost.
func TestPartitionSealEndsWithTheLastMessageBehindIt(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = time.Hour })
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	f.requireState(m, name, outbox.PartitionSealed)

	// One that has not committed keeps the seal, and is not waited for. The other one is
	// published again meanwhile.
	f.insertAt(f.pool, "orders", inside, "late 1")
	tx := f.begin()
	f.insertAt(tx, "orders", inside, "late 2")
	p := f.requireState(m, name, outbox.PartitionSealed)
	require.Zero(t, p.Voided)
	require.Contains(t, problems(m.Status()), name+": 1 messages came after")
	require.Equal(t, 1, f.number("SELECT count(*) FROM outbox.messages WHERE uuid = 'late 1' AND created_at > $1", inside))
	require.NoError(t, tx.Commit(t.Context()))

	// More than fit in one transaction: in all of them but the last the seal stands.
	f.exec("INSERT INTO outbox.messages (topic, uuid, created_at) SELECT 'orders', 'late ' || g, $1 FROM generate_series(3, 2500) g", inside)
	require.Equal(t, 1000, f.number("SELECT outbox.upkeep_strays($1, 1000)", name))
	require.Equal(t, "sealed", f.text("SELECT state FROM outbox.partitions WHERE name = $1", name))
	require.Contains(t, problems(f.pass(m)), "499 messages came after")
	require.Equal(t, 1, f.rowsOf(name))
	require.Equal(t, 2500, f.number("SELECT count(*) FROM outbox.messages WHERE uuid LIKE 'late %' AND created_at > $1", inside))
	require.Equal(t, 1, partitionOf(m.Status(), name).Voided)
	require.Equal(t, outbox.PartitionOpen, partitionOf(m.Status(), name).State)
}

// texts returns the texts that a query returns.
func (f *fixture) texts(query string, args ...any) []string {
	f.t.Helper()
	rows, err := f.pool.Query(f.t.Context(), f.sql(query), args...)
	require.NoError(f.t, err)
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(f.t, err)
	return list
}

// One that has not committed when the partition is about to go.
func TestPartitionIsNotEmptiedUnderAnInsert(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(nil)
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	f.requireState(m, name, outbox.PartitionSealed)
	f.consumed("a", "orders", 1)
	tx := f.begin()
	f.insertAt(tx, "orders", inside, "late")
	f.passUntil(m, "it is tried", func(s outbox.MaintenanceStatus) bool {
		return len(s.Postponed) > 0 && s.Postponed[0] == "partition "+name
	})
	require.NoError(t, tx.Commit(t.Context()))
	require.Contains(t, problems(f.pass(m)), name+": 1 messages came after")
	require.Equal(t, 1, f.number("SELECT count(*) FROM outbox.messages WHERE uuid = 'late'"))
	f.consumed("a", "orders", 1)
}

// Field case F72. A drop that only waits lets everybody wait behind it.
func TestPartitionDropMakesNobodyWait(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(nil)
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	f.requireState(m, name, outbox.PartitionSealed)
	f.consumed("a", "orders", 1)
	tx := f.begin()
	f.insertAt(tx, "orders", time.Now(), "open")
	f.passUntil(m, "it is emptied", func(s outbox.MaintenanceStatus) bool { return partitionOf(s, name).State == outbox.PartitionFreed })
	// Two means, of which neither covers for the other: while a transaction stays on the
	// log it is not tried, and what comes in between is waited for no longer than 50 ms.
	require.Equal(t, "busy", f.text("SELECT outbox.upkeep_drop($1)", name))
	require.Equal(t, []string{"delete", "drop", "free", "guard", "identify", "make", "seal", "strays", "sweep", "unguard", "validate"}, f.texts(`
		SELECT DISTINCT substr(p.proname, 8) COLLATE "C" AS name FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
		WHERE n.nspname = $1 AND p.proname LIKE 'upkeep\_%' AND 'lock_timeout=50ms' = ANY (p.proconfig) AND p.proname <> 'upkeep_bury' ORDER BY 1`, oddSchema))

	ctx, stop := context.WithCancel(t.Context())
	var publishing sync.WaitGroup
	published := make([]int, 4)
	for i := range published {
		conn := f.connect(t)
		publishing.Go(func() {
			// Of what upkeep waits for itself it must not make others wait twice.
			_, err := conn.Exec(context.WithoutCancel(ctx), "SET lock_timeout = '1s'")
			for ; err == nil && ctx.Err() == nil; published[i]++ {
				_, err = conn.Exec(context.WithoutCancel(ctx), f.sql("INSERT INTO outbox.messages (topic, uuid) VALUES ('others', 'x')"))
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	for range 10 {
		status := f.pass(m)
		require.Contains(t, status.Postponed, "partition "+name)
	}
	stop()
	publishing.Wait()
	for _, n := range published {
		require.Positive(t, n)
	}
	require.NoError(t, tx.Commit(t.Context()))
	f.passUntil(m, "it is dropped", func(s outbox.MaintenanceStatus) bool { return partitionOf(s, name) == nil })
}

// A transaction that was writing when the time of a partition was over keeps it from
// being sealed. If it stays for ever, as one that was prepared and forgotten, so
// does all that comes after, which somebody should know.
func TestPartitionThatIsNeverSealedIsReported(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	tx := f.begin()
	f.insertAt(tx, "others", time.Now(), "open")
	m := f.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = 24 * time.Hour })
	f.requireState(m, name, outbox.PartitionWaiting)
	require.NotContains(t, problems(m.Status()), name, "it may well end in time")
	m = f.maintenance(nil)
	f.requireState(m, name, outbox.PartitionWaiting)
	require.Contains(t, problems(m.Status()), "partition "+name+": cannot be sealed")
	require.NoError(t, tx.Rollback(t.Context()))
	f.requireState(m, name, outbox.PartitionSealed)
	require.NotContains(t, problems(m.Status()), name)
}

// Every function refuses by itself what would lose something, whoever calls it.
func TestPartitionFunctionsByHand(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	f.pass(f.maintenance(nil))
	present := "messages_present"
	f.exec("CREATE TABLE outbox." + present + " PARTITION OF outbox.messages FOR VALUES FROM ('-infinity') TO ('2000-01-01')")
	refused := func(code, text string, args ...any) {
		t.Helper()
		_, err := f.pool.Exec(t.Context(), f.sql(text), args...)
		require.Equal(t, code, sqlState(err), "%s: %v", text, err)
	}
	require.Equal(t, "held", f.text("SELECT outbox.upkeep_free($1, 0, 0, false)", name))
	require.Equal(t, "sealed", f.text("SELECT outbox.upkeep_drop($1)", name))
	// Even if somebody has changed the table of partitions.
	f.exec("UPDATE outbox.partitions SET delivered_at = now() - interval '1 day' WHERE name = $1", name)
	require.Equal(t, "held", f.text("SELECT outbox.upkeep_free($1, 0, 0, false)", name))
	f.exec("UPDATE outbox.partitions SET state = 'freed' WHERE name = $1", name)
	require.Equal(t, "stray", f.text("SELECT outbox.upkeep_drop($1)", name))
	f.exec("UPDATE outbox.partitions SET state = 'sealed', seal = '1:1:' WHERE name = $1", name)
	f.exec("INSERT INTO outbox.cursors (consumer_group, topic, era, p) SELECT 'g', 'orders', outbox.era(), pg_current_snapshot()")
	require.Equal(t, "stray", f.text("SELECT outbox.upkeep_free($1, 0, 0, false)", name))
	require.Equal(t, 1, f.rowsOf(name))

	for _, other := range []string{present, "cursors", "nothing", "messages"} {
		refused("42P01", "SELECT outbox.upkeep_seal($1, 0)", other)
		refused("42P01", "SELECT outbox.upkeep_free($1, 0, 0, false)", other)
		refused("42P01", "SELECT outbox.upkeep_drop($1)", other)
		refused("42P01", "SELECT outbox.upkeep_strays($1, 1)", other)
	}
	now := time.Now()
	refused("55000", "SELECT outbox.upkeep_make($1, $2)", now, now.Add(time.Hour))
	refused("22023", "SELECT outbox.upkeep_make($1, $2)", now.Add(time.Hour), now)
	refused("22023", "SELECT outbox.upkeep_make($1, $2)", nil, now)
	refused("22023", "SELECT outbox.upkeep_sweep('inbox', 0, 1)")
	refused("22023", "SELECT outbox.upkeep_sweep('cursors', 1, 1)")
	tx := f.begin()
	_, err := tx.Exec(t.Context(), "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), f.sql("SELECT outbox.upkeep_seal($1, 0)"), name)
	require.Equal(t, "25000", sqlState(err), "%v", err)
	require.NoError(t, tx.Rollback(t.Context()))

	// One at a time, and the second does not wait.
	first := f.begin()
	_, err = first.Exec(t.Context(), f.sql("SELECT outbox.upkeep_seal($1, 0)"), name)
	require.NoError(t, err)
	refused("55P03", "SELECT outbox.upkeep_seal($1, 0)", name)
	var busy *pgconn.PgError
	_, err = f.pool.Exec(t.Context(), f.sql("SELECT outbox.upkeep_unguard(), outbox.upkeep_look($1, 0)"), name)
	require.ErrorAs(t, err, &busy)
}

// The seal of a partition stays for as long as somebody has not got all of it. To look
// behind it at each pass must not take longer the more there is in the partition,
// though a transaction was open all over its time, and the seal cannot rule out its id.
func TestPartitionIsNotReadAtEachPass(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	few, insideFew := f.past(4)
	many, insideMany := f.past(3)
	foreign, insideForeign := f.past(2)
	open := f.begin()
	_, err := open.Exec(t.Context(), "SELECT pg_current_xact_id()")
	require.NoError(t, err)
	for rows, inside := range map[int]time.Time{20: insideFew, 60_000: insideMany} {
		f.exec("INSERT INTO outbox.messages (topic, uuid, created_at) SELECT 'orders', g::text, $1 FROM generate_series(1, $2) g", inside, rows)
	}
	// Of a cluster that was older, in which the outbox was before.
	f.exec("INSERT INTO outbox.messages (topic, uuid, era, xid, created_at) SELECT 'orders', g::text, 7, (900000000000 + g)::text::xid8, $1 FROM generate_series(1, 60000) g", insideForeign)
	m := f.maintenance(nil)
	f.pass(m)
	blocks := func(name string) int {
		require.Equal(t, outbox.PartitionSealed, partitionOf(m.Status(), name).State)
		var text []byte
		require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT outbox.upkeep_strays('"+name+"', 1000)")).Scan(&text))
		var plans []struct {
			Plan struct {
				Hit  int `json:"Shared Hit Blocks"`
				Read int `json:"Shared Read Blocks"`
			}
		}
		require.NoError(t, json.Unmarshal(text, &plans))
		return plans[0].Plan.Hit + plans[0].Plan.Read
	}
	blocks(few) // what a session asks of the catalogs once
	least, most := blocks(few), max(blocks(many), blocks(foreign))
	t.Logf("%d and %d blocks", least, most)
	require.Positive(t, least)
	// Each transaction that was running costs a look into an index, a deeper one.
	require.Less(t, most, least+300, "the index and the table of the larger one are more than 900 blocks")
}

// Many messages that came behind a seal are published again in the order of their ids,
// whichever of their transactions began first.
func TestPartitionMessagesBehindTheSealKeepTheirOrder(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	m := f.maintenance(nil)
	f.requireState(m, name, outbox.PartitionSealed)
	first := f.begin()
	_, err := first.Exec(t.Context(), "SELECT pg_current_xact_id()")
	require.NoError(t, err)
	f.exec("INSERT INTO outbox.messages (topic, uuid, created_at) SELECT 'orders', 'late ' || g, $1 FROM generate_series(1, 700) g", inside)
	_, err = first.Exec(t.Context(), f.sql("INSERT INTO outbox.messages (topic, uuid, created_at) SELECT 'orders', 'late ' || g, $1 FROM generate_series(701, 1400) g"), inside)
	require.NoError(t, err)
	require.NoError(t, first.Commit(t.Context()))
	f.pass(m)
	moved := f.texts("SELECT uuid FROM outbox.messages WHERE uuid LIKE 'late %' AND created_at > $1 ORDER BY id", inside)
	require.Len(t, moved, 1400)
	for i, uuid := range moved {
		require.Equal(t, fmt.Sprint("late ", i+1), uuid)
	}
}
