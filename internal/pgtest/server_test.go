package pgtest

import (
	"context"
	"net"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestStart(t *testing.T) {
	t.Parallel()
	s := Own(t, Options{Settings: map[string]string{"Work_Mem": "9MB", "application_name": `it's a \ test`}})
	require.True(t, s.Owned())

	settings := map[string]string{}
	require.NoError(t, withConn(t.Context(), s.URL(), func(conn *pgx.Conn) error {
		rows, err := conn.Query(t.Context(), "SELECT name, current_setting(name) FROM pg_settings")
		if err != nil {
			return err
		}
		var name, value string
		_, err = pgx.ForEachRow(rows, []any{&name, &value}, func() error {
			settings[name] = value
			return nil
		})
		return err
	}))
	for name, want := range map[string]string{
		"wal_level":                 "logical",
		"max_wal_senders":           "60",
		"max_replication_slots":     "60",
		"max_connections":           "300",
		"max_prepared_transactions": "20",
		"fsync":                     "off",
		"TimeZone":                  "UTC",
		"server_encoding":           "UTF8",
		"listen_addresses":          "127.0.0.1",
		"unix_socket_directories":   "",
		"work_mem":                  "9MB",
		"application_name":          `it's a \ test`,
		"data_directory":            s.DataDir(),
	} {
		require.Equal(t, want, settings[name], name)
	}
	require.Equal(t, "C", query[string](t, s.URL(), "SELECT datcollate FROM pg_database WHERE datname = 'template1'"))
	require.Equal(t, "postgres", query[string](t, s.URL(), "SELECT current_user::text"))
}

func TestDurable(t *testing.T) {
	t.Parallel()
	s := Own(t, Options{Durable: true})
	require.Equal(t, "on", query[string](t, s.URL(), "SHOW fsync"))
}

func TestStartRefusesReservedSetting(t *testing.T) {
	t.Parallel()
	_, err := Start(t.Context(), Options{Settings: map[string]string{"PORT": "5432"}})
	require.ErrorContains(t, err, `setting "port" is chosen by this package`)
}

// The log's end is in the error: after a failed start there is no log to read.
func TestStartFailureTellsWhy(t *testing.T) {
	t.Parallel()
	_, err := Start(t.Context(), Options{Settings: map[string]string{"no_such_setting": "1"}})
	require.ErrorContains(t, err, "ended with exit code 1 while starting")
	require.ErrorContains(t, err, `unrecognized configuration parameter "no_such_setting"`)
}

func TestStartEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Start(ctx, Options{})
	require.ErrorIs(t, err, context.Canceled)
	require.NotContains(t, err.Error(), "has not ended")
}

// A server named in the environment is somebody else's: everything that could
// disturb its owner is refused, and Stop leaves it alone.
func TestOpenNamedServer(t *testing.T) {
	owned := Own(t, Options{})
	t.Setenv(EnvDatabaseURL, owned.URLFor("template1"))

	s, err := Open(t.Context(), Options{})
	require.NoError(t, err)
	require.False(t, s.Owned())
	require.Equal(t, owned.URLFor("template1"), s.URL())
	require.Equal(t, owned.URLFor("other"), s.URLFor("other"))
	require.Equal(t, owned.Port(), s.Port())
	require.Equal(t, owned.Addr(), s.Addr())
	require.Empty(t, s.DataDir())
	require.Empty(t, s.LogFile())

	require.ErrorIs(t, s.Shutdown(t.Context(), Fast), ErrNotOwned)
	require.ErrorIs(t, s.StartAgain(t.Context()), ErrNotOwned)
	require.ErrorIs(t, s.Restart(t.Context(), Fast), ErrNotOwned)
	require.ErrorIs(t, s.Kill(t.Context()), ErrNotOwned)
	require.ErrorIs(t, s.Reconfigure(t.Context(), nil), ErrNotOwned)
	_, err = s.Standby(t.Context(), Options{})
	require.ErrorIs(t, err, ErrNotOwned)
	require.NoError(t, s.Stop())

	t.Run("database", func(t *testing.T) {
		url := DatabaseOn(t, s)
		require.Equal(t, 1, query[int](t, url, "SELECT 1"))
	})
	require.NoError(t, s.Stop())
	require.Equal(t, 1, query[int](t, owned.URL(), "SELECT 1"))
}

func TestOpenNamedServerThatIsUnusable(t *testing.T) {
	t.Setenv(EnvDatabaseURL, "postgres://postgres:secret@127.0.0.1:1/postgres?sslmode=disable")
	_, err := Open(t.Context(), Options{})
	require.ErrorContains(t, err, "the server named by OUTBOX_DATABASE_URL does not answer")
	require.NotContains(t, err.Error(), "secret")

	t.Setenv(EnvDatabaseURL, "postgres://postgres:secret@127.0.0.1:x/")
	_, err = Open(t.Context(), Options{})
	require.ErrorContains(t, err, "OUTBOX_DATABASE_URL is not a URL of a PostgreSQL server")
	require.NotContains(t, err.Error(), "secret")

	t.Setenv(EnvDatabaseURL, "host=localhost dbname=postgres")
	_, err = Open(t.Context(), Options{})
	require.ErrorContains(t, err, "it should look like postgres://")
}

func TestOpenWithoutNamedServer(t *testing.T) {
	t.Setenv(EnvDatabaseURL, "")
	s, err := Open(t.Context(), Options{})
	require.NoError(t, err)
	Cleanup(t, s)
	require.True(t, s.Owned())
}

// Another process took the port between the choice and the bind: the server
// comes up on another one.
func TestStartChoosesAnotherPort(t *testing.T) {
	t.Parallel()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	taken := l.Addr().(*net.TCPAddr).Port

	asked := 0
	s, err := create(t.Context(), programs(t), defaultSettings(), initialise, func(ctx context.Context) (int, error) {
		asked++
		if asked == 1 {
			return taken, nil
		}
		return freePort(ctx)
	})
	require.NoError(t, err)
	Cleanup(t, s)
	require.Equal(t, 2, asked)
	require.NotEqual(t, taken, s.Port())
	require.Equal(t, 1, query[int](t, s.URL(), "SELECT 1"))
}

// The process on the port may be a PostgreSQL that lets us in. It must not be
// taken for the new server.
func TestStartIsNotFooledByAnotherServer(t *testing.T) {
	t.Parallel()
	other := Own(t, Options{})
	asked := 0
	s, err := create(t.Context(), programs(t), defaultSettings(), initialise, func(ctx context.Context) (int, error) {
		asked++
		if asked == 1 {
			return other.Port(), nil
		}
		return freePort(ctx)
	})
	require.NoError(t, err)
	Cleanup(t, s)
	require.NotEqual(t, other.Port(), s.Port())
	require.Equal(t, s.DataDir(), query[string](t, s.URL(), "SHOW data_directory"))
}

func TestStartGivesUpOnPorts(t *testing.T) {
	t.Parallel()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	_, err = create(t.Context(), programs(t), defaultSettings(), initialise, func(context.Context) (int, error) {
		return l.Addr().(*net.TCPAddr).Port, nil
	})
	require.ErrorIs(t, err, errPortTaken)
}

// programs returns the folder of the server's programs.
func programs(t *testing.T) string {
	t.Helper()
	bin, err := defaultFinder().find(t.Context())
	require.NoError(t, err)
	return bin
}
