package tests

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// A message that a timed-out handler left behind, and a caller who gave up.
func TestPublishWithContextThatIsDone(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	pool, counter := f.countedPool(t)
	publisher := publisherOn(t, pool, outbox.PublisherConfig{})
	before := counter.n.Load()
	errOwn := errors.New("shutting down")
	cancelled, cancel := context.WithCancelCause(t.Context())
	cancel(errOwn)
	expired, cancelExpired := context.WithDeadline(t.Context(), time.Unix(0, 0))
	defer cancelExpired()
	for want, ctx := range map[error]context.Context{errOwn: cancelled, context.DeadlineExceeded: expired} {
		for name, n := range callSizes {
			messages := newMessages(n)
			for _, msg := range messages {
				msg.SetContext(ctx)
			}
			err := publisher.Publish("orders", messages...)
			require.ErrorIs(t, err, want, name)
			require.ErrorContains(t, err, "Timeout middleware", name)
		}
	}
	require.Equal(t, before, counter.n.Load())
	require.Empty(t, f.stored(t, "orders"))
}

// The context bounds the call: here nobody ever gives a connection back.
func TestPublishEndsWithItsContext(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	config := f.pool.Config()
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	publisher := publisherOn(t, pool, outbox.PublisherConfig{})
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	for name, n := range callSizes {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		messages := newMessages(n)
		messages[0].SetContext(ctx)
		require.ErrorIs(t, publisher.Publish("orders", messages...), context.DeadlineExceeded, name)
	}
	require.Empty(t, f.stored(t, "orders"))
}
