package tests

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/cursor"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/internal/window"
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

// The statement whose outcome is unknown may still be at it when it is sent again,
// or be rolled back in the end; and another epoch makes both void.
func TestVerdictThatIsSentAgainWhileItIsStored(t *testing.T) {
	t.Parallel()

	for name, ends := range map[string]func(pgx.Tx, context.Context) error{"committed": pgx.Tx.Commit, "rolled back": pgx.Tx.Rollback} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(1)...))
			store, key := cursor.NewStore(oddSchema, "holder"), cursor.Key{Group: "group", Topic: "topic"}
			f.ensure(t, store, key)
			require.NoError(t, store.MarkLife(t.Context(), f.pool))
			held, err := store.Claim(t.Context(), f.pool, []cursor.Wanted{{Key: key}}, nil)
			require.NoError(t, err)
			require.Len(t, held, 1)
			write := cursor.Write{Key: key, Epoch: held[0].Epoch, Life: held[0].Life, State: held[0].State}
			write.State.Position.Step, write.State.Position.Floor = window.Idle, 1
			write.State.Holes = []window.Hole{{Era: held[0].Life.Era, ID: 7, CreatedAt: time.Now(), Attempts: 1}}
			verdict := cursor.Verdict{Topic: "topic", Era: held[0].Life.Era, ID: 1, Attempts: 1, After: time.Hour}

			tx, err := f.pool.Begin(t.Context())
			require.NoError(t, err)
			saved, err := store.Settle(t.Context(), tx, write, verdict, false)
			require.NoError(t, err)
			require.True(t, saved)
			again := make(chan error, 1)
			go func() {
				saved, err := store.Settle(t.Context(), f.pool, write, verdict, true)
				if err == nil && !saved {
					err = errors.New("not stored")
				}
				again <- err
			}()
			require.Eventually(t, func() bool {
				return f.number("SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'") > 0
			}, waitFor, time.Millisecond, "it does not wait")
			require.NoError(t, ends(tx, t.Context()))
			require.NoError(t, <-again)
			require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.deferred"))
			require.Equal(t, 1, f.number("SELECT floor::int FROM outbox.cursors"))

			write.Epoch++
			saved, err = store.Settle(t.Context(), f.pool, write, verdict, true)
			require.NoError(t, err)
			require.False(t, saved)
			require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.deferred"))
		})
	}
}
