package tests

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

func TestPublishRequiresTransaction(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	strict := outbox.PublisherConfig{Schema: oddSchema, RequireTx: true}
	conn, sqlDB := f.connect(t), openSQL(t, "pgx", f.url)
	for name, base := range map[string]any{"nil": nil, "pool": f.pool, "connection": conn, "database/sql": sqlDB} {
		publisher, err := outbox.NewPublisher(base, strict, nil)
		require.NoError(t, err, name)
		err = publisher.Publish("orders", newMessages(2)...)
		require.ErrorIs(t, err, outbox.ErrNoTransaction, name)
		require.ErrorContains(t, err, "ContextWithTx", name)
		require.Empty(t, f.stored(t, "orders"), name)

		tx, err := f.connect(t).Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, publishIn(t.Context(), publisher, tx, name, newMessages(2)...))
		require.NoError(t, tx.Commit(t.Context()))
		require.Len(t, f.stored(t, name), 2)
	}
}

// A connection may be in a transaction or not, and that changes while the
// publisher lives: what it was when the publisher was made says nothing.
func TestPublishRequiresTransactionOnConnection(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	pooled, err := f.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer pooled.Release()
	for name, base := range map[string]interface {
		pgxHandle
		Begin(ctx context.Context) (pgx.Tx, error)
	}{"connection": f.connect(t), "pooled connection": pooled} {
		for _, begun := range []bool{false, true} {
			f.exec("TRUNCATE outbox.messages")
			exec := func(text string) {
				_, err := base.Exec(t.Context(), text)
				require.NoError(t, err)
			}
			if begun {
				exec("BEGIN")
			}
			publisher := publisherOn(t, base, outbox.PublisherConfig{RequireTx: true})
			if begun {
				exec("COMMIT")
			}
			require.ErrorIs(t, publisher.Publish("orders", newMessages(1)...), outbox.ErrNoTransaction, name)

			exec("BEGIN")
			require.NoError(t, publisher.Publish("orders", newMessages(1)...), name)
			exec("ROLLBACK")
			require.Empty(t, f.stored(t, "orders"), name)

			exec("BEGIN")
			require.NoError(t, publisher.Publish("orders", newMessages(1)...), name)
			exec("COMMIT")
			require.Len(t, f.stored(t, "orders"), 1, name)

			require.ErrorIs(t, publisher.Publish("orders", newMessages(1)...), outbox.ErrNoTransaction, name)
			require.Len(t, f.stored(t, "orders"), 1, name)

			// The connection's transaction in a context is not another one.
			tx, err := base.Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, publishIn(t.Context(), publisher, tx, "orders", newMessages(1)...), name)
			require.NoError(t, tx.Commit(t.Context()))
			require.Len(t, f.stored(t, "orders"), 2, name)
		}
	}
}
