package tests

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/replication"
)

func TestReplicationConnect(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	pool := pgtest.Pool(t, url)
	ctx := t.Context()

	// From the configuration of a pool, with what that has in it.
	config, err := pgxpool.ParseConfig(url + "&pool_max_conns=3&default_query_exec_mode=exec&target_session_attrs=read-write&search_path=odd")
	require.NoError(t, err)
	conn, err := replication.Connect(ctx, &config.ConnConfig.Config, replication.ConnectOptions{
		Settings:        map[string]string{"lock_timeout": "1234ms", "statement_timeout": "0"},
		ApplicationName: "captures",
	})
	require.NoError(t, err)
	defer conn.Close(ctx)
	require.NotContains(t, config.ConnConfig.RuntimeParams, "replication", "the caller's is a copy")
	for name, want := range map[string]string{
		"lock_timeout": "1234ms", "search_path": "odd", "client_encoding": "UTF8", "application_name": "captures", "wal_level": "logical",
	} {
		got, err := conn.Setting(ctx, name)
		require.NoError(t, err)
		require.Equal(t, want, got, name)
	}
	var name, kind string
	require.NoError(t, pool.QueryRow(ctx, `SELECT application_name, backend_type FROM pg_stat_activity WHERE pid = $1`, conn.PID()).Scan(&name, &kind))
	require.Equal(t, "captures", name)
	require.Equal(t, "walsender", kind)
	require.GreaterOrEqual(t, conn.ServerVersion(), 14)

	system, err := conn.IdentifySystem(ctx)
	require.NoError(t, err)
	var id, database string
	var lsn replication.LSN
	require.NoError(t, pool.QueryRow(ctx, `SELECT system_identifier::text, current_database(), pg_current_wal_insert_lsn() FROM pg_control_system()`).Scan(&id, &database, &lsn))
	require.Equal(t, id, system.ID)
	require.Equal(t, database, system.Database)
	require.Equal(t, int32(1), system.Timeline)
	require.LessOrEqual(t, system.FlushLSN, lsn)
	require.NotZero(t, system.FlushLSN)

	// An LSN as a parameter, and back.
	var back, null replication.LSN
	require.NoError(t, pool.QueryRow(ctx, `SELECT $1::pg_lsn + 1, $2::pg_lsn`, system.FlushLSN, replication.LSN(0)).Scan(&back, &null))
	require.Equal(t, system.FlushLSN+1, back)
	require.Zero(t, null)

	_, err = conn.Setting(ctx, "no_such.setting")
	require.True(t, replication.IsMisconfigured(err), err)
	require.NoError(t, conn.Close(ctx))
	require.NoError(t, conn.Close(ctx))
	_, err = conn.IdentifySystem(ctx)
	require.ErrorIs(t, err, replication.ErrConnectionLost)
}

func TestReplicationConnectFails(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	ctx := t.Context()

	_, err := tryConnect(ctx, url, replication.ConnectOptions{Settings: map[string]string{"no_such_setting": "1"}})
	require.ErrorContains(t, err, "no_such_setting")
	require.True(t, replication.IsMisconfigured(err))
	_, err = tryConnect(ctx, url, replication.ConnectOptions{Settings: map[string]string{"lock_timeout": "soon"}})
	require.ErrorContains(t, err, "lock_timeout")
	require.True(t, replication.IsMisconfigured(err))

	address := strings.ReplaceAll(pgtest.NewProxy(t, "127.0.0.1:1").Addr(), "localhost", "127.0.0.1")
	_, err = tryConnect(ctx, "postgres://nobody@"+address+"/db?sslmode=disable", replication.ConnectOptions{})
	require.ErrorIs(t, err, replication.ErrConnectionLost)
	require.True(t, replication.IsRetryable(err))

	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	_, err = tryConnect(cancelled, url, replication.ConnectOptions{})
	require.ErrorIs(t, err, context.Canceled)
	require.False(t, replication.IsRetryable(err))
}

// A role that may log in and not replicate.
func TestReplicationNoPrivilege(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t, pgtest.Options{})
	c := captureOn(t, server, `CREATE TABLE t (id text); CREATE ROLE plain LOGIN; CREATE ROLE replicator LOGIN REPLICATION`)
	as := func(role string) string { return strings.Replace(c.url, "postgres@", role+"@", 1) }
	ctx := t.Context()
	_, err := tryConnect(ctx, as("plain"), replication.ConnectOptions{})
	require.ErrorIs(t, err, replication.ErrNoPrivilege)
	require.True(t, replication.IsMisconfigured(err))
	require.False(t, replication.IsRetryable(err))

	plain, err := pgxpool.New(ctx, as("plain"))
	require.NoError(t, err)
	defer plain.Close()
	err = replication.CreatePublication(ctx, plain, replication.Publication{Name: "p", Tables: []replication.Table{{Schema: "public", Name: "t"}}, Insert: true})
	require.ErrorIs(t, err, replication.ErrNoPrivilege)
	_, err = replication.ListSlots(ctx, plain)
	require.NoError(t, err)
	exists, err := replication.PublicationExists(ctx, plain, oddPublication)
	require.NoError(t, err)
	require.True(t, exists)

	// With the publication made for it, REPLICATION is all a role needs.
	conn := connectAt(t, as("replicator"), replication.ConnectOptions{})
	c.create(conn, true)
	reader := c.start(conn, replication.Options{})
	c.exec(`INSERT INTO t VALUES ('seen')`)
	require.Equal(t, []string{"seen"}, inserted(transaction(t, reader)))
}

func TestReplicationNoFreeSender(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t, pgtest.Options{Settings: map[string]string{"max_wal_senders": "1"}})
	conn := connectAt(t, server.URL(), replication.ConnectOptions{})
	_, err := tryConnect(t.Context(), server.URL(), replication.ConnectOptions{})
	require.ErrorIs(t, err, replication.ErrNoFreeSender)
	require.True(t, replication.IsRetryable(err))
	require.NoError(t, conn.Close(t.Context()))
}
