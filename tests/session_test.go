package tests

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/schema"
)

// sessions describes what the consumers' sessions in the test's database do.
type sessions struct {
	All int
	// InTransaction are those that wait for their client inside a transaction.
	InTransaction int
	// Oldest is the age of the oldest transaction, in seconds.
	Oldest float64
}

func (f *fixture) sessions(t testing.TB) sessions {
	t.Helper()
	var s sessions
	require.NoError(t, f.pool.QueryRow(t.Context(), `
		SELECT count(*)::int, count(*) FILTER (WHERE state LIKE 'idle in transaction%')::int,
		       coalesce(extract(epoch FROM max(clock_timestamp() - xact_start)), 0)::float8
		FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'watermill-outbox'
		    AND backend_type <> 'walsender'`,
	).Scan(&s.All, &s.InTransaction, &s.Oldest))
	return s
}

// A broker stops answering, the handler that publishes to it hangs, and with it
// a transaction of the relay's, which keeps the whole database from cleaning up
// and the application from its connections. While handlers run no transaction of
// ours is open, few connections are in use, and the application goes on. Field
// case F14.
func TestHandlerThatBlocksHoldsNoTransaction(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.MaxConns = 3 })
	var blocked []*message.Message
	for _, topic := range []string{"a", "b", "c", "d", "e"} {
		require.NoError(t, publisher.Publish(topic, newMessages(3)...))
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{CloseTimeout: -1}, topic)
		blocked = append(blocked, nextMessage(t, messages))
	}
	f.exec("CREATE TABLE business (n int)")
	for i := range 100 {
		f.exec("INSERT INTO business VALUES ($1)", i)
		s := f.sessions(t)
		require.Positive(t, s.All)
		require.LessOrEqual(t, s.All, 3)
		require.Zero(t, s.InTransaction)
		require.Less(t, s.Oldest, waitFor.Seconds())
	}
	for _, msg := range blocked {
		require.NoError(t, msg.Context().Err(), "it was in flight all the time")
		require.True(t, msg.Ack())
	}
}

// Administrators end sessions that are idle in a transaction, statements that
// take long, and idle sessions. A relay whose handlers run inside its
// transaction loses the message with the session, and repeats it for ever. Field
// case F51.
func TestRoleWithTimeouts(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("consumer")
	f.grant(schema.Roles{Consumer: role})
	f.exec("ALTER ROLE " + quoteIdentifier(role) + ` SET idle_in_transaction_session_timeout = '100ms'`)
	f.exec("ALTER ROLE " + quoteIdentifier(role) + ` SET statement_timeout = '2s'`)
	f.exec("ALTER ROLE " + quoteIdentifier(role) + ` SET idle_session_timeout = '2s'`)
	db, err := pgxpool.ParseConfig(f.urlAs(role))
	require.NoError(t, err)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(11)
	require.NoError(t, publisher.Publish("topic", sent[:10]...))

	subscriber, messages := f.subscribe(f.consumerOn(db, nil), outbox.SubscriberConfig{PageSize: 3}, "topic")
	for _, want := range sent[:10] {
		msg := nextMessage(t, messages)
		require.Equal(t, want.UUID, msg.UUID)
		time.Sleep(300 * time.Millisecond) // longer than the sessions may be idle: it is what the test is about
		require.True(t, msg.Ack())
	}
	require.NoError(t, subscriber.Close())
	require.NoError(t, publisher.Publish("topic", sent[10]))
	_, messages = f.subscribe(f.consumerOn(db, nil), outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent[10])
}

// The smallest number of connections works, however many topics share them.
func TestFewConnectionsForManyTopics(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.MaxConns = outbox.MinMaxConns })
	sent := map[string][]*message.Message{}
	channels := map[string]<-chan *message.Message{}
	for range 12 {
		topic := watermill.NewUUID()
		sent[topic] = newMessages(50)
		require.NoError(t, publisher.Publish(topic, sent[topic]...))
		_, channels[topic] = f.subscribe(consumer, outbox.SubscriberConfig{PageSize: 7}, topic)
	}
	for topic, messages := range channels {
		requireNext(t, messages, sent[topic]...)
	}
	require.LessOrEqual(t, f.sessions(t).All, outbox.MinMaxConns)
	require.NoError(t, consumer.Close())
	require.Eventually(t, func() bool { return f.sessions(t).All == 0 }, waitFor, 5*time.Millisecond, "sessions are left")
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.cursors WHERE holder IS NOT NULL"))
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.processes"))
	_, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	require.ErrorIs(t, err, outbox.ErrSubscriberClosed)
}
