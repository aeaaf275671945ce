package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/window"
)

// hotQuery is a query that runs for each page, or each look.
type hotQuery struct {
	file string
	// index are the columns of the index it reads messages by, except in some
	// parts of the statement.
	index string
	in    map[string]string
	// values of its parameters; see planValues.
	values func(v planValues) []string
	// many is set where it is explained: as it reads many topics, not one.
	many bool
}

// planValues are what the values of parameters are made of: a position in the
// middle of the log, and the present.
type planValues struct {
	p, c       string // snapshots: in the middle of the log, and now
	floor, top int64
	xids       string // transactions, as an array
	era        int64
	shards     int
}

const (
	byEra = "(topic, era, id)"
	byXid = "(topic, xid, id)"
	// The same for those who read many topics.
	manyByEra = "(((era + 0)), ((id + 0)))"
	manyByXid = "(NULLIF(xid, '0'::xid8), ((id + 0)))"

	// noEnd is the end of a scan that has none.
	noEnd = "9223372036854775807"
)

var hotQueries = []hotQuery{
	{file: "internal/window/queries/open.sql", index: byEra, in: map[string]string{"CTE late_xid": byXid, "CTE late": byXid}, values: func(v planValues) []string {
		return []string{"'topic 1'", "'group'", quote(v.p), fmt.Sprint(v.floor), "1000", "1000000", "0", fmt.Sprint(v.shards), noEnd}
	}},
	{file: "internal/window/queries/main.sql", index: byEra, values: func(v planValues) []string {
		return []string{"'topic 1'", "'group'", "1000", "1000000", fmt.Sprint(v.floor), fmt.Sprint(v.top), quote(v.p), quote(v.c), "0", fmt.Sprint(v.shards)}
	}},
	{file: "internal/window/queries/late.sql", index: byXid, values: func(v planValues) []string {
		return []string{"'topic 1'", "'group'", "1000", "1000000", "0", fmt.Sprint(v.floor), v.xids, "0", fmt.Sprint(v.shards)}
	}},
	{file: "internal/window/queries/late_xids.sql", index: byXid, values: func(v planValues) []string {
		return []string{"'topic 1'", quote(v.p), quote(v.c), fmt.Sprint(v.floor)}
	}},
	{file: "internal/window/queries/holes.sql", index: byEra, values: func(v planValues) []string {
		return []string{"'topic 1'", "'group'", "1000", "1000000", fmt.Sprintf("array[%d, %d]", v.era, v.era), fmt.Sprintf("array[%d, %d]", v.floor, v.top)}
	}},
	{file: "internal/watch/queries/watch.sql", index: byXid, values: func(v planValues) []string {
		return []string{"array['topic 1', 'topic 2', 'no such topic']", quote(v.p), "array['group']", "array['topic 1']", "array['topic%']"}
	}},
	{file: "internal/cursor/queries/finish.sql", index: byEra, values: func(v planValues) []string {
		return []string{
			"'topic 1'", "'holder'", "'group'", "''", "0", "1", fmt.Sprint(v.era), "'life'",
			quote(fmt.Sprintf(`[{"era": %d, "id": %d}, {"era": %d, "id": %d}]`, v.era, v.floor, v.era, v.top)),
		}
	}},
	{file: "internal/window/queries/past.sql", index: byEra, values: func(v planValues) []string {
		return []string{
			"'topic 1'", "'group'", "1000", "1000000", "(-9223372036854775808)::bigint", "0",
			fmt.Sprintf("array[%d]", v.era-1), "array['3:3:']", "array['1:1:']", "array[0]", "3000",
			"0", fmt.Sprint(v.shards), "NULL", "'1:1:'",
		}
	}},
}

func quote(text string) string { return "'" + text + "'" }

// consumerSettings are what a consumer's sessions are started with.
var consumerSettings = map[string]string{
	"row_security": "off", "search_path": "", "jit": "off", "enable_seqscan": "off", "enable_bitmapscan": "off",
	"max_parallel_workers_per_gather": "0",
}

// A query that reads the whole table, or sorts more than a page, is fast as long
// as the table is small, and its plan changes with the statistics, some day. Each
// one reads messages by its index, within the bounds of its position, whether the
// plan is made for the values at hand or for any, before there are statistics and
// after. A plan may outlive the time in which a partition was empty, so that is no
// excuse.
func TestPlansReadByIndex(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	values := f.fillForPlans(t)
	columns := f.indexColumns(t)
	check := func(t *testing.T) {
		f.explainAll(t, consumerSettings, values, func(t *testing.T, q hotQuery, p plan) {
			scans := 0
			p.walk(func(node plan, above []plan) {
				if !node.onMessages() {
					return
				}
				scans++
				require.Contains(t, []string{"Index Scan", "Index Only Scan"}, node.Type, "%s\n%s", node.Relation, p)
				q.requireBounds(t, p, node, above, columns)
				for i := len(above) - 1; i >= 0 && above[i].Type != "Limit" && above[i].Type != "Nested Loop"; i-- {
					require.NotContains(t, above[i].Type, "Sort", "rows of messages are sorted before a limit\n%s", p)
					require.NotContains(t, above[i].Type, "Join", "all rows of the topic are joined\n%s", p)
				}
			})
			require.Positive(t, scans, p)
		})
	}
	t.Run("before the first ANALYZE", check)
	f.exec("ANALYZE outbox.messages")
	t.Run("after it", check)
}

// Without the settings of our sessions, which a pooler between may drop, plans are
// not what they should be, but where rows are they are found by index all the
// same.
func TestPlansWithDefaultSettings(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	values := f.fillForPlans(t)
	columns := f.indexColumns(t)
	f.exec("ANALYZE outbox.messages")
	f.explainAll(t, nil, values, func(t *testing.T, q hotQuery, p plan) {
		scans := 0
		p.walk(func(node plan, above []plan) {
			relation := node.Relation
			if node.Type == "Bitmap Index Scan" {
				relation = above[len(above)-1].Relation
			}
			if !strings.HasPrefix(relation, "messages_") || relation == "messages_id_seq" ||
				f.number("SELECT count(*)::int FROM (SELECT FROM outbox."+quoteIdentifier(relation)+" LIMIT 1) AS m") == 0 {
				return
			}
			if node.Index == "" {
				require.Equal(t, "Bitmap Heap Scan", node.Type, "%s\n%s", relation, p)
				return
			}
			scans++
			q.requireBounds(t, p, node, above, columns)
		})
		require.Positive(t, scans, p)
	})
}

// explainAll explains each query with these settings, for given values and for
// any.
func (f *fixture) explainAll(t *testing.T, settings map[string]string, values planValues, check func(*testing.T, hotQuery, plan)) {
	for _, q := range hotQueries {
		for _, c := range []struct {
			mode   string
			shards int
			many   bool
		}{
			{mode: "force_generic_plan", shards: 1},
			{mode: "force_custom_plan", shards: 1},
			{mode: "force_custom_plan", shards: 8},
			{mode: "force_generic_plan", shards: 1, many: true},
			{mode: "force_custom_plan", shards: 1, many: true},
		} {
			t.Run(fmt.Sprintf("%s %s of %d shards, many topics %t", filepath.Base(q.file), c.mode, c.shards, c.many), func(t *testing.T) {
				q, values := q, values
				q.many, values.shards = c.many, c.shards
				arguments := q.values(values)
				if q.many && arguments[0] == "'topic 1'" {
					arguments[0] = "array['topic%']"
				}
				conn := f.connect(t)
				for name, value := range settings {
					_, err := conn.Exec(t.Context(), "SELECT set_config($1, $2, false)", name, value)
					require.NoError(t, err)
				}
				f.prepare(t, conn, q.file, q.many)
				_, err := conn.Exec(t.Context(), "SELECT set_config('plan_cache_mode', $1, false)", c.mode)
				require.NoError(t, err)
				check(t, q, explain(t, conn, "", "hot", arguments))
			})
		}
	}
}

// requireBounds fails unless a scan uses the index that fits, and more of it than
// the topic.
func (q hotQuery) requireBounds(t *testing.T, p, node plan, above []plan, columns map[string]string) {
	t.Helper()
	index := q.index
	for _, n := range above {
		if in, ok := q.in[n.Subplan]; ok {
			index = in
		}
	}
	switch q.file {
	case "internal/watch/queries/watch.sql": // looks for both at once
		if columns[node.Index] == manyByXid {
			index = manyByXid
		}
	default:
		if q.many {
			index = map[string]string{byEra: manyByEra, byXid: manyByXid}[index]
		}
	}
	require.Equal(t, index, columns[node.Index], "%s\n%s", node.Index, p)
	for _, bound := range map[string][]string{
		byEra: {"topic =", "era", "id"}, byXid: {"topic =", "xid"}, manyByEra: {"era + 0", "id + 0"}, manyByXid: {"xid"},
	}[index] {
		require.Contains(t, node.IndexCond, bound, "%s\n%s", node.Index, p)
	}
}

// With the log full of rows, a look at nothing new touches none of them, and a
// page as many as it returns.
func TestPlansTouchOnlyWhatTheyReturn(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	v := f.fillForPlans(t)
	f.exec("ANALYZE outbox.messages")
	conn := f.connect(t)
	for name, value := range consumerSettings {
		_, err := conn.Exec(t.Context(), "SELECT set_config($1, $2, false)", name, value)
		require.NoError(t, err)
	}
	touched := func(file string, values ...string) float64 {
		t.Helper()
		f.prepare(t, conn, file, strings.HasPrefix(values[0], "array[") && !strings.HasSuffix(file, "watch.sql"))
		p := explain(t, conn, ", ANALYZE", "hot", values)
		rows := 0.0
		p.walk(func(node plan, _ []plan) {
			if node.onMessages() {
				rows += (node.Rows + node.Removed) * node.Loops
			}
		})
		return rows
	}
	last := fmt.Sprint(v.top)
	require.Zero(t, touched("internal/watch/queries/watch.sql", "array['topic 1', 'topic 2', 'no such topic']", quote(v.c), "array['group']", "array['topic 1']", "array['topic%']"))
	require.Zero(t, touched("internal/window/queries/open.sql", "'topic 1'", "'group'", quote(v.c), last, "1000", "1000000", "0", "8", noEnd))
	require.Zero(t, touched("internal/window/queries/late_xids.sql", "'topic 1'", quote(v.c), quote(v.c), last))
	// A partition gives one row more than it is asked for, at most.
	const page, slack = 100, 30
	require.InDelta(t, page, touched("internal/window/queries/main.sql",
		"'topic 1'", "'group'", fmt.Sprint(page), "1000000", "0", last, "'1:1:'", quote(v.c), "0", "1"), slack)
	require.InDelta(t, page, touched("internal/window/queries/open.sql", "'topic 1'", "'group'", "'1:1:'", "0", fmt.Sprint(page), "1000000", "0", "1", noEnd), slack)
	require.LessOrEqual(t, touched("internal/watch/queries/watch.sql", "array['topic 1', 'topic 2', 'no such topic']", quote(v.p), "array['group']", "array['topic 1']", "array['topic%']"), float64(slack),
		"one row says that there is news")
	many := func(file string, values ...string) float64 {
		return touched(file, append([]string{"array['topic%']"}, values...)...)
	}
	require.Zero(t, many("internal/window/queries/open.sql", "'group'", quote(v.c), last, "1000", "1000000", "0", "8", noEnd))
	require.Zero(t, many("internal/window/queries/late_xids.sql", quote(v.c), quote(v.c), last))
	require.InDelta(t, page, many("internal/window/queries/main.sql",
		"'group'", fmt.Sprint(page), "1000000", "0", last, "'1:1:'", quote(v.c), "0", "1"), slack)
	require.InDelta(t, page, many("internal/window/queries/open.sql", "'group'", "'1:1:'", "0", fmt.Sprint(page), "1000000", "0", "1", noEnd), slack)
	// Of other clusters' rows as many are looked at as it may, and no more where
	// none of them match.
	for topics, matching := range map[string]float64{"array['topic%']": page, "array['no such topic%']": 0} {
		rows := touched("internal/window/queries/past.sql", topics, "'group'", "1000", "1000000", "(-9223372036854775808)::bigint", "0",
			"array[]::bigint[]", "array[]::text[]", "array[]::text[]", "array[]::bigint[]", fmt.Sprint(page), "0", "1", "NULL", "'1:1:'")
		require.InDelta(t, page+matching, rows, slack, topics)
	}
}

// prepare prepares a query as "hot", for one topic or for many.
func (f *fixture) prepare(t *testing.T, conn *pgx.Conn, file string, many bool) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", file))
	require.NoError(t, err)
	for _, statement := range []string{"DEALLOCATE ALL", "PREPARE hot AS " + f.sql(window.Fill(string(text), many, time.Time{}))} {
		_, err = conn.Exec(t.Context(), statement, pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
	}
}

// fillForPlans writes 20,000 rows of four topics, in 200 transactions, and some
// of another cluster.
func (f *fixture) fillForPlans(t *testing.T) (v planValues) {
	t.Helper()
	const transactions, rows = 200, 100
	publisher := f.publisher(outbox.PublisherConfig{})
	for i := range transactions {
		require.NoError(t, publisher.Publish(fmt.Sprintf("topic %d", i%4), newMessages(rows)...))
		if i == transactions/2 {
			require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT pg_current_snapshot()::text, last_value FROM outbox.messages_id_seq")).Scan(&v.p, &v.floor))
		}
	}
	f.exec(`INSERT INTO outbox.messages (era, topic, uuid) SELECT outbox.era() - 1, 'topic ' || g % 4, 'old ' || g FROM generate_series(1, 1000) g`)
	require.NoError(t, f.pool.QueryRow(t.Context(), f.sql(`SELECT pg_current_snapshot()::text, last_value, outbox.era(),
		(SELECT 'array[' || string_agg(DISTINCT '''' || xid::text || '''', ', ') || ']' FROM outbox.messages WHERE topic = 'topic 1' AND id <= $1)
		FROM outbox.messages_id_seq`), v.floor).Scan(&v.c, &v.top, &v.era, &v.xids))
	return v
}

// indexColumns returns the columns of the indexes of messages' partitions.
func (f *fixture) indexColumns(t *testing.T) map[string]string {
	t.Helper()
	rows, err := f.pool.Query(t.Context(), `SELECT c.relname::text, pg_get_indexdef(c.oid) FROM pg_class c
		JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relkind = 'i'`, oddSchema)
	require.NoError(t, err)
	columns := map[string]string{}
	var name, definition string
	_, err = pgx.ForEachRow(rows, []any{&name, &definition}, func() error {
		_, columns[name], _ = strings.Cut(definition, "USING btree ")
		return nil
	})
	require.NoError(t, err)
	return columns
}
