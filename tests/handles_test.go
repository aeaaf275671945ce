package tests

import (
	"context"
	"database/sql"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	_ "github.com/lib/pq"              // the driver "postgres"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// connect returns a connection that is closed when the test ends.
func (f *fixture) connect(t testing.TB) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), f.url)
	require.NoError(t, err)
	// The test's own context has ended by then.
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

// withParameter returns a URL with one parameter more, if that has a name.
func withParameter(t testing.TB, address, name, value string) string {
	t.Helper()
	if name == "" {
		return address
	}
	u, err := url.Parse(address)
	require.NoError(t, err)
	query := u.Query()
	query.Set(name, value)
	u.RawQuery = query.Encode()
	return u.String()
}

// openSQL returns a database/sql handle with one of the two drivers, "pgx" and
// "postgres", that is closed when the test ends.
func openSQL(t testing.TB, driver, address string) *sql.DB {
	t.Helper()
	if !strings.Contains(address, "sslmode=") {
		// pgx's default, as libpq's; lib/pq insists on encryption.
		address = withParameter(t, address, "sslmode", "prefer")
	}
	db, err := sql.Open(driver, address)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	return db
}

// publisherOn returns a Publisher on a handle other than the fixture's pool.
func publisherOn(t testing.TB, db any, config outbox.PublisherConfig) *outbox.Publisher {
	t.Helper()
	config.Schema = oddSchema
	publisher, err := outbox.NewPublisher(db, config, nil)
	require.NoError(t, err)
	return publisher
}

// await returns what the channel gets, which must not take for ever.
func await[T any](t testing.TB, channel <-chan T) T {
	t.Helper()
	select {
	case value := <-channel:
		return value
	case <-time.After(waitFor):
		require.FailNow(t, "waited in vain")
		panic("not reached")
	}
}
