package tests

import (
	"database/sql"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/schema/watermillsql"
)

// drainingPublisher publishes in the transactions that watermill-sql consumes in.
func drainingPublisher(f *fixture) *outbox.Publisher {
	return f.publisher(outbox.PublisherConfig{RequireTx: true, TxResolver: watermillsql.TxFromContext})
}

// awaitOldPosition waits until the group has had all of an old table.
func (f *fixture) awaitOldPosition(t testing.TB, topic string) {
	t.Helper()
	require.Eventually(t, func() bool { return f.oldLeft(t, topic) == 0 }, waitFor, 5*time.Millisecond)
}

// A handler that consumes from watermill-sql publishes to the outbox in the
// transaction it consumes in: what it published is there with the ack, and without
// it never was. watermill-sql by itself commits the transaction of a message that
// was not acked when it is closed, or when the deadline for the ack has passed.
func testWatermillSQLHandlerPublishesInItsTransaction(t *testing.T, f *fixture) {
	publisher := drainingPublisher(f)
	for _, driver := range oldDrivers {
		topic, results := "orders-"+driver, "results-"+driver
		db := openSQL(t, driver, f.url)
		require.NoError(t, oldTable(t, db, topic, "JSON").Publish(topic, jsonMessages(3)...))
		handle := func(msg *message.Message) {
			result := message.NewMessage("result of "+msg.Metadata.Get("number"), nil)
			result.SetContext(msg.Context())
			require.NoError(t, publisher.Publish(results, result))
			require.Empty(t, f.stored(t, results), "not committed yet")
		}
		consume := func(batch int, deadline time.Duration) (*wsql.Subscriber, <-chan *message.Message) {
			subscriber := oldSubscriber(t, db, "JSON", batch, deadline)
			messages, err := subscriber.Subscribe(t.Context(), topic)
			require.NoError(t, err)
			return subscriber, messages
		}

		// Closed before the ack.
		subscriber, messages := consume(1, waitFor)
		handle(await(t, messages))
		require.NoError(t, subscriber.Close())
		require.Empty(t, f.stored(t, results))
		require.Equal(t, 3, f.oldLeft(t, topic))

		// Closed before the ack of one of a batch: the one before it comes again, too.
		subscriber, messages = consume(100, waitFor)
		first := await(t, messages)
		handle(first)
		require.True(t, first.Ack())
		handle(await(t, messages))
		require.NoError(t, subscriber.Close())
		require.Empty(t, f.stored(t, results))
		require.Equal(t, 3, f.oldLeft(t, topic))

		// Acked too late, so that it comes again, and then in time.
		subscriber, messages = consume(1, time.Second)
		late := await(t, messages)
		handle(late)
		<-late.Context().Done()
		late.Ack()
		require.Equal(t, late.UUID, await(t, messages).UUID)
		require.NoError(t, subscriber.Close())
		require.Empty(t, f.stored(t, results))

		subscriber, messages = consume(100, waitFor)
		for range 3 {
			msg := await(t, messages)
			handle(msg)
			require.True(t, msg.Ack())
		}
		f.awaitOldPosition(t, topic)
		require.NoError(t, subscriber.Close())
		require.Equal(t, []string{"result of 0", "result of 1", "result of 2"}, f.storedUUIDs(t, results))
	}
	_, ok := watermillsql.TxFromContext(t.Context())
	require.False(t, ok)
	require.ErrorIs(t, publisher.Publish("results", newMessages(1)...), outbox.ErrNoTransaction)
}

// rollingBack fails the transactions of some messages from the outside, after
// what they are about was published.
type rollingBack struct {
	message.Publisher
	t     testing.TB
	db    *sql.DB
	calls atomic.Int32
}

func (p *rollingBack) Publish(topic string, messages ...*message.Message) error {
	if err := p.Publisher.Publish(topic, messages...); err != nil {
		return err
	}
	if p.calls.Add(1)%10 != 0 {
		return nil
	}
	tx, ok := wsql.TxFromContext(messages[0].Context())
	if !ok {
		return errors.New("no transaction")
	}
	// The connection is gone before the ack.
	var pid int
	if err := tx.QueryRowContext(p.t.Context(), "SELECT pg_backend_pid()").Scan(&pid); err != nil {
		return err
	}
	_, err := p.db.ExecContext(p.t.Context(), "SELECT pg_terminate_backend($1::int, 10000)", pid)
	return err
}

// A table of envelopes is drained by the stock Forwarder: our Publisher writes in
// the transaction in which watermill-sql moves its offset. Now and then the
// connection is cut between the two, and still nothing is lost, and nothing there
// twice.
func testWatermillSQLDrainByTheStockForwarder(t *testing.T, f *fixture) {
	for _, driver := range oldDrivers {
		db := openSQL(t, driver, f.url)
		sent := variety(30)
		topic := "orders of " + driver
		old := oldTable(t, db, forwarderTopic, "JSON")
		require.NoError(t, forwarding(old).Publish(topic, sent...))

		drained := &rollingBack{Publisher: drainingPublisher(f), t: t, db: openSQL(t, driver, f.url)}
		stop := startForwarder(t, oldSubscriber(t, db, "JSON", 7, waitFor), drained, forwarder.Config{})
		f.awaitOldPosition(t, forwarderTopic)
		stop()
		f.requireStored(t, topic, sent)
		require.Greater(t, int(drained.calls.Load()), len(sent), "some were rolled back")

		// Nothing is left for a second run, and it takes on where the first ended.
		position := f.oldPosition(t, forwarderTopic)
		stop = startForwarder(t, oldSubscriber(t, db, "JSON", 7, waitFor), drainingPublisher(f), forwarder.Config{})
		last := jsonMessages(1)
		require.NoError(t, forwarding(old).Publish(topic, last...))
		require.Eventually(t, func() bool { return f.oldPosition(t, forwarderTopic) != position }, waitFor, 5*time.Millisecond)
		stop()
		f.requireStored(t, topic, append(sent, last...))
	}
}

// A table of plain messages is drained by a handler that passes them through.
func testWatermillSQLDrainByARouter(t *testing.T, f *fixture) {
	for _, driver := range oldDrivers {
		topic := "orders-" + driver
		db := openSQL(t, driver, f.url)
		sent := variety(30)
		require.NoError(t, oldTable(t, db, topic, "BYTEA").Publish(topic, sent...))
		stop := startRouter(t, func(r *message.Router) {
			r.AddHandler("drain", topic, oldSubscriber(t, db, "BYTEA", 7, waitFor), topic, drainingPublisher(f), message.PassthroughHandler)
		})
		f.awaitOldPosition(t, topic)
		stop()
		f.requireStored(t, topic, sent)
	}
}
