package tests

import (
	"slices"
	"strconv"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// Decorators hand on what is left after they have taken messages out, which may
// be nothing. A publisher of another outbox built an INSERT without any row
// from it, and the syntax error aborted the transaction.
func TestPublishWithoutMessagesSendsNothing(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	pool, counter := f.countedPool(t)
	publisher := publisherOn(t, pool, outbox.PublisherConfig{})
	require.Positive(t, counter.n.Load(), "the counter must count what the constructor asks")
	before := counter.n.Load()
	require.NoError(t, publisher.Publish("orders"))
	require.NoError(t, publisher.Publish("orders", []*message.Message{}...))
	require.Equal(t, before, counter.n.Load())

	require.NoError(t, publisher.Publish("orders", newMessages(1)...))
	require.Greater(t, counter.n.Load(), before)
}

// Field case F10. An outbox that created the tables of a topic on its first
// publish took the strongest locks there are inside somebody's business
// transaction, and left tables behind that nobody had asked for.
func TestPublishInTransactionRunsNothingButInserts(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	before := catalog(t, f.pool)
	for name, n := range callSizes {
		t.Run(name, func(t *testing.T) {
			topic := "never used before: " + name
			tx, err := f.connect(t).Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, publishIn(t.Context(), publisher, tx, topic, newMessages(n)...))

			rows, err := tx.Query(t.Context(), `
				SELECT DISTINCT l.mode FROM pg_catalog.pg_locks l
				JOIN pg_catalog.pg_class c ON c.oid = l.relation JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
				WHERE l.pid = pg_backend_pid() AND n.nspname = $1 ORDER BY 1`, oddSchema)
			require.NoError(t, err)
			modes, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			require.Contains(t, modes, "RowExclusiveLock", "an insert takes this one")
			require.Subset(t, []string{"AccessShareLock", "RowExclusiveLock"}, modes)

			require.NoError(t, tx.Rollback(t.Context()))
			require.Empty(t, f.stored(t, topic))
		})
	}
	require.Equal(t, before, catalog(t, f.pool))
}

// Field case F17. With a unique index on the UUID, publishing one twice is an
// error inside the transaction, and code that swallows it loses the business
// row as well: everything after it fails with "transaction is aborted".
// Watermill's UUIDs repeat by design, so there is nothing to trip over.
func TestPublishSameUUIDTwiceInOneTransaction(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.exec("CREATE TABLE orders (id int)")
	publisher := f.publisher(outbox.PublisherConfig{})
	tx, err := f.connect(t).Begin(t.Context())
	require.NoError(t, err)
	msg := message.NewMessage("same", []byte("1"))
	require.NoError(t, publishIn(t.Context(), publisher, tx, "orders", msg))
	require.NoError(t, publishIn(t.Context(), publisher, tx, "orders", msg))
	_, err = tx.Exec(t.Context(), "INSERT INTO orders VALUES (1)")
	require.NoError(t, err)
	require.NoError(t, publishIn(t.Context(), publisher, tx, "orders", msg, msg))
	require.NoError(t, tx.Commit(t.Context()))

	require.Equal(t, []string{"same", "same", "same", "same"}, f.storedUUIDs(t, "orders"))
	require.Equal(t, 1, f.number("SELECT count(*) FROM orders"))
}

// A business row and its message share one fate.
func TestPublishIsAtomicWithTheTransaction(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.exec("CREATE TABLE orders (id int)")
	publisher := f.publisher(outbox.PublisherConfig{})
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "orders")
	conn := f.connect(t)
	for i, commit := range []bool{false, true, false, true} {
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), "INSERT INTO orders VALUES ($1)", i)
		require.NoError(t, err)
		require.NoError(t, publishIn(t.Context(), publisher, tx, "orders", message.NewMessage(strconv.Itoa(i), nil)))
		if commit {
			require.NoError(t, tx.Commit(t.Context()))
		} else {
			require.NoError(t, tx.Rollback(t.Context()))
		}
	}
	require.Equal(t, []string{"1", "3"}, uuids(receive(t, messages, 2)))
	require.Equal(t, []string{"1", "3"}, f.storedUUIDs(t, "orders"))
	require.Equal(t, 4, f.number("SELECT sum(id) FROM orders"))
}

// The ways into the table differ by the size of the call. Order must not: an id
// drawn by the server before another one is handed out before it.
func TestPublishKeepsOrderWithinAndAcrossCalls(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	tx, err := f.connect(t).Begin(t.Context())
	require.NoError(t, err)
	sent := newMessages(500)
	rest := sent
	for _, n := range []int{1, 100, 5, 1, 63, 64, 65, 2, 199} {
		require.NoError(t, publishIn(t.Context(), publisher, tx, "orders", rest[:n]...))
		rest = rest[n:]
	}
	require.Empty(t, rest)
	require.NoError(t, tx.Commit(t.Context()))

	f.requireStored(t, "orders", sent)
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "orders")
	require.Equal(t, uuids(sent), uuids(receive(t, messages, len(sent))))
}

func TestPublishConcurrently(t *testing.T) {
	t.Parallel()

	const goroutines, calls = 8, 30
	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	errs := make(chan error, goroutines)
	for g := range goroutines {
		go func() {
			for i := range calls {
				// Each way into the table.
				messages := make([]*message.Message, []int{1, 3, 70}[i%3])
				for j := range messages {
					messages[j] = message.NewMessage(strconv.Itoa(g), []byte{byte(i), byte(j)})
				}
				if err := publisher.Publish("orders", messages...); err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	for range goroutines {
		require.NoError(t, <-errs)
	}
	rows := f.stored(t, "orders")
	require.Len(t, rows, goroutines*calls/3*(1+3+70))
	last := map[string][]byte{}
	for _, row := range rows {
		require.Negative(t, slices.Compare(last[row.UUID], row.Payload), "goroutine %s: its calls keep their order", row.UUID)
		last[row.UUID] = row.Payload
	}
}
