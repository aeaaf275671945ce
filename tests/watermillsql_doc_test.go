package tests

import (
	"context"
	stdsql "database/sql"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
	"github.com/millrace/watermill-outbox/schema/watermillsql"
)

// What docs/watermill-sql.md shows, block by block.

func showAdapter(tx *stdsql.Tx, logger watermill.LoggerAdapter) (message.Publisher, error) {
	adapter, err := watermillsql.NewAdapter(watermillsql.AdapterConfig{})
	if err != nil {
		return nil, err
	}
	publisher, err := sql.NewPublisher(tx, sql.PublisherConfig{SchemaAdapter: adapter}, logger)
	return publisher, err
}

func showEnvelopes(db *stdsql.DB, logger watermill.LoggerAdapter) (message.Publisher, error) {
	publisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{UnwrapEnvelopes: "forwarder_topic"}, logger)
	if err != nil {
		return nil, err
	}
	return forwarder.NewPublisher(publisher, forwarder.PublisherConfig{ForwarderTopic: "forwarder_topic"}), nil
}

func showResolver(db *stdsql.DB, logger watermill.LoggerAdapter) (message.Publisher, message.Subscriber, error) {
	publisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{RequireTx: true, TxResolver: watermillsql.TxFromContext}, logger)
	if err != nil {
		return nil, nil, err
	}
	subscriber, err := sql.NewSubscriber(db, sql.SubscriberConfig{
		ConsumerGroup: "invoices", SchemaAdapter: sql.DefaultPostgreSQLSchema{}, OffsetsAdapter: watermillsql.AtomicOffsets{},
	}, logger)
	return publisher, subscriber, err
}

func showForwarder(publisher message.Publisher, subscriber message.Subscriber, logger watermill.LoggerAdapter) (*forwarder.Forwarder, error) {
	return forwarder.NewForwarder(subscriber, publisher, logger, forwarder.Config{ForwarderTopic: "forwarder_topic"})
}

func showRouter(router *message.Router, publisher message.Publisher, subscriber message.Subscriber) {
	router.AddHandler("drain", "orders", subscriber, "orders", publisher, message.PassthroughHandler)
}

func showDrain(ctx context.Context, db *stdsql.DB) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	drained, err := watermillsql.Drain(ctx, tx, watermillsql.DrainConfig{Topic: "orders", ConsumerGroup: "invoices", MaxRows: 100_000})
	if err != nil {
		return errors.Join(err, tx.Rollback())
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	if drained.Moved == 0 {
		return errors.New("nothing moved")
	}
	return nil
}

// The manual's code and SQL do what it says, on tables of the default name.
func testWatermillSQLManual(t *testing.T, server *pgtest.Server) {
	f := &fixture{t: t, url: pgtest.DatabaseOn(t, server)}
	f.pool = pgtest.Pool(t, f.url)
	require.NoError(t, schema.Migrate(t.Context(), f.pool, schema.Config{}))
	db := openSQL(t, "pgx", f.url)
	old := oldTable(t, db, "orders", "JSON")
	f.execRaw(`UPDATE "watermill_offsets_orders" SET consumer_group = 'invoices'`)
	var want []string
	publishOld := func() {
		for _, msg := range jsonMessages(10) {
			require.NoError(t, old.Publish("orders", msg))
			want = append(want, msg.UUID)
		}
		f.awaitHorizon(t, "orders")
	}
	stored := func() (uuids []string) {
		require.NoError(t, f.pool.QueryRow(t.Context(), "SELECT array_agg(uuid ORDER BY id) FROM outbox.messages WHERE topic = 'orders'").Scan(&uuids))
		return uuids
	}

	publishOld()
	require.NoError(t, showDrain(t.Context(), db))
	require.Equal(t, want, stored())
	publishOld()
	manual, err := os.ReadFile("../docs/watermill-sql.md")
	require.NoError(t, err)
	for range 2 { // moves nothing when it is run again
		for _, block := range codeBlocks(t, string(manual), "sql") {
			_, err := f.pool.Exec(t.Context(), block)
			require.NoError(t, err, block)
		}
		f.execRaw(`DELETE FROM "watermill_offsets_orders" WHERE consumer_group = 'new'`)
		require.Equal(t, want, stored())
	}
	require.ErrorContains(t, showDrain(t.Context(), db), "nothing moved")
	var same int
	require.NoError(t, f.pool.QueryRow(t.Context(), `SELECT count(*) FROM outbox.messages m JOIN "watermill_orders" o USING (uuid)
		WHERE m.payload = convert_to(o.payload::text, 'UTF8') AND m.metadata::text = o.metadata::text
			AND m.key = o.metadata ->> 'partition_key'`).Scan(&same))
	require.Equal(t, 20, same)

	publisher, subscriber, err := showResolver(db, watermill.NopLogger{})
	require.NoError(t, err)
	publishOld()
	stop := startRouter(t, func(router *message.Router) { showRouter(router, publisher, subscriber) })
	require.Eventually(t, func() bool { return len(stored()) == len(want) }, waitFor, 5*time.Millisecond)
	stop()
	require.Equal(t, want, stored())
	_, err = showForwarder(publisher, subscriber, watermill.NopLogger{})
	require.NoError(t, err)

	tx := begin(t, db)
	adapted, err := showAdapter(tx, watermill.NopLogger{})
	require.NoError(t, err)
	last := newMessages(2)
	require.NoError(t, adapted.Publish("orders", last[0]))
	require.NoError(t, tx.Commit())
	unwrapping, err := showEnvelopes(db, watermill.NopLogger{})
	require.NoError(t, err)
	require.NoError(t, unwrapping.Publish("orders", last[1]))
	require.Equal(t, append(want, uuids(last)...), stored())
}

// Each line of Go in the manual is one of this file.
func TestForwardWatermillSQLManualShowsThisCode(t *testing.T) {
	t.Parallel()

	source, err := os.ReadFile("watermillsql_doc_test.go")
	require.NoError(t, err)
	manual, err := os.ReadFile("../docs/watermill-sql.md")
	require.NoError(t, err)
	lines := map[string]bool{}
	for line := range strings.Lines(string(source)) {
		lines[strings.TrimSpace(line)] = true
	}
	for _, block := range codeBlocks(t, string(manual), "go") {
		for line := range strings.Lines(block) {
			require.True(t, lines[strings.TrimSpace(line)], line)
		}
	}
}
