package tests

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/promote"
)

// dueIn returns a message that is due in a time from now, to the microsecond.
func dueIn(d time.Duration) *message.Message {
	return dueAt(time.Now().Add(d))
}

func dueAt(at time.Time) *message.Message {
	return withMetadata(watermill.NewUUID(), []byte(at.String()), message.Metadata{delay.DelayedUntilKey: at.Format(time.RFC3339Nano)})
}

// due returns when a message is due.
func due(t testing.TB, msg *message.Message) time.Time {
	t.Helper()
	at, err := time.Parse(time.RFC3339, msg.Metadata.Get(delay.DelayedUntilKey))
	require.NoError(t, err)
	return at
}

// deferredRow is a message that waits.
type deferredRow struct {
	ID       int64
	Due      time.Time
	Key      *string
	UUID     string
	Metadata []byte
	Payload  []byte
	Failures int
	Error    *string
}

// deferred returns the messages of a topic that wait, in the order of their ids.
func (f *fixture) deferred(t testing.TB, topic string) []deferredRow {
	t.Helper()
	rows, err := f.pool.Query(t.Context(), f.sql(`SELECT id, due_at, key, uuid, metadata::text, payload, failures, error
		FROM outbox.deferred WHERE topic = $1 ORDER BY id`), topic)
	require.NoError(t, err)
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[deferredRow])
	require.NoError(t, err)
	return list
}

// fillDeferred puts n rows into deferred, one second after the other, the first
// one so many seconds from now.
func (f *fixture) fillDeferred(topic string, n, first int) {
	f.t.Helper()
	f.exec(`INSERT INTO outbox.deferred (due_at, topic, uuid, payload)
		SELECT clock_timestamp() + make_interval(secs => $3::int + g), $1, g::text, 'x' FROM generate_series(0, $2::int - 1) g`, topic, n, first)
}

// promoter returns a Promoter whose steps are the test's, and its log.
func (f *fixture) promoter(db promote.Querier, change func(*promote.Config)) (*promote.Promoter, *logBook) {
	book := newLogBook()
	config := promote.Config{
		Schema: oddSchema, Interval: 10 * time.Millisecond, Timeout: 15 * time.Second, Failed: func(error) {}, Logger: book,
	}
	if change != nil {
		change(&config)
	}
	return promote.New(db, config), book
}

// promote takes steps until one finds nothing more to do.
func (f *fixture) promote(t testing.TB, p *promote.Promoter) {
	t.Helper()
	for {
		pause, err := p.Step(t.Context())
		require.NoError(t, err)
		if pause > 0 {
			return
		}
	}
}

// requireNeverEarly fails if a message was written into the log before it was
// due, both by the database's clock.
func requireNeverEarly(t testing.TB, msg *message.Message) {
	t.Helper()
	delivery, ok := outbox.DeliveryFromCtx(msg.Context())
	require.True(t, ok)
	require.False(t, delivery.PublishedAt.Before(due(t, msg)), "due %s, in the log at %s", due(t, msg), delivery.PublishedAt)
}

// awaitDeferred waits until so many messages wait.
func (f *fixture) awaitDeferred(t testing.TB, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return f.number("SELECT count(*)::int FROM outbox.deferred") == n }, waitFor, 5*time.Millisecond,
		"%d messages should wait", n)
}

// querierFunc is a Querier that a test made of a function.
type querierFunc func(ctx context.Context, sql string, args ...any) (pgx.Rows, error)

func (q querierFunc) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return q(ctx, sql, args...)
}
