package tests

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// lookingConsumer is a Consumer whose looks for news can be waited for.
func (f *fixture) lookingConsumer() (consumer *outbox.Consumer, awaitLooks func(n int64)) {
	f.t.Helper()
	looks := &statementCounter{text: watchStatement}
	db := f.pool.Config()
	db.ConnConfig.Tracer = looks
	return f.consumerOn(db, nil), func(n int64) {
		f.t.Helper()
		before := looks.n.Load()
		require.Eventually(f.t, func() bool { return looks.n.Load() >= before+n }, waitFor, time.Millisecond, "the watcher does not look")
	}
}

// requireNext fails unless the next messages of the channel are these and no
// others, which it acks.
func requireNext(t testing.TB, messages <-chan *message.Message, want ...*message.Message) {
	t.Helper()
	require.Equal(t, uuids(want), uuids(receive(t, messages, len(want))))
}

// A transaction draws its message's id, another one draws a higher id and
// commits first, and the reader, which remembers the highest id it saw, never
// comes back for the lower one. Lost without any error. If the transaction rolls
// back instead, the gap must not be waited for. Field case F01.
func TestLowerIDThatCommitsLater(t *testing.T) {
	t.Parallel()

	for name, commits := range map[string]bool{"commits": true, "rolls back": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			consumer, awaitLooks := f.lookingConsumer()
			subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
			publisher := f.publisher(outbox.PublisherConfig{})
			sent := newMessages(4)

			tx, err := f.connect(t).Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, publishIn(t.Context(), publisher, tx, "topic", sent[0]))
			require.NoError(t, publisher.Publish("topic", sent[1]))
			requireNext(t, messages, sent[1])
			awaitLooks(5)
			if commits {
				require.NoError(t, tx.Commit(t.Context()))
				requireNext(t, messages, sent[0])
			} else {
				require.NoError(t, tx.Rollback(t.Context()))
			}
			require.NoError(t, publisher.Publish("topic", sent[2]))
			requireNext(t, messages, sent[2])

			// It is not only in memory that the position is right.
			require.NoError(t, subscriber.Close())
			require.NoError(t, publisher.Publish("topic", sent[3]))
			_, messages = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
			requireNext(t, messages, sent[3])
		})
	}
}

// A reader that looks back for a fixed time, or a fixed number of ids, loses the
// messages of a transaction that stays open for longer. Field case F02.
func TestMessageCommittedAfterAThousandOthers(t *testing.T) {
	t.Parallel()

	for name, commits := range map[string]bool{"commits": true, "rolls back": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{PageSize: 30}, "topic")
			publisher := f.publisher(outbox.PublisherConfig{})
			late, last := newMessages(3), newMessages(1)

			tx, err := f.connect(t).Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, publishIn(t.Context(), publisher, tx, "topic", late...))
			others := newMessages(1000)
			for i := 0; i < len(others); i += 20 {
				require.NoError(t, publisher.Publish("topic", others[i:i+20]...))
				requireNext(t, messages, others[i:i+20]...)
			}
			if commits {
				require.NoError(t, tx.Commit(t.Context()))
				requireNext(t, messages, late...)
			} else {
				require.NoError(t, tx.Rollback(t.Context()))
			}
			require.NoError(t, publisher.Publish("topic", last...))
			requireNext(t, messages, last...)
		})
	}
}

// Transaction ids are counted for the whole server, so a transaction that writes
// in another database holds back what every snapshot sees as the oldest one. A
// reader that takes only what is older than that stops for as long as it stays
// open. Field case F03.
func TestTransactionInAnotherDatabaseHoldsNothingUp(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	elsewhere, err := pgx.Connect(t.Context(), pgtest.Database(t))
	require.NoError(t, err)
	defer elsewhere.Close(t.Context())
	tx, err := elsewhere.Begin(t.Context())
	require.NoError(t, err)
	var xid string
	require.NoError(t, tx.QueryRow(t.Context(), "SELECT pg_current_xact_id()::text").Scan(&xid))

	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
	publisher := f.publisher(outbox.PublisherConfig{})
	for _, msg := range newMessages(10) {
		require.NoError(t, publisher.Publish("topic", msg))
		requireNext(t, messages, msg)
	}
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM pg_locks WHERE locktype = 'transactionid' AND granted AND transactionid = $1::text::xid", xid),
		"the other transaction was not open all the time")
	require.NoError(t, tx.Rollback(t.Context()))
}

// A prepared transaction that its coordinator has forgotten outlives every
// client and every restart. It holds its own messages back, and no others; when
// somebody commits it at last, they arrive. Field case F09.
func TestForgottenPreparedTransaction(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	prepared, others := newMessages(2), newMessages(20)
	conn := f.connect(t)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, publishIn(t.Context(), publisher, tx, "topic", prepared...))
	gid := "forgotten " + prepared[0].UUID
	_, err = tx.Exec(t.Context(), "PREPARE TRANSACTION '"+gid+"'")
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))

	consumer := f.consumer(nil)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	require.NoError(t, publisher.Publish("topic", others[:10]...))
	requireNext(t, messages, others[:10]...)
	require.NoError(t, consumer.Close()) // and all clients with it

	_, messages = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "topic")
	require.NoError(t, publisher.Publish("topic", others[10:19]...))
	requireNext(t, messages, others[10:19]...)

	f.exec("COMMIT PREPARED '" + gid + "'")
	requireNext(t, messages, prepared...)
	require.NoError(t, publisher.Publish("topic", others[19]))
	requireNext(t, messages, others[19])
}

// lateTransaction is a transaction of a session of its own.
type lateTransaction struct {
	f  *fixture
	t  testing.TB
	tx pgx.Tx
}

func (l *lateTransaction) begin() {
	l.t.Helper()
	tx, err := l.f.connect(l.t).Begin(l.t.Context())
	require.NoError(l.t, err)
	l.tx = tx
}

// exec runs a statement that must work.
func (l *lateTransaction) exec(text string, args ...any) {
	l.t.Helper()
	_, err := l.tx.Exec(l.t.Context(), l.f.sql(text), args...)
	require.NoError(l.t, err)
}

func (l *lateTransaction) commit() {
	l.t.Helper()
	require.NoError(l.t, l.tx.Commit(l.t.Context()))
}
