package tests

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// largeIntervals make partitions so wide that no test sees the next one begin.
var largeIntervals = schema.Config{PartitionInterval: schema.MaxPartitionInterval, LookAhead: schema.MaxPartitionInterval}

func TestMigrateTwiceIsOnce(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("orders", newMessages(1)...))
	before := catalog(t, f.pool)
	life := f.text("SELECT life::text FROM outbox.boot")
	require.NoError(t, schema.Migrate(t.Context(), f.pool, schema.Config{Name: oddSchema}))
	conn := f.connect(t)
	require.NoError(t, schema.Migrate(t.Context(), conn, schema.Config{Name: oddSchema, PartitionInterval: time.Minute}))
	require.Equal(t, before, catalog(t, f.pool))
	require.Equal(t, life, f.text("SELECT life::text FROM outbox.boot"))
	require.Equal(t, "3600", f.text("SELECT value::text FROM outbox.meta WHERE key = 'partition_interval'"))
	require.Len(t, f.stored(t, "orders"), 1)
}

// Every moment from now up to the look-ahead has a partition, whatever the part
// of an interval that has passed already.
func TestMigrateCreatesPartitions(t *testing.T) {
	t.Parallel()

	pool := pgtest.Pool(t, pgtest.Database(t))
	for name, config := range map[string]schema.Config{
		"default":    {},
		"no ahead":   {PartitionInterval: time.Hour, LookAhead: time.Second},
		"odd widths": {PartitionInterval: 61 * time.Second, LookAhead: 7 * time.Minute},
		"many":       {PartitionInterval: time.Minute, LookAhead: 100 * time.Minute},
		"longest":    largeIntervals,
	} {
		config.Name = name
		// In one transaction now() is the same moment for all.
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, schema.Migrate(t.Context(), tx, config))
		config = config.WithDefaults()
		var partitions, missing int
		require.NoError(t, tx.QueryRow(t.Context(), `
			WITH bound AS (
				SELECT regexp_match(pg_get_expr(c.relpartbound, c.oid), $re$FROM \('(.*)'\) TO \('(.*)'\)$re$) AS b
				FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
				WHERE n.nspname = $1 AND c.relispartition AND c.relkind = 'r' AND c.relname <> 'messages_default'
			)
			SELECT (SELECT count(*) FROM bound), count(*)
			FROM generate_series(now(), now() + make_interval(secs => $2), make_interval(secs => $2 / 50)) AS moment
			WHERE NOT EXISTS (SELECT FROM bound WHERE moment >= b[1]::timestamptz AND moment < b[2]::timestamptz)`,
			name, config.LookAhead.Seconds()).Scan(&partitions, &missing))
		require.Zero(t, missing, name)
		require.InDelta(t, int(config.LookAhead/config.PartitionInterval)+1, partitions, 1, name)
		require.Contains(t, meta(t, tx, name), fmt.Sprintf("look_ahead=%d", int(config.LookAhead.Seconds())))
		require.Contains(t, meta(t, tx, name), fmt.Sprintf("partition_interval=%d", int(config.PartitionInterval.Seconds())))
		require.NoError(t, tx.Commit(t.Context()))
	}
}

// The message of a future that no upkeep has prepared is stored all the same.
func TestPublishWithoutPartition(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.dropPartitions()
	sent := variety(100)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("orders", sent...))
	require.Equal(t, len(sent), f.number("SELECT count(*) FROM outbox.messages_default"))
	f.requireStored(t, "orders", sent)
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "orders")
	requireDelivered(t, messages, sent)
}

// partitions returns the names of all partitions but the DEFAULT one.
func (f *fixture) partitions() []string {
	f.t.Helper()
	rows, err := f.pool.Query(f.t.Context(), `SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relispartition AND c.relkind = 'r' AND c.relname <> 'messages_default' ORDER BY 1`, oddSchema)
	require.NoError(f.t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(f.t, err)
	require.NotEmpty(f.t, names)
	return names
}

// dropPartitions drops them.
func (f *fixture) dropPartitions() {
	f.t.Helper()
	for _, name := range f.partitions() {
		f.exec("DROP TABLE outbox." + quoteIdentifier(name))
	}
}
