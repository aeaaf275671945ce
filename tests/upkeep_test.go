package tests

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/schema"
)

// Field case F73. Two that do the upkeep as fast as they can, partitions of a
// second, publishers, a long transaction now and then and a reader: nobody sees a
// deadlock, nothing is lost, nothing comes twice, and the tables stay small.
func TestPartitionsUnderTraffic(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	const publishers = 3
	settings := outbox.MaintenanceConfig{Interval: outbox.MinMaintenanceInterval, Retention: time.Second, SealDelay: 100 * time.Millisecond}
	ctx, stop := context.WithCancel(t.Context())
	var working sync.WaitGroup
	for range 2 {
		m := f.maintenance(func(c *outbox.MaintenanceConfig) { *c = settings })
		working.Go(func() {
			for ctx.Err() == nil {
				if err := m.Pass(ctx); err != nil && ctx.Err() == nil {
					t.Errorf("pass: %v", err)
					return
				}
				for _, problem := range m.Status().Problems {
					if text := problem.Error(); !strings.Contains(text, "has messages: there was no partition") && !strings.Contains(text, "is held back") && !strings.Contains(text, "cannot be sealed") {
						t.Errorf("problem: %v", problem)
					}
				}
			}
		})
	}
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Maintenance = settings })
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "a", Ordering: outbox.OrderingByKey, MaxInFlight: 100}, "orders")

	sent := make([][]string, publishers)
	for i := range sent {
		conn := f.connect(t)
		working.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				uuid := fmt.Sprintf("%d-%d", i, n)
				tx, err := conn.Begin(context.WithoutCancel(ctx))
				if err == nil {
					_, err = tx.Exec(context.WithoutCancel(ctx), f.sql("INSERT INTO outbox.messages (topic, uuid, key) VALUES ('orders', $1, $2)"), uuid, fmt.Sprint(i))
				}
				if err == nil && n%50 == 7 && i == 0 {
					_, err = tx.Exec(context.WithoutCancel(ctx), "SELECT pg_sleep(1.2)")
				}
				if err == nil {
					err = tx.Commit(context.WithoutCancel(ctx))
				}
				if err != nil {
					t.Errorf("publish: %v", err)
					return
				}
				sent[i] = append(sent[i], uuid)
			}
		})
	}
	got := map[string]int{}
	filled := map[string]bool{} // partitions that have held messages
	var count, passed, most int
	began := time.Now()
	receiveOne := func(msg *message.Message) {
		got[msg.UUID]++
		count++
		require.True(t, msg.Ack())
	}
	// Until some partitions have gone the whole way, and it has lasted.
	for passed < 3 || time.Since(began) < 5*time.Second {
		select {
		case msg := <-messages:
			receiveOne(msg)
		case <-time.After(waitFor):
			require.FailNow(t, "nothing comes")
		}
		if count%100 == 0 {
			holders := f.texts("SELECT m.tableoid::regclass::text FROM (SELECT DISTINCT tableoid FROM outbox.messages) AS m")
			for _, table := range holders {
				filled[table] = true
			}
			most = max(most, f.number("SELECT count(*)::int FROM outbox.messages"))
			passed = 0
			for table := range filled {
				if !slices.Contains(holders, table) && !strings.Contains(table, "messages_default") {
					passed++
				}
			}
		}
		require.Less(t, time.Since(began), 2*waitFor, "partitions do not go")
	}
	stop()
	working.Wait()
	total := 0
	for _, list := range sent {
		total += len(list)
	}
	for len(got) < total {
		select {
		case msg := <-messages:
			receiveOne(msg)
		case <-time.After(waitFor):
			require.FailNow(t, "messages missing", "%d of %d", len(got), total)
		}
	}
	require.Equal(t, total, count, "none came twice")
	// Field case F70: what is stored does not grow with what was published.
	require.Less(t, most, total, "nothing has gone")
	t.Logf("%d messages, %d partitions gone, %d rows at most", total, passed, most)
}

// A Consumer does the upkeep by itself, soon after it began, says how it stands, and
// one that was told not to does not.
func TestConsumerDoesTheUpkeep(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	without := f.consumer(nil)
	f.subscribe(without, outbox.SubscriberConfig{ConsumerGroup: "b"}, "others")
	require.Equal(t, outbox.MaintenanceStatus{}, without.Status().Maintenance)
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Maintenance = outbox.MaintenanceConfig{} })
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "a"}, "orders")
	receive(t, messages, 1)
	require.Eventually(t, func() bool { return !consumer.Status().Maintenance.At.IsZero() }, waitFor, time.Millisecond)
	status := consumer.Status().Maintenance
	require.NoError(t, status.Err)
	require.True(t, status.Enabled)
	require.True(t, status.Ran)
	require.Equal(t, outbox.PartitionSealed, partitionOf(status, name).State)
	require.NotEmpty(t, f.attached())
	require.NoError(t, consumer.Close())
	require.Equal(t, 0, f.number("SELECT count(*) FROM outbox.upkeep WHERE holder IS NOT NULL"))
}

// And so it does through a transaction pooler.
func TestPoolerCarriesTheUpkeep(t *testing.T) {
	t.Parallel()

	p := newPooled(t)
	f := newUpkeep(p.fixture)
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	archived := make(chan string, 100)
	consumer := p.consumer(func(c *outbox.ConsumerConfig) {
		c.Maintenance = outbox.MaintenanceConfig{
			Interval: outbox.MinMaintenanceInterval, Retention: time.Second, SealDelay: time.Nanosecond,
			Archive: func(_ context.Context, p outbox.PartitionStatus, in io.Reader) error {
				content, err := io.ReadAll(in)
				if p.Name == name {
					archived <- string(content)
				}
				return err
			},
		}
	})
	_, messages := p.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "a"}, "orders")
	receive(t, messages, 1)
	require.Eventually(t, func() bool {
		return f.number("SELECT count(*) FROM outbox.partitions WHERE name = $1 AND state = 'sealed'", name) == 1
	}, waitFor, 10*time.Millisecond)
	// What moves the position over the seal, sooner than an idle one is stored.
	f.exec("INSERT INTO outbox.messages (topic, uuid) VALUES ('orders', '2')")
	receive(t, messages, 1)
	select {
	case content := <-archived:
		require.Contains(t, content, ",orders,k,1,")
	case <-time.After(waitFor):
		require.FailNow(t, "not archived", "%+v", consumer.Status().Maintenance)
	}
	require.Eventually(t, func() bool { return f.number("SELECT count(*) FROM outbox.partitions WHERE name = $1", name) == 0 }, waitFor, 10*time.Millisecond)
	require.Empty(t, consumer.Status().Maintenance.Err)
}

// One at a time, and each of them at its interval: the lease.
func TestMaintenanceLease(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	begin := func(holder string, lease, rest float64) string {
		return f.text("SELECT outbox.upkeep_begin($1, $2, $3)", holder, lease, rest)
	}
	require.Equal(t, "mine", begin("a", 10, 60))
	require.Equal(t, "mine", begin("a", 10, 60), "renewed")
	require.Equal(t, "busy", begin("b", 10, 60))
	m := f.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention = 0 })
	require.NoError(t, m.Pass(t.Context()))
	require.False(t, m.Status().Ran)
	f.exec("SELECT outbox.upkeep_end('b', true)")
	require.Equal(t, "busy", begin("b", 10, 60), "only the holder ends it")
	f.exec("SELECT outbox.upkeep_end('a', false)")
	require.Equal(t, "mine", begin("b", 10, 60), "it was not through")
	f.exec("SELECT outbox.upkeep_end('b', true)")
	require.Equal(t, "rested", begin("a", 10, 60))
	require.Equal(t, "mine", begin("a", 10, 0))
	// A clock that was set back by a day.
	f.exec("UPDATE outbox.upkeep SET until = until + interval '1 day', ran_at = ran_at + interval '1 day'")
	require.Equal(t, "mine", begin("b", 10, 60))
	// A holder that died.
	f.exec("UPDATE outbox.upkeep SET until = now() - interval '1 second', ran_at = NULL")
	require.Equal(t, "mine", begin("c", 10, 60))
	// A row that somebody deleted.
	f.exec("DELETE FROM outbox.upkeep")
	require.Equal(t, "working", begin("d", 10, 60))
	require.Equal(t, "mine", begin("d", 10, 60))
	// A step in progress.
	tx := f.begin()
	_, err := tx.Exec(t.Context(), f.sql("SELECT outbox.upkeep_sync()"))
	require.NoError(t, err)
	require.Equal(t, "working", begin("e", 10, 60))
}

// A partition is given to the archive before it goes, all of it; if that fails it
// stays.
func TestRetentionArchives(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1", "2", "3")
	f.insertAt(f.pool, "orders", time.Now(), "another")
	var content bytes.Buffer
	var fail func(content io.Reader) error
	calls := 0
	m := f.maintenance(func(c *outbox.MaintenanceConfig) {
		c.Archive = func(_ context.Context, p outbox.PartitionStatus, in io.Reader) error {
			if p.Name != name {
				_, err := io.Copy(io.Discard, in)
				return err
			}
			calls++
			if fail != nil {
				return fail(in)
			}
			content.Reset()
			_, err := content.ReadFrom(in)
			return err
		}
	})
	f.requireState(m, name, outbox.PartitionSealed)
	f.consumed("a", "orders", 4)
	f.requireState(m, name, outbox.PartitionSealed)
	require.Zero(t, calls)
	f.exec("UPDATE outbox.partitions SET delivered_at = delivered_at - interval '1 minute' WHERE name = $1", name)

	full := errors.New("the disk is full")
	for what, test := range map[string]func(io.Reader) error{
		full.Error(): func(in io.Reader) error {
			_, _ = in.Read(make([]byte, 10))
			return full
		},
		"before it had read all": func(in io.Reader) error {
			_, err := in.Read(make([]byte, 10))
			return err
		},
		"panic: oh": func(io.Reader) error { panic("oh") },
	} {
		fail = test
		status := f.pass(m)
		require.Contains(t, problems(status), "partition "+name+": archive: ")
		require.Contains(t, problems(status), what)
		require.Equal(t, outbox.PartitionSealed, partitionOf(status, name).State)
		require.Contains(t, partitionOf(status, name).Error, what)
		require.Equal(t, 3, f.rowsOf(name))
	}
	fail = nil
	p := f.requireState(m, name, outbox.PartitionFreed)
	require.False(t, p.ArchivedAt.IsZero())
	require.Empty(t, p.Error)
	require.Equal(t, 4, calls)
	lines, err := csv.NewReader(&content).ReadAll()
	require.NoError(t, err)
	require.Len(t, lines, 4)
	require.Equal(t, []string{"era", "id", "xid", "topic", "key", "uuid", "metadata", "payload", "created_at", "target_group", "attempt"}, lines[0])
	for i, line := range lines[1:] {
		require.Equal(t, fmt.Sprint(i+1), line[5])
		require.Equal(t, `\x78`, line[7])
	}
}

// Bad input is refused when it is given.
func TestMaintenanceConfigIsChecked(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	for want, config := range map[string]outbox.MaintenanceConfig{
		"Retention must not be negative":                                    {Retention: -1},
		"SealDelay must not be negative":                                    {SealDelay: -time.Second},
		"UnreadRetention must not be negative":                              {UnreadRetention: -time.Second},
		"DeadLetterRetention must not be negative":                          {DeadLetterRetention: -time.Second},
		"Interval must be at least 100ms, is -1s":                           {Interval: -time.Second},
		"Retention (59m0s) must not be shorter than the partition interval": {Retention: 59 * time.Minute},
	} {
		_, err := outbox.NewMaintenance(f.pool.Config(), oddSchema, config, nil)
		require.ErrorContains(t, err, "MaintenanceConfig."+want)
		_, err = outbox.NewConsumer(f.pool.Config(), outbox.ConsumerConfig{Schema: oddSchema, Maintenance: config}, nil)
		require.ErrorContains(t, err, "ConsumerConfig.Maintenance."+want)
	}
	_, err := outbox.NewMaintenance(nil, oddSchema, outbox.MaintenanceConfig{}, nil)
	require.ErrorContains(t, err, "pool configuration")
	_, err = outbox.NewMaintenance(f.pool.Config(), "pg_x", outbox.MaintenanceConfig{}, nil)
	require.ErrorContains(t, err, "reserved")
	_, err = outbox.NewMaintenance(f.pool.Config(), "elsewhere", outbox.MaintenanceConfig{}, nil)
	require.ErrorIs(t, err, outbox.ErrNotInstalled)
}

// The upkeep needs no more than its grants, whoever owns the tables; who lacks them
// is told.
func TestLeastPrivilegeOfTheUpkeep(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	roles := schema.Roles{Owner: f.role("owner"), Publisher: f.role("publisher"), Consumer: f.role("consumer"), Upkeep: f.role("upkeep")}
	f.grant(roles)
	for i, role := range []string{roles.Owner, roles.Consumer, roles.Upkeep} {
		config := f.pool.Config()
		config.ConnConfig.User, config.ConnConfig.Password = role, rolePassword
		m, err := outbox.NewMaintenance(config, oddSchema, outbox.MaintenanceConfig{
			Retention: time.Second, SealDelay: time.Nanosecond, DeadLetterRetention: time.Hour,
			Archive: func(_ context.Context, _ outbox.PartitionStatus, in io.Reader) error {
				_, err := io.Copy(io.Discard, in)
				return err
			},
		}, testLogger(t))
		require.NoError(t, err)
		name, inside := f.past(3 + i)
		f.exec("ALTER TABLE outbox." + name + " OWNER TO " + quoteIdentifier(roles.Owner))
		f.insertAt(f.pool, "orders", inside, "1")
		f.requireState(m, name, outbox.PartitionSealed)
		f.insertAt(f.pool, "orders", inside, "late")
		require.Contains(t, problems(f.pass(m)), "1 messages came after")
		f.passUntil(m, "sealed again", func(s outbox.MaintenanceStatus) bool { return partitionOf(s, name).State == outbox.PartitionSealed })
		f.consumed("a", "orders", 2)
		f.passUntil(m, "it goes", func(s outbox.MaintenanceStatus) bool { return partitionOf(s, name) == nil })
		require.NoError(t, m.Close())
	}
	// The guard is checked with the rights of whoever publishes.
	f.exec("SELECT outbox.upkeep_guard(now() + interval '10 s', now() + interval '20 s')")
	_, err := f.poolAs(roles.Publisher).Exec(t.Context(), f.sql("INSERT INTO outbox.messages (topic, uuid) VALUES ('orders', 'x')"))
	require.NoError(t, err)

	publisher := f.poolAs(roles.Publisher)
	for _, text := range []string{
		"SELECT outbox.upkeep_sync()", "SELECT outbox.upkeep_free('x', 0, 0, false)", "SELECT outbox.upkeep_drop('x')",
		"SELECT outbox.upkeep_begin('x', 1, 1)", "SELECT outbox.upkeep_sweep('inbox', 1, 1)", "SELECT FROM outbox.partitions",
	} {
		f.requireDenied(publisher, text)
	}
	for _, role := range []string{roles.Consumer, roles.Upkeep} {
		f.requireDenied(f.poolAs(role), "UPDATE outbox.partitions SET state = 'open'")
		f.requireDenied(f.poolAs(role), "SELECT outbox.upkeep_enter()")
	}
	require.Empty(t, errorsOf(f.check(f.pool)))
}

// A schema that somebody else owns: said, and nothing is harmed.
func TestMaintenanceOfTablesOfSomebodyElse(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1")
	owner, other := f.role("owner"), f.role("other")
	f.grant(schema.Roles{Owner: owner})
	// As after a restore under another role: the tables are its, the functions not.
	f.exec("ALTER TABLE outbox.messages OWNER TO " + quoteIdentifier(other))
	f.exec("GRANT ALL ON outbox.messages TO " + quoteIdentifier(owner))
	m := f.maintenance(nil)
	status := f.pass(m)
	require.Contains(t, problems(status), "partition from ")
	require.Contains(t, problems(status), "must be owner of")
	require.Equal(t, outbox.PartitionSealed, partitionOf(status, name).State, "the rest goes on")
}

// What is old goes from the other tables, and no more than that.
func TestMaintenanceSweeps(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.exec(`INSERT INTO outbox.inbox (consumer_group, uuid, handled_at) SELECT 'g', n::text, now() - n * interval '1 minute' FROM generate_series(1, 3000) n`)
	f.exec(`INSERT INTO outbox.dead_letters (consumer_group, topic, uuid, origin_era, origin_id, created_at, attempts, error, died_at)
		SELECT 'g', 't', n::text, 1, n, now(), 1, 'e', now() - n * interval '1 minute' FROM generate_series(1, 120) n`)
	f.exec(`INSERT INTO outbox.dead_letter_log (at, action, dead_letter_id, consumer_group, topic, uuid, origin_era, origin_id, attempts)
		SELECT now() - interval '2 hours', 'died', d.id, 'g', 't', d.uuid, 1, 1, 1 FROM outbox.dead_letters d`)
	f.exec(`INSERT INTO outbox.processes (holder, beat, beat_at) VALUES ('alive', 7, now()), ('dead', 7, now() - interval '2 days')`)
	f.exec(`INSERT INTO outbox.members (holder, consumer_group, topic) VALUES ('alive', 'g', 't'), ('dead', 'g', 't')`)

	f.pass(f.maintenance(func(c *outbox.MaintenanceConfig) { c.Retention, c.InboxRetention = 0, -1 }))
	require.Equal(t, 3000, f.number("SELECT count(*) FROM outbox.inbox"))
	require.Equal(t, 120, f.number("SELECT count(*) FROM outbox.dead_letters"), "by default they stay")
	require.Equal(t, 2, f.number("SELECT count(*) FROM outbox.processes"), "times say nothing of processes")
	require.Equal(t, 1, f.number("SELECT outbox.upkeep_bury('{alive,dead}', '{6,7}')"), "alive has beaten since")
	require.Equal(t, []string{"alive"}, f.texts("SELECT holder FROM outbox.processes"))
	require.Equal(t, []string{"alive"}, f.texts("SELECT holder FROM outbox.members"))

	f.pass(f.maintenance(func(c *outbox.MaintenanceConfig) {
		c.Retention, c.InboxRetention, c.DeadLetterRetention = 0, 30*time.Minute, time.Hour
	}))
	require.Equal(t, 29, f.number("SELECT count(*) FROM outbox.inbox"))
	require.Equal(t, 59, f.number("SELECT count(*) FROM outbox.dead_letters"))
	require.Equal(t, 61, f.number("SELECT count(*) FROM outbox.dead_letter_log WHERE action = 'discarded'"))
	require.Equal(t, 59, f.number("SELECT count(*) FROM outbox.dead_letter_log WHERE action = 'died'"), "of those that are there")
}

// What SQL says of snapshots is what Go says.
func TestUpkeepCoversAsTheReaderDoes(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	random := rand.New(rand.NewPCG(1, 2))
	snapshot := func() string {
		xmin := 3 + random.IntN(6) // no transaction is older
		var xip []string
		x := xmin
		for range random.IntN(5) {
			xip = append(xip, fmt.Sprint(x))
			x += 1 + random.IntN(2)
		}
		xmax := x + random.IntN(3)
		if len(xip) == 0 {
			xmin = xmax
		}
		return fmt.Sprintf("%d:%d:%s", xmin, xmax, strings.Join(xip, ","))
	}
	var ps, seals []string
	for range 5000 {
		ps, seals = append(ps, snapshot()), append(seals, snapshot())
	}
	rows, err := f.pool.Query(t.Context(), f.sql(`SELECT s.p, s.seal, outbox.upkeep_covers(s.p::pg_snapshot, s.seal::pg_snapshot) FROM unnest($1::text[], $2::text[]) AS s (p, seal)`), ps, seals)
	require.NoError(t, err)
	answers := map[bool]int{}
	for rows.Next() {
		var p, seal string
		var covers bool
		require.NoError(t, rows.Scan(&p, &seal, &covers))
		position, err := window.ParseSnapshot(p)
		require.NoError(t, err)
		other, err := window.ParseSnapshot(seal)
		require.NoError(t, err)
		require.Equal(t, position.Covers(other), covers, "%s covers %s", p, seal)
		answers[covers]++
	}
	require.NoError(t, rows.Err())
	require.Greater(t, answers[true], 100)
	require.Greater(t, answers[false], 100)
}

// The ranges that a reader may leave out.
func TestUpkeepRanges(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	m := f.maintenance(nil)
	f.past(5)
	f.past(4)
	_, last := f.past(2)
	f.pass(m)
	var seals window.Seals
	require.NoError(t, seals.Refresh(t.Context(), window.NewQueries(oddSchema), f.pool))
	var era int64
	require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT outbox.era()")).Scan(&era))
	now, err := window.ParseSnapshot(f.text("SELECT pg_current_snapshot()::text"))
	require.NoError(t, err)
	require.Equal(t, last.Truncate(time.Hour).Add(time.Hour), seals.Of(era, now).Since, "over the gap: what is in the DEFAULT partition is looked for")
	require.True(t, seals.Of(era+1, now).Since.IsZero())
	require.True(t, seals.Of(era, window.Snapshot{}).Since.IsZero())
}
