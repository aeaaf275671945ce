package tests

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/replication"
	"github.com/millrace/watermill-outbox/schema"
)

// checkLive returns what schema.CheckLive finds, which schema.Check must find,
// too.
func (f *fixture) checkLive(db schema.Querier) []schema.Difference {
	f.t.Helper()
	differences, err := schema.CheckLive(f.t.Context(), db, schema.Config{Name: oddSchema})
	require.NoError(f.t, err)
	for _, d := range differences {
		require.Equal(f.t, schema.SeverityLive, d.Severity)
	}
	require.Subset(f.t, f.check(db), differences)
	return differences
}

// replicates gives a role what it needs to read the WAL.
func (f *fixture) replicates(role string) {
	f.t.Helper()
	f.execRaw("ALTER ROLE " + quoteIdentifier(role) + " REPLICATION")
}

// kinds are the severities and objects of differences.
func kinds(differences []schema.Difference) []string {
	list := make([]string, len(differences))
	for i, d := range differences {
		list[i] = string(d.Severity) + " " + d.Object
	}
	return list
}

func TestCheckLiveFindsNothingOnFreshInstall(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	require.Empty(t, f.checkLive(f.pool))

	_, err := schema.CheckLive(t.Context(), f.pool, schema.Config{})
	require.ErrorIs(t, err, schema.ErrNotInstalled)
	conn := f.connect(t)
	require.NoError(t, conn.Close(t.Context()))
	_, err = schema.CheckLive(t.Context(), conn, schema.Config{Name: oddSchema})
	require.Error(t, err, "a database that cannot be asked is no clean one")
}

// publicationCases are what may have become of the publication.
func publicationCases(version int) map[string]struct{ create, found string } {
	cases := map[string]struct{ create, found string }{
		"missing": {"", "missing"},
		"all tables, partition by partition": {
			"FOR ALL TABLES", "all tables, not via the partition root",
		},
		"all tables without inserts": {
			"FOR ALL TABLES WITH (publish = 'update, delete', publish_via_partition_root = true)", "all tables, without inserts",
		},
		"nothing":       {"WITH (publish_via_partition_root = true)", "without table messages"},
		"another table": {"FOR TABLE outbox.cursors WITH (publish_via_partition_root = true)", "without table messages"},
		"a partition":   {"FOR TABLE outbox.messages_default WITH (publish_via_partition_root = true)", "without table messages"},
		"no inserts":    {"FOR TABLE outbox.messages WITH (publish = 'truncate, delete', publish_via_partition_root = true)", "without inserts"},
		"no root":       {"FOR TABLE outbox.messages", "not via the partition root"},
		"everything": {
			"FOR TABLE outbox.deferred WITH (publish = 'truncate')", "without table messages, without inserts, not via the partition root",
		},
		"just right":   {"FOR TABLE outbox.messages WITH (publish = 'insert', publish_via_partition_root = true)", ""},
		"more actions": {"FOR TABLE outbox.messages WITH (publish_via_partition_root = true)", ""},
		"more tables":  {"FOR TABLE outbox.cursors, outbox.messages_default, outbox.messages WITH (publish_via_partition_root = true)", ""},
		"all tables":   {"FOR ALL TABLES WITH (publish_via_partition_root = true)", ""},
	}
	if version < 150000 {
		return cases
	}
	cases["row filter"] = struct{ create, found string }{
		"FOR TABLE outbox.messages WHERE (topic = 'orders') WITH (publish = 'insert', publish_via_partition_root = true)",
		"with a row filter on table messages",
	}
	cases["column list"] = struct{ create, found string }{
		"FOR TABLE outbox.messages (id, xid, topic) WITH (publish = 'insert', publish_via_partition_root = true)",
		"with a column list of table messages",
	}
	cases["row filter and column list"] = struct{ create, found string }{
		"FOR TABLE outbox.messages (id, topic) WHERE (topic = 'orders') WITH (publish = 'insert', publish_via_partition_root = true)",
		"with a row filter on table messages, with a column list of table messages",
	}
	cases["all tables of the schema"] = struct{ create, found string }{
		"FOR TABLES IN SCHEMA outbox WITH (publish_via_partition_root = true)", "",
	}
	cases["all tables of another schema"] = struct{ create, found string }{
		"FOR TABLES IN SCHEMA public WITH (publish_via_partition_root = true)", "without table messages",
	}
	return cases
}

// Each is found by itself and gone after its remedy, which takes nothing away
// from other readers of the publication.
func TestCheckLiveFindsWhatPublicationLacks(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	conn := f.connect(t)
	version := f.number("SELECT current_setting('server_version_num')::int")
	for name, test := range publicationCases(version) {
		t.Run(name, func(t *testing.T) {
			// Rolled back, so that each case begins with a fresh installation.
			tx, err := conn.Begin(t.Context())
			require.NoError(t, err)
			defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
			exec := func(text string) {
				_, err := tx.Exec(t.Context(), text)
				require.NoError(t, err, text)
			}
			exec("DROP PUBLICATION " + quoteIdentifier(oddSchema))
			if test.create != "" {
				exec("CREATE PUBLICATION " + quoteIdentifier(oddSchema) + " " + f.sql(test.create))
			}
			actions := func() string {
				var s string
				require.NoError(t, tx.QueryRow(t.Context(), `SELECT coalesce(string_agg(format('%s %s %s', pubupdate, pubdelete, pubtruncate), ''), '')
					FROM pg_catalog.pg_publication`).Scan(&s))
				return s
			}
			differences, before := f.checkLive(tx), actions()
			if test.found == "" {
				require.Empty(t, differences)
				return
			}
			require.Len(t, differences, 1, "%v", differences)
			require.Equal(t, "publication "+quoteIdentifier(oddSchema), differences[0].Object)
			require.Equal(t, test.found, differences[0].Found)
			exec(statement(differences[0].Remedy))
			require.Empty(t, f.checkLive(tx))
			if test.create != "" {
				require.Equal(t, before, actions())
			}
		})
	}
}

// What Check says of a role is what the server does when that role asks for the
// WAL.
func TestCheckLiveFindsMissingRole(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer, publisher := f.role("consumer"), f.role("publisher")
	f.grant(schema.Roles{Consumer: consumer, Publisher: publisher, Upkeep: publisher})
	require.Empty(t, f.checkLive(f.poolAs(publisher)), "no consumer")
	require.Empty(t, f.checkLive(f.pool), "a superuser may")

	replicate := func(role string) error {
		conn, err := tryConnect(t.Context(), f.urlAs(role), replication.ConnectOptions{})
		if err == nil {
			require.NoError(t, conn.Close(t.Context()))
		}
		return err
	}
	want := []schema.Difference{{
		Severity: schema.SeverityLive, Object: "role " + quoteIdentifier(consumer), Found: "no REPLICATION", Want: "REPLICATION",
		Remedy: "ALTER ROLE " + quoteIdentifier(consumer) + " REPLICATION: as a superuser",
	}}
	pool := f.poolAs(consumer)
	require.Equal(t, want, f.checkLive(pool))
	require.ErrorIs(t, replicate(consumer), replication.ErrNoPrivilege)

	// Setting a role that has it does not help, and one without it does no harm.
	replicator := f.role("replicator")
	f.replicates(replicator)
	f.execRaw("GRANT " + quoteIdentifier(replicator) + " TO " + quoteIdentifier(consumer))
	f.grant(schema.Roles{Consumer: replicator})
	set := func(login, role string) schema.Querier {
		config, err := pgxpool.ParseConfig(f.urlAs(login))
		require.NoError(t, err)
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "SET ROLE "+quoteIdentifier(role))
			return err
		}
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		return pool
	}
	require.Equal(t, want, f.checkLive(set(consumer, replicator)))
	f.execRaw("REVOKE " + quoteIdentifier(replicator) + " FROM " + quoteIdentifier(consumer) +
		"; GRANT " + quoteIdentifier(consumer) + " TO " + quoteIdentifier(replicator))
	require.Empty(t, f.checkLive(set(replicator, consumer)))
	require.NoError(t, replicate(replicator))

	f.execRaw(statement(want[0].Remedy))
	require.Empty(t, f.checkLive(pool))
	require.NoError(t, replicate(consumer))
}

// On Amazon RDS nobody gets the attribute: membership in a role stands for it.
func TestCheckLiveKnowsAmazonsRole(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("consumer")
	f.grant(schema.Roles{Consumer: role})
	// Nobody else sees the role that this transaction never commits.
	tx, err := f.connect(t).Begin(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(context.WithoutCancel(t.Context()))) }()
	exec := func(text string) {
		_, err := tx.Exec(t.Context(), text)
		require.NoError(t, err, text)
	}
	exec("CREATE ROLE rds_replication; SET LOCAL SESSION AUTHORIZATION " + quoteIdentifier(role))
	differences := f.checkLive(tx)
	require.Len(t, differences, 1)
	require.Equal(t, "role "+quoteIdentifier(role), differences[0].Object)
	exec("SET LOCAL SESSION AUTHORIZATION DEFAULT; " + statement(differences[0].Remedy) +
		"; SET LOCAL SESSION AUTHORIZATION " + quoteIdentifier(role))
	require.Empty(t, f.checkLive(tx))
}

// What Check says of a server is what the server does.
func TestCheckLiveFindsServersSettings(t *testing.T) {
	t.Parallel()

	server := pgtest.Own(t, pgtest.Options{Settings: map[string]string{"wal_level": "replica"}})
	f := fixtureAt(t, server.URL())
	role := f.role("consumer")
	f.grant(schema.Roles{Consumer: role})
	f.replicates(role)
	f.url = f.urlAs(role)
	pool := f.poolAs(role)
	c := &capture{t: t, url: f.url, pool: pool, slot: slotName()}

	differences := f.checkLive(pool)
	require.Equal(t, []string{"live setting wal_level"}, kinds(differences))
	require.Equal(t, "replica", differences[0].Found)
	require.Equal(t, "logical", differences[0].Want)
	require.Equal(t, "ALTER SYSTEM SET wal_level = logical", statement(differences[0].Remedy))
	_, err := c.connect().CreateSlot(t.Context(), c.slot, replication.SlotOptions{Temporary: true})
	require.ErrorIs(t, err, replication.ErrWALLevel)

	reconfigure := func(settings map[string]string) {
		require.NoError(t, server.Reconfigure(t.Context(), settings))
		f.pool.Reset()
		pool.Reset()
	}
	reconfigure(map[string]string{"wal_level": "logical", "max_replication_slots": "1", "max_wal_senders": "2"})
	require.Empty(t, f.checkLive(pool))
	f.exec("SELECT pg_catalog.pg_create_physical_replication_slot('taken')")
	differences = f.checkLive(pool)
	require.Equal(t, []string{"live setting max_replication_slots"}, kinds(differences))
	require.Equal(t, "1, with 1 in use", differences[0].Found)
	require.Equal(t, "ALTER SYSTEM SET max_replication_slots = 11", statement(differences[0].Remedy))
	_, err = c.connect().CreateSlot(t.Context(), c.slot, replication.SlotOptions{Temporary: true})
	require.ErrorIs(t, err, replication.ErrNoFreeSlot)
	f.exec("SELECT pg_catalog.pg_drop_replication_slot('taken')")
	require.Empty(t, f.checkLive(pool))

	// A plain role, which sees nobody else's senders, must count them all.
	connectAt(t, server.URL(), replication.ConnectOptions{})
	differences = f.checkLive(pool)
	require.Equal(t, []string{"live setting max_wal_senders"}, kinds(differences))
	require.Equal(t, "2, with 2 in use", differences[0].Found)
	require.Equal(t, "ALTER SYSTEM SET max_wal_senders = 12", statement(differences[0].Remedy))
	_, err = tryConnect(t.Context(), f.url, replication.ConnectOptions{})
	require.ErrorIs(t, err, replication.ErrNoFreeSender)

	// Without any, nothing of it is free either, and the server is not asked
	// for more than it has.
	reconfigure(map[string]string{"wal_level": "minimal", "max_replication_slots": "0", "max_wal_senders": "0"})
	require.Equal(t, []string{"live setting max_replication_slots", "live setting max_wal_senders", "live setting wal_level"},
		kinds(f.checkLive(pool)))
}
