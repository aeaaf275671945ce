package tests

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/replication"
	"github.com/millrace/watermill-outbox/schema"
)

// publishedText describes what logical replication knows of a database, one
// line each: the publications with their tables, and which rows of a table can
// be told apart.
const publishedText = `
SELECT format('publication %I all=%s insert=%s update=%s delete=%s truncate=%s root=%s tables=%s', p.pubname, p.puballtables,
              p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot,
              (SELECT jsonb_agg(jsonb_build_array(n.nspname, c.relname, to_jsonb(r) -> 'prqual', to_jsonb(r) -> 'prattrs') ORDER BY n.nspname, c.relname)
               FROM pg_catalog.pg_publication_rel r
               JOIN pg_catalog.pg_class c ON c.oid = r.prrelid
               JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
               WHERE r.prpubid = p.oid)) AS line
FROM pg_catalog.pg_publication p
UNION ALL
SELECT format('identity %I.%I %s', n.nspname, c.relname, c.relreplident)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND n.nspname NOT LIKE 'pg\_%' AND n.nspname <> 'information_schema'
ORDER BY line`

// published is catalog for what publishedText describes.
func published(t testing.TB, db schema.Querier) []string {
	t.Helper()
	rows, err := db.Query(t.Context(), publishedText)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return lines
}

func publicationNames(t testing.TB, db schema.Querier) []string {
	t.Helper()
	rows, err := db.Query(t.Context(), "SELECT pubname FROM pg_catalog.pg_publication")
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return names
}

// publicationSQL is the statement for an administrator.
func publicationSQL(t testing.TB, name string) string {
	t.Helper()
	statement, err := schema.PublicationSQL(schema.Config{Name: name})
	require.NoError(t, err)
	return statement
}

// connectNoticing is a connection as pgx makes it, with the notices that the
// server sends.
func connectNoticing(t testing.TB, url string) (*pgx.Conn, *[]*pgconn.Notice) {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	var notices []*pgconn.Notice
	config.OnNotice = func(_ *pgconn.PgConn, notice *pgconn.Notice) { notices = append(notices, notice) }
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	// The test's own context has ended by then.
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn, &notices
}

// What the migration makes, and what the statement for an administrator makes,
// is the same: inserts of all rows and columns, by way of the root.
func TestMigratePublishes(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	require.Equal(t, oddSchema, schema.PublicationName(oddSchema))
	publication, err := replication.DescribePublication(t.Context(), f.pool, oddSchema)
	require.NoError(t, err)
	publication.OID = 0
	require.Equal(t, replication.Publication{
		Name: oddSchema, Tables: []replication.Table{{Schema: oddSchema, Name: "messages"}}, Insert: true, ViaRoot: true,
	}, publication)

	for _, name := range oddNames {
		config := largeIntervals
		config.Name = name
		require.NoError(t, schema.Migrate(t.Context(), f.pool, config), name)
		before := published(t, f.pool)
		f.execRaw("DROP PUBLICATION " + quoteIdentifier(name))
		require.NotEqual(t, before, published(t, f.pool), name)
		f.execRaw(publicationSQL(t, name))
		require.Equal(t, before, published(t, f.pool), name)
	}
	require.Equal(t, publicationSQL(t, "outbox"), publicationSQL(t, ""))
}

// The messages of every partition arrive as those of the root, also of one that
// came after the publication, and nothing else of the schema does.
func TestPublicationCoversEveryPartition(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	c := &capture{t: t, url: f.url, pool: f.pool, slot: slotName()}
	conn := c.connect()
	c.create(conn, true)
	reader, err := replication.StartReader(t.Context(), conn, c.slot, 0, replication.Options{
		Publications: []string{schema.PublicationName(oddSchema)},
	})
	require.NoError(t, err)
	t.Cleanup(func() { _ = reader.Close() })

	const column = "SELECT tableoid = $1::text::regclass FROM outbox.messages WHERE uuid = $2"
	in := func(table, uuid, created string) {
		f.exec("INSERT INTO outbox.messages (topic, uuid, created_at) VALUES ('orders', $1, "+created+")", uuid)
		var there bool
		require.NoError(t, f.pool.QueryRow(t.Context(), f.sql(column), f.sql("outbox."+table), uuid).Scan(&there))
		require.True(t, there, "%s is in %s", uuid, table)
	}
	f.exec("CREATE TABLE outbox.earlier (LIKE outbox.messages INCLUDING DEFAULTS)")
	in("messages_default", "default", "'1990-01-01'")
	f.exec("INSERT INTO outbox.inbox (consumer_group, uuid) VALUES ('g', 'u')")
	f.exec("DELETE FROM outbox.messages_default")
	f.exec("ALTER TABLE outbox.messages ATTACH PARTITION outbox.earlier FOR VALUES FROM ('2000-01-01') TO ('2001-01-01')")
	in("earlier", "attached", "'2000-06-01'")
	f.exec("TRUNCATE outbox.earlier")
	f.exec("ALTER TABLE outbox.messages DETACH PARTITION outbox.earlier; DROP TABLE outbox.earlier")
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("orders", newMessages(1)...))

	var uuids []string
	for len(uuids) < 3 {
		switch event := next(t, reader).(type) {
		case *replication.Insert:
			require.Equal(t, []string{oddSchema, "messages"}, []string{event.Relation.Schema, event.Relation.Name})
			uuids = append(uuids, texts(event.New)[5])
		case *replication.Delete, *replication.Update, *replication.Truncate:
			require.Failf(t, "not published", "%T", event)
		}
	}
	require.Equal(t, []string{"default", "attached"}, uuids[:2])
}

// Where the role may create tables in a schema of its own and nothing else, it
// gets those, and says what somebody else has to do for the rest.
func TestMigrateWithoutRightToPublish(t *testing.T) {
	t.Parallel()

	for name, repair := range map[string]func(f *fixture, role string, statement string){
		"a superuser creates it": func(f *fixture, _, statement string) { f.execRaw(statement) },
		"the owner may create it later": func(f *fixture, role, statement string) {
			f.execRaw("GRANT CREATE ON DATABASE " + quoteIdentifier(f.text("SELECT current_database()::text")) + " TO " + quoteIdentifier(role))
			_, err := f.poolAs(role).Exec(f.t.Context(), statement)
			require.NoError(f.t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			url := pgtest.Database(t)
			f := &fixture{t: t, url: url, pool: pgtest.Pool(t, url)}
			role := f.role("owner")
			f.replicates(role)
			f.execRaw("CREATE SCHEMA " + quoteIdentifier(oddSchema) + " AUTHORIZATION " + quoteIdentifier(role))
			conn, notices := connectNoticing(t, f.urlAs(role))
			require.NoError(t, schema.Migrate(t.Context(), conn, schema.Config{Name: oddSchema}))
			require.Empty(t, publicationNames(t, conn))

			statement := publicationSQL(t, oddSchema)
			require.Len(t, *notices, 1)
			notice := (*notices)[0]
			require.Equal(t, "WARNING", notice.SeverityUnlocalized)
			require.Contains(t, notice.Message, "role "+quoteIdentifier(role)+" may not create the publication")
			require.Contains(t, notice.Hint+";", statement)

			missing := []schema.Difference{{
				Severity: schema.SeverityLive, Object: "publication " + quoteIdentifier(oddSchema), Found: "missing", Want: "present",
				Remedy: statement[:len(statement)-1] + ": as a superuser, or as the owner of the tables with CREATE on the database",
			}}
			require.Equal(t, missing, f.check(conn))
			require.Equal(t, missing, f.checkLive(conn))
			require.NoError(t, schema.Errors(missing), "it polls")
			f.requireDenied(conn, statement)
			repair(f, role, statement)
			require.Empty(t, f.check(conn))
			require.NoError(t, schema.Migrate(t.Context(), conn, schema.Config{Name: oddSchema}))
		})
	}
}

// Somebody may have a publication of that name, and readers of it.
func TestMigrateLeavesPublicationAlone(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		create string
		found  string
	}{
		"of all tables":    {"CREATE PUBLICATION mine FOR ALL TABLES", "all tables, not via the partition root"},
		"of another table": {"CREATE PUBLICATION mine FOR TABLE orders", "without table messages, not via the partition root"},
		"of nothing":       {"CREATE PUBLICATION mine WITH (publish = '')", "without table messages, without inserts, not via the partition root"},
		"that will do":     {"CREATE PUBLICATION mine FOR ALL TABLES WITH (publish_via_partition_root = true)", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			url := pgtest.Database(t)
			f := &fixture{t: t, url: url, pool: pgtest.Pool(t, url)}
			f.execRaw("CREATE TABLE orders (id int PRIMARY KEY); " + test.create +
				"; ALTER PUBLICATION mine RENAME TO " + quoteIdentifier(oddSchema))
			conn, notices := connectNoticing(t, url)
			const row = `SELECT jsonb_agg(to_jsonb(p) || jsonb_build_object('xmin', p.xmin::text))::text FROM pg_catalog.pg_publication p`
			before, tables := f.text(row), f.text("SELECT count(*)::text FROM pg_catalog.pg_publication_rel")
			require.NoError(t, schema.Migrate(t.Context(), conn, schema.Config{Name: oddSchema}))
			require.Equal(t, before, f.text(row))
			require.Equal(t, tables, f.text("SELECT count(*)::text FROM pg_catalog.pg_publication_rel"))

			require.Len(t, *notices, 1)
			require.Equal(t, "NOTICE", (*notices)[0].SeverityUnlocalized)
			require.Contains(t, (*notices)[0].Message, "publication "+quoteIdentifier(oddSchema)+" exists already")
			if test.found == "" {
				require.Empty(t, f.check(conn))
				return
			}
			differences := f.check(conn)
			require.Len(t, differences, 1)
			require.Equal(t, schema.SeverityLive, differences[0].Severity)
			require.Equal(t, "publication "+quoteIdentifier(oddSchema), differences[0].Object)
			require.Equal(t, test.found, differences[0].Found)
		})
	}
}

// Any other failure is one: half a migration is not told apart from a whole one
// later.
func TestMigrateFailsWithThePublication(t *testing.T) {
	t.Parallel()

	pool := pgtest.Pool(t, pgtest.Database(t))
	_, err := pool.Exec(t.Context(), `
		CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not here' USING ERRCODE = '55000'; END $$;
		CREATE EVENT TRIGGER refuse ON ddl_command_start WHEN TAG IN ('CREATE PUBLICATION') EXECUTE FUNCTION refuse()`)
	require.NoError(t, err)
	before := catalog(t, pool)
	err = schema.Migrate(t.Context(), pool, schema.Config{Name: oddSchema})
	var failed *schema.MigrationError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, 2, failed.Version)
	require.ErrorContains(t, err, "not here")
	require.Equal(t, before, catalog(t, pool))
}
