package tests

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/internal/window"
)

// publication is the fixture's one, for the text of a statement.
var publication = quoteIdentifier(oddSchema)

// Somebody alters the publication, and from then on the stream leaves out rows in
// silence. The position moved over them, so that not even polling found them
// later. Here are the ways in which that was not noticed.
func TestPublicationIsAlteredUnderTheStream(t *testing.T) {
	t.Parallel()

	// Only a commit that asks for it waits for the standby that is not there.
	server := pgtest.Own(t, pgtest.Options{Settings: map[string]string{
		"synchronous_commit": "local", "synchronous_standby_names": "nobody",
	}})
	setUp := func(t *testing.T) (*fixture, *outbox.Consumer, <-chan *message.Message) {
		f := fixtureAt(t, pgtest.DatabaseOn(t, server))
		consumer, _ := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) { c.Mode = outbox.ModeAuto })
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
		return f, consumer, messages
	}
	publish := func(t *testing.T, f *fixture) *message.Message {
		t.Helper()
		msg := newMessages(1)[0]
		require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", msg))
		return msg
	}

	// It was looked at, and found to be right. Then the slot had to wait for the
	// transaction that altered it.
	t.Run("between the look at it and the slot", func(t *testing.T) {
		f, consumer, messages := setUp(t)
		awaitLive(t, consumer)
		tx, err := f.pool.Begin(t.Context())
		require.NoError(t, err)
		defer tx.Rollback(context.WithoutCancel(t.Context()))
		_, err = tx.Exec(t.Context(), "ALTER PUBLICATION "+publication+" SET (publish = 'update')")
		require.NoError(t, err)
		// Another stream is needed.
		f.execRaw("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active AND database = current_database()")
		require.Eventually(t, func() bool {
			return f.number(`SELECT count(*)::int FROM pg_stat_activity
				WHERE backend_type = 'walsender' AND wait_event_type = 'Lock' AND datname = current_database()`) == 1
		}, waitFor, time.Millisecond, "no slot waits for the transaction")
		require.NoError(t, tx.Commit(t.Context()))
		awaitPolling(t, consumer, "without inserts")
		requireNext(t, messages, publish(t, f))
	})

	// What a schema's tables are published by is in another catalog than what
	// tables are published by themselves, the only way before PostgreSQL 15.
	t.Run("with all tables of the schema", func(t *testing.T) {
		f := fixtureAt(t, pgtest.DatabaseOn(t, server))
		tables := "TABLE " + publication + ".messages"
		if f.number("SELECT current_setting('server_version_num')::int") >= 150000 {
			tables = "TABLES IN SCHEMA " + publication
		}
		f.execRaw("DROP PUBLICATION " + publication)
		f.execRaw("CREATE PUBLICATION " + publication + " FOR " + tables + " WITH (publish = 'insert', publish_via_partition_root = true)")
		consumer, _ := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) { c.Mode = outbox.ModeAuto })
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
		awaitLive(t, consumer)
		requireNext(t, messages, publish(t, f))
		f.execRaw("ALTER PUBLICATION " + publication + " DROP " + tables)
		requireNext(t, messages, publish(t, f))
		awaitPolling(t, consumer, "without table messages")
	})

	// Rows behind the alteration's commit are decoded by it, before anybody else
	// can see it.
	t.Run("while the alteration waits for a standby", func(t *testing.T) {
		f, consumer, messages := setUp(t)
		awaitLive(t, consumer)
		conn := f.connect(t)
		_, err := conn.Exec(t.Context(), "SET synchronous_commit = on")
		require.NoError(t, err)
		altered := make(chan error, 1)
		go func() {
			_, err := conn.Exec(context.WithoutCancel(t.Context()), "ALTER PUBLICATION "+publication+" SET (publish = 'update')")
			altered <- err
		}()
		require.Eventually(t, func() bool {
			return f.number("SELECT count(*)::int FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = current_database()") == 1
		}, waitFor, time.Millisecond, "the alteration does not wait")
		requireNext(t, messages, publish(t, f))
		f.execRaw("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = current_database()")
		require.NoError(t, await(t, altered), "it has committed, and only stops waiting")
		requireNext(t, messages, publish(t, f))
	})
}

// An application writes a large row, and then its transaction waits for
// something. The end of that row's records is not on disk, but the page before
// is, and the stream counted as lagging for as long as the transaction waited.
func TestIdleTransactionIsNoLag(t *testing.T) {
	t.Parallel()

	f, _ := newOwnFixture(t, pgtest.Options{})
	consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) {
		c.Mode, c.Lease = outbox.ModeAuto, 10*time.Minute // a beat brings all to the disk
	})
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	awaitLive(t, consumer)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(2)
	require.NoError(t, publisher.Publish("topic", sent[0]))
	requireNext(t, messages, sent[0])
	f.awaitStored(t, "topic")
	f.execRaw("CREATE TABLE business (x text)")
	since := consumer.Status().Subscriptions[0].Since

	tx, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	// half reports how far the log is on disk, if that is the middle of a record.
	half := func() (flush string, is bool) {
		require.NoError(t, f.pool.QueryRow(t.Context(), `SELECT w.flush::text, w.flush < w.insert AND (w.flush - '0/0') % 8192 = 0 AND w.flush > $1::text::pg_lsn
			FROM (SELECT pg_current_wal_flush_lsn() AS flush, pg_current_wal_insert_lsn() AS insert) AS w`,
			consumer.Status().ReceivedLSN.String()).Scan(&flush, &is))
		return flush, is
	}
	// Whatever else the server writes may bring it to the disk: then once more.
	const enough = 1500 * time.Millisecond // well above the lag that is allowed
	began, at := time.Now(), ""
	for at == "" || time.Since(began) < enough {
		switch flush, is := half(); {
		case !is:
			_, err = tx.Exec(t.Context(), "INSERT INTO business SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 900)")
			require.NoError(t, err)
			at = ""
			require.Eventually(t, func() bool { _, is := half(); return is }, waitFor, 10*time.Millisecond)
		case flush != at:
			began, at = time.Now(), flush
		default:
			time.Sleep(10 * time.Millisecond) // the state has a length
		}
		require.Equal(t, outbox.SourceWAL, consumer.Status().Source, "%+v", consumer.Status())
	}
	require.NoError(t, publisher.Publish("topic", sent[1]))
	requireNext(t, messages, sent[1])
	require.Empty(t, book.find("Messages are polled"))
	require.Equal(t, since, consumer.Status().Subscriptions[0].Since, "it was live all the time")
}

// A stream that has the server's last slot is no reason to refuse its readers.
func TestSubscribeWhileTheStreamHasTheLastSlot(t *testing.T) {
	t.Parallel()

	f, _ := newOwnFixture(t, pgtest.Options{Settings: map[string]string{"max_replication_slots": "1"}})
	consumer, _ := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) { c.Mode = outbox.ModeWAL })
	f.subscribe(consumer, outbox.SubscriberConfig{}, "first")
	awaitLive(t, consumer)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "second")
	awaitLive(t, consumer)
	sent := newMessages(1)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("second", sent...))
	requireNext(t, messages, sent...)

	// Another process has none, and is told so.
	other, _ := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) { c.Mode = outbox.ModeWAL })
	subscriber, err := outbox.NewSubscriber(other, outbox.SubscriberConfig{ConsumerGroup: "other"}, nil)
	require.NoError(t, err)
	_, err = subscriber.Subscribe(t.Context(), "first")
	require.ErrorIs(t, err, outbox.ErrNoWAL)
	require.ErrorContains(t, err, "max_replication_slots")
}

// A row that is larger than all that may be buffered cost every reader its place
// at the stream, and was refused all the same. It is found in the table, by its
// own readers, and the others stay.
func TestRowLargerThanAllBuffers(t *testing.T) {
	t.Parallel()

	f, _ := newOwnFixture(t, pgtest.Options{})
	consumer, _ := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) {
		c.Mode, c.LiveBytes = outbox.ModeAuto, outbox.MinLiveBytes
	})
	_, slow := f.subscribe(consumer, outbox.SubscriberConfig{PageSize: 1}, "a slow one")
	_, large := f.subscribe(consumer, outbox.SubscriberConfig{}, "large")
	awaitLive(t, consumer)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(10)
	for _, msg := range sent {
		require.NoError(t, publisher.Publish("a slow one", msg))
	}
	inFlight := nextMessage(t, slow)
	status := func(i int) outbox.SubscriptionStatus { return consumer.Status().Subscriptions[i] } // by topic
	require.Equal(t, "a slow one", status(0).Topic)
	since := status(0).Since

	big := newMessages(3)
	big[1].Payload = make([]byte, 2*outbox.MinLiveBytes)
	require.NoError(t, publisher.Publish("large", big[0]))
	requireNext(t, large, big[0])
	require.Positive(t, consumer.Status().BufferedBytes, "what came before is in the slow one's buffer")
	for _, msg := range big[1:] {
		require.NoError(t, publisher.Publish("large", msg))
	}
	requireNext(t, large, big[1:]...)
	require.Equal(t, outbox.SourceWAL, status(0).Source)
	require.Equal(t, since, status(0).Since, "it was live all the time")
	require.NotEmpty(t, status(1).Reason)
	require.Equal(t, sent[0].UUID, inFlight.UUID)
	require.True(t, inFlight.Ack())
	requireNext(t, slow, sent[1:]...)
	require.Equal(t, since, status(0).Since, "it was live all the time")

	awaitLive(t, consumer)
	last := newMessages(1)
	require.NoError(t, publisher.Publish("large", last...))
	requireNext(t, large, last...)
	require.Equal(t, outbox.SourceWAL, status(1).Source)
	require.Empty(t, status(1).Reason)
}

// When another process took a topic, the status went on to say that its messages
// came from the WAL, of a subscription that stood by, and of one that began again
// by polling.
func TestStatusAfterTheLeaseHasMoved(t *testing.T) {
	t.Parallel()

	f, _ := newOwnFixture(t, pgtest.Options{})
	consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) {
		c.Mode, c.Lease = outbox.ModeAuto, 10*waitFor
	})
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	awaitLive(t, consumer)
	f.exec("INSERT INTO outbox.processes (holder) VALUES ('other')")
	f.exec("UPDATE outbox.cursors SET holder = 'other', epoch = epoch + 1")
	sent := newMessages(1)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	requireNext(t, messages, sent...) // when it is to be stored, the loss is noticed
	book.await(t, 1, "Topic lost")
	status := func() outbox.SubscriptionStatus { return consumer.Status().Subscriptions[0] }
	require.False(t, status().Holding)
	require.Equal(t, outbox.SourceTable, status().Source)
	require.Empty(t, status().Reason, "there is nothing wrong with the WAL")

	f.exec("UPDATE outbox.cursors SET holder = NULL")
	requireNext(t, messages, sent...) // it was not stored
	awaitLive(t, consumer)
	require.True(t, status().Holding)
}

// A crash took back what was handed out ahead of the position, and its
// transaction ids went to others. Where the snapshot of the position covers all
// that is left nothing else tells: a window from there would leave out rows that
// only have the ids of those.
func TestServerOlderThanWhatIsAhead(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	queries := window.NewQueries(oddSchema)
	reader := window.Reader{Queries: queries, Topics: window.One("topic"), Group: "group", Limits: window.Limits{Rows: 10, Bytes: 1 << 20}}
	now, err := queries.Now(t.Context(), f.pool)
	require.NoError(t, err)
	pos := window.Latest(now.Life.Era, now.Snapshot, now.Top)
	f.exec("INSERT INTO outbox.messages (topic, uuid) VALUES ('topic', 'first'), ('topic', 'second')")
	var id int64
	var xid uint64
	require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT id, xid::text::bigint FROM outbox.messages WHERE uuid = 'first'")).Scan(&id, &xid))

	pos.Ahead = []window.Ahead{{ID: id, XID: xid}}
	page, err := reader.Next(t.Context(), f.pool, pos)
	require.NoError(t, err)
	require.Len(t, page.Rows, 1)
	require.Equal(t, "second", page.Rows[0].UUID)

	// A transaction of the future, and one that has not ended.
	tx, err := f.pool.BeginTx(t.Context(), pgx.TxOptions{})
	require.NoError(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	var running uint64
	require.NoError(t, tx.QueryRow(t.Context(), "SELECT pg_current_xact_id()::text::bigint").Scan(&running))
	for _, lost := range []uint64{running, now.Snapshot.Xmax() + 1_000_000} {
		pos.Ahead = []window.Ahead{{ID: id, XID: xid}, {ID: id + 1, XID: lost}}
		_, err = reader.Next(t.Context(), f.pool, pos)
		require.ErrorIs(t, err, window.ErrWentBack)
	}
}
