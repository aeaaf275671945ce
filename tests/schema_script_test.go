package tests

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// runScript runs a script as psql -f does: one session, statement by statement
// until one fails, its own BEGIN and COMMIT included.
func runScript(t testing.TB, url, script string) error {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.WithoutCancel(t.Context()))) }()
	_, err = conn.PgConn().Exec(t.Context(), script).ReadAll()
	return err
}

// Where the application may not run DDL somebody else runs the script, and must
// get the very same tables.
func TestScriptMakesWhatMigrateMakes(t *testing.T) {
	t.Parallel()

	for _, name := range []string{"outbox", oddSchema, "$body$", `back\slash`, "SCHEMA outbox", ":schema", "two\nlines"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			config := largeIntervals
			config.Name = name
			migrated, scripted := pgtest.Database(t), pgtest.Database(t)
			migratedPool, scriptedPool := pgtest.Pool(t, migrated), pgtest.Pool(t, scripted)
			require.NoError(t, schema.Migrate(t.Context(), migratedPool, config))
			script, err := schema.SQL(config, 0)
			require.NoError(t, err)
			require.NoError(t, runScript(t, scripted, script))

			require.Equal(t, catalog(t, migratedPool), catalog(t, scriptedPool))
			require.Equal(t, published(t, migratedPool), published(t, scriptedPool))
			require.Equal(t, meta(t, migratedPool, name), meta(t, scriptedPool, name))
			require.NoError(t, schema.Migrate(t.Context(), scriptedPool, config))
			require.Equal(t, catalog(t, migratedPool), catalog(t, scriptedPool))

			// Backslashes in literals mean something else there.
			old := pgtest.Database(t)
			require.NoError(t, runScript(t, withParameter(t, old, "standard_conforming_strings", "off"), script))
			require.Equal(t, catalog(t, migratedPool), catalog(t, pgtest.Pool(t, old)))
			require.Equal(t, published(t, migratedPool), published(t, pgtest.Pool(t, old)))
		})
	}
}

// meta returns what the table meta says.
func meta(t testing.TB, db schema.Querier, name string) []string {
	t.Helper()
	rows, err := db.Query(t.Context(), schema.Text(name, "SELECT key || '=' || value FROM outbox.meta ORDER BY 1"))
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.NotEmpty(t, lines)
	return lines
}

// A script lies around and is run twice, or against the wrong database.
func TestScriptRefusesAnotherVersion(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	config := schema.Config{Name: oddSchema}
	first, err := schema.SQL(config, 0)
	require.NoError(t, err)
	next, err := schema.SQL(config, schema.Version)
	require.NoError(t, err)
	before := catalog(t, f.pool)

	require.Error(t, runScript(t, f.url, first), "all of it is there already")
	require.NoError(t, runScript(t, f.url, next), "nothing is missing")
	require.Equal(t, before, catalog(t, f.pool))
	require.Equal(t, schema.Version, f.number("SELECT value::int FROM outbox.meta WHERE key = 'version'"))

	f.exec("UPDATE outbox.meta SET value = '7' WHERE key = 'version'")
	require.ErrorContains(t, runScript(t, f.url, next), "division by zero")
	f.exec("DELETE FROM outbox.meta WHERE key = 'version'")
	require.ErrorContains(t, runScript(t, f.url, next), "division by zero", "no version is another version, too")
	require.Error(t, runScript(t, f.url, first))
	require.Equal(t, before, catalog(t, f.pool))

	empty := pgtest.Database(t)
	require.ErrorContains(t, runScript(t, empty, next), "does not exist")
	for _, from := range []int{-1, schema.Version + 1} {
		_, err := schema.SQL(config, from)
		require.ErrorContains(t, err, "there is no version")
	}
}

// Scripts and Migrate take the same lock.
func TestScriptWaitsForMigrate(t *testing.T) {
	t.Parallel()

	url := pgtest.Database(t)
	pool := pgtest.Pool(t, url)
	holder, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = holder.Exec(t.Context(), "SELECT pg_advisory_xact_lock($1)", schema.LockKey("outbox"))
	require.NoError(t, err)
	script, err := schema.SQL(schema.Config{}, 0)
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- runScript(t, url, script) }()
	waitForLock(t, pool)
	require.Empty(t, done)
	require.NoError(t, holder.Rollback(t.Context()))
	require.NoError(t, await(t, done))
}
