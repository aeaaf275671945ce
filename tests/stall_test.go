package tests

import (
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// stalledOutbox is a fixture whose messages somebody has locked, with a consumer
// that waits for them and a message that becomes visible with the lock's end.
func stalledOutbox(t *testing.T, f *fixture) (consumer *outbox.Consumer, book *logBook, lock pgx.Tx) {
	t.Helper()
	consumer, book = f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) {
		c.QueryTimeout = 250 * time.Millisecond
		c.MaxConns = 4
	})
	lock, err := f.connect(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = lock.Exec(t.Context(), f.sql("LOCK TABLE outbox.messages IN ACCESS EXCLUSIVE MODE"))
	require.NoError(t, err)
	return consumer, book, lock
}

// A migration of somebody's holds the table, the reader's query waits, and
// without a limit of its own it waits for ever, or a queue of such queries piles
// up behind the lock. Each is given up after its time and tried again, and when
// the lock is gone all goes on. Field case F49.
func TestLockedTableStallsNothingForEver(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer, book, lock := stalledOutbox(t, f)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	for range 4 {
		seen := len(book.find("Cannot read messages"))
		book.await(t, seen+1, "Cannot read messages")
		waiting := f.number(`SELECT count(*)::int FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'watermill-outbox' AND wait_event_type = 'Lock'`)
		require.LessOrEqual(t, waiting, 8, "queries pile up behind the lock")
	}
	book.await(t, 2, "Cannot look for new messages")
	require.Empty(t, book.find("Topic lost"), "the lease does not depend on the messages")

	sent := newMessages(2)
	require.NoError(t, publishIn(t.Context(), f.publisher(outbox.PublisherConfig{}), lock, "topic", sent...))
	require.NoError(t, lock.Commit(t.Context()))
	requireNext(t, messages, sent...)
}

// Close does not wait for the lock, either. Field case F49.
func TestCloseWhileTheTableIsLocked(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer, book, lock := stalledOutbox(t, f)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	book.await(t, 1, "Cannot read messages")
	var wg sync.WaitGroup
	closed := make(chan struct{})
	for range 3 {
		wg.Go(func() { assert.NoError(t, consumer.Close()) })
	}
	go func() {
		defer close(closed)
		wg.Wait()
	}()
	await(t, closed)
	_, open := <-messages
	require.False(t, open)
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.cursors WHERE holder IS NOT NULL"), "the topic was not given up")
	require.NoError(t, lock.Rollback(t.Context()))
}
