package tests

import (
	"testing"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// The database is read-only for a while, as after a failover: nothing can be acked, and
// leases are lost. When it can be written to again all goes on by itself: no message was
// given up or has spent an attempt, all is there in order, and what has de-duplication has
// nothing twice. Field case F48.
func TestForwardReadOnlyDatabase(t *testing.T) {
	t.Parallel()

	f, _ := newOwnFixture(t, pgtest.Options{})
	r := newRelayOf(t, f, forwardTopic)
	sent := brokerMessages(120, 6)
	book := newLogBook()
	r.logger = book
	consumer := r.consumer(func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	publisher := r.publisher(outbox.PublisherConfig{})
	running, stop := r.run(t, consumer, nil)
	r.publish(t, forwardTopic, sent[:60]...)
	r.awaitTaken(t, sent[:30])
	require.NoError(t, consumer.Status().Ready())

	readOnly := func(value string) {
		r.exec("ALTER SYSTEM SET default_transaction_read_only = " + value)
		r.exec("SELECT pg_reload_conf()")
	}
	readOnly("on")
	require.Eventually(t, func() bool {
		return r.number("SELECT (current_setting('transaction_read_only') = 'on')::int") == 1
	}, waitFor, waitFor/10_000)
	require.ErrorIs(t, publisher.Publish(forwardTopic, sent[60:]...), outbox.ErrReadOnly)
	book.await(t, len(r.ends), "Topic lost") // their leases cannot be renewed
	holding := func() (n int) {
		for _, s := range consumer.Status().Subscriptions {
			if s.Holding {
				n++
			}
		}
		return n
	}
	require.Eventually(t, func() bool { return holding() == 0 }, waitFor, waitFor/10_000)
	readOnly("off")
	require.Eventually(t, func() bool { return publisher.Publish(forwardTopic, sent[60:]...) == nil }, waitFor, waitFor/10_000)

	r.awaitTaken(t, sent)
	require.Eventually(t, func() bool { return holding() == len(r.ends) }, waitFor, waitFor/10_000)
	require.NoError(t, consumer.Status().Ready())
	for _, d := range running.Status().Destinations {
		require.Zero(t, d.FailingCount, d.Name)
	}
	stop()
	r.requireNoLetters(t)
	require.Empty(t, book.find("A message"), "attempts were spent")
	require.Empty(t, book.find("The destination fails"))
	for _, e := range r.ends {
		duplicates := requireInBroker(t, e.broker, forwardTopic, sent)
		require.True(t, duplicates == 0 || e.deduplication == "", "%s: duplicates", e.name)
	}
}
