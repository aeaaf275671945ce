package tests

import (
	"context"
	"errors"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// proxy is a proxy in front of the fixture's server.
func (f *fixture) proxy(t testing.TB) *pgtest.Proxy {
	t.Helper()
	server, err := url.Parse(f.url)
	require.NoError(t, err)
	return pgtest.NewProxy(t, server.Host)
}

// loadCounter counts what a consumer asks of the server: statements, and
// attempts to connect.
type loadCounter struct{ statements, connects atomic.Int64 }

func (c *loadCounter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.statements.Add(1)
	return ctx
}
func (c *loadCounter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (c *loadCounter) TraceConnectStart(ctx context.Context, _ pgx.TraceConnectStartData) context.Context {
	c.connects.Add(1)
	return ctx
}
func (c *loadCounter) TraceConnectEnd(context.Context, pgx.TraceConnectEndData) {}

// Somebody ends our sessions again and again. A connection that is opened once
// and kept dead, or a loop that spins on its error, is the usual result. Each
// message arrives, and the server is not asked more than it would be otherwise.
// Field case F43.
func TestSessionsAreEndedAgainAndAgain(t *testing.T) {
	t.Parallel()

	const kills, perKill = 15, 4
	f := newFixture(t)
	load := &loadCounter{}
	db := f.pool.Config()
	db.ConnConfig.Tracer = load
	consumer := f.consumerOn(db, func(c *outbox.ConsumerConfig) {
		c.PollInterval, c.CheckpointInterval = outbox.DefaultPollInterval, outbox.DefaultCheckpointInterval
	})
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	publisher := f.publisher(outbox.PublisherConfig{})
	received := map[string]bool{}
	killed := 0
	begin, statements, connects := time.Now(), load.statements.Load(), load.connects.Load()
	for range kills {
		missing := map[string]bool{}
		for _, msg := range newMessages(perKill) {
			require.NoError(t, publisher.Publish("topic", msg))
			missing[msg.UUID] = true
		}
		killed += f.number(`SELECT count(pg_terminate_backend(pid))::int FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'watermill-outbox'`)
		for len(missing) > 0 { // some come again, where their ack was not stored
			uuid := receive(t, messages, 1)[0].UUID
			require.True(t, missing[uuid] || received[uuid], "it was never published")
			delete(missing, uuid)
			received[uuid] = true
		}
	}
	require.GreaterOrEqual(t, killed, kills, "too few sessions were there to be ended")
	seconds := int64(time.Since(begin)/time.Second) + 1
	statements, connects = load.statements.Load()-statements, load.connects.Load()-connects
	t.Logf("%d sessions ended in %d s, %d statements, %d connections", killed, seconds, statements, connects)
	require.Less(t, statements, 60*seconds+10*int64(kills*perKill), "a loop spins")
	require.Less(t, connects, 3*int64(killed)+30, "a loop spins")
}

// The server is gone, and comes back. Consumers that connect as fast as they are
// refused keep it from coming up; those that wait for too long are late. Field
// case F47.
func TestServerRefusesConnections(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	proxy := f.proxy(t)
	db, err := pgxpool.ParseConfig(proxy.URL(f.url))
	require.NoError(t, err)
	var attempts atomic.Int64
	dial := db.ConnConfig.DialFunc
	db.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		attempts.Add(1)
		return dial(ctx, network, address)
	}
	consumer, book := f.loggedConsumer(db, func(c *outbox.ConsumerConfig) {
		c.PollInterval, c.CheckpointInterval = outbox.DefaultPollInterval, outbox.DefaultCheckpointInterval
	})
	publisher := f.publisher(outbox.PublisherConfig{})
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	const topics = 20
	for i := range topics {
		f.subscribe(consumer, outbox.SubscriberConfig{}, strconv.Itoa(i))
	}
	before, during, after := newMessages(3), newMessages(3), newMessages(3)
	require.NoError(t, publisher.Publish("topic", before...))
	requireNext(t, messages, before[:2]...)

	proxy.RefuseNew(true)
	proxy.CutAll()
	begin, connects := time.Now(), attempts.Load()
	requireNext(t, messages, before[2]) // its ack is to be stored all the time
	require.NoError(t, publisher.Publish("topic", during...))
	for len(book.find("Cannot look for new messages")) == 0 || time.Since(begin) < 6*time.Second {
		time.Sleep(10 * time.Millisecond) // the outage has a length
	}
	seconds := int64(time.Since(begin)/time.Second) + 1
	connects = attempts.Load() - connects
	t.Logf("%d attempts to connect in %d s", connects, seconds)
	// Those that began before anything was known, a growing pause between the
	// others.
	require.Less(t, connects, outbox.DefaultMaxConns+16+seconds/2)

	proxy.RefuseNew(false)
	require.NoError(t, publisher.Publish("topic", after...))
	requireNext(t, messages, append(during, after...)...)
}

// A failover by some tool leaves the server read-only for a while. An error that
// is taken for an ordinary failure uses up attempts, or sticks to connections
// that are kept. What is published while it lasts is refused; what was, and what
// is published later, arrives. Field case F48.
func TestServerIsReadOnlyForAWhile(t *testing.T) {
	t.Parallel()

	f, _ := newOwnFixture(t, pgtest.Options{})
	consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	publisher := f.publisher(outbox.PublisherConfig{})
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	before, after := newMessages(5), newMessages(5)
	require.NoError(t, publisher.Publish("topic", before...))
	requireNext(t, messages, before[:2]...)
	f.awaitAt(t, before[1].UUID)

	readOnly := func(value string) {
		f.exec("ALTER SYSTEM SET default_transaction_read_only = " + value)
		f.exec("SELECT pg_reload_conf()")
	}
	readOnly("on")
	require.Eventually(t, func() bool {
		return f.number("SELECT (current_setting('transaction_read_only') = 'on')::int") == 1
	}, waitFor, 5*time.Millisecond)
	require.ErrorIs(t, publisher.Publish("topic", after...), outbox.ErrReadOnly)
	_, err := outbox.NewConsumer(f.pool.Config(), outbox.ConsumerConfig{Schema: oddSchema}, nil)
	require.ErrorIs(t, err, outbox.ErrReadOnly)
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: "new"}, nil)
	require.NoError(t, err)
	_, err = subscriber.Subscribe(t.Context(), "topic")
	require.ErrorIs(t, err, outbox.ErrReadOnly)
	book.await(t, 1, "Topic lost") // it could not renew its lease
	book.await(t, 3, "Cannot renew the lease")
	readOnly("off")
	require.Eventually(t, func() bool { return publisher.Publish("topic", after...) == nil }, waitFor, 5*time.Millisecond)

	missing := map[string]bool{}
	for _, msg := range append(before[2:], after...) {
		missing[msg.UUID] = true
	}
	for len(missing) > 0 {
		delete(missing, receive(t, messages, 1)[0].UUID)
	}
	f.awaitStored(t, "topic")
	for _, entry := range book.errors() {
		// Refused by the statement, or already by the check of a new connection.
		readOnly := strings.Contains(entry.Err.Error(), "25006") || errors.Is(entry.Err, outbox.ErrReadOnly)
		late := errors.Is(entry.Err, context.DeadlineExceeded) // on a busy machine
		require.True(t, readOnly || late, "%s: %v", entry.Text, entry.Err)
	}
}
