package tests

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// buffers is how many pages a statement touches.
func buffers(t testing.TB, answer string) int {
	t.Helper()
	var list []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		} `json:"Plan"`
	}
	require.NoError(t, json.Unmarshal([]byte(answer), &list), answer)
	require.Len(t, list, 1)
	return list[0].Plan.Hit + list[0].Plan.Read
}

// Elsewhere dead rows stay in the index of those that are pending, and each poll
// gets slower as they become more. Ours are in a table of their own: beside
// 50,000 of them, a page of what is pending touches a few pages of the disk.
// Field case F68.
func TestDeadLettersAreNotInTheWayOfReading(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.insertDeadLetters("group", "topic 1", 50_000, 100)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic 1", newMessages(10)...))
	f.exec("ANALYZE outbox.messages, outbox.dead_letters")
	conn := f.connect(t)
	for name, value := range consumerSettings {
		_, err := conn.Exec(t.Context(), "SELECT set_config($1, $2, false)", name, value)
		require.NoError(t, err)
	}
	f.prepare(t, conn, "internal/window/queries/open.sql", false)
	execute := "EXECUTE hot('topic 1', 'group', '1:1:', 0, 1000, 1000000, 0, 1, 9223372036854775807)"
	rows, err := conn.Query(t.Context(), execute, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	rows.Close()
	require.NoError(t, rows.Err())
	require.Equal(t, int64(11), rows.CommandTag().RowsAffected(), "the header, and what is pending")
	var text string
	require.NoError(t, conn.QueryRow(t.Context(), "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "+execute, pgx.QueryExecModeSimpleProtocol).Scan(&text))
	touched := buffers(t, text)
	t.Logf("a window of 10 messages touches %d buffers", touched)
	require.Less(t, touched, 100)
}

// statementBook keeps the statements that are sent, with their values.
type statementBook struct{ list []pgx.TraceQueryStartData }

func (b *statementBook) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	b.list = append(b.list, data)
	return ctx
}
func (*statementBook) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Among 50,000 dead letters, those of a group and topic are listed and requeued
// by index; so are batches in the middle of many.
func TestDeadLettersPlans(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.insertDeadLetters("many", "topic", 25_000, 100)
	f.insertDeadLetters("few", "topic", 10, 100)
	f.insertDeadLetters("many", "topic", 25_000, 100)
	f.exec("ANALYZE outbox.dead_letters")
	book := &statementBook{}
	config := f.pool.Config()
	config.ConnConfig.Tracer = book
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	ctx := t.Context()
	few := outbox.DeadLetterFilter{ConsumerGroup: "few", Topic: "topic"}
	many := outbox.DeadLetterFilter{ConsumerGroup: "many", Topic: "topic"}
	list := func(filter outbox.DeadLetterFilter, after int64) func(*outbox.DeadLetters) error {
		return func(l *outbox.DeadLetters) error {
			_, err := l.List(ctx, filter, outbox.DeadLetterPage{After: after})
			return err
		}
	}
	requeue := func(filter outbox.DeadLetterFilter, limit int) func(*outbox.DeadLetters) error {
		return func(l *outbox.DeadLetters) error {
			_, err := l.RequeueAll(ctx, filter, outbox.RequeueOptions{Limit: limit})
			return err
		}
	}
	for _, test := range []struct {
		name string
		call func(*outbox.DeadLetters) error
		most int
	}{
		{"list a group of few", list(few, 0), 50},
		{"list a group of many", list(many, 0), 50},
		{"list in the middle", list(many, 25_000), 50},
		{"list a group alone", list(outbox.DeadLetterFilter{ConsumerGroup: "few"}, 0), 100},
		{"get", func(l *outbox.DeadLetters) error { _, err := l.Get(ctx, 30_000); return err }, 10},
		{"count a group of few", func(l *outbox.DeadLetters) error { _, err := l.Count(ctx, few); return err }, 50},
		// Without what is inserted, which EXPLAIN does not count here.
		{"requeue one", func(l *outbox.DeadLetters) error { return l.Requeue(ctx, 30_000, "") }, 50},
		{"discard one", func(l *outbox.DeadLetters) error { return l.Discard(ctx, 30_000, "") }, 50},
		{"requeue a group of few", requeue(few, 0), 150},
		{"requeue 100 of many", requeue(many, 100), 1500},
	} {
		t.Run(test.name, func(t *testing.T) {
			// In transactions that are undone, so that there is the same to do
			// again.
			book.list = nil
			undone(t, pool, func(tx pgx.Tx) { require.NoError(t, test.call(f.deadLetters(tx))) })
			require.NotEmpty(t, book.list)
			for _, statement := range book.list {
				if len(statement.Args) == 0 {
					continue // the transaction's own, and the highest id
				}
				undone(t, f.pool, func(tx pgx.Tx) {
					var text string
					require.NoError(t, tx.QueryRow(ctx, "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "+statement.SQL, statement.Args...).Scan(&text))
					touched := buffers(t, text)
					t.Logf("%d buffers", touched)
					require.LessOrEqual(t, touched, test.most, "%s\n%s", statement.SQL, text)
				})
			}
		})
	}
}

// undone does something in a transaction that is rolled back.
func undone(t testing.TB, pool *pgxpool.Pool, do func(tx pgx.Tx)) {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(context.WithoutCancel(t.Context()))) }()
	do(tx)
}
