package tests

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// unsupportedHandles are what nobody can publish through, by what the error
// says of them.
func unsupportedHandles() map[string]any {
	return map[string]any{
		"string":        "postgres://",
		"struct {}":     struct{}{},
		"*pgxpool.Pool": (*pgxpool.Pool)(nil),
		"*pgx.Conn":     (*pgx.Conn)(nil),
		"*pgxpool.Tx":   (*pgxpool.Tx)(nil),
		"*sql.DB":       (*sql.DB)(nil),
		"*sql.Tx":       (*sql.Tx)(nil),
	}
}

func TestContextWithTx(t *testing.T) {
	t.Parallel()

	_, ok := outbox.TxFromContext(t.Context())
	require.False(t, ok)
	tx, ok := outbox.TxFromContext(outbox.ContextWithTx(t.Context(), "tx"))
	require.True(t, ok)
	require.Equal(t, "tx", tx)
	tx, ok = outbox.TxFromContext(outbox.ContextWithTx(t.Context(), nil))
	require.True(t, ok, "a nil transaction is a mistake to be told, not the absence of one")
	require.Nil(t, tx)
}

// What the context carries decides, and nothing is ever written elsewhere
// instead.
func TestPublishRefusesWhatTheContextCarries(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	handles := unsupportedHandles()
	handles["<nil>"] = nil
	// Of a kind to publish through, but no transaction: its owner would wait
	// for a commit that has happened already.
	conn := f.connect(t)
	handles["*pgx.Conn, which is no transaction"] = conn
	handles["*pgxpool.Pool, which is no transaction"] = f.pool
	db := openSQL(t, "postgres", f.url)
	handles["*sql.DB, which is no transaction"] = db
	for _, base := range []any{f.pool, db} {
		publisher := publisherOn(t, base, outbox.PublisherConfig{})
		for name, tx := range handles {
			err := publishIn(t.Context(), publisher, tx, "orders", newMessages(1)...)
			require.ErrorIs(t, err, outbox.ErrUnsupportedExecutor, name)
			require.ErrorContains(t, err, name)
		}
	}
	require.Empty(t, f.stored(t, "orders"))
}

// An application has a context key of its own, long before it has an outbox.
func TestPublishWithTxResolver(t *testing.T) {
	t.Parallel()

	type ownKey struct{}
	f := newFixture(t)
	publisher := publisherOn(t, f.pool, outbox.PublisherConfig{
		RequireTx: true,
		TxResolver: func(ctx context.Context) (any, bool) {
			tx, ok := ctx.Value(ownKey{}).(pgx.Tx)
			return tx, ok
		},
	})
	begin := func() pgx.Tx {
		tx, err := f.connect(t).Begin(t.Context())
		require.NoError(t, err)
		return tx
	}
	publish := func(ctx context.Context) error {
		msg := newMessages(1)[0]
		msg.SetContext(ctx)
		return publisher.Publish("orders", msg)
	}
	require.ErrorIs(t, publish(t.Context()), outbox.ErrNoTransaction)

	mine := begin()
	ctx := context.WithValue(t.Context(), ownKey{}, mine)
	require.NoError(t, publish(ctx))
	require.Empty(t, f.stored(t, "orders"))

	// ContextWithTx is nearer to the call.
	other := begin()
	require.NoError(t, publish(outbox.ContextWithTx(ctx, other)))
	require.NoError(t, other.Rollback(t.Context()))
	require.NoError(t, mine.Commit(t.Context()))
	require.Len(t, f.stored(t, "orders"), 1)

	broken := publisherOn(t, f.pool, outbox.PublisherConfig{TxResolver: func(context.Context) (any, bool) { return nil, true }})
	require.ErrorIs(t, broken.Publish("orders", newMessages(1)...), outbox.ErrUnsupportedExecutor)
	require.Len(t, f.stored(t, "orders"), 1)
}

type valueContext struct {
	context.Context //nolint:containedctx // is a context

	tags []string
}

type wrappedContext struct {
	context.Context //nolint:containedctx // is a context
}
