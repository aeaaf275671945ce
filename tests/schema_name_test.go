package tests

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// oddNames are names of schemas that PostgreSQL takes.
var oddNames = []string{
	"outbox", "Outbox", "OUTBOX", `My "odd" Schema`, "it's", "a;b", "; DROP TABLE t;--", "a.b", "$body$", "$body_$ $body$", "$1", ":schema",
	"two\nlines", "\r--", `back\slash`, `\`, `E'\''`, "ünïcode", "select", " ", "outbox.", "SCHEMA outbox", "%I", strings.Repeat("n", 63), strings.Repeat("é", 31) + "n",
}

// Several outboxes in one database, each under a name that would do harm if it
// were not quoted in every place. Each gets its own messages.
func TestMigrateOddNames(t *testing.T) {
	t.Parallel()

	pool := pgtest.Pool(t, pgtest.Database(t))
	for _, name := range oddNames {
		config := largeIntervals
		config.Name = name
		require.NoError(t, schema.Migrate(t.Context(), pool, config), name)
		require.NoError(t, schema.Migrate(t.Context(), pool, config), name)
		differences, err := schema.Check(t.Context(), pool, config)
		require.NoError(t, err, name)
		require.Empty(t, differences, name)
	}
	var names []string
	rows, err := pool.Query(t.Context(), "SELECT nspname FROM pg_catalog.pg_namespace WHERE nspname NOT IN ('public', 'information_schema') AND nspname !~ '^pg_'")
	require.NoError(t, err)
	names, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.ElementsMatch(t, oddNames, names)
	require.ElementsMatch(t, oddNames, publicationNames(t, pool))

	for _, name := range oddNames {
		publisher, err := outbox.NewPublisher(pool, outbox.PublisherConfig{Schema: name}, nil)
		require.NoError(t, err)
		msg := newMessages(1)
		require.NoError(t, publisher.Publish("orders", msg...))
		_, err = pool.Exec(t.Context(), schema.Text(name, "SELECT outbox.publish('orders', 'by SQL')"))
		require.NoError(t, err, name)
		consumer, err := outbox.NewConsumer(pool.Config(), outbox.ConsumerConfig{Schema: name, PollInterval: 10 * time.Millisecond}, nil)
		require.NoError(t, err)
		subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
		require.NoError(t, err)
		messages, err := subscriber.Subscribe(t.Context(), "orders")
		require.NoError(t, err)
		received := receive(t, messages, 2)
		require.Equal(t, msg[0].UUID, received[0].UUID)
		require.Equal(t, "by SQL", string(received[1].Payload))
		require.NoError(t, consumer.Close())
	}
}

func TestMigrateRefusesNames(t *testing.T) {
	t.Parallel()

	pool := pgtest.Pool(t, pgtest.Database(t))
	before := catalog(t, pool)
	for name, problem := range map[string]string{
		strings.Repeat("n", 64): "has 64 bytes", strings.Repeat("é", 32): "has 64 bytes", "pg_outbox": "reserved", "information_schema": "reserved",
		"a\x00b": "NUL", "\xff": "UTF-8",
	} {
		require.ErrorContains(t, schema.Migrate(t.Context(), pool, schema.Config{Name: name}), problem)
		_, err := schema.SQL(schema.Config{Name: name}, 0)
		require.ErrorContains(t, err, problem)
		_, err = schema.Grants(schema.Config{Name: name}, schema.Roles{})
		require.ErrorContains(t, err, problem)
		_, err = schema.Check(t.Context(), pool, schema.Config{Name: name})
		require.ErrorContains(t, err, problem)
		_, err = schema.CheckLive(t.Context(), pool, schema.Config{Name: name})
		require.ErrorContains(t, err, problem)
		_, err = schema.PublicationSQL(schema.Config{Name: name})
		require.ErrorContains(t, err, problem)
	}
	require.Equal(t, before, catalog(t, pool))
}
