package tests

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/schema"
)

// newConsumerError is the error of NewConsumer, which must not take for ever.
func newConsumerError(t testing.TB, url string) error {
	t.Helper()
	db, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	begin := time.Now()
	consumer, err := outbox.NewConsumer(db, outbox.ConsumerConfig{Schema: oddSchema}, nil)
	require.Nil(t, consumer)
	require.Error(t, err)
	require.Less(t, time.Since(begin), waitFor)
	return err
}

// Whatever would keep an outbox from being delivered is said when the Consumer is
// made, in words that lead to the remedy.
func TestNewConsumerSaysWhatIsWrong(t *testing.T) {
	t.Parallel()

	t.Run("no configuration", func(t *testing.T) {
		t.Parallel()

		_, err := outbox.NewConsumer(nil, outbox.ConsumerConfig{}, nil)
		require.ErrorContains(t, err, "pool configuration")
	})
	t.Run("nobody listens", func(t *testing.T) {
		t.Parallel()

		err := newConsumerError(t, fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres", pgtest.FreePort(t)))
		require.ErrorContains(t, err, "refused")
	})
	t.Run("nobody answers", func(t *testing.T) {
		t.Parallel()

		f := newFixture(t)
		proxy := f.proxy(t)
		proxy.Pause()
		err := newConsumerError(t, proxy.URL(f.url))
		require.True(t, errors.Is(err, context.DeadlineExceeded) || pgconnTimeout(err), "%v", err)
	})
	t.Run("no such database", func(t *testing.T) {
		t.Parallel()

		config, err := pgx.ParseConfig(pgtest.Shared(t).URL())
		require.NoError(t, err)
		err = newConsumerError(t, fmt.Sprintf("postgres://%s@%s:%d/missing", config.User, config.Host, config.Port))
		require.ErrorContains(t, err, "missing")
	})
	t.Run("no schema", func(t *testing.T) {
		t.Parallel()

		err := newConsumerError(t, pgtest.Database(t))
		require.ErrorIs(t, err, outbox.ErrNotInstalled)
		require.ErrorContains(t, err, fmt.Sprintf("%q", oddSchema))
	})
	for name, version := range map[string]int{"older": schema.Version - 1, "newer": schema.Version + 1} {
		t.Run(name+" version", func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			f.exec("UPDATE outbox.meta SET value = to_jsonb($1::int) WHERE key = 'version'", version)
			err := newConsumerError(t, f.url)
			var versionError *schema.VersionError
			require.ErrorAs(t, err, &versionError)
			require.Equal(t, &schema.VersionError{Schema: oddSchema, Have: version, Want: schema.Version}, versionError)
		})
	}

	breaks := map[string]struct {
		statement string
		says      []string
	}{
		"unlogged partition": {"", []string{"unlogged", "SET LOGGED"}},
		"missing table":      {"DROP TABLE outbox.processes", []string{"processes"}},
		"missing index":      {"DROP INDEX outbox.messages_topic_xid_id", []string{"messages_topic_xid_id", "CREATE INDEX"}},
	}
	for name, b := range breaks {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			if b.statement == "" {
				var partition string
				require.NoError(t, f.pool.QueryRow(t.Context(), `SELECT inhrelid::regclass::text FROM pg_inherits i
					JOIN pg_class p ON p.oid = i.inhparent JOIN pg_class c ON c.oid = i.inhrelid
					WHERE p.relname = 'messages' AND p.relkind = 'p' AND c.relname <> 'messages_default' ORDER BY 1 LIMIT 1`).Scan(&partition))
				b.statement = "ALTER TABLE " + partition + " SET UNLOGGED"
				b.says = append(b.says, "partition")
			}
			f.exec(b.statement)
			err := newConsumerError(t, f.url)
			for _, text := range b.says {
				require.ErrorContains(t, err, text)
			}
		})
	}
}

// pgconnTimeout reports whether the driver gave up waiting.
func pgconnTimeout(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.As(err, &timeout) && timeout.Timeout()
}

// A role that lacks a privilege would fail later, in the background, or, with
// row-level security, see nothing without any error. Both are said at once.
// Field case F113.
func TestNewConsumerChecksItsRole(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("consumer")
	f.grant(schema.Roles{Consumer: role})
	subscribe := func() (*outbox.Consumer, error) {
		db, err := pgxpool.ParseConfig(f.urlAs(role))
		require.NoError(t, err)
		return outbox.NewConsumer(db, outbox.ConsumerConfig{Schema: oddSchema}, nil)
	}
	consumer, err := subscribe()
	require.NoError(t, err, "what schema.Grants gives is enough")
	require.NoError(t, consumer.Close())

	for privilege, object := range map[string]string{
		"SELECT": "messages", "UPDATE": "cursors", "INSERT": "cursors", "DELETE": "processes",
	} {
		f.exec("REVOKE " + privilege + " ON outbox." + object + " FROM " + quoteIdentifier(role))
		_, err := subscribe()
		require.ErrorContains(t, err, privilege+" on "+object)
		require.ErrorContains(t, err, "schema.Grants")
		f.grant(schema.Roles{Consumer: role})
	}
	for _, privilege := range []string{"UPDATE", "DELETE"} {
		f.exec("REVOKE " + privilege + " ON outbox.deferred FROM " + quoteIdentifier(role))
		_, err := subscribe()
		require.ErrorContains(t, err, privilege+" on deferred")
		f.grant(schema.Roles{Consumer: role})
	}
	f.exec("REVOKE INSERT (target_group, attempt) ON outbox.messages FROM " + quoteIdentifier(role))
	_, err = subscribe()
	require.ErrorContains(t, err, "INSERT on messages (target_group, attempt)")
	f.grant(schema.Roles{Consumer: role})
	f.exec("REVOKE USAGE ON SCHEMA outbox FROM " + quoteIdentifier(role))
	_, err = subscribe()
	require.ErrorContains(t, err, "USAGE")
	f.grant(schema.Roles{Consumer: role})

	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(5)...))
	for _, table := range []string{"messages", "cursors"} {
		f.exec("ALTER TABLE outbox." + table + " ENABLE ROW LEVEL SECURITY")
		_, err = subscribe()
		require.ErrorIs(t, err, outbox.ErrRowSecurity)
		f.exec("ALTER TABLE outbox." + table + " DISABLE ROW LEVEL SECURITY")
	}
	f.exec("ALTER TABLE outbox.messages ENABLE ROW LEVEL SECURITY")
	f.exec("ALTER ROLE " + quoteIdentifier(role) + " BYPASSRLS")
	consumer, err = subscribe()
	require.NoError(t, err, "it does not hide anything from this role")
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	require.Len(t, receive(t, messages, 5), 5)
	require.NoError(t, consumer.Close())
}

// A policy that comes later, under a running consumer, is an error and not a
// silent gap. Field case F113.
func TestRowSecurityUnderARunningConsumer(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("consumer")
	f.grant(schema.Roles{Consumer: role})
	db, err := pgxpool.ParseConfig(f.urlAs(role))
	require.NoError(t, err)
	consumer, book := f.loggedConsumer(db, nil)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(4)
	require.NoError(t, publisher.Publish("topic", sent[:2]...))
	requireNext(t, messages, sent[:2]...)
	f.exec("ALTER TABLE outbox.messages ENABLE ROW LEVEL SECURITY")
	require.NoError(t, publisher.Publish("topic", sent[2:]...))
	require.ErrorContains(t, book.await(t, 1, "Cannot read messages")[0].Err, "row-level security")
	f.exec("ALTER TABLE outbox.messages DISABLE ROW LEVEL SECURITY")
	requireNext(t, messages, sent[2:]...)
}
