package tests

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// Several outboxes in one database, whose names differ only in their case, their
// quotes, or their last byte, each with roles, a publication and a stream of its
// own. Whatever is done in one, by roles that have nothing in the others, leaves
// these alone. Field case F98.
func TestLeastPrivilegeInOneOfManyOutboxes(t *testing.T) {
	t.Parallel()

	long := strings.Repeat("n", 62)
	names := []string{"jobs", "Jobs", `"jobs"`, long + "1", long + "2"}
	server := pgtest.Own(t, pgtest.Options{})
	f := &fixture{t: t, url: server.URL(), pool: pgtest.Pool(t, server.URL())}
	type one struct {
		name                string
		publisher, consumer string
	}
	var all []one
	for _, name := range names {
		require.NoError(t, schema.Migrate(t.Context(), f.pool, schema.Config{Name: name}))
		o := one{name: name, publisher: f.role("publisher"), consumer: f.role("consumer")}
		script, err := schema.Grants(schema.Config{Name: name}, schema.Roles{Publisher: o.publisher, Consumer: o.consumer})
		require.NoError(t, err)
		f.execRaw(script)
		f.execRaw("ALTER ROLE " + quoteIdentifier(o.consumer) + " REPLICATION")
		all = append(all, o)
	}
	require.ElementsMatch(t, names, publicationNames(t, f.pool))
	contents := func(name string) (text string) {
		for _, table := range []string{"messages", "cursors", "deferred", "dead_letters", "dead_letter_log", "inbox", "members", "meta"} {
			query := fmt.Sprintf("SELECT coalesce(string_agg(t::text, ' ' ORDER BY t::text), '') FROM outbox.%s t", table)
			var rows string
			require.NoError(t, f.pool.QueryRow(t.Context(), schema.Text(name, query)).Scan(&rows))
			text += table + ": " + rows + "\n"
		}
		return text
	}
	for i, o := range all {
		before := map[string]string{}
		for _, other := range all {
			if other.name == o.name {
				continue
			}
			before[other.name] = contents(other.name)
			for _, role := range []string{o.publisher, o.consumer} {
				_, err := f.poolAs(role).Exec(t.Context(), schema.Text(other.name, "SELECT FROM outbox.meta"))
				require.ErrorContains(t, err, "permission denied for schema")
			}
		}
		publisherPool := f.poolAs(o.publisher)
		publisher, err := outbox.NewPublisher(publisherPool, outbox.PublisherConfig{Schema: o.name}, nil)
		require.NoError(t, err)
		config, err := pgxpool.ParseConfig(f.urlAs(o.consumer))
		require.NoError(t, err)
		consumer := f.consumerOn(config, func(c *outbox.ConsumerConfig) { c.Schema, c.Mode = o.name, outbox.ModeWAL })
		retry := quick(2)
		retry.Mode = outbox.RetryDeferred
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{Retry: retry, Ordering: outbox.OrderingByKey}, "topic")
		awaitLive(t, consumer)
		sent := keyed(6)
		require.NoError(t, publisher.Publish("topic", sent...))
		require.ElementsMatch(t, uuids(sent), uuids(receive(t, messages, len(sent))))
		scheduled := dueIn(50 * time.Millisecond)
		require.NoError(t, publisher.Publish("topic", scheduled))
		requireNext(t, messages, scheduled)
		bySQL := f.textIn(publisherPool, schema.Text(o.name, "SELECT outbox.publish('topic', 'x')"))
		msg := nextMessage(t, messages)
		require.Equal(t, bySQL, msg.UUID)
		require.True(t, msg.Nack())
		require.True(t, nextMessage(t, messages).Nack())
		letters, err := outbox.NewDeadLetters(f.poolAs(o.consumer), outbox.DeadLettersConfig{Schema: o.name})
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			n, err := letters.Count(t.Context(), outbox.DeadLetterFilter{})
			return err == nil && n == 1
		}, waitFor, 5*time.Millisecond)
		list, err := letters.List(t.Context(), outbox.DeadLetterFilter{}, outbox.DeadLetterPage{})
		require.NoError(t, err)
		require.NoError(t, letters.Requeue(t.Context(), list[0].ID, ""))
		require.Equal(t, bySQL, receive(t, messages, 1)[0].UUID)
		require.NoError(t, consumer.Reshard(t.Context(), "", "topic", 2+i))
		more := keyed(6)
		require.NoError(t, publisher.Publish("topic", more...))
		require.ElementsMatch(t, uuids(more), uuids(receive(t, messages, len(more))))
		require.NoError(t, consumer.Close())
		for name, was := range before {
			require.Equal(t, was, contents(name), "%q was touched by what was done in %q", name, o.name)
		}
	}
	// One goes with all it has, and the others keep theirs.
	f.execRaw("DROP SCHEMA " + quoteIdentifier(names[0]) + " CASCADE")
	for _, name := range names[1:] {
		differences, err := schema.Check(t.Context(), f.pool, schema.Config{Name: name})
		require.NoError(t, err)
		require.Empty(t, differences, name)
	}
}

// textIn is text through another pool, of an SQL text that is filled in.
func (f *fixture) textIn(pool *pgxpool.Pool, query string) (text string) {
	f.t.Helper()
	require.NoError(f.t, pool.QueryRow(f.t.Context(), query).Scan(&text))
	return text
}
