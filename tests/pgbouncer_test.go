package tests

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/replication"
	"github.com/millrace/watermill-outbox/schema"
)

// queryModes are the ways in which pgx sends a statement.
var queryModes = []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"}

// consumer returns a Consumer behind PgBouncer, and its log.
func (b *bouncer) consumer(f *fixture, mode string) (*outbox.Consumer, *logBook) {
	b.t.Helper()
	config, err := pgxpool.ParseConfig(b.url(mode))
	require.NoError(b.t, err)
	return f.loggedConsumer(config, byTransaction)
}

// Twenty clients and two connections to the server, so that hardly two statements
// of a client run in the same session, and a Consumer among them: all is
// delivered, in order, and nobody sees an error. Field case F45.
func TestPgBouncerManyClients(t *testing.T) {
	t.Parallel()

	const clients, each = 20, 250
	f := newFixture(t)
	b := newBouncer(t, f, 2)
	consumer, book := b.consumer(f, "")
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{Ordering: outbox.OrderingByKey}, "topic")
	sent := make([][]*message.Message, clients)
	var wg sync.WaitGroup
	for client := range clients {
		// The default mode prepares each statement once, in whichever session.
		publisher := publisherOn(t, pgtest.Pool(t, b.url("")), outbox.PublisherConfig{TransactionPooler: true})
		sent[client] = newMessages(each)
		for _, msg := range sent[client] {
			msg.Metadata.Set(outbox.DefaultKeyMetadata, fmt.Sprint(client))
		}
		wg.Go(func() {
			for _, msg := range sent[client] {
				if !assert.NoError(t, publisher.Publish("topic", msg)) {
					return
				}
			}
		})
	}
	received := receive(t, messages, clients*each)
	wg.Wait()
	var all []*message.Message
	for _, some := range sent {
		all = append(all, some...)
	}
	requireKeysInOrder(t, all, received)
	require.LessOrEqual(t, b.serverConns(), 2)
	require.NoError(t, consumer.Close())
	require.Empty(t, book.errors())
}

// What is published in each query mode of pgx's, one call after another in other
// sessions, arrives as it was. Field cases F45 and F46.
func TestPgBouncerPublishInEachQueryMode(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	b := newBouncer(t, f, 3)
	consumer, book := b.consumer(f, "")
	for _, mode := range queryModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()

			pool := pgtest.Pool(t, b.url(mode))
			publisher := publisherOn(t, pool, outbox.PublisherConfig{TransactionPooler: true})
			_, delivered := f.subscribe(consumer, outbox.SubscriberConfig{}, mode)
			for range 3 {
				for name, n := range callSizes {
					sent := variety(n)
					require.NoError(t, publisher.Publish(mode, sent...), name)
					requireDelivered(t, delivered, sent)

					// In the caller's transaction.
					sent = variety(n)
					tx, err := pool.Begin(t.Context())
					require.NoError(t, err)
					require.NoError(t, publishIn(t.Context(), publisher, tx, mode, sent...))
					require.NoError(t, tx.Commit(t.Context()))
					requireDelivered(t, delivered, sent)
				}
			}
		})
	}
	t.Cleanup(func() { require.Empty(t, book.errors()) })
}

// The same through database/sql, with both drivers. Field case F108.
func TestPgBouncerPublishWithDatabaseSQL(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	b := newBouncer(t, f, 3)
	consumer, book := b.consumer(f, "")
	for name, test := range map[string]struct {
		driver, parameter, value string
		conn, tx                 bool // where it works beside an *sql.DB
	}{
		"pgx stdlib":                     {"pgx", "", "", true, false},
		"pgx stdlib, descriptions":       {"pgx", "default_query_exec_mode", "cache_describe", true, true},
		"pgx stdlib, described each":     {"pgx", "default_query_exec_mode", "describe_exec", true, true},
		"pgx stdlib, nothing prepared":   {"pgx", "default_query_exec_mode", "exec", true, true},
		"pgx stdlib, simple protocol":    {"pgx", "default_query_exec_mode", "simple_protocol", true, true},
		"lib/pq":                         {"postgres", "", "", false, true},
		"lib/pq, with binary parameters": {"postgres", "binary_parameters", "yes", true, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := openSQL(t, test.driver, withParameter(t, b.url(""), test.parameter, test.value))
			publisher := publisherOn(t, db, outbox.PublisherConfig{TransactionPooler: true})
			_, delivered := f.subscribe(consumer, outbox.SubscriberConfig{}, name)
			for range 3 {
				for size, n := range callSizes {
					sent := variety(n)
					require.NoError(t, publisher.Publish(name, sent...), size)
					requireDelivered(t, delivered, sent)
					if test.conn {
						sent = variety(n)
						conn, err := db.Conn(t.Context())
						require.NoError(t, err)
						require.NoError(t, publisherOn(t, conn, outbox.PublisherConfig{TransactionPooler: true}).Publish(name, sent...))
						require.NoError(t, conn.Close())
						requireDelivered(t, delivered, sent)
					}
					if !test.tx {
						continue
					}
					sent = variety(n)
					tx, err := db.BeginTx(t.Context(), nil)
					require.NoError(t, err)
					require.NoError(t, publishIn(t.Context(), publisher, tx, name, sent...))
					require.NoError(t, tx.Commit())
					requireDelivered(t, delivered, sent)
				}
			}
		})
	}
	t.Cleanup(func() { require.Empty(t, book.errors()) })
}

// Who does not say that there is a pooler is told of the setting by the error, at
// the latest when a statement is not there that was prepared in another session.
func TestPgBouncerIsNotExpected(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	b := newBouncer(t, f, 2)
	// Two sessions, each of which has what one client prepared, and a client whose
	// statements go to either.
	publish := func(db any) (err error) {
		for range 100 {
			publisher, err := outbox.NewPublisher(db, outbox.PublisherConfig{Schema: oddSchema}, nil)
			if err != nil {
				return err
			}
			if err := publisher.Publish("topic", newMessages(1)...); err != nil {
				return err
			}
		}
		return nil
	}
	var wg sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs {
		pool := pgtest.Pool(t, b.url("cache_statement"))
		wg.Go(func() { errs[i] = publish(pool) })
	}
	wg.Wait()
	failed := 0
	for _, err := range errs {
		if err != nil {
			failed++
			require.ErrorContains(t, err, "prepared statement")
			require.ErrorContains(t, err, "PublisherConfig.TransactionPooler")
		}
	}
	require.Positive(t, failed)
}

// A Consumer takes a configuration in any query mode. What comes through has what
// was sent. Field cases F45 and F46.
func TestPgBouncerSubscribeInEachQueryMode(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	b := newBouncer(t, f, 3)
	for _, mode := range queryModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()

			consumer, book := b.consumer(f, mode)
			_, messages := f.subscribe(consumer, outbox.SubscriberConfig{PageSize: 10, Retry: quick(2)}, mode)
			sent := variety(100)
			require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish(mode, sent...))
			requireDelivered(t, messages, sent)
			require.NoError(t, consumer.Close())
			require.Empty(t, book.errors())

			// Its position is stored: another one goes on behind it.
			consumer, _ = b.consumer(f, mode)
			_, messages = f.subscribe(consumer, outbox.SubscriberConfig{}, mode)
			last := newMessages(1)
			require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish(mode, last...))
			requireNext(t, messages, last...)
		})
	}
}

// What needs a connection to the server itself is refused through PgBouncer with
// an error that says so, and has an address of its own.
func TestPgBouncerIsNoWayToTheWAL(t *testing.T) {
	t.Parallel()

	server := pgtest.Own(t, pgtest.Options{})
	f := fixtureAt(t, pgtest.DatabaseOn(t, server))
	b := newBouncer(t, f, 3)
	config, err := pgxpool.ParseConfig(b.url(""))
	require.NoError(t, err)
	for _, mode := range []outbox.Mode{outbox.ModeAuto, outbox.ModeWAL, outbox.ModePoll} {
		_, err = outbox.NewConsumer(config, outbox.ConsumerConfig{Schema: oddSchema, Mode: mode}, nil)
		require.ErrorContains(t, err, "unsupported startup parameter", "mode %s", mode)
		require.ErrorContains(t, err, "ConsumerConfig.TransactionPooler", "mode %s", mode)
	}
	_, err = outbox.NewConsumer(config, outbox.ConsumerConfig{Schema: oddSchema, Mode: outbox.ModeWAL, TransactionPooler: true}, nil)
	require.ErrorContains(t, err, "connect the Consumer to the server directly")
	_, err = replication.Connect(t.Context(), &config.ConnConfig.Config, replication.ConnectOptions{})
	require.ErrorContains(t, err, "replication: connect: not supported there")

	// With the server's address it reads the WAL, and what was published through
	// PgBouncer comes.
	publisher := publisherOn(t, pgtest.Pool(t, b.url("")), outbox.PublisherConfig{TransactionPooler: true})
	direct := f.consumer(readsWAL)
	_, messages := f.subscribe(direct, outbox.SubscriberConfig{}, "topic")
	first := newMessages(1)
	require.NoError(t, publisher.Publish("topic", first...))
	requireNext(t, messages, first...)
	awaitLive(t, direct)
	sent := variety(50)
	require.NoError(t, publisher.Publish("topic", sent...))
	requireDelivered(t, messages, sent)
}

// A migration is one transaction, so it goes through in each query mode that
// prepares nothing.
func TestPgBouncerMigrate(t *testing.T) {
	t.Parallel()

	for _, mode := range []string{"cache_describe", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()

			f := &fixture{t: t, url: pgtest.Database(t)}
			f.pool = pgtest.Pool(t, f.url)
			b := newBouncer(t, f, 2)
			pool := pgtest.Pool(t, b.url(mode))
			for range 2 {
				require.NoError(t, schema.Migrate(t.Context(), pool, schema.Config{Name: oddSchema}))
			}
			consumer, _ := b.consumer(f, mode)
			_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
			sent := newMessages(3)
			require.NoError(t, publisherOn(t, pool, outbox.PublisherConfig{TransactionPooler: true}).Publish("topic", sent...))
			requireDelivered(t, messages, sent)
		})
	}
}

// PgBouncer is killed and comes back, as at an upgrade of it. Publishing fails
// meanwhile, and says so; what was stored is delivered afterwards, in its order.
func TestPgBouncerIsKilled(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	b := newBouncer(t, f, 3)
	consumer, book := b.consumer(f, "")
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	publisher := publisherOn(t, pgtest.Pool(t, b.url("")), outbox.PublisherConfig{TransactionPooler: true})
	for round := 1; round <= 3; round++ {
		sent := newMessages(2)
		require.NoError(t, publisher.Publish("topic", sent[0]))
		requireNext(t, messages, sent[0])
		require.NoError(t, b.process.Kill())
		require.Error(t, publisher.Publish("topic", message.NewMessage("refused", nil)))
		require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent[1]))
		book.await(t, round, "Cannot look for")
		b.start()
		requireNext(t, messages, sent[1])
	}
	require.NoError(t, consumer.Close())
	// Nothing is left in the sessions for whoever is lent them next.
	require.Eventually(t, func() bool {
		return f.number(`SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'`) == 0
	}, waitFor, 5*time.Millisecond, "a transaction was left behind")
}
