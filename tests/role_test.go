package tests

import (
	"context"
	"crypto/rand"
	"net/url"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// role creates a role that may log in and nothing else. Its name is a new one,
// because roles belong to the whole server, and an odd one. When the test ends
// it is dropped with whatever it owns.
func (f *fixture) role(part string) string {
	f.t.Helper()
	name := `Odd "` + part + `"; 'x' ` + strings.ToLower(rand.Text()[:16])
	f.execRaw("CREATE ROLE " + quoteIdentifier(name) + " LOGIN PASSWORD '" + rolePassword + "'")
	f.t.Cleanup(func() {
		// The test's own context has ended by now.
		ctx := context.WithoutCancel(f.t.Context())
		quoted := quoteIdentifier(name)
		_, err := f.pool.Exec(ctx, "DROP OWNED BY "+quoted+" CASCADE; DROP ROLE "+quoted)
		require.NoError(f.t, err)
	})
	return name
}

const rolePassword = "secret"

// urlAs is the database's URL for a role.
func (f *fixture) urlAs(role string) string {
	f.t.Helper()
	u, err := url.Parse(f.url)
	require.NoError(f.t, err)
	u.User = url.UserPassword(role, rolePassword)
	return u.String()
}

// poolAs is a pool of connections of a role.
func (f *fixture) poolAs(role string) *pgxpool.Pool {
	f.t.Helper()
	return pgtest.Pool(f.t, f.urlAs(role))
}

// grant runs the script that is shipped for these roles.
func (f *fixture) grant(roles schema.Roles) {
	f.t.Helper()
	script, err := schema.Grants(schema.Config{Name: oddSchema}, roles)
	require.NoError(f.t, err)
	f.execRaw(script)
}

// execRaw runs a text without filling anything in, as psql would.
func (f *fixture) execRaw(text string) {
	f.t.Helper()
	_, err := f.pool.Exec(f.t.Context(), text)
	require.NoError(f.t, err)
}

// quoteIdentifier quotes a name for the text of a statement.
func quoteIdentifier(name string) string { return pgx.Identifier{name}.Sanitize() }
