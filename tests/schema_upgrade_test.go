package tests

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// oldScript is what schema.SQL printed for a new installation when version was
// the newest there was.
func oldScript(t testing.TB, config schema.Config, version int) string {
	t.Helper()
	script, err := schema.SQL(config, 0)
	require.NoError(t, err)
	note := fmt.Sprintf("VALUES ('version', '%d')", version)
	script, _, found := strings.Cut(script, note)
	require.True(t, found)
	return script + note + " ON CONFLICT (key) DO UPDATE SET value = excluded.value;\nCOMMIT;\n"
}

// installOld is newFixture as of an earlier version.
func installOld(t testing.TB, version int) *fixture {
	t.Helper()
	url := pgtest.Database(t)
	config := largeIntervals
	config.Name = oddSchema
	require.NoError(t, runScript(t, url, oldScript(t, config, version)))
	return &fixture{t: t, url: url, pool: pgtest.Pool(t, url)}
}

// upgrades are the ways from a version to the newest.
var upgrades = map[string]func(t testing.TB, url string, version int) error{
	"Migrate": func(t testing.TB, url string, _ int) error {
		conn, _ := connectNoticing(t, url)
		return schema.Migrate(t.Context(), conn, schema.Config{Name: oddSchema})
	},
	"script": func(t testing.TB, url string, version int) error {
		script, err := schema.SQL(schema.Config{Name: oddSchema}, version)
		require.NoError(t, err)
		return runScript(t, url, script)
	},
}

// From version 1, where groups have positions and a publisher is at work: all is
// as in a new installation, and the groups go on where they were.
func TestUpgradeFromVersion1(t *testing.T) {
	t.Parallel()

	fresh := pgtest.Pool(t, pgtest.Database(t))
	config := largeIntervals
	config.Name = oddSchema
	require.NoError(t, schema.Migrate(t.Context(), fresh, config))
	for name, upgrade := range upgrades {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := installOld(t, 1)
			require.Empty(t, publicationNames(t, f.pool))
			require.Equal(t, []string{
				fmt.Sprintf("error schema %q", oddSchema),
				"error column cursors.ahead", "error column cursors.base", "error column cursors.patterns", "error column cursors.reach", "error column cursors.reshard",
				"error column cursors.shards", "error column cursors.until", "error column cursors.until_era", "error column cursors.until_top",
				"error column deferred.error", "error column deferred.failures", "error column deferred.origin_era", "error column deferred.origin_id",
				"error index dead_letters_origin", "error table dead_letter_log", "error table group_log", "error table members", "error table partitions", "error table upkeep",
				"warning index messages_id", "warning index messages_xid", "warning table messages_default", "live publication " + quoteIdentifier(oddSchema),
			}, kinds(f.check(f.pool)))
			_, err := outbox.NewPublisher(f.pool, outbox.PublisherConfig{Schema: oddSchema}, nil)
			require.ErrorContains(t, err, "run schema.Migrate")

			publish := func(uuid string) {
				f.exec("SELECT outbox.publish('orders', 'x', uuid => $1)", uuid)
			}
			publish("before")
			late, err := f.pool.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = late.Rollback(context.WithoutCancel(t.Context())) }()
			_, err = late.Exec(t.Context(), f.sql("SELECT outbox.publish('orders', 'x', uuid => 'late')"))
			require.NoError(t, err)
			f.exec(`INSERT INTO outbox.cursors (consumer_group, topic, era, p, floor, holes)
				SELECT 'g', 'orders', outbox.era(), pg_current_snapshot(), s.last_value, '[]' FROM outbox.messages_id_seq s`)
			cursor := f.text("SELECT to_jsonb(k)::text FROM outbox.cursors k")

			// The publisher's transaction stays open: nobody waits for it. Only two
			// indexes do, which take somebody to choose the time.
			require.NoError(t, upgrade(t, f.url, 1))
			require.Equal(t, []string{"warning index messages_id", "warning index messages_xid"}, kinds(f.check(f.pool)))
			require.NoError(t, late.Commit(t.Context()))
			for _, missing := range f.check(f.pool) {
				f.execRaw(missing.Remedy)
			}
			require.Equal(t, catalog(t, fresh), catalog(t, f.pool))
			require.Equal(t, published(t, fresh), published(t, f.pool))
			require.Empty(t, f.check(f.pool))
			require.Equal(t, cursor, f.text(`SELECT (to_jsonb(k) - ARRAY['ahead', 'shards', 'base', 'until', 'until_top', 'until_era', 'reshard', 'reach', 'patterns'])::text
				FROM outbox.cursors k`))
			require.Equal(t, "[]", f.text("SELECT ahead::text FROM outbox.cursors"))
			require.NoError(t, schema.Migrate(t.Context(), f.pool, schema.Config{Name: oddSchema}))
			require.ErrorContains(t, runScript(t, f.url, oldScript(t, config, 1)), "already exists")

			publish("after")
			_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{ConsumerGroup: "g"}, "orders")
			require.Equal(t, []string{"late", "after"}, uuids(receive(t, messages, 2)))
		})
	}
}

// The owner of the tables upgrades them, whether it may publish or not.
func TestUpgradeWithoutRightToPublish(t *testing.T) {
	t.Parallel()

	for name, upgrade := range upgrades {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := installOld(t, 1)
			role := f.role("owner")
			f.grant(schema.Roles{Owner: role})
			f.replicates(role)
			require.NoError(t, upgrade(t, f.urlAs(role), 1))
			require.Empty(t, publicationNames(t, f.pool))
			require.Equal(t, []string{"live publication " + quoteIdentifier(oddSchema)}, kinds(f.check(f.poolAs(role))))
			f.execRaw(publicationSQL(t, oddSchema))
			require.Empty(t, f.check(f.poolAs(role)))
		})
	}
}

// What a position may hold.
func TestCursorRefusesWhatIsNoList(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.exec("INSERT INTO outbox.cursors (consumer_group, topic, era, p, ahead) VALUES ('g', 't', 1, '1:1:', '[[1, \"7\"]]')")
	for value, code := range map[string]string{"'{}'": "23514", "'null'": "23514", "NULL": "23502"} {
		_, err := f.pool.Exec(t.Context(), f.sql("UPDATE outbox.cursors SET ahead = "+value))
		require.Equal(t, code, sqlState(err), "%s: %v", value, err)
	}
}
