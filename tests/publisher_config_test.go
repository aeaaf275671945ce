package tests

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

func TestNewPublisherRefusesConfig(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	for field, config := range map[string]outbox.PublisherConfig{
		"PublisherConfig.Schema: schema: the schema's name":     {Schema: strings.Repeat("é", 32)},
		`PublisherConfig.Schema: schema: the schema's name "pg`: {Schema: "pg_outbox"},
		"PublisherConfig.MaxPayloadBytes must be between 1 and": {Schema: oddSchema, MaxPayloadBytes: -1},
		fmt.Sprintf("PublisherConfig.MaxPayloadBytes must be between 1 and %d, is %d", 256<<20, 256<<20+1): {
			Schema: oddSchema, MaxPayloadBytes: outbox.LimitPayloadBytes + 1,
		},
	} {
		publisher, err := outbox.NewPublisher(f.pool, config, nil)
		require.ErrorContains(t, err, field)
		require.Nil(t, publisher)
	}
	for _, bytes := range []int{0, 1, outbox.LimitPayloadBytes} {
		_, err := outbox.NewPublisher(f.pool, outbox.PublisherConfig{Schema: oddSchema, MaxPayloadBytes: bytes}, nil)
		require.NoError(t, err)
	}
}

func TestNewPublisherUsesTheDefaultSchema(t *testing.T) {
	t.Parallel()

	pool := pgtest.Pool(t, pgtest.Database(t))
	_, err := outbox.NewPublisher(pool, outbox.PublisherConfig{}, nil)
	require.ErrorIs(t, err, outbox.ErrNotInstalled)
	require.NoError(t, schema.Migrate(t.Context(), pool, schema.Config{}))
	publisher, err := outbox.NewPublisher(pool, outbox.PublisherConfig{}, nil)
	require.NoError(t, err)
	require.NoError(t, publisher.Publish("orders", newMessages(1)...))
	var n int
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM outbox.messages").Scan(&n))
	require.Equal(t, 1, n)
}

// poolKinds opens a pool of each kind for a URL.
var poolKinds = map[string]func(t testing.TB, url string) any{
	"pgxpool":    func(t testing.TB, url string) any { return pgtest.Pool(t, url) },
	"pgx stdlib": func(t testing.TB, url string) any { return openSQL(t, "pgx", url) },
	"lib/pq":     func(t testing.TB, url string) any { return openSQL(t, "postgres", url) },
}

// What is wrong with the installation is told when the service starts, and not
// by the first order that fails in production.
func TestNewPublisherChecksTheInstallation(t *testing.T) {
	t.Parallel()

	for kind, open := range poolKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			newPublisher := func(db any, schemaName string) error {
				publisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{Schema: schemaName}, nil)
				if err != nil {
					require.Nil(t, publisher)
				}
				return err
			}
			db := open(t, f.url)
			require.NoError(t, newPublisher(db, oddSchema))

			t.Run("nobody listens", func(t *testing.T) {
				url := fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", pgtest.FreePort(t))
				require.ErrorContains(t, newPublisher(open(t, url), oddSchema), "connect")
			})
			t.Run("missing schema", func(t *testing.T) {
				err := newPublisher(db, "nowhere")
				require.ErrorIs(t, err, outbox.ErrNotInstalled)
				require.ErrorContains(t, err, `schema "nowhere" does not exist`)
			})
			t.Run("empty schema", func(t *testing.T) {
				f.exec("CREATE SCHEMA empty")
				err := newPublisher(db, "empty")
				require.ErrorIs(t, err, outbox.ErrNotInstalled)
				require.ErrorContains(t, err, `table meta in schema "empty" does not exist`)
			})
			t.Run("missing table", func(t *testing.T) {
				f.exec("ALTER TABLE outbox.messages RENAME TO elsewhere")
				err := newPublisher(db, oddSchema)
				f.exec("ALTER TABLE outbox.elsewhere RENAME TO messages")
				require.ErrorIs(t, err, outbox.ErrNotInstalled)
				require.ErrorContains(t, err, "table messages in schema")
			})
			for version, advice := range map[int]string{0: "run schema.Migrate", schema.Version + 1: "update the library"} {
				t.Run(fmt.Sprintf("version %d", version), func(t *testing.T) {
					f.exec("UPDATE outbox.meta SET value = to_jsonb($1::int) WHERE key = 'version'", version)
					err := newPublisher(db, oddSchema)
					f.exec("UPDATE outbox.meta SET value = to_jsonb($1::int) WHERE key = 'version'", schema.Version)
					var other *schema.VersionError
					require.ErrorAs(t, err, &other)
					require.Equal(t, schema.VersionError{Schema: oddSchema, Have: version, Want: schema.Version}, *other)
					require.ErrorContains(t, err, advice)
				})
			}
			t.Run("missing privileges", func(t *testing.T) {
				role := f.role("nobody")
				mine := open(t, f.urlAs(role))
				for _, step := range []struct{ privilege, on, grant string }{
					{"USAGE", "on it", "GRANT USAGE ON SCHEMA outbox TO "},
					{"SELECT", "on table meta", "GRANT SELECT ON outbox.meta TO "},
					{"INSERT", "on table messages", "GRANT INSERT ON outbox.messages TO "},
				} {
					err := newPublisher(mine, oddSchema)
					require.ErrorContains(t, err, fmt.Sprintf("role %q lacks %s %s", role, step.privilege, step.on))
					require.ErrorContains(t, err, "schema.Grants")
					require.NotErrorIs(t, err, outbox.ErrNotInstalled)
					f.exec(step.grant + quoteIdentifier(role))
				}
				require.NoError(t, newPublisher(mine, oddSchema))
			})
			t.Run("read-only server", func(t *testing.T) {
				var name string
				require.NoError(t, f.pool.QueryRow(t.Context(), "SELECT current_database()").Scan(&name))
				f.exec("ALTER DATABASE " + quoteIdentifier(name) + " SET default_transaction_read_only = on")
				require.ErrorIs(t, newPublisher(open(t, f.url), oddSchema), outbox.ErrReadOnly)
			})
		})
	}
}

func TestNewPublisherRefusesHandles(t *testing.T) {
	t.Parallel()

	for name, db := range unsupportedHandles() {
		publisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{}, nil)
		require.ErrorIs(t, err, outbox.ErrUnsupportedExecutor, name)
		require.ErrorContains(t, err, name)
		require.Nil(t, publisher)
	}
	_, err := outbox.NewPublisher(nil, outbox.PublisherConfig{}, nil)
	require.ErrorIs(t, err, outbox.ErrUnsupportedExecutor)
	require.ErrorContains(t, err, "only with RequireTx")
}

// The publisher asks for what it can: a connection or a transaction belongs to
// somebody who may be in the middle of something, and is left alone.
func TestNewPublisherDoesNotUseOtherPeoplesTransaction(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	tx, err := f.connect(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "no SQL")
	require.Error(t, err)
	publisher := publisherOn(t, tx, outbox.PublisherConfig{})
	require.Error(t, publisher.Publish("orders", newMessages(1)...))
}

// A role that can do too little, a schema that went away, a server that became
// read-only: Publish says what to do about it, with the server's own error.
func TestPublishExplainsTheServersError(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("nobody")
	for kind, driver := range map[string]string{"pgx": "pgx", "lib/pq": "postgres"} {
		t.Run(kind, func(t *testing.T) {
			for name, n := range callSizes {
				t.Run(name, func(t *testing.T) {
					publish := func(url, schemaName string) error {
						// No pool, so that nothing is asked at construction.
						var db any
						if driver == "pgx" {
							pool := pgtest.Pool(t, url)
							conn, err := pool.Acquire(t.Context())
							require.NoError(t, err)
							defer conn.Release()
							db = conn.Conn()
						} else {
							conn, err := openSQL(t, driver, url).Conn(t.Context())
							require.NoError(t, err)
							defer func() { require.NoError(t, conn.Close()) }()
							db = conn
						}
						publisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{Schema: schemaName}, nil)
						require.NoError(t, err)
						return publisher.Publish("orders", newMessages(n)...)
					}
					require.NoError(t, publish(f.url, oddSchema))

					err := publish(f.url, "nowhere")
					require.ErrorIs(t, err, outbox.ErrNotInstalled)
					require.ErrorContains(t, err, `"nowhere"`)

					err = publish(f.urlAs(role), oddSchema)
					require.ErrorContains(t, err, "schema.Grants")
					require.ErrorContains(t, err, "permission denied")

					require.ErrorIs(t, publish(withParameter(t, f.url, "default_transaction_read_only", "on"), oddSchema), outbox.ErrReadOnly)
				})
			}
		})
	}
}

// The error of a wrong address comes from pgx, and stays recognisable.
func TestNewPublisherKeepsTheDriversError(t *testing.T) {
	t.Parallel()

	url := fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", pgtest.FreePort(t))
	_, err := outbox.NewPublisher(pgtest.Pool(t, url), outbox.PublisherConfig{}, nil)
	var refused *pgconn.ConnectError
	require.ErrorAs(t, err, &refused)
}
