package tests

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// fillDefault puts so many messages of the past into the DEFAULT partition.
func (f *fixture) fillDefault(topic string, n int) {
	f.t.Helper()
	f.exec("INSERT INTO outbox.messages (topic, uuid, payload, created_at) SELECT $1, g::text, 'x', now() - interval '1 hour' FROM generate_series(1, $2::int) g", topic, n)
	require.GreaterOrEqual(f.t, f.rowsOf("messages_default"), n)
}

// Field case F75. What lands in the DEFAULT partition is delivered from there,
// reported, and deleted when everybody has it; new partitions are made meanwhile.
func TestDefaultPartitionIsCleared(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	f.execRaw("CREATE PUBLICATION somebodys FOR ALL TABLES") // F33
	m := f.maintenance(nil)
	f.fillDefault("orders", 2500)
	status := f.pass(m)
	require.Contains(t, problems(status), "partition messages_default: has messages")
	require.NotEmpty(t, f.attached(), "it keeps no partition from being made")
	require.Equal(t, "no group has ever subscribed to anything", partitionOf(status, "messages_default").HeldBy.String())
	require.Equal(t, 0, f.number("SELECT count(*) FROM pg_constraint WHERE conname = 'upkeep_guard'"))

	f.consumed("a", "orders", 2500)
	// What comes after the mark stays for the next one.
	f.exec("INSERT INTO outbox.messages (topic, uuid, created_at) VALUES ('orders', 'after', now() - interval '1 hour')")
	f.passUntil(m, "it is cleared", func(outbox.MaintenanceStatus) bool {
		return f.number("SELECT count(*) FROM outbox.messages_default WHERE uuid ~ '^[0-9]+$'") == 0
	})
	require.Equal(t, 1, f.number("SELECT count(*) FROM outbox.messages_default WHERE uuid = 'after'"))
	f.pass(m)
	f.consumed("a", "orders", 1)
	f.passUntil(m, "and that", func(outbox.MaintenanceStatus) bool {
		return f.number("SELECT count(*) FROM outbox.messages_default WHERE uuid = 'after'") == 0
	})
	f.exec("UPDATE outbox.cursors SET p = pg_current_snapshot()")
	f.exec("DELETE FROM outbox.messages_default")
	f.passUntil(m, "nothing more to report", func(s outbox.MaintenanceStatus) bool {
		return !strings.Contains(problems(s), "messages_default: has messages")
	})
}

// What goes from the DEFAULT partition is given to the archive first, and stays while
// that fails. One call deletes no more than a thousand rows, whatever it is asked for.
func TestDefaultPartitionIsArchived(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	f.fillDefault("orders", 2500)
	archived := map[string]int{}
	fail := true
	m := f.maintenance(func(c *outbox.MaintenanceConfig) {
		c.Archive = func(_ context.Context, p outbox.PartitionStatus, in io.Reader) error {
			if fail {
				return errors.New("the disk is full")
			}
			lines, err := csv.NewReader(in).ReadAll()
			if err != nil || p.Name != "messages_default" {
				return err
			}
			for _, line := range lines[1:] {
				archived[line[5]]++
			}
			return nil
		}
	})
	f.requireState(m, "messages_default", outbox.PartitionSealed)
	f.consumed("a", "orders", 2500)
	f.insertAt(f.pool, "orders", time.Now().Add(-time.Hour), "after the mark")
	f.pass(m)
	f.exec("UPDATE outbox.partitions SET delivered_at = delivered_at - interval '1 minute' WHERE name = 'messages_default'")
	const remove = "SELECT format('%s %s', d.seen, d.deleted) FROM outbox.upkeep_delete('', 0, 0, 0, 0, $1, 100000) d"
	require.Equal(t, "-1 0", f.text(remove, true))
	f.pass(m)
	require.Contains(t, problems(m.Status()), "partition messages_default: archive: the disk is full")
	require.Equal(t, 2500, f.number("SELECT count(*) FROM outbox.messages_default WHERE uuid ~ '^[0-9]+$'"))
	fail = false
	f.passUntil(m, "it is archived and cleared", func(outbox.MaintenanceStatus) bool {
		return f.number("SELECT count(*) FROM outbox.messages_default WHERE uuid ~ '^[0-9]+$'") == 0
	})
	require.Equal(t, 1, f.number("SELECT count(*) FROM outbox.messages_default WHERE uuid = 'after the mark'"))
	for n := range 2500 {
		require.Equal(t, 1, archived[fmt.Sprint(n+1)])
	}
	require.Zero(t, archived["after the mark"])

	f.fillDefault("orders", 1500)
	f.consumed("a", "orders", 1501)
	f.pass(m)
	f.consumed("a", "orders", 0)
	f.pass(m)
	require.Equal(t, "1000 1000", f.text(remove, false))
}

// A message that is not acknowledged, and what a group has not got, stay.
func TestDefaultPartitionKeepsWhatIsNotDelivered(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(nil)
	f.fillDefault("orders", 1500)
	var era, id int64
	require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT era, id FROM outbox.messages_default WHERE uuid = '700'")).Scan(&era, &id))
	f.exec("INSERT INTO outbox.cursors (consumer_group, topic, era, p) SELECT 'stopped', 'orders', outbox.era(), '1:1:'")
	p := f.requireState(m, "messages_default", outbox.PartitionSealed)
	require.Equal(t, "stopped", p.HeldBy.ConsumerGroup)
	f.exec("UPDATE outbox.cursors SET p = pg_current_snapshot(), holes = jsonb_build_array(jsonb_build_object('era', $1::bigint, 'id', $2::bigint, 'created_at', now()))", era, id)
	f.passUntil(m, "all but one go", func(outbox.MaintenanceStatus) bool { return f.rowsOf("messages_default") == 1 })
	require.Equal(t, []string{"700"}, f.texts("SELECT uuid FROM outbox.messages_default"))
	for range 3 {
		f.pass(m)
	}
	require.Equal(t, 1, f.rowsOf("messages_default"))
	f.exec("UPDATE outbox.cursors SET holes = '[]', p = pg_current_snapshot()")
	f.passUntil(m, "the last one", func(outbox.MaintenanceStatus) bool { return f.rowsOf("messages_default") == 0 })
}

// To attach a partition under its lock without a search, the DEFAULT partition is
// proven empty of its range first.
func TestDefaultPartitionIsNotSearchedUnderALock(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	f.exec("UPDATE outbox.meta SET value = '60' WHERE key = 'partition_interval'")
	f.exec("UPDATE outbox.meta SET value = '600' WHERE key = 'look_ahead'")
	f.fillDefault("orders", 10)
	config := f.pool.Config().ConnConfig
	var notices []string
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { notices = append(notices, n.Message) }
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	defer conn.Close(context.WithoutCancel(t.Context()))
	call := func(text string, args ...any) (word string) {
		require.NoError(t, conn.QueryRow(t.Context(), f.sql(text), args...).Scan(&word), text)
		return word
	}
	lower := time.Now().UTC().Truncate(time.Minute).Add(5 * time.Minute)
	_, err = conn.Exec(t.Context(), "SET client_min_messages = debug1")
	require.NoError(t, err)
	require.Equal(t, "guard", call("SELECT outbox.upkeep_make($1, $2)", lower, lower.Add(time.Minute)))
	call("SELECT outbox.upkeep_guard($1, $2)::text", lower, lower.Add(3*time.Minute))
	require.Equal(t, "guard", call("SELECT outbox.upkeep_make($1, $2)", lower, lower.Add(time.Minute)), "not proven yet")
	call("SELECT outbox.upkeep_validate()::text")
	for i := range 3 {
		notices = nil
		from := lower.Add(time.Duration(i) * time.Minute)
		require.Equal(t, "made", call("SELECT outbox.upkeep_make($1, $2)", from, from.Add(time.Minute)))
		require.Contains(t, fmt.Sprint(notices), `updated partition constraint for default partition "messages_default" is implied by existing constraints`)
	}
	require.Equal(t, "guard", call("SELECT outbox.upkeep_make($1, $2)", lower.Add(3*time.Minute), lower.Add(4*time.Minute)), "beyond what was proven")
	require.Equal(t, "true", call("SELECT outbox.upkeep_unguard()::text"))
	require.Equal(t, "false", call("SELECT outbox.upkeep_unguard()::text"))
}

// The guard keeps rows out while it proves something. If upkeep dies then, the time
// comes when those rows are published, and no insert may fail.
func TestDefaultPartitionGuardEndsByItself(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	f.exec("UPDATE outbox.meta SET value = '2' WHERE key = 'partition_interval'")
	f.fillDefault("orders", 10)
	var lower time.Time
	insert := "INSERT INTO outbox.messages (topic, uuid, created_at) VALUES ('orders', 'future', $1)"
	// On a machine that is busy the time may be over before it has begun.
	require.Eventually(t, func() bool {
		lower = time.Now().Add(5 * time.Second)
		f.exec("SELECT outbox.upkeep_guard($1, $2)", lower, lower.Add(time.Hour))
		_, err := f.pool.Exec(t.Context(), f.sql(insert), lower.Add(time.Second))
		return sqlState(err) == "23514"
	}, waitFor, time.Millisecond)
	_, err := f.pool.Exec(t.Context(), f.sql("INSERT INTO outbox.messages (topic, uuid, created_at) VALUES ('orders', 'present', now())"))
	require.NoError(t, err)
	conn := f.connect(t)
	require.Eventually(t, func() bool {
		// Prepared, so that a plan of before is used.
		_, err := conn.Exec(t.Context(), f.sql(insert), lower.Add(time.Second))
		return err == nil
	}, waitFor, 10*time.Millisecond)
	require.True(t, time.Now().Before(lower), "before the range begins")
	require.Equal(t, "guard", f.text("SELECT outbox.upkeep_make($1, $2)", lower.Add(10*time.Second), lower.Add(20*time.Second)), "it proves nothing any more")
	f.pass(f.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = 0 }))
	require.Equal(t, 0, f.number("SELECT count(*) FROM pg_constraint WHERE conname = 'upkeep_guard'"), "what was left behind is cleared away")
}

// Messages of a time to come, as after a clock that was set back: no partition can
// be made for theirs, which is said, and all others are.
func TestDefaultPartitionWithMessagesOfTheFuture(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	f.exec("UPDATE outbox.meta SET value = '60' WHERE key = 'partition_interval'")
	f.exec("UPDATE outbox.meta SET value = '600' WHERE key = 'look_ahead'")
	future := time.Now().UTC().Truncate(time.Minute).Add(5 * time.Minute)
	f.insertAt(f.pool, "orders", future.Add(30*time.Second), "future")
	m := f.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = 0 })
	f.passUntil(m, "those behind it, too", func(s outbox.MaintenanceStatus) bool {
		return len(f.attached()) >= 7
	})
	require.Contains(t, problems(m.Status()), "partition from "+future.Format(time.RFC3339))
	require.Contains(t, problems(m.Status()), "the DEFAULT partition has messages of this range")
	for _, r := range f.attached() {
		require.NotEqual(t, future, r[0].UTC())
	}
}

// However much is there, those who publish, and those who publish into it, do not
// wait.
func TestDefaultPartitionThatIsLargeMakesNobodyWait(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	f.exec("UPDATE outbox.meta SET value = '60' WHERE key = 'partition_interval'")
	f.fillDefault("orders", 100_000)
	f.exec("INSERT INTO outbox.cursors (consumer_group, topic, era, p) SELECT 'g', 'orders', outbox.era(), '1:1:'")
	m := f.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = 0 })
	ctx, stop := context.WithCancel(t.Context())
	var publishing sync.WaitGroup
	for _, at := range []string{"clock_timestamp()", "clock_timestamp() - interval '1 hour'"} {
		conn := f.connect(t)
		publishing.Go(func() {
			// Ten times as long as it should be, on a machine that does other things,
			// too.
			_, err := conn.Exec(context.WithoutCancel(ctx), "SET lock_timeout = '1s'")
			for err == nil && ctx.Err() == nil {
				_, err = conn.Exec(context.WithoutCancel(ctx), f.sql("INSERT INTO outbox.messages (topic, uuid, created_at) VALUES ('others', 'x', "+at+")"))
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	f.passUntil(m, "partitions", func(outbox.MaintenanceStatus) bool { return len(f.attached()) > 0 })
	f.exec("UPDATE outbox.cursors SET p = pg_current_snapshot()")
	f.exec("INSERT INTO outbox.cursors (consumer_group, topic, era, p) SELECT 'g', 'others', outbox.era(), '900000000:900000000:'")
	f.exec("UPDATE outbox.cursors SET p = '900000000:900000000:'")
	f.requireState(m, "messages_default", outbox.PartitionSealed)
	f.exec("UPDATE outbox.partitions SET delivered_at = now() - interval '1 day' WHERE name = 'messages_default'")
	f.passUntil(m, "it is cleared", func(outbox.MaintenanceStatus) bool {
		return f.number("SELECT count(*) FROM outbox.messages_default WHERE topic = 'orders'") == 0
	})
	stop()
	publishing.Wait()
}

// A Seek falls between the look whether everybody has a row of the DEFAULT partition
// and its deletion. It would put a message into the group's future that is just going:
// one that was never acked, and for that is kept until then.
func TestDefaultPartitionIsNotClearedBesideASeek(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	f.fillDefault("orders", 20)
	m := f.maintenance(nil)
	f.requireState(m, "messages_default", outbox.PartitionSealed)
	f.consumed("a", "orders", 20)
	var era, id int64
	require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT era, id FROM outbox.messages_default WHERE uuid = '7'")).Scan(&era, &id))
	f.exec("UPDATE outbox.cursors SET holes = jsonb_build_array(jsonb_build_object('era', $1::bigint, 'id', $2::bigint, 'created_at', now()))", era, id)
	f.exec("UPDATE outbox.partitions SET delivered_at = now() - interval '1 day' WHERE name = 'messages_default'")

	// The deletion waits for a lock, and the look before it needs none.
	f.exec("ALTER FUNCTION outbox.upkeep_delete SET lock_timeout = '30s'")
	lock := f.begin()
	_, err := lock.Exec(t.Context(), f.sql("LOCK TABLE ONLY outbox.messages_default IN SHARE MODE"))
	require.NoError(t, err)
	deleting := f.connect(t)
	var pid int
	require.NoError(t, deleting.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
	deleted := make(chan error, 1)
	go func() {
		_, err := deleting.Exec(context.WithoutCancel(t.Context()), f.sql("SELECT outbox.upkeep_delete('', 0, 0, 0, 0, false, 1000)"))
		deleted <- err
	}()
	require.Eventually(t, func() bool {
		return f.number("SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'", pid) == 1
	}, waitFor, time.Millisecond)
	consumer := f.consumer(nil)
	sought := make(chan error, 1)
	go func() {
		_, err := consumer.Seek(context.WithoutCancel(t.Context()), "a", "orders", outbox.SeekMessage(era, id), outbox.SeekOptions{})
		sought <- err
	}()
	select {
	case err := <-sought: // it is refused or waits, but must not have been in time
		require.Error(t, err)
		sought <- err
	case <-time.After(100 * time.Millisecond):
	}
	require.NoError(t, lock.Rollback(t.Context()))
	require.NoError(t, <-deleted)
	t.Log("it says", <-sought)
	require.Equal(t, []string{"7"}, f.texts("SELECT uuid FROM outbox.messages_default WHERE uuid ~ '^[0-9]+$'"))
}

// Whoever stays on the DEFAULT partition keeps new ones from being made, and everybody
// else waits behind each try: there is one in a pass, however many there are to make.
func TestDefaultPartitionIsLockedOnceInVain(t *testing.T) {
	t.Parallel()

	for name, rows := range map[string]int{"empty": 0, "with messages": 10} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newUpkeep(newFixture(t))
			if rows > 0 {
				f.fillDefault("orders", rows)
			}
			tx := f.begin()
			_, err := tx.Exec(t.Context(), f.sql("LOCK TABLE ONLY outbox.messages_default IN ACCESS SHARE MODE"))
			require.NoError(t, err)
			m := f.maintenance(nil)
			f.pass(m)
			require.Len(t, m.Status().Postponed, 1)
			require.Empty(t, f.attached())
			require.NoError(t, tx.Rollback(t.Context()))
			f.pass(m)
			require.NotEmpty(t, f.attached())
		})
	}
}

// There is so much in the DEFAULT partition that to prove it empty of the next range
// takes longer than there is time. What lies further ahead is made.
func TestDefaultPartitionThatTakesLongToSearch(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	f.fillDefault("orders", 10)
	f.exec(`CREATE SEQUENCE public.searched;
		CREATE OR REPLACE FUNCTION outbox.upkeep_passed(moment timestamptz) RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $body$
			SELECT CASE nextval('public.searched') WHEN 1 THEN pg_sleep(3) IS NOT NULL ELSE true END AND clock_timestamp() >= moment $body$`)
	began := time.Now()
	f.pass(f.maintenance(nil))
	require.Greater(t, f.number("SELECT last_value FROM public.searched"), 1)
	made := f.attached()
	require.NotEmpty(t, made)
	for _, r := range made {
		require.Greater(t, r[0].Sub(began), 3*time.Second)
	}
}
