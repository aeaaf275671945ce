package tests

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// A transaction found in a context may have ended: a goroutine outlived it, or
// a handler kept the context. Falling back to the pool would publish what was
// rolled back.
func TestPublishInFinishedTransaction(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	begin := func(t *testing.T) pgx.Tx {
		tx, err := f.connect(t).Begin(t.Context())
		require.NoError(t, err)
		return tx
	}
	beginSQL := func(t *testing.T, driver string) *sql.Tx {
		tx, err := openSQL(t, driver, f.url).BeginTx(t.Context(), nil)
		require.NoError(t, err)
		return tx
	}
	for name, finished := range map[string]func(t *testing.T) any{
		"committed": func(t *testing.T) any {
			tx := begin(t)
			require.NoError(t, tx.Commit(t.Context()))
			return tx
		},
		"rolled back": func(t *testing.T) any {
			tx := begin(t)
			require.NoError(t, tx.Rollback(t.Context()))
			return tx
		},
		"of a pool": func(t *testing.T) any {
			tx, err := f.pool.Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context()))
			return tx
		},
		"released savepoint": func(t *testing.T) any {
			savepoint, err := begin(t).Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, savepoint.Commit(t.Context()))
			return savepoint
		},
		"rolled back savepoint": func(t *testing.T) any {
			savepoint, err := begin(t).Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, savepoint.Rollback(t.Context()))
			return savepoint
		},
		"savepoint of a finished transaction": func(t *testing.T) any {
			tx := begin(t)
			savepoint, err := tx.Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context()))
			return savepoint
		},
		"failed commit": func(t *testing.T) any {
			tx := begin(t)
			_, err := tx.Exec(t.Context(), "no SQL")
			require.Error(t, err)
			require.ErrorIs(t, tx.Commit(t.Context()), pgx.ErrTxCommitRollback)
			return tx
		},
		"pgx stdlib": func(t *testing.T) any {
			tx := beginSQL(t, "pgx")
			require.NoError(t, tx.Commit())
			return tx
		},
		"lib/pq": func(t *testing.T) any {
			tx := beginSQL(t, "postgres")
			require.NoError(t, tx.Rollback())
			return tx
		},
		"of another type": func(t *testing.T) any {
			tx := beginSQL(t, "postgres")
			require.NoError(t, tx.Commit())
			return &sqlTxOfAnApplication{tx}
		},
	} {
		t.Run(name, func(t *testing.T) {
			for size, n := range callSizes {
				tx := finished(t)
				require.ErrorIs(t, publishIn(t.Context(), publisher, tx, "orders", newMessages(n)...), outbox.ErrTxFinished, size)
				direct := publisherOn(t, tx, outbox.PublisherConfig{})
				require.ErrorIs(t, direct.Publish("orders", newMessages(n)...), outbox.ErrTxFinished, size)
			}
			require.Empty(t, f.stored(t, "orders"))
		})
	}
}

// Messages of one call that belong to different transactions cannot be written
// atomically. Looking at the first one's context only would write the others
// where they do not belong.
func TestPublishRefusesMixedTransactions(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	begin := func() pgx.Tx {
		tx, err := f.connect(t).Begin(t.Context())
		require.NoError(t, err)
		return tx
	}
	std, err := openSQL(t, "pgx", f.url).BeginTx(t.Context(), nil)
	require.NoError(t, err)
	a, b := begin(), begin()
	savepoint, err := a.Begin(t.Context())
	require.NoError(t, err)
	in := func(tx any) context.Context { return outbox.ContextWithTx(t.Context(), tx) }
	publisher := f.publisher(outbox.PublisherConfig{})
	for name, contexts := range map[string][]context.Context{
		"two transactions":              {in(a), in(b)},
		"transaction and savepoint":     {in(a), in(savepoint)},
		"transaction and none":          {in(a), in(a), t.Context()},
		"none and transaction":          {t.Context(), in(a)},
		"two drivers":                   {in(a), in(std)},
		"the odd one is in the middle":  {in(a), in(a), in(b), in(a), in(a)},
		"of types that look comparable": {in(txByValue{a}), in(txByValue{b})},
	} {
		messages := newMessages(len(contexts))
		for i, ctx := range contexts {
			messages[i].SetContext(ctx)
		}
		require.ErrorIs(t, publisher.Publish("orders", messages...), outbox.ErrMixedExecutors, name)
	}

	// The same transaction by way of several contexts is one.
	type key struct{}
	messages := newMessages(4)
	messages[0].SetContext(in(savepoint))
	messages[1].SetContext(in(savepoint))
	messages[2].SetContext(context.WithValue(in(savepoint), key{}, 1))
	messages[3].SetContext(outbox.ContextWithTx(in(b), savepoint))
	require.NoError(t, publisher.Publish("orders", messages...))

	// A publisher made for a transaction writes into no other one.
	bound := publisherOn(t, b, outbox.PublisherConfig{})
	require.ErrorIs(t, publishIn(t.Context(), bound, a, "orders", newMessages(1)...), outbox.ErrMixedExecutors)
	require.NoError(t, publishIn(t.Context(), bound, b, "others", newMessages(1)...))

	require.NoError(t, savepoint.Commit(t.Context()))
	require.NoError(t, a.Commit(t.Context()))
	require.NoError(t, b.Commit(t.Context()))
	require.NoError(t, std.Commit())
	require.Equal(t, uuids(messages), f.storedUUIDs(t, "orders"))
	require.Len(t, f.stored(t, "others"), 1)
}

// txByValue is a transaction type whose values compare equal only with the
// transaction inside.
type txByValue struct{ pgx.Tx }

// Some frameworks pass contexts around by value. Comparing two of a type that
// cannot be compared, to save a look at the second, was a panic in Publish.
func TestPublishWithContextsThatCannotBeCompared(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	tx, err := f.connect(t).Begin(t.Context())
	require.NoError(t, err)
	publisher := f.publisher(outbox.PublisherConfig{})
	messages := newMessages(3)
	for _, msg := range messages {
		msg.SetContext(valueContext{outbox.ContextWithTx(t.Context(), tx), []string{"tag"}})
	}
	require.NoError(t, publisher.Publish("orders", messages...))
	// Comparable by its type, but not by what it holds.
	for _, msg := range messages {
		msg.SetContext(wrappedContext{msg.Context()})
	}
	require.NoError(t, publisher.Publish("orders", messages...))
	require.NoError(t, tx.Commit(t.Context()))
	require.Len(t, f.stored(t, "orders"), 6)
}

// After any failed statement PostgreSQL answers everything with the same dry
// sentence, and it is Publish that gets the blame.
func TestPublishInAbortedTransaction(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	for name, n := range callSizes {
		tx, err := f.connect(t).Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), "no SQL")
		require.Error(t, err)
		require.ErrorContains(t, publishIn(t.Context(), publisher, tx, "orders", newMessages(n)...), "an earlier statement of the transaction failed", name)

		for _, driver := range []string{"pgx", "postgres"} {
			tx, err := openSQL(t, driver, f.url).BeginTx(t.Context(), nil)
			require.NoError(t, err)
			_, err = tx.ExecContext(t.Context(), "no SQL")
			require.Error(t, err)
			require.ErrorContains(t, publishIn(t.Context(), publisher, tx, "orders", newMessages(n)...), "an earlier statement of the transaction failed", name)
			require.NoError(t, tx.Rollback())
		}
	}
}

// An error of the server takes the transaction with it, and a savepoint is how
// to survive it.
func TestPublishFailureWithinSavepoint(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.exec("ALTER TABLE outbox.messages ADD CONSTRAINT refused CHECK (uuid <> 'refused')")
	publisher := f.publisher(outbox.PublisherConfig{})
	for name, n := range callSizes {
		tx, err := f.connect(t).Begin(t.Context())
		require.NoError(t, err)
		kept := newMessages(1)
		require.NoError(t, publishIn(t.Context(), publisher, tx, name, kept...))
		savepoint, err := tx.Begin(t.Context())
		require.NoError(t, err)
		refused := newMessages(n)
		refused[n-1].UUID = "refused"
		require.Error(t, publishIn(t.Context(), publisher, savepoint, name, refused...), name)
		require.NoError(t, savepoint.Rollback(t.Context()))
		kept = append(kept, newMessages(n)...)
		require.NoError(t, publishIn(t.Context(), publisher, tx, name, kept[1:]...))
		require.NoError(t, tx.Commit(t.Context()))
		require.Equal(t, uuids(kept), f.storedUUIDs(t, name))
	}
}
