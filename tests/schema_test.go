package tests

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// text returns the text that a query returns.
func (f *fixture) text(query string, args ...any) string {
	f.t.Helper()
	var s string
	require.NoError(f.t, f.pool.QueryRow(f.t.Context(), f.sql(query), args...).Scan(&s))
	return s
}

func TestMigrateRefusesNewerVersion(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.exec("UPDATE outbox.meta SET value = '1000' WHERE key = 'version'")
	before := catalog(t, f.pool)
	err := schema.Migrate(t.Context(), f.pool, schema.Config{Name: oddSchema})
	var other *schema.VersionError
	require.ErrorAs(t, err, &other)
	require.Equal(t, schema.VersionError{Schema: oddSchema, Have: 1000, Want: schema.Version}, *other)
	require.ErrorContains(t, err, "update the library")
	require.Equal(t, before, catalog(t, f.pool))
}

// A schema may be in use already, for something else.
func TestMigrateRefusesOtherPeoplesTables(t *testing.T) {
	t.Parallel()

	for name, create := range map[string]string{
		"no version":    "CREATE TABLE meta (key text, value jsonb)",
		"other columns": "CREATE TABLE meta (id int, name text)",
		"other values":  "CREATE TABLE meta (key text, value text); INSERT INTO meta VALUES ('version', 'v1.2.3')",
		"a view":        "CREATE VIEW meta AS SELECT 'version'::text AS key, NULL::jsonb AS value",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			pool := pgtest.Pool(t, pgtest.Database(t))
			_, err := pool.Exec(t.Context(), create)
			require.NoError(t, err)
			before := catalog(t, pool)
			config := schema.Config{Name: "public"}
			err = schema.Migrate(t.Context(), pool, config)
			require.ErrorContains(t, err, "not an outbox of this library")
			_, err = outbox.NewPublisher(pool, outbox.PublisherConfig{Schema: "public"}, nil)
			require.ErrorContains(t, err, "not an outbox of this library")
			_, err = schema.Check(t.Context(), pool, config)
			require.ErrorContains(t, err, "not an outbox of this library")
			require.Equal(t, before, catalog(t, pool))
		})
	}
	// A table of another name is in the way only if it is ours by name.
	pool := pgtest.Pool(t, pgtest.Database(t))
	_, err := pool.Exec(t.Context(), "CREATE TABLE cursors (id int); CREATE TABLE orders (id int)")
	require.NoError(t, err)
	before := catalog(t, pool)
	err = schema.Migrate(t.Context(), pool, schema.Config{Name: "public"})
	var failed *schema.MigrationError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, 1, failed.Version)
	require.Equal(t, "outbox", failed.Name)
	require.ErrorContains(t, err, `relation "cursors" already exists`)
	require.Equal(t, before, catalog(t, pool), "nothing of it is left")
	_, err = pool.Exec(t.Context(), "DROP TABLE cursors")
	require.NoError(t, err)
	require.NoError(t, schema.Migrate(t.Context(), pool, schema.Config{Name: "public"}))
}

func TestMigrateExplainsMissingRights(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("nobody")
	pool := f.poolAs(role)
	config := schema.Config{Name: "another"}
	err := schema.Migrate(t.Context(), pool, config)
	require.ErrorContains(t, err, "grant CREATE on the database")
	require.ErrorContains(t, err, "schema.SQL")
	require.ErrorContains(t, err, "42501")

	// An empty schema of its own will do.
	f.execRaw("CREATE SCHEMA another AUTHORIZATION " + quoteIdentifier(role))
	require.NoError(t, schema.Migrate(t.Context(), pool, config))
	differences, err := schema.Check(t.Context(), pool, config)
	require.NoError(t, err)
	require.Equal(t, []string{"live publication another", "live role " + quoteIdentifier(role)}, kinds(differences), "it polls")

	// Somebody else's does not, and says whose.
	err = schema.Migrate(t.Context(), pool, schema.Config{Name: oddSchema})
	require.ErrorContains(t, err, fmt.Sprintf("role %q lacks USAGE", role))
}
