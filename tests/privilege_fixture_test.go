package tests

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// managed is an outbox as a managed service has it: whoever installs it is no
// superuser, and PUBLIC has no privileges of its own, nor gets any. Its fixture is
// the administrator's, who gives what the documentation asks for and looks on.
type managed struct {
	*fixture
	roles schema.Roles
}

// newManaged installs an outbox as a plain role and gives the others what
// schema.Grants says, and nothing else but REPLICATION.
func newManaged(t *testing.T) *managed {
	t.Helper()
	server := pgtest.Own(t, pgtest.Options{})
	m := &managed{fixture: &fixture{t: t, url: server.URL(), pool: pgtest.Pool(t, server.URL())}}
	m.roles = schema.Roles{Owner: m.role("owner"), Publisher: m.role("publisher"), Consumer: m.role("consumer"), Upkeep: m.role("upkeep")}
	owner := quoteIdentifier(m.roles.Owner)
	database := quoteIdentifier(m.text("SELECT current_database()::text"))
	m.execRaw("REVOKE ALL ON SCHEMA public FROM PUBLIC")
	m.execRaw("REVOKE ALL ON DATABASE " + database + " FROM PUBLIC")
	for _, role := range []string{m.roles.Owner, m.roles.Publisher, m.roles.Consumer, m.roles.Upkeep} {
		m.execRaw("GRANT CONNECT ON DATABASE " + database + " TO " + quoteIdentifier(role))
	}
	m.execRaw("GRANT CREATE ON DATABASE " + database + " TO " + owner)
	m.execRaw("ALTER DEFAULT PRIVILEGES FOR ROLE " + owner + " REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC")
	m.execRaw("ALTER DEFAULT PRIVILEGES FOR ROLE " + owner + " REVOKE USAGE ON TYPES FROM PUBLIC")
	m.execRaw("ALTER ROLE " + quoteIdentifier(m.roles.Consumer) + " REPLICATION")

	pool := m.poolAs(m.roles.Owner)
	require.NoError(t, schema.Migrate(t.Context(), pool, schema.Config{Name: oddSchema}))
	script, err := schema.Grants(schema.Config{Name: oddSchema}, m.roles)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), script)
	require.NoError(t, err)
	return m
}

// consumerAs is consumer, logged in as the shipped role.
func (m *managed) consumerAs(change func(*outbox.ConsumerConfig)) *outbox.Consumer {
	m.t.Helper()
	config, err := pgxpool.ParseConfig(m.urlAs(m.roles.Consumer))
	require.NoError(m.t, err)
	return m.consumerOn(config, change)
}
