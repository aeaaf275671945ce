package pgtest

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"
)

func TestDatabase(t *testing.T) {
	t.Parallel()
	var name string
	t.Run("made", func(t *testing.T) {
		one, two := Database(t), Database(t)
		require.NotEqual(t, one, two)
		run(t, one, "CREATE TABLE mine (n int)")
		run(t, two, "CREATE TABLE mine (n int)")
		name = query[string](t, one, "SELECT current_database()")
		require.True(t, strings.HasPrefix(name, "testdatabase_made_"), name)
	})
	require.False(t, exists(t, name), "dropped at the end of its test")
}

func exists(t *testing.T, name string) bool {
	t.Helper()
	return query[bool](t, Shared(t).URL(), "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name)
}

// A failed test leaves all kinds of things that keep a database from being
// dropped.
func TestDatabaseDropsWhatHoldsIt(t *testing.T) {
	t.Parallel()
	var name string
	// Neither connection is closed while the database is dropped, nor given up
	// by the program: the collector would close it.
	var streaming, idle *pgx.Conn
	defer func() {
		for _, conn := range []*pgx.Conn{streaming, idle} {
			_ = conn.Close(context.Background()) // the server has closed it
		}
	}()
	t.Run("hold", func(t *testing.T) {
		url := Database(t)
		name = query[string](t, url, "SELECT current_database()")
		// Slots and transaction ids belong to the whole server.
		unique := name[len(name)-16:]
		run(t, url, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", "idle_"+unique)
		run(t, url, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", "busy_"+unique)
		run(t, url, "CREATE TABLE held (n int); CREATE PUBLICATION all_of_it FOR TABLE held")
		run(t, url, fmt.Sprintf("BEGIN; INSERT INTO held VALUES (1); PREPARE TRANSACTION 'it''s %s'", unique))

		var err error
		streaming, err = pgx.Connect(t.Context(), url+"&replication=database")
		require.NoError(t, err)
		_, err = streaming.PgConn().Exec(t.Context(), "IDENTIFY_SYSTEM").ReadAll()
		require.NoError(t, err)
		frontend := streaming.PgConn().Frontend()
		frontend.SendQuery(&pgproto3.Query{String: fmt.Sprintf("START_REPLICATION SLOT busy_%s LOGICAL 0/0 (proto_version '1', publication_names 'all_of_it')", unique)})
		require.NoError(t, frontend.Flush())
		answer, err := frontend.Receive()
		require.NoError(t, err)
		require.IsType(t, &pgproto3.CopyBothResponse{}, answer)
		idle, err = pgx.Connect(t.Context(), url)
		require.NoError(t, err)
	})
	require.False(t, exists(t, name))
}

// A server that a test left down takes its databases with it.
func TestDatabaseOnServerThatIsDown(t *testing.T) {
	t.Parallel()
	s := Own(t, Options{})
	t.Run("down", func(t *testing.T) {
		DatabaseOn(t, s)
		require.NoError(t, s.Shutdown(t.Context(), Immediate))
	})
	require.NoError(t, s.StartAgain(t.Context()))
	require.Equal(t, 1, query[int](t, s.URL(), "SELECT count(*) FROM pg_database WHERE datname LIKE 'testdatabaseonserver%'"))
}

func TestDatabaseName(t *testing.T) {
	t.Parallel()
	name := databaseName("TestX/" + strings.Repeat(`Quote"ü `, 20))
	require.Regexp(t, `^testx_quote___quote_[a-z_]+_[a-z0-9]{16}$`, name)
	require.LessOrEqual(t, len(name), 63)
	require.NotEqual(t, databaseName("TestX"), databaseName("TestX"))
}

// Many tests want the same to begin with: it is made once, and each has a copy.
func TestDatabaseLike(t *testing.T) {
	t.Parallel()

	prepared := 0
	original := &Original{Prepare: func(ctx context.Context, url string) error {
		prepared++
		return withConn(ctx, url, func(conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "CREATE TABLE mine (n int); INSERT INTO mine VALUES (1)")
			return err
		})
	}}
	one, two := DatabaseLike(t, original), DatabaseLike(t, original)
	require.NotEqual(t, one, two)
	run(t, one, "DELETE FROM mine")
	require.Equal(t, 1, query[int](t, two, "SELECT count(*)::int FROM mine"))
	if Shared(t).Owned() {
		require.Equal(t, 1, prepared)
	}
}
