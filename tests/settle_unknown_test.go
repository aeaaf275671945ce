package tests

import (
	"bytes"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// The connection dies after the server has deferred a message, and before the
// answer. To defer it once more would make two of it, each with its own retries.
// A position that is stored meanwhile, or by the subscription that ends, must not
// take it back either.
func TestVerdictWithUnknownOutcome(t *testing.T) {
	t.Parallel()

	for name, ends := range map[string]bool{"goes on": false, "ends": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			proxy := f.proxy(t)
			db, err := pgxpool.ParseConfig(proxy.URL(f.url))
			require.NoError(t, err)
			var lost atomic.Int64
			proxy.OnClient(func(m pgtest.Message) pgtest.Action {
				if m.Type == 'B' && bytes.Contains(m.Body, []byte("put off by the test")) && lost.Add(1) <= 2 {
					return pgtest.LoseReply
				}
				return pgtest.Forward
			})
			consumer := f.consumerOn(db, nil)
			config := outbox.SubscriberConfig{Ordering: outbox.OrderingUnordered}
			subscriber, messages := f.subscribe(consumer, config, "topic")
			const others = 5
			require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(1+others)...))
			msg := nextMessage(t, messages)
			msg.Metadata.Set(delay.DelayedUntilKey, "2100-01-01T00:00:00Z")
			msg.Metadata.Set(delay.DelayedForKey, "put off by the test")
			require.True(t, msg.Nack())
			require.Eventually(t, func() bool { return lost.Load() > 0 }, waitFor, time.Millisecond)
			if ends {
				require.NoError(t, subscriber.Close())
				subscriber, messages = f.subscribe(consumer, config, "topic")
			}
			for _, other := range receive(t, messages, others) {
				require.NotEqual(t, msg.UUID, other.UUID)
			}
			if !ends {
				require.Eventually(t, func() bool { return lost.Load() > 2 }, waitFor, time.Millisecond)
			}
			require.NoError(t, subscriber.Close())
			require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.deferred"))
			require.Empty(t, f.holes(t, "topic"))
		})
	}
}
