package tests

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/window"
)

// After a move to another cluster nearly all rows are another era's and were
// handed out there. A statement that walked them all ran into its time limit,
// was begun again, and never got through. For many topics it walked those of all
// others, too, of whatever cluster, until it had found enough.
func TestRowsOfAnotherEraAreLookedAtInBoundedSteps(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		topics window.Topics
		// old is the topic of the rows that are none of the reader's to hand out.
		old string
		// p is what was handed out of the older cluster's.
		p string
	}{
		"one topic":                 {window.One("topic"), "topic", "1500:1500:"},
		"many topics":               {window.Matching(window.Pattern{"topic", ""}), "topic", "1500:1500:"},
		"many topics beside others": {window.Matching(window.Pattern{"topic", ""}), "other", "1:1:"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			// An older cluster's rows: 45,000 that are not for the reader, then three that are.
			const old, seen = 1, 45_000
			insert := "INSERT INTO outbox.messages (xid, era, topic, uuid) SELECT $1::text::xid8, 1, $3, 'old ' || g FROM generate_series(1, $2::int) g"
			f.exec(insert, "1000", seen, test.old)
			f.exec(insert, "2000", 3, "topic")
			f.exec("INSERT INTO outbox.messages (topic, uuid) VALUES ('topic', 'new')")

			queries := window.NewQueries(oddSchema)
			now, err := queries.Now(t.Context(), f.pool)
			require.NoError(t, err)
			snapshot, err := window.ParseSnapshot(test.p)
			require.NoError(t, err)
			reader := window.Reader{Queries: queries, Topics: test.topics, Group: "group", Limits: window.Limits{Rows: 2, Bytes: 1 << 20}}
			pos := window.Earliest(now.Life.Era)
			pos.Past = map[int64]window.PastEra{old: {P: snapshot, Floor: seen}}

			var got []string
			steps := 0
			for pos.Step == window.Past {
				page, err := reader.Next(t.Context(), f.pool, pos)
				require.NoError(t, err)
				for _, row := range page.Rows {
					require.Equal(t, int64(old), row.Era)
					require.Equal(t, "topic", row.Topic)
					got = append(got, row.UUID)
				}
				pos = page.End
				steps++
			}
			require.Equal(t, []string{"old 1", "old 2", "old 3"}, got)
			require.Greater(t, steps, seen/20_000)
			page, err := reader.Next(t.Context(), f.pool, pos)
			require.NoError(t, err)
			require.Len(t, page.Rows, 1)
			require.Equal(t, "new", page.Rows[0].UUID)
		})
	}
}

// Where nearly all rows of a partition came from one transaction, the planner
// looked for the late rows of another by walking that bulk load: correct, by its
// statistics, and slow at each window.
func TestLateRowsBesideABulkLoadAreReadByTransaction(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	queries := window.NewQueries(oddSchema)
	insert := "INSERT INTO outbox.messages (topic, uuid) SELECT 'topic', 'u' FROM generate_series(1, $1::int)"
	f.exec(insert, 50_000)
	f.exec("VACUUM ANALYZE outbox.messages")
	late, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = late.Exec(t.Context(), f.sql(insert), 10)
	require.NoError(t, err)
	f.exec(insert, 10)
	before, err := queries.Now(t.Context(), f.pool)
	require.NoError(t, err)
	require.NoError(t, late.Commit(t.Context()))

	content, err := os.ReadFile("../internal/window/queries/open.sql")
	require.NoError(t, err)
	for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
		conn, err := pgx.Connect(t.Context(), f.url)
		require.NoError(t, err)
		_, err = conn.Exec(t.Context(), fmt.Sprintf("SET plan_cache_mode = %s; SET jit = off; SET enable_seqscan = off; SET enable_bitmapscan = off", mode))
		require.NoError(t, err)
		_, err = conn.Exec(t.Context(), "PREPARE open (text, text, text, bigint, bigint, bigint, integer, integer, bigint) AS "+f.sql(window.Fill(string(content), false, time.Time{})))
		require.NoError(t, err)
		rows, err := conn.Query(t.Context(), fmt.Sprintf("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) EXECUTE open ('topic', 'group', '%s', %d, 1000, 1000000, 0, 1, 9223372036854775807)",
			before.Snapshot, before.Top), pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		plan := strings.Join(lines, "\n")
		require.Regexp(t, `actual rows=10(\.00)? `, plan, "the late rows") // with a fraction since version 18
		for _, line := range lines {
			var removed int
			if _, err := fmt.Sscanf(strings.TrimSpace(line), "Rows Removed by Filter: %d", &removed); err == nil {
				require.Less(t, removed, 1000, "%s:\n%s", mode, plan)
			}
		}
		require.NoError(t, conn.Close(t.Context()))
	}
}
