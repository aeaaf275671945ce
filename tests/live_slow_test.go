package tests

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/replication"
)

// subscriptionOf returns how the topic's subscription stands.
func subscriptionOf(t testing.TB, consumer *outbox.Consumer, topic string) outbox.SubscriptionStatus {
	t.Helper()
	for _, sub := range consumer.Status().Subscriptions {
		if sub.Topic == topic {
			return sub
		}
	}
	require.FailNow(t, "no such subscription", "%s", topic)
	panic("not reached")
}

// numbered is a message of about size bytes that tells its number.
func numbered(n, size int) *message.Message {
	return message.NewMessage(watermill.NewUUID(), fmt.Appendf(nil, "%d %s", n, strings.Repeat("x", size)))
}

// numberOf is the reverse of numbered.
func numberOf(t testing.TB, msg *message.Message) (n int) {
	t.Helper()
	_, err := fmt.Sscan(string(msg.Payload), &n)
	require.NoError(t, err)
	return n
}

// slotState is what the only stream's slot keeps.
type slotState struct {
	retained    int64 // bytes of WAL
	catalogXmin int64
	hasXmin     bool
}

func (f *fixture) slotState(t testing.TB) (s slotState) {
	t.Helper()
	require.NoError(t, f.pool.QueryRow(t.Context(), `
		SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), restart_lsn)::bigint, catalog_xmin::text::bigint, xmin IS NOT NULL
		FROM pg_replication_slots WHERE slot_name LIKE 'watermill\_outbox\_%'`).Scan(&s.retained, &s.catalogXmin, &s.hasXmin))
	return s
}

// writeWAL writes about so many megabytes of WAL that are no messages, into a
// table of their own.
func (f *fixture) writeWAL(megabytes int) {
	f.t.Helper()
	f.exec("CREATE TABLE IF NOT EXISTS public.ballast (n int, content text)")
	f.exec("INSERT INTO public.ballast SELECT n, repeat(md5(n::text), 32) FROM generate_series(1, $1) n", 950*megabytes)
}

// awaitReceived waits until the stream has come to where the log ends now.
func (f *fixture) awaitReceived(t testing.TB, consumer *outbox.Consumer) {
	t.Helper()
	lsn, err := replication.ParseLSN(f.text("SELECT pg_current_wal_insert_lsn()::text"))
	require.NoError(t, err)
	awaitStatus(t, consumer, waitFor, func(s outbox.Status) bool { return s.ReceivedLSN >= lsn })
}

// awaitDecoded is awaitReceived, or returns when there is no stream.
func (f *fixture) awaitDecoded(t testing.TB, consumer *outbox.Consumer) {
	t.Helper()
	lsn, err := replication.ParseLSN(f.text("SELECT pg_current_wal_insert_lsn()::text"))
	require.NoError(t, err)
	awaitStatus(t, consumer, waitFor, func(s outbox.Status) bool { return s.ReceivedLSN >= lsn || s.Slot == "" })
}

// A consumer that blocks keeps the slot from moving elsewhere, until the disk is
// full of WAL, vacuum removes nothing any more, and all other topics wait behind
// it. Here it leaves the stream, alone: what it has not handled is in the table.
func TestSlowConsumerPinsNothing(t *testing.T) {
	t.Parallel()

	const liveBytes, size = 128 << 10, 1000
	f, _ := newOwnFixture(t, pgtest.Options{})
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode, c.LiveBytes = outbox.ModeAuto, liveBytes })
	_, blocked := f.subscribe(consumer, outbox.SubscriberConfig{}, "blocked")
	p := f.probe(t, consumer)
	awaitLive(t, consumer)
	publisher := f.publisher(outbox.PublisherConfig{})
	require.NoError(t, publisher.Publish("blocked", numbered(0, size)))
	first := nextMessage(t, blocked)
	require.Equal(t, 0, numberOf(t, first))

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var load, watching sync.WaitGroup
	var published atomic.Int64
	published.Store(1)
	load.Go(func() {
		pace := time.NewTicker(5 * time.Millisecond)
		defer pace.Stop()
		for ctx.Err() == nil {
			<-pace.C
			batch := make([]*message.Message, 20)
			for i := range batch {
				batch[i] = numbered(int(published.Load())+i, size)
			}
			if !assert.NoError(t, publisher.Publish("blocked", batch...)) {
				return
			}
			published.Add(int64(len(batch)))
		}
	})
	var most atomic.Int64
	var left atomic.Value // why the other topic left the stream
	watching.Go(func() {
		for ctx.Err() == nil {
			status := consumer.Status()
			most.Store(max(most.Load(), int64(status.BufferedBytes)))
			for _, sub := range status.Subscriptions {
				// Where this machine is too slow for the load, the stream lags, and
				// all leave it for a moment.
				if sub.Topic == "probe" && sub.Source != outbox.SourceWAL && !strings.Contains(sub.Reason, "lags") {
					left.Store(sub.Reason)
				}
			}
			time.Sleep(time.Millisecond)
		}
	})

	awaitStatus(t, consumer, waitFor, func(s outbox.Status) bool {
		return s.Subscriptions[0].Source == outbox.SourceTable // by topic: the blocked one
	})
	require.Contains(t, subscriptionOf(t, consumer, "blocked").Reason, "buffer is full")
	f.exec("CREATE TABLE public.garbage (n int)")
	for i := range 30 {
		f.writeWAL(4)
		f.exec("INSERT INTO public.garbage SELECT generate_series(1, 100)")
		f.exec("DELETE FROM public.garbage")
		if i%5 == 0 {
			f.exec("CHECKPOINT")
		}
		f.awaitReceived(t, consumer) // no faster than this machine decodes
		require.Equal(t, outbox.SourceTable, subscriptionOf(t, consumer, "blocked").Source)
	}
	retained := f.slotState(t).retained
	worst := p.worst()
	cancel()
	load.Wait()
	watching.Wait()
	require.Nil(t, left.Load(), "the other topic has left the stream")
	require.Less(t, most.Load(), int64(liveBytes+size+500), "more is buffered than one row beyond the bound")

	// One message is in flight still.
	require.NoError(t, first.Context().Err())
	xid := int64(f.number("SELECT pg_current_xact_id()::text::int"))
	var now slotState
	if !assert.Eventually(t, func() bool {
		f.exec("INSERT INTO public.garbage VALUES (1)")
		f.exec("DELETE FROM public.garbage")
		f.exec("CHECKPOINT") // and with it a note of what transactions run
		now = f.slotState(t)
		return now.retained < 1<<20 && now.catalogXmin > xid
	}, waitFor, 50*time.Millisecond) {
		require.FailNow(t, "the slot keeps WAL, or catalog rows", "%+v", f.slotState(t))
	}
	require.False(t, now.hasXmin)
	require.Eventually(t, func() bool {
		f.exec("VACUUM public.garbage")
		return f.number("SELECT pg_relation_size('public.garbage')::int") == 0
	}, waitFor, 10*time.Millisecond, "vacuum is held back")
	require.Eventually(t, func() bool {
		return f.number("SELECT count(*)::int FROM pg_stat_activity WHERE age(backend_xmin) > 10 AND datname = current_database()") == 0
	}, waitFor, 10*time.Millisecond, "a session holds an old snapshot")

	require.True(t, first.Ack())
	begin := time.Now()
	for n := 1; n < int(published.Load()); n++ {
		msg := nextMessage(t, blocked)
		require.Equal(t, n, numberOf(t, msg), "lost, repeated or out of order")
		require.True(t, msg.Ack())
	}
	caughtUp := time.Since(begin)
	awaitLive(t, consumer)
	n, slowest := p.end()
	t.Logf("%d messages while blocked, caught up in %s; probe: %d messages, latest %s, %s under load; buffered at most %d of %d bytes; WAL kept %d MB under load, %d bytes later",
		published.Load()-1, caughtUp.Round(time.Millisecond), n, slowest, worst, most.Load(), liveBytes, retained>>20, now.retained)
	require.NoError(t, publisher.Publish("blocked", numbered(-1, 1)))
	require.Equal(t, -1, numberOf(t, nextMessage(t, blocked)))
}
