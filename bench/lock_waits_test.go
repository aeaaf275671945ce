package main

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// The server logs who waited for a table for too long, of one application and no
// other, since the beginning.
func TestLockWaitsAreThoseOfTheServersLog(t *testing.T) {
	var running servers
	t.Cleanup(func() { require.NoError(t, running.stop()) })
	b := &bench{server: func(ctx context.Context) (*pgtest.Server, error) { return running.get(ctx, false) }}
	d, err := b.database(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.close(t.Context())) }()
	waits, err := watchLockWaits(t.Context(), d)
	require.NoError(t, err)
	holder := d.connectAs(t, "holder")
	require.Eventually(t, func() bool {
		var timeout string
		require.NoError(t, holder.QueryRow(t.Context(), "SHOW deadlock_timeout").Scan(&timeout))
		return timeout == "100ms"
	}, meterPatience, time.Millisecond)
	for _, name := range []string{"waits", "waits elsewhere"} {
		tx, err := holder.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), "LOCK TABLE outbox.messages IN ACCESS EXCLUSIVE MODE")
		require.NoError(t, err)
		waiting := d.connectAs(t, name)
		done := make(chan error, 1)
		go func() {
			_, err := waiting.Exec(t.Context(), "SET lock_timeout = '300ms'; LOCK TABLE outbox.messages IN ROW EXCLUSIVE MODE")
			done <- err
		}()
		require.ErrorContains(t, <-done, "lock timeout")
		require.NoError(t, tx.Rollback(t.Context()))
	}
	n, known, err := waits.end(t.Context(), "waits")
	require.NoError(t, err)
	require.True(t, known)
	require.Equal(t, 1, n)
}
