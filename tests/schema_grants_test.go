package tests

import (
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// requireDenied fails unless the server refuses the statement for want of a
// privilege.
func (f *fixture) requireDenied(db pgxHandle, text string, args ...any) {
	f.t.Helper()
	_, err := db.Exec(f.t.Context(), f.sql(text), args...)
	var pgErr *pgconn.PgError
	require.ErrorAs(f.t, err, &pgErr, text)
	require.Equal(f.t, "42501", pgErr.Code, "%s: %v", text, err)
}

// Field case F103. A library that insists on DDL rights cannot start under a
// role of production, and one whose grants are too narrow fails only on the way
// into the table that nobody tried.
func TestPublisherNeedsNoMoreThanItsGrants(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("publisher")
	f.grant(schema.Roles{Publisher: role})
	f.exec("CREATE SCHEMA empty; GRANT USAGE ON SCHEMA empty TO " + quoteIdentifier(role))
	for kind, open := range poolKinds {
		db := open(t, f.urlAs(role))
		publisher := publisherOn(t, db, outbox.PublisherConfig{})
		for name, n := range callSizes {
			topic := kind + " " + name
			messages := variety(n)
			require.NoError(t, publisher.Publish(topic, messages...), topic)
			f.requireStored(t, topic, messages)
		}
		_, err := outbox.NewPublisher(db, outbox.PublisherConfig{Schema: "empty"}, nil)
		require.ErrorIs(t, err, outbox.ErrNotInstalled)
		require.ErrorContains(t, err, `"empty"`)
	}
}

// Whoever may set the columns from which visibility is computed can hide
// messages from every reader, and whoever may read can see other people's.
func TestPublisherMayDoNothingElse(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("publisher")
	f.grant(schema.Roles{Publisher: role})
	pool := f.poolAs(role)

	sequence := "'" + strings.ReplaceAll(f.sql("outbox.messages_id_seq"), "'", "''") + "'"
	insert := func(column, value string) string {
		return "INSERT INTO outbox.messages (topic, uuid, " + column + ") VALUES ('t', 'u', " + value + ")"
	}
	_, err := pool.Exec(t.Context(), f.sql(insert("key", "'k'")))
	require.NoError(t, err, "the form of the statements below is allowed")
	for _, text := range []string{
		insert("xid", "'3'"), insert("era", "1"), insert("created_at", "now()"), insert("target_group", "'g'"), insert("attempt", "1"),
		"INSERT INTO outbox.messages (id, topic, uuid) OVERRIDING SYSTEM VALUE VALUES (1, 't', 'u')",
		"INSERT INTO outbox.messages_default (topic, uuid) VALUES ('t', 'u')",
		"SELECT payload FROM outbox.messages", "SELECT count(*) FROM outbox.messages", "SELECT FROM outbox.messages_default",
		"SELECT FROM outbox.deferred", "SELECT FROM outbox.cursors", "SELECT FROM outbox.dead_letters", "SELECT FROM outbox.inbox",
		"SELECT nextval(" + sequence + ")", "SELECT last_value FROM outbox.messages_id_seq",
		"INSERT INTO outbox.messages (topic, uuid) VALUES ('t', 'u') RETURNING id",
		"UPDATE outbox.messages SET topic = 'x'", "DELETE FROM outbox.messages", "TRUNCATE outbox.messages",
		"UPDATE outbox.meta SET value = '2'", "DELETE FROM outbox.boot",
		"INSERT INTO outbox.deferred (due_at, topic, uuid, target_group) VALUES (now(), 't', 'u', 'g')",
		"CREATE TABLE outbox.mine ()", "DROP TABLE outbox.meta",
	} {
		f.requireDenied(pool, text)
	}

	var uuid string
	require.NoError(t, pool.QueryRow(t.Context(), f.sql("SELECT outbox.publish('by SQL', 'x')")).Scan(&uuid))
	require.Equal(t, []string{uuid}, f.storedUUIDs(t, "by SQL"))
	_, err = pool.Exec(t.Context(), f.sql("INSERT INTO outbox.deferred (due_at, topic, uuid) VALUES (now(), 't', 'u')"))
	require.NoError(t, err)
}

func TestConsumerNeedsNoMoreThanItsGrants(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("consumer")
	config := f.pool.Config()
	config.ConnConfig.User, config.ConnConfig.Password = role, rolePassword
	_, err := outbox.NewConsumer(config, outbox.ConsumerConfig{Schema: oddSchema}, nil)
	require.ErrorContains(t, err, strconv.Quote(role)+" lacks USAGE")

	f.grant(schema.Roles{Consumer: role})
	sent := variety(10)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("orders", sent...))
	consumer := f.consumerOn(config, nil)
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "orders")
	requireDelivered(t, messages, sent[:4])
	require.NoError(t, subscriber.Close())
	// The position was stored, and another one goes on from there.
	_, messages = f.subscribe(consumer, outbox.SubscriberConfig{}, "orders")
	requireDelivered(t, messages, sent[4:])

	pool := f.poolAs(role)
	for _, text := range []string{
		"INSERT INTO outbox.messages (topic, uuid, xid) VALUES ('t', 'u', '3')",
		"UPDATE outbox.messages SET topic = 'x'", "DELETE FROM outbox.messages", "TRUNCATE outbox.messages",
		"UPDATE outbox.meta SET value = '2'", "CREATE TABLE outbox.mine ()",
	} {
		f.requireDenied(pool, text)
	}
}

// A role's rights must not end where the tables' owner is somebody else.
func TestGrantsForEachPart(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	roles := schema.Roles{Owner: f.role("owner"), Publisher: f.role("publisher"), Consumer: f.role("consumer"), Upkeep: f.role("upkeep")}
	f.grant(roles)
	granted, publications := catalog(t, f.pool), published(t, f.pool)
	f.grant(roles)
	require.Equal(t, granted, catalog(t, f.pool), "running the script again changes nothing")
	require.Equal(t, publications, published(t, f.pool))

	require.Equal(t, 0, f.number(`SELECT count(*) FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relowner <> $2::text::regrole`, oddSchema, quoteIdentifier(roles.Owner)), "all of it has one owner")
	require.Equal(t, 0, f.number(`SELECT count(*) FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
		WHERE n.nspname = $1 AND p.proowner <> $2::text::regrole`, oddSchema, quoteIdentifier(roles.Owner)))

	// The owner migrates, gives the script to others itself, and finds nothing
	// amiss; neither does anybody else.
	owner := f.poolAs(roles.Owner)
	require.NoError(t, schema.Migrate(t.Context(), owner, schema.Config{Name: oddSchema}))
	script, err := schema.Grants(schema.Config{Name: oddSchema}, roles)
	require.NoError(t, err)
	_, err = owner.Exec(t.Context(), script)
	require.NoError(t, err)
	require.Equal(t, granted, catalog(t, f.pool))
	require.Equal(t, publications, published(t, f.pool))
	f.replicates(roles.Consumer)
	f.replicates(roles.Owner)
	for _, role := range []string{roles.Owner, roles.Publisher, roles.Consumer, roles.Upkeep} {
		require.Empty(t, f.check(f.poolAs(role)), role)
	}

	// From end to end, each part by its own role.
	sent := variety(10)
	require.NoError(t, publisherOn(t, f.poolAs(roles.Publisher), outbox.PublisherConfig{}).Publish("orders", sent...))
	config := f.pool.Config()
	config.ConnConfig.User, config.ConnConfig.Password = roles.Consumer, rolePassword
	_, messages := f.subscribe(f.consumerOn(config, nil), outbox.SubscriberConfig{}, "orders")
	requireDelivered(t, messages, sent)

	// What it does it does by functions, see TestLeastPrivilegeOfTheUpkeep.
	upkeep := f.poolAs(roles.Upkeep)
	for _, text := range []string{
		"INSERT INTO outbox.messages (topic, uuid) VALUES ('t', 'u')", "DELETE FROM outbox.messages", "TRUNCATE outbox.messages_default",
		"DELETE FROM outbox.inbox", "DELETE FROM outbox.processes", "UPDATE outbox.meta SET value = '1'", "CREATE TABLE outbox.partition (LIKE outbox.messages)",
	} {
		f.requireDenied(upkeep, text)
	}
	f.requireDenied(upkeep, "INSERT INTO outbox.messages (topic, uuid, xid) VALUES ('t', 'u', '3')")
	f.requireDenied(upkeep, "UPDATE outbox.cursors SET floor = 0")
	// The functions decide what goes from the log; and a function in the schema might be
	// called in place of one of theirs, with the owner's rights.
	for _, text := range []string{
		"DELETE FROM outbox.messages", "TRUNCATE outbox.messages_default", "CREATE TABLE outbox.partition (LIKE outbox.messages)",
		"CREATE FUNCTION outbox.mine() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
	} {
		f.requireDenied(upkeep, text)
	}
}

// Nobody gets in through PUBLIC, which has EXECUTE on every new function.
func TestGrantsLeaveNothingToPublic(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("nobody")
	f.exec("GRANT USAGE ON SCHEMA outbox TO PUBLIC; GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO PUBLIC")
	f.grant(schema.Roles{Publisher: f.role("publisher")})
	require.Equal(t, "false", f.text("SELECT has_schema_privilege($1::text, $2::text, 'USAGE')::text", role, oddSchema))
	pool := f.poolAs(role)
	f.exec("GRANT USAGE ON SCHEMA outbox TO " + quoteIdentifier(role))
	f.requireDenied(pool, "SELECT outbox.era()")
	f.requireDenied(pool, "SELECT outbox.publish('t', 'x')")
	f.requireDenied(pool, "SELECT FROM outbox.messages")
	f.requireDenied(pool, "SELECT FROM outbox.meta")
}

// One role that plays every part, as small installations have it.
func TestGrantsForOneRole(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("all")
	f.grant(schema.Roles{Publisher: role, Consumer: role, Upkeep: role})
	config := f.pool.Config()
	config.ConnConfig.User, config.ConnConfig.Password = role, rolePassword
	sent := variety(100)
	require.NoError(t, publisherOn(t, pgtest.Pool(t, f.urlAs(role)), outbox.PublisherConfig{}).Publish("orders", sent...))
	_, messages := f.subscribe(f.consumerOn(config, nil), outbox.SubscriberConfig{}, "orders")
	requireDelivered(t, messages, sent)
}

// What only a superuser can give is in the script as a comment. Without the
// marks it is all that a consumer lacks.
func TestGrantsSayWhatTheWALNeeds(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("consumer")
	f.grant(schema.Roles{Consumer: role})
	pool := f.poolAs(role)
	require.Equal(t, []string{"live role " + quoteIdentifier(role)}, kinds(f.check(pool)))
	script, err := schema.Grants(schema.Config{Name: oddSchema}, schema.Roles{Consumer: role})
	require.NoError(t, err)
	run := 0
	for line := range strings.Lines(script) {
		comment, _ := strings.CutPrefix(line, "-- ")
		if strings.HasPrefix(comment, "ALTER ROLE ") || strings.HasPrefix(comment, "GRANT pg_read_all_stats ") {
			f.execRaw(comment)
			run++
		}
	}
	require.Equal(t, 2, run)
	require.Empty(t, f.check(pool))
	require.Equal(t, "true", f.text("SELECT pg_has_role($1::text, 'pg_read_all_stats', 'USAGE')::text", role))
}

// The publication changes hands with the tables it came with, unless it is
// somebody else's or the server would refuse that.
func TestGrantsHandOverThePublication(t *testing.T) {
	t.Parallel()

	const owner = "SELECT pg_get_userbyid(pubowner)::text FROM pg_catalog.pg_publication"
	script := func(f *fixture, role string) string {
		script, err := schema.Grants(schema.Config{Name: oddSchema}, schema.Roles{Owner: role})
		require.NoError(f.t, err)
		return script
	}
	for name, test := range map[string]func(f *fixture) (want string){
		"from who installed": func(f *fixture) string {
			next := f.role("owner")
			f.grant(schema.Roles{Owner: next})
			return next
		},
		"on to the next owner": func(f *fixture) string {
			next := f.role("owner")
			f.grant(schema.Roles{Owner: f.role("owner")})
			f.grant(schema.Roles{Owner: next})
			return next
		},
		"not if somebody else made it": func(f *fixture) string {
			other := f.role("other")
			f.execRaw("ALTER PUBLICATION " + quoteIdentifier(oddSchema) + " OWNER TO " + quoteIdentifier(other))
			f.grant(schema.Roles{Owner: f.role("owner")})
			return other
		},
		"not if it is of all tables": func(f *fixture) string {
			before := f.text(owner)
			quoted := quoteIdentifier(oddSchema)
			f.execRaw("DROP PUBLICATION " + quoted + "; CREATE PUBLICATION " + quoted + " FOR ALL TABLES")
			f.grant(schema.Roles{Owner: f.role("owner")})
			return before
		},
		"by the owner, to one who may create publications": func(f *fixture) string {
			present, next := f.role("owner"), f.role("owner")
			f.grant(schema.Roles{Owner: present})
			f.execRaw("GRANT " + quoteIdentifier(next) + " TO " + quoteIdentifier(present) + "; GRANT CREATE ON DATABASE " +
				quoteIdentifier(f.text("SELECT current_database()::text")) + " TO " + quoteIdentifier(present) + ", " + quoteIdentifier(next))
			_, err := f.poolAs(present).Exec(f.t.Context(), script(f, next))
			require.NoError(f.t, err)
			return next
		},
		"by the owner, to one who may not": func(f *fixture) string {
			present, next := f.role("owner"), f.role("owner")
			f.grant(schema.Roles{Owner: present})
			f.execRaw("GRANT " + quoteIdentifier(next) + " TO " + quoteIdentifier(present) + "; GRANT CREATE ON DATABASE " +
				quoteIdentifier(f.text("SELECT current_database()::text")) + " TO " + quoteIdentifier(present))
			f.exec("GRANT CREATE ON SCHEMA outbox TO " + quoteIdentifier(next))
			_, err := f.poolAs(present).Exec(f.t.Context(), script(f, next))
			require.NoError(f.t, err)
			return present
		},
		"and not at all where there is none": func(f *fixture) string {
			f.execRaw("DROP PUBLICATION " + quoteIdentifier(oddSchema))
			f.grant(schema.Roles{Owner: f.role("owner")})
			return ""
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			want := test(f)
			require.Equal(t, want, f.text("SELECT coalesce(("+owner+"), '')"))
			require.Equal(t, 0, f.number(`SELECT count(DISTINCT c.relowner) - 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
				WHERE n.nspname = $1 AND c.relkind IN ('r', 'p')`, oddSchema))
		})
	}
}
