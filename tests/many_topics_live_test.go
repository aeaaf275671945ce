package tests

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// lane is a key of a topic: its messages come in order.
type lane struct{ topic, key string }

// lanes numbers the messages of lanes, and checks what arrives. Safe for
// concurrent use.
type lanes struct {
	mu        sync.Mutex
	sent, got map[lane]int
}

// publish publishes n messages of about size bytes to each of some topics' keys,
// beside one of a topic that nobody reads.
func (l *lanes) publish(t *testing.T, publisher *outbox.Publisher, n, size int) {
	t.Helper()
	for i := range 6 * n {
		to := lane{fmt.Sprint("orders.", i%3), fmt.Sprint("key ", i%2)}
		l.mu.Lock()
		msg := numbered(l.sent[to], size)
		l.sent[to]++
		l.mu.Unlock()
		msg.Metadata.Set(outbox.DefaultKeyMetadata, to.key)
		require.NoError(t, publisher.Publish(to.topic, msg))
	}
	require.NoError(t, publisher.Publish("other", numbered(0, size)))
}

// add fails the test unless the message is the next one of its lane: what is lost,
// repeated or out of order is not.
func (l *lanes) add(t *testing.T, msg *message.Message) {
	delivery, _ := outbox.DeliveryFromCtx(msg.Context())
	from := lane{delivery.Topic, delivery.OrderingKey}
	var n int
	_, err := fmt.Sscan(string(msg.Payload), &n)
	l.mu.Lock()
	defer l.mu.Unlock()
	assert.NoError(t, err)
	assert.Contains(t, l.sent, from)
	assert.Equal(t, l.got[from], n, "%v", from)
	l.got[from]++
}

// await waits until everything has arrived.
func (l *lanes) await(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return assert.ObjectsAreEqual(l.sent, l.got)
	}, waitFor, time.Millisecond)
}

// Many topics are read from the write-ahead log, in whatever way they fall back to
// the table, and return: when the stream is killed, and when their buffer is full
// because handlers are slow. Nothing is lost or repeated, and the order per key
// stands.
func TestManyTopicsLive(t *testing.T) {
	t.Parallel()

	// A server of its own: a slot waits for everybody's transactions.
	f, _ := newOwnFixture(t, pgtest.Options{})
	publisher := f.publisher(outbox.PublisherConfig{})
	consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) {
		c.Mode, c.LiveBytes = outbox.ModeWAL, outbox.MinLiveBytes
	})
	// Little is taken in, so that the buffer has to hold what handlers leave.
	subscriber, batches := f.subscribeBatches(consumer, outbox.SubscriberConfig{
		Ordering: outbox.OrderingByKey, PageBytes: 8 << 10, PageSize: 10,
	}, outbox.MatchTopics("orders.*"))
	l := &lanes{sent: map[lane]int{}, got: map[lane]int{}}
	var gate sync.RWMutex // held by the test while handlers are slow
	read := make(chan struct{})
	go func() {
		defer close(read)
		for batch := range batches {
			gate.RLock()
			for _, msg := range batch {
				l.add(t, msg)
				msg.Ack()
			}
			gate.RUnlock()
		}
	}()
	status := func() outbox.SubscriptionStatus { return consumer.Status().Subscriptions[0] }

	for round := range 4 {
		// Without a detachment in between everything has come from the WAL. A busy
		// machine may be the reason for one.
		require.Eventually(t, func() bool {
			awaitLive(t, consumer)
			before := status()
			l.publish(t, publisher, 3, 100)
			l.await(t)
			after := status()
			return before.Source == outbox.SourceWAL && after.Source == outbox.SourceWAL && after.Since.Equal(before.Since)
		}, waitFor, time.Millisecond, "round %d: nothing is read live", round)

		if round%2 == 0 {
			detached := len(book.find("Topic is polled"))
			f.exec(`SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name LIKE 'watermill_outbox_%'`)
			l.publish(t, publisher, 20, 100)
			book.await(t, detached+1, "Topic is polled")
		} else {
			full := len(book.find("Topic is polled: its buffer is full"))
			func() {
				gate.Lock()
				defer gate.Unlock()
				for range 4 * outbox.MinLiveBytes / (6 * 2000) {
					l.publish(t, publisher, 1, 2000)
				}
				book.await(t, full+1, "Topic is polled: its buffer is full")
			}()
		}
		l.await(t)
	}
	require.NoError(t, subscriber.Close())
	<-read
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.cursors"))

	// And nothing comes again.
	_, batches = f.subscribeBatches(consumer, outbox.SubscriberConfig{Ordering: outbox.OrderingByKey}, outbox.MatchTopics("orders.*"))
	l.publish(t, publisher, 1, 10)
	for range 6 {
		for _, msg := range nextBatch(t, batches) {
			l.add(t, msg)
			msg.Ack()
		}
	}
	l.await(t)
}
