package tests

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// Contexts that end at a random moment of a call leave transactions open and
// connections behind, wherever the cleaning up is done with the context that has
// just ended. Goroutines are counted when all tests are over. Field case F50.
func TestCallsCancelledAtRandom(t *testing.T) {
	t.Parallel()

	const workers, each = 8, 60
	f := newFixture(t)
	config := f.pool.Config()
	config.MaxConns = 4
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	publisher := publisherOn(t, pool, outbox.PublisherConfig{})
	consumer := f.consumer(nil)
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{CloseTimeout: -1}, nil)
	require.NoError(t, err)

	var mu sync.Mutex
	published := map[string]bool{} // Publish returned nil
	var attempted sync.Map
	var cancelledPublish, cancelledSubscribe, subscribed atomic.Int64
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(worker), 50))
			for range each {
				limit := 8_000
				if random.IntN(4) == 0 {
					limit = 2_000_000 // comes through
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random.IntN(limit))*time.Microsecond)
				if random.IntN(2) == 0 {
					sent := newMessages(1 + random.IntN(60))
					for _, msg := range sent {
						msg.SetContext(ctx)
						attempted.Store(msg.UUID, true)
					}
					if publisher.Publish("topic", sent...) == nil {
						mu.Lock()
						for _, msg := range sent {
							published[msg.UUID] = true
						}
						mu.Unlock()
					} else {
						cancelledPublish.Add(1)
					}
				} else if messages, err := subscriber.Subscribe(ctx, "other topic"); err == nil {
					subscribed.Add(1)
					cancel()
					for range messages {
						assert.Fail(t, "nothing was published there")
					}
				} else {
					cancelledSubscribe.Add(1)
				}
				cancel()
			}
		})
	}
	wg.Wait()
	require.Positive(t, cancelledPublish.Load(), "no call was cancelled: the test proves nothing")
	require.Positive(t, cancelledSubscribe.Load(), "no call was cancelled: the test proves nothing")
	require.Positive(t, subscribed.Load(), "no call came through: the test proves nothing")
	require.NotEmpty(t, published, "no call came through: the test proves nothing")

	require.Eventually(t, func() bool {
		return f.number(`SELECT count(*)::int FROM pg_stat_activity
			WHERE datname = current_database() AND state LIKE 'idle in transaction%'`) == 0
	}, waitFor, 5*time.Millisecond, "a session is left in a transaction")
	require.Eventually(t, func() bool { return pool.Stat().AcquiredConns() == 0 }, waitFor, 5*time.Millisecond, "connections are left behind")

	// All works as before.
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "another"}, "topic")
	total := f.number("SELECT count(*)::int FROM outbox.messages WHERE topic = 'topic'")
	for _, msg := range receive(t, messages, total) {
		delete(published, msg.UUID)
		_, ok := attempted.Load(msg.UUID)
		require.True(t, ok)
	}
	require.Empty(t, published, "Publish returned nil, and there is no message")
	last := newMessages(1)
	require.NoError(t, publisher.Publish("other topic", last...))
	messages, err = subscriber.Subscribe(t.Context(), "other topic")
	require.NoError(t, err)
	requireNext(t, messages, last...)
	require.NoError(t, consumer.Close())
	require.Eventually(t, func() bool { return f.sessions(t).All == 0 }, waitFor, 5*time.Millisecond, "sessions are left")
}
