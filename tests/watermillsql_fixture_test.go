package tests

import (
	"database/sql"
	"encoding/json"
	"strconv"
	"testing"
	"time"

	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/schema/watermillsql"
)

// oldDrivers are the drivers that watermill-sql is used with.
var oldDrivers = []string{"pgx", "postgres"}

// oldSchema is watermill-sql's own, with payloads of this type.
func oldSchema(payloadType string) wsql.DefaultPostgreSQLSchema {
	return wsql.DefaultPostgreSQLSchema{GeneratePayloadType: func(string) string { return payloadType }}
}

// oldTable makes watermill-sql's tables for a topic, with a position of the group
// "" at their beginning, and returns a publisher that writes to them.
func oldTable(t testing.TB, db *sql.DB, topic, payloadType string) *wsql.Publisher {
	t.Helper()
	var offsets wsql.DefaultPostgreSQLOffsetsAdapter
	queries := append(oldSchema(payloadType).SchemaInitializingQueries(topic), offsets.SchemaInitializingQueries(topic)...)
	for _, query := range append(queries, offsets.BeforeSubscribingQueries(topic, "")...) {
		_, err := db.ExecContext(t.Context(), query.Query, query.Args...)
		require.NoError(t, err)
	}
	return oldPublisher(t, db, payloadType)
}

// oldPublisher writes to watermill-sql's tables through a handle.
func oldPublisher(t testing.TB, db wsql.ContextExecutor, payloadType string) *wsql.Publisher {
	t.Helper()
	publisher, err := wsql.NewPublisher(db, wsql.PublisherConfig{SchemaAdapter: oldSchema(payloadType)}, nil)
	require.NoError(t, err)
	return publisher
}

// oldSubscriber reads watermill-sql's tables, so many rows at once.
func oldSubscriber(t testing.TB, db *sql.DB, payloadType string, batch int, ackDeadline time.Duration) *wsql.Subscriber {
	t.Helper()
	adapter := oldSchema(payloadType)
	adapter.SubscribeBatchSize = batch
	subscriber, err := wsql.NewSubscriber(db, wsql.SubscriberConfig{
		SchemaAdapter: adapter, OffsetsAdapter: watermillsql.AtomicOffsets{},
		AckDeadline: &ackDeadline, PollInterval: 5 * time.Millisecond, ResendInterval: time.Millisecond, RetryInterval: 5 * time.Millisecond,
	}, nil)
	require.NoError(t, err)
	return subscriber
}

// jsonMessages returns n messages that a column of type JSON takes, of two keys.
func jsonMessages(n int) []*message.Message {
	messages := newMessages(n)
	for i, msg := range messages {
		payload, err := json.Marshal(map[string]any{"n": i, "<é>": "\x01"})
		if err != nil {
			panic(err)
		}
		msg.Payload = payload
		msg.Metadata = message.Metadata{"partition_key": strconv.Itoa(i % 2), "number": strconv.Itoa(i)}
	}
	return messages
}

// oldPosition returns how far the group "" is in watermill-sql's tables.
func (f *fixture) oldPosition(t testing.TB, topic string) (position string) {
	t.Helper()
	require.NoError(t, f.pool.QueryRow(t.Context(), `SELECT last_processed_transaction_id || '/' || offset_acked
		FROM "watermill_offsets_`+topic+`" WHERE consumer_group = ''`).Scan(&position))
	return position
}

// oldLeft returns how many rows that group has not had.
func (f *fixture) oldLeft(t testing.TB, topic string) int {
	t.Helper()
	return f.number(`SELECT count(*)::int FROM "watermill_` + topic + `" m, "watermill_offsets_` + topic + `" o
		WHERE o.consumer_group = '' AND (m.transaction_id, m."offset") > (o.last_processed_transaction_id, o.offset_acked)`)
}

// begin begins a transaction, which ends with the test at the latest.
func begin(t testing.TB, db *sql.DB) *sql.Tx {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback() })
	return tx
}
