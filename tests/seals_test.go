package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/window"
)

// sealedReader is a reader of a topic that leaves out what is sealed, in the middle
// of the log.
type sealedReader struct {
	*fixture

	reader window.Reader
	pos    window.Position
}

// sealedReader returns one that has everything there is now; it knows no seals yet.
func (f *fixture) sealedReader(topics window.Topics) *sealedReader {
	f.t.Helper()
	queries := window.NewQueries(oddSchema)
	now, err := queries.Now(f.t.Context(), f.pool)
	require.NoError(f.t, err)
	return &sealedReader{
		fixture: f, pos: window.Latest(now.Life.Era, now.Snapshot, now.Top),
		reader: window.Reader{Queries: queries, Topics: topics, Group: "group", Limits: window.Limits{Rows: 100, Bytes: 1 << 20}, Seals: &window.Seals{}},
	}
}

// refresh reads the seals, and returns before when the reader leaves out everything.
func (r *sealedReader) refresh() time.Time {
	r.t.Helper()
	require.NoError(r.t, r.reader.Seals.Refresh(r.t.Context(), r.reader.Queries, r.pool))
	return r.since()
}

func (r *sealedReader) since() time.Time {
	return r.reader.Seals.Of(r.pos.Era, r.pos.P).Since
}

// read reads on until there is no more, and returns what it got.
func (r *sealedReader) read() (uuids []string) {
	r.t.Helper()
	for {
		page, err := r.reader.Next(r.t.Context(), r.pool, r.pos)
		require.NoError(r.t, err)
		for _, row := range page.Rows {
			uuids = append(uuids, row.UUID)
		}
		if r.pos = page.End; !page.More {
			return uuids
		}
	}
}

// sealedPast makes a partition of the past with a message, seals it, and returns a
// reader that has all of it and leaves it out.
func (f *fixture) sealedPast(hours int) (name string, inside time.Time, r *sealedReader) {
	f.t.Helper()
	name, inside = f.past(hours)
	f.past(0) // the present
	f.past(-1)
	f.exec("SELECT outbox.upkeep_sync()")
	f.insertAt(f.pool, "orders", inside, "first")
	require.Equal(f.t, "sealed", f.text("SELECT outbox.upkeep_seal($1, 0)", name))
	r = f.sealedReader(window.One("orders"))
	require.Equal(f.t, inside.Truncate(time.Hour).Add(time.Hour), r.refresh())
	return name, inside, r
}

// clockAt makes the log take this for the present, as after the server's clock was
// set.
func (f *fixture) clockAt(moment time.Time) {
	f.t.Helper()
	f.exec(fmt.Sprintf("ALTER TABLE outbox.messages ALTER COLUMN created_at SET DEFAULT '%s'", moment.Format(time.RFC3339)))
}

// The clock was set back by more than the seal delay, so messages came into a sealed
// partition. They were published again, by the same clock, into the same partition,
// and the seal was void; a reader that still knew it left the partition out, was
// past them when it learned better, and the next seal saw them. So with all that
// came before it had asked again.
func TestSealsThatAreVoidedWhileAReaderKnowsThem(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	name, inside, r := f.sealedPast(3)
	f.clockAt(inside)
	f.exec("INSERT INTO outbox.messages (topic, uuid) VALUES ('orders', 'stray')")
	require.Empty(t, r.read(), "left out until it is published again")
	require.Equal(t, 1, f.number("SELECT outbox.upkeep_strays($1, 1000)", name))
	require.Equal(t, "open", f.text("SELECT state FROM outbox.partitions WHERE name = $1", name))
	require.Equal(t, []string{"stray"}, r.read())
	f.exec("INSERT INTO outbox.messages (topic, uuid) VALUES ('orders', 'after')")
	require.Equal(t, []string{"after"}, r.read())
	require.Zero(t, r.since())
	require.Zero(t, r.refresh())

	require.Equal(t, "sealed", f.text("SELECT outbox.upkeep_seal($1, 0)", name))
	require.Empty(t, r.read())
	require.NotZero(t, r.refresh(), "the position covers the new seal")
}

// More strays than are published again at a time: the seal was void after the first
// of them, the next one saw the others, and nobody ever looked there again.
func TestSealsWithMoreStraysThanAreMovedAtATime(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	name, inside, r := f.sealedPast(3)
	f.insertAt(f.pool, "orders", inside, "1", "2", "3")
	require.Empty(t, r.read())
	var got []string
	for moved := 0; moved < 3; {
		n := f.number("SELECT outbox.upkeep_strays($1, 2)", name)
		require.Positive(t, n, "of 3 strays %d were published again", moved)
		moved += n
		got = append(got, r.read()...)
	}
	require.Equal(t, []string{"1", "2", "3"}, got)
	require.Equal(t, "open", f.text("SELECT state FROM outbox.partitions WHERE name = $1", name))
	require.Equal(t, 1, f.number("SELECT voided FROM outbox.partitions WHERE name = $1", name))
}

// A stray that has not committed when others are published again: the seal is not
// void before it has, for the next one would see it. It keeps none of the others.
func TestSealsAreNotVoidedBesideAnOpenTransaction(t *testing.T) {
	t.Parallel()

	for name, prepare := range map[string]bool{"open": false, "prepared": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newUpkeep(newFixture(t))
			name, inside, r := f.sealedPast(3)
			f.clockAt(inside)
			tx := f.begin()
			_, err := tx.Exec(t.Context(), f.sql("INSERT INTO outbox.messages (topic, uuid) VALUES ('orders', 'open')"))
			require.NoError(t, err)
			commit := func() error { return tx.Commit(t.Context()) }
			if prepare && f.number("SELECT current_setting('max_prepared_transactions')::int") > 0 {
				id := quote(f.text("SELECT gen_random_uuid()::text"))
				_, err := tx.Exec(t.Context(), "PREPARE TRANSACTION "+id)
				require.NoError(t, err)
				commit = func() error { _, err := f.pool.Exec(t.Context(), "COMMIT PREPARED "+id); return err }
			}
			f.exec("INSERT INTO outbox.messages (topic, uuid) VALUES ('orders', 'other')")
			require.Empty(t, r.read())
			require.Equal(t, 1, f.number("SELECT outbox.upkeep_strays($1, 1000)", name))
			require.Equal(t, "sealed", f.text("SELECT state FROM outbox.partitions WHERE name = $1", name))
			require.Equal(t, []string{"other"}, r.read())
			require.NoError(t, commit())
			require.Empty(t, r.read())
			require.Equal(t, 1, f.number("SELECT outbox.upkeep_strays($1, 1000)", name))
			require.Equal(t, "open", f.text("SELECT state FROM outbox.partitions WHERE name = $1", name))
			require.Equal(t, []string{"open"}, r.read())
		})
	}
}

// The clock was far ahead for a while, so partitions of the future were sealed,
// emptied and dropped. What is made in their place, under the same names, is read by
// those who remember their seals.
func TestSealsOfPartitionsThatAreMadeAgain(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	f.exec("UPDATE outbox.meta SET value = '3600' WHERE key = 'partition_interval'")
	f.exec("UPDATE outbox.meta SET value = '43200' WHERE key = 'look_ahead'")
	lower := time.Now().UTC().Truncate(time.Hour).Add(10 * time.Hour)
	name := "messages_" + lower.Format("20060102t150405")
	require.Equal(t, "made", f.text("SELECT outbox.upkeep_make($1, $2)", lower, lower.Add(time.Hour)))
	// As upkeep_seal does by a clock that is past the range.
	f.exec(`UPDATE outbox.partitions SET state = 'sealed', seal = pg_current_snapshot(), seal_era = outbox.era() WHERE name = $1`, name)
	f.exec(`UPDATE outbox.upkeep SET sealed_to = $1`, lower.Add(time.Hour))
	r := f.sealedReader(window.One("orders"))
	require.Equal(t, lower.Add(time.Hour), r.refresh())
	f.exec("DROP TABLE outbox." + name)
	require.Empty(t, r.read())
	require.Equal(t, "made", f.text("SELECT outbox.upkeep_make($1, $2)", lower, lower.Add(time.Hour)))
	f.insertAt(f.pool, "orders", lower.Add(time.Minute), "in it")
	require.Equal(t, []string{"in it"}, r.read())
}

// In the DEFAULT partition there may be messages of any time.
func TestSealsWithMessagesInTheDefaultPartition(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	_, inside, r := f.sealedPast(3)
	// Of a time before that of all partitions; and the seals were read before.
	f.insertAt(f.pool, "orders", inside.Add(-time.Hour), "old")
	require.Equal(t, []string{"old"}, r.read())
	require.Zero(t, r.since(), "it knows none until it has asked again")
	require.Zero(t, r.refresh(), "nor then")
	f.insertAt(f.pool, "orders", inside.Add(-time.Hour), "older")
	f.insertAt(f.pool, "orders", time.Now(), "present")
	require.Equal(t, []string{"older", "present"}, r.read())
	f.exec("DELETE FROM outbox.messages_default")
	require.NotZero(t, r.refresh())
	require.Empty(t, r.read())
	// And in the middle of a window.
	f.insertAt(f.pool, "orders", inside.Add(-time.Hour), "a", "b", "c")
	require.NotZero(t, r.since())
	r.reader.Limits.Rows = 1
	require.Equal(t, []string{"a", "b", "c"}, r.read())
}

// Late rows, of a transaction that published before others and committed after
// them, from the DEFAULT partition.
func TestSealsAndLateMessagesInTheDefaultPartition(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	_, inside, r := f.sealedPast(3)
	tx := f.begin()
	f.insertAt(tx, "orders", inside.Add(-time.Hour), "late 1", "late 2", "late 3")
	f.exec("UPDATE outbox.meta SET value = value") // ends later than tx began
	require.Empty(t, r.read())
	require.NoError(t, tx.Commit(t.Context()))
	require.NotZero(t, r.since())
	r.reader.Limits.Rows = 1
	require.Equal(t, []string{"late 1", "late 2", "late 3"}, r.read())
}

// Whoever has not got all of a sealed partition reads it.
func TestSealsThatAPositionDoesNotCover(t *testing.T) {
	t.Parallel()

	for name, topics := range map[string]window.Topics{"one topic": window.One("orders"), "many topics": window.Matching(window.Pattern{"ord", ""})} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newUpkeep(newFixture(t))
			behind := f.sealedReader(topics)
			first, inside := f.past(4)
			second, after := f.past(3)
			f.exec("SELECT outbox.upkeep_sync()")
			f.insertAt(f.pool, "orders", inside, "1")
			require.Equal(t, "sealed", f.text("SELECT outbox.upkeep_seal($1, 0)", first))
			between := f.sealedReader(topics)
			f.insertAt(f.pool, "orders", after, "2")
			require.Equal(t, "sealed", f.text("SELECT outbox.upkeep_seal($1, 0)", second))
			require.Zero(t, behind.refresh())
			require.Equal(t, inside.Truncate(time.Hour).Add(time.Hour), between.refresh())
			require.Equal(t, []string{"1", "2"}, behind.read())
			require.Equal(t, []string{"2"}, between.read())
			require.Equal(t, after.Truncate(time.Hour).Add(time.Hour), behind.since(), "now it has them")
		})
	}
}

// What was sealed in another life of the server, or on another cluster, says nothing
// of this one.
func TestSealsOfAnotherLife(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	name, inside, r := f.sealedPast(3)
	f.exec("UPDATE outbox.boot SET life = gen_random_uuid()")
	f.insertAt(f.pool, "orders", inside, "in it")
	require.NotZero(t, r.since())
	require.Equal(t, []string{"in it"}, r.read())
	require.Zero(t, r.since())
	require.NotZero(t, r.refresh(), "read in this life")

	f.exec("UPDATE outbox.partitions SET seal_era = seal_era - 1 WHERE name = $1", name)
	require.Zero(t, r.refresh())
	f.exec("UPDATE outbox.partitions SET seal_era = seal_era + 1 WHERE name = $1; ", name)
	require.NotZero(t, r.refresh())
	f.exec("DELETE FROM outbox.boot")
	require.Zero(t, r.refresh(), "nobody has named this life yet")
}

// A partition that upkeep does not know may get rows at any time, wherever its range
// lies.
func TestSealsBesideAPartitionMadeByHand(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	_, inside, r := f.sealedPast(3)
	day := inside.Truncate(time.Hour).Add(-48 * time.Hour)
	f.exec(fmt.Sprintf("CREATE TABLE outbox.by_hand PARTITION OF outbox.messages FOR VALUES FROM ('%s') TO ('%s')", day.Format(time.RFC3339), day.Add(time.Hour).Format(time.RFC3339)))
	require.Zero(t, r.refresh())
	f.insertAt(f.pool, "orders", day.Add(time.Minute), "by hand")
	require.Equal(t, []string{"by hand"}, r.read())
	f.exec("DROP TABLE outbox.by_hand")
	require.NotZero(t, r.refresh())
	// One of a name that upkeep would give, which it has not seen yet.
	other, at := f.past(5)
	require.Zero(t, r.refresh())
	f.exec("SELECT outbox.upkeep_sync()")
	require.Zero(t, r.refresh(), "%s is known now, and open", other)
	f.insertAt(f.pool, "orders", at, "open")
	require.Equal(t, []string{"open"}, r.read())
}

// What has been read of a long log costs nothing: the statements that leave out sealed
// partitions do not even lock them, and read the others, and the DEFAULT one, by their
// indexes.
func TestSealsLeaveOutPartitions(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	const oldest, newest = 43, 4 // hours ago
	sealed := map[string]bool{}
	for hours := oldest; hours >= -1; hours-- {
		name, _ := f.past(hours)
		sealed[name] = hours >= newest
	}
	f.exec("INSERT INTO outbox.messages (topic, uuid, created_at) SELECT 'topic 1', 'old', now() - g * interval '1 hour' FROM generate_series(1, 43) AS g")
	f.exec("SELECT outbox.upkeep_sync()")
	since := time.Now().UTC().Truncate(time.Hour).Add(-(newest - 1) * time.Hour)
	require.Equal(t, 40, f.number("SELECT count(outbox.upkeep_seal(p.name, 0)) FROM outbox.partitions p WHERE p.upper <= $1", since))
	r := f.sealedReader(window.One("topic 1"))
	require.Equal(t, since, r.refresh())
	values := f.fillForPlans(t)
	values.shards = 1
	columns := f.indexColumns(t)

	for _, q := range hotQueries {
		name := filepath.Base(q.file)
		if !slices.Contains([]string{"open.sql", "main.sql", "late.sql", "watch.sql"}, name) {
			continue
		}
		for _, many := range []bool{false, true} {
			for _, mode := range []string{"force_generic_plan", "force_custom_plan"} {
				t.Run(fmt.Sprintf("%s, many topics %t, %s", name, many, mode), func(t *testing.T) {
					q := q
					q.many = many
					arguments := q.values(values)
					if many && arguments[0] == "'topic 1'" {
						arguments[0] = "array['topic%']"
					}
					conn := f.connect(t)
					for name, value := range consumerSettings {
						_, err := conn.Exec(t.Context(), "SELECT set_config($1, $2, false)", name, value)
						require.NoError(t, err)
					}
					text, err := os.ReadFile(filepath.Join("..", q.file))
					require.NoError(t, err)
					_, err = conn.Exec(t.Context(), "PREPARE hot AS "+f.sql(window.Fill(string(text), many, since)), pgx.QueryExecModeSimpleProtocol)
					require.NoError(t, err)
					_, err = conn.Exec(t.Context(), "SELECT set_config('plan_cache_mode', $1, false)", mode)
					require.NoError(t, err)
					_, err = conn.Exec(t.Context(), "BEGIN")
					require.NoError(t, err)
					p := explain(t, conn, ", ANALYZE", "hot", arguments)
					locked, err := conn.Query(t.Context(), "SELECT c.relname::text FROM pg_locks l JOIN pg_class c ON c.oid = l.relation WHERE l.pid = pg_backend_pid() AND c.relkind = 'r'")
					require.NoError(t, err)
					names, err := pgx.CollectRows(locked, pgx.RowTo[string])
					require.NoError(t, err)
					require.Contains(t, names, "messages_default")
					for _, name := range names {
						require.False(t, sealed[name], "%s is locked\n%s", name, p)
					}
					read, asked := map[string]bool{}, 0
					p.walk(func(node plan, above []plan) {
						if !node.onMessages() {
							return
						}
						require.Contains(t, []string{"Index Scan", "Index Only Scan"}, node.Type, "%s\n%s", node.Relation, p)
						if node.Relation == "messages_default" && node.IndexCond == "" {
							asked++ // whether there is anything
							require.LessOrEqual(t, (node.Rows+node.Removed)*node.Loops, 1.0)
							return
						}
						read[node.Relation] = true
						q.requireBounds(t, p, node, above, columns)
					})
					require.Equal(t, 1, asked, p)
					require.Len(t, read, 6, "those of the last three hours, of this and the next, and the DEFAULT one\n%s", p)
				})
			}
		}
	}
}
