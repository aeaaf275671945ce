package tests

import (
	"context"
	"crypto/rand"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/replication"
)

// oddPublication is the publication of the tests, whose name needs quotes
// everywhere.
const oddPublication = `Odd "pub", 'x' \`

// capture is a database from which changes are captured.
type capture struct {
	t    testing.TB
	url  string
	pool *pgxpool.Pool
	slot string // a name that no other test has
}

// newCapture creates a database with tables as SQL says, and a publication of
// them all.
func newCapture(t testing.TB, tables string) *capture {
	t.Helper()
	return captureAt(t, pgtest.Database(t), tables)
}

func captureOn(t testing.TB, server *pgtest.Server, tables string) *capture {
	t.Helper()
	return captureAt(t, pgtest.DatabaseOn(t, server), tables)
}

func captureAt(t testing.TB, url, tables string) *capture {
	t.Helper()
	c := &capture{t: t, url: url, pool: pgtest.Pool(t, url), slot: slotName()}
	c.exec(tables)
	require.NoError(t, replication.CreatePublication(t.Context(), c.pool, replication.Publication{
		Name: oddPublication, AllTables: true, Insert: true, Update: true, Delete: true, Truncate: true, ViaRoot: true,
	}))
	return c
}

func slotName() string { return "1_" + strings.ToLower(rand.Text()) }

func (c *capture) exec(sql string, args ...any) {
	c.t.Helper()
	_, err := c.pool.Exec(c.t.Context(), sql, args...)
	require.NoError(c.t, err)
}

// connectAt returns a replication connection that is closed when the test ends.
func connectAt(t testing.TB, url string, options replication.ConnectOptions) *replication.Conn {
	t.Helper()
	conn, err := tryConnect(t.Context(), url, options)
	require.NoError(t, err)
	// The test's own context has ended by then.
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func tryConnect(ctx context.Context, url string, options replication.ConnectOptions) (*replication.Conn, error) {
	config, err := pgconn.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	return replication.Connect(ctx, config, options)
}

func (c *capture) connect() *replication.Conn {
	c.t.Helper()
	return connectAt(c.t, c.url, replication.ConnectOptions{})
}

// create creates the test's slot.
func (c *capture) create(conn *replication.Conn, temporary bool) replication.CreatedSlot {
	c.t.Helper()
	slot, err := conn.CreateSlot(c.t.Context(), c.slot, replication.SlotOptions{Temporary: temporary})
	require.NoError(c.t, err)
	return slot
}

// start returns a stream from the test's slot that is closed when the test ends.
func (c *capture) start(conn *replication.Conn, options replication.Options) *replication.Reader {
	c.t.Helper()
	options.Publications = []string{oddPublication}
	reader, err := replication.StartReader(c.t.Context(), conn, c.slot, 0, options)
	require.NoError(c.t, err)
	c.t.Cleanup(func() { _ = reader.Close() }) // tests of Close look at its error
	return reader
}

// stream is a stream from a new temporary slot.
func (c *capture) stream(options replication.Options) *replication.Reader {
	c.t.Helper()
	conn := c.connect()
	c.create(conn, true)
	return c.start(conn, options)
}

// reopen is a stream from the test's durable slot on a new connection. Whoever
// had the slot before may not have let go of it yet.
func (c *capture) reopen(options replication.Options) *replication.Reader {
	c.t.Helper()
	options.Publications = []string{oddPublication}
	var reader *replication.Reader
	require.Eventually(c.t, func() bool {
		conn := c.connect()
		var err error
		reader, err = replication.StartReader(c.t.Context(), conn, c.slot, 0, options)
		if err != nil {
			require.ErrorIs(c.t, err, replication.ErrSlotInUse)
			require.NoError(c.t, conn.Close(c.t.Context()))
		}
		return err == nil
	}, waitFor, 20*time.Millisecond)
	c.t.Cleanup(func() { _ = reader.Close() })
	return reader
}

// next returns a copy of the next event that is no keepalive.
func next(t testing.TB, reader *replication.Reader) replication.Event {
	t.Helper()
	event, err := tryNext(t, reader)
	require.NoError(t, err)
	return event
}

func tryNext(t testing.TB, reader *replication.Reader) (replication.Event, error) {
	ctx, cancel := context.WithTimeout(t.Context(), waitFor)
	defer cancel()
	for {
		event, err := reader.Next(ctx)
		if err != nil {
			return nil, err
		}
		if _, idle := event.(*replication.Keepalive); !idle {
			return event.Clone(), nil
		}
	}
}

// nextAs is next for an event that must be of a certain kind.
func nextAs[E replication.Event](t testing.TB, reader *replication.Reader) E {
	t.Helper()
	event := next(t, reader)
	e, ok := event.(E)
	require.True(t, ok, "%T: %+v", event, event)
	return e
}

// nextChange is nextAs for a change, before which its table may be described
// once more: the server does that when it likes.
func nextChange[E replication.Event](t testing.TB, reader *replication.Reader) E {
	t.Helper()
	for {
		switch event := next(t, reader).(type) {
		case *replication.Relation, *replication.Type:
		default:
			e, ok := event.(E)
			require.True(t, ok, "%T: %+v", event, event)
			return e
		}
	}
}

// transaction returns the events of the next transaction in which there is
// something for the reader, Begin and Commit included, without descriptions of
// relations and types. Before version 15 the server sends empty ones as well.
func transaction(t testing.TB, reader *replication.Reader) []replication.Event {
	t.Helper()
	for {
		events := []replication.Event{nextAs[*replication.Begin](t, reader)}
		for commit := false; !commit; {
			switch event := next(t, reader).(type) {
			case *replication.Relation, *replication.Type:
			default:
				events = append(events, event)
				_, commit = event.(*replication.Commit)
			}
		}
		if len(events) > 2 {
			return events
		}
	}
}

// texts are the values of a tuple that came as text, with null and unchanged
// ones by name.
func texts(tuple replication.Tuple) []string {
	list := make([]string, len(tuple))
	for i, value := range tuple {
		switch value.Kind {
		case replication.Null:
			list[i] = "<null>"
		case replication.Unchanged:
			list[i] = "<unchanged>"
		default:
			list[i] = string(value.Data)
		}
	}
	return list
}

// inserted returns the first columns of the rows that a transaction inserted.
func inserted(events []replication.Event) []string {
	var list []string
	for _, event := range events {
		if insert, ok := event.(*replication.Insert); ok {
			list = append(list, texts(insert.New)[0])
		}
	}
	return list
}

// commitOf returns the Commit of a transaction.
func commitOf(events []replication.Event) *replication.Commit {
	return events[len(events)-1].(*replication.Commit)
}

// slotIsGone waits until there is no slot of that name.
func (c *capture) slotIsGone() {
	c.t.Helper()
	require.Eventually(c.t, func() bool {
		_, err := replication.InspectSlot(c.t.Context(), c.pool, c.slot)
		if err != nil {
			require.ErrorIs(c.t, err, replication.ErrSlotMissing)
		}
		return err != nil
	}, waitFor, 10*time.Millisecond)
}
