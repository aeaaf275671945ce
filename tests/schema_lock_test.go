package tests

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// Field case F11. CREATE … IF NOT EXISTS is not safe against another one: of
// replicas that started together all but one died of a duplicate key in a
// system catalog.
func TestMigrateConcurrently(t *testing.T) {
	t.Parallel()

	const replicas, rounds = 8, 20
	url := pgtest.Database(t)
	conns := make([]*pgx.Conn, replicas)
	for i := range conns {
		var err error
		conns[i], err = pgx.Connect(t.Context(), url)
		require.NoError(t, err)
		defer func() { _ = conns[i].Close(context.WithoutCancel(t.Context())) }()
	}
	for round := range rounds {
		config := largeIntervals
		config.Name = fmt.Sprintf("Round %d", round)
		start := make(chan struct{})
		errs := make(chan error, replicas)
		for _, conn := range conns {
			go func() {
				<-start
				errs <- schema.Migrate(t.Context(), conn, config)
			}()
		}
		close(start)
		for range replicas {
			require.NoError(t, await(t, errs), "round %d", round)
		}
		version, err := schema.ReadVersion(t.Context(), schema.PgxRow(conns[0]), config.Name)
		require.NoError(t, err)
		require.Equal(t, schema.Version, version)
	}
}

// The same replicas in a database whose transactions are serializable unless
// they say otherwise: one that waited for the lock would still see the database
// as it was before, and create everything again.
func TestMigrateConcurrentlyWithSerializableDefault(t *testing.T) {
	t.Parallel()

	const replicas = 4 // the least that a pool has connections
	url := withParameter(t, pgtest.Database(t), "default_transaction_isolation", "serializable")
	errs := make(chan error, replicas)
	pool := pgtest.Pool(t, url)
	for range replicas {
		go func() { errs <- schema.Migrate(t.Context(), pool, schema.Config{}) }()
	}
	for range replicas {
		require.NoError(t, await(t, errs))
	}
}

// A cancelled caller leaves neither tables nor the lock behind, and the pool
// usable.
func TestMigrateEndsWithItsContext(t *testing.T) {
	t.Parallel()

	url := pgtest.Database(t)
	pool := pgtest.Pool(t, url)
	holder, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = holder.Exec(t.Context(), "SELECT pg_advisory_xact_lock($1)", schema.LockKey("outbox"))
	require.NoError(t, err)

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- schema.Migrate(ctx, pool, schema.Config{}) }()
	waitForLock(t, pool)
	cancel()
	require.ErrorIs(t, await(t, done), context.Canceled)
	require.NoError(t, holder.Rollback(t.Context()))
	_, err = schema.ReadVersion(t.Context(), schema.PgxRow(pool), "outbox")
	require.ErrorIs(t, err, schema.ErrNotInstalled)
	require.NoError(t, schema.Migrate(t.Context(), pool, schema.Config{}))
}

// waitForLock returns when a session of the database waits for an advisory lock.
func waitForLock(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	require.Eventually(t, func() bool {
		var waiting bool
		err := pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND NOT granted
			AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()))`).Scan(&waiting)
		return err == nil && waiting
	}, waitFor, 5*time.Millisecond)
}
