package tests

import (
	"context"
	"encoding/json"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/cursor"
	"github.com/millrace/watermill-outbox/internal/lease"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

func shortLease(c *outbox.ConsumerConfig) {
	c.Lease, c.QueryTimeout = time.Second, time.Second
}

// The last write of a closing subscription met a locked row and failed. The
// process lived on, with a beat for all its topics, so the cursor seemed held for
// ever and no other process got the topic.
func TestFailedReleaseDoesNotKeepTheTopic(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(shortLease)
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	sent := newMessages(3)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	receive(t, messages, 1)

	tx, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), f.sql("SELECT FROM outbox.cursors FOR UPDATE"))
	require.NoError(t, err)
	require.NoError(t, subscriber.Close())
	require.NoError(t, tx.Rollback(t.Context()))

	_, messages = f.subscribe(f.consumer(shortLease), outbox.SubscriberConfig{}, "topic")
	received := uuids(receive(t, messages, 2))
	require.Subset(t, uuids(sent), received)
}

// The lease ran out in an outage, and the subscription ended before it could
// take it again: nothing is written for a lost lease, so nothing gave it up.
func TestLostLeaseOfAnEndedSubscriptionIsGivenUp(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	proxy := pgtest.NewProxy(t, pgtest.Shared(t).Addr())
	db, err := pgxpool.ParseConfig(proxy.URL(f.url))
	require.NoError(t, err)
	consumer := f.consumerOn(db, shortLease)
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{CloseTimeout: -1}, "topic")
	_, other := f.subscribe(consumer, outbox.SubscriberConfig{}, "other")
	publisher := f.publisher(outbox.PublisherConfig{})
	require.NoError(t, publisher.Publish("topic", newMessages(3)...))
	require.NoError(t, publisher.Publish("other", newMessages(2)...))
	receive(t, messages, 1)
	inFlight := <-other

	proxy.RefuseNew(true)
	proxy.CutAll()
	<-inFlight.Context().Done() // the leases are lost
	require.NoError(t, subscriber.Close())
	inFlight.Nack()
	proxy.RefuseNew(false)

	_, messages = f.subscribe(f.consumer(shortLease), outbox.SubscriberConfig{}, "topic")
	receive(t, messages, 2)
}

// A process that was stopped for longer than its lease, while another took its
// topic, renewed its beat when it woke, and with it, for a moment, the lease that
// was no longer its own: idle, it had nothing to write that would have told it.
func TestPausedProcessHandsOutNothingWhenItWakes(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	publish := func(version int) {
		payload, err := json.Marshal(change{Version: version})
		require.NoError(t, err)
		require.NoError(t, publisher.Publish("topic", message.NewMessage(watermill.NewUUID(), payload)))
	}
	publish(0)
	c := f.startChild(t, "topic", time.Second)
	<-c.lines
	require.Eventually(t, func() bool {
		return f.number("SELECT count(*)::int FROM outbox.cursors WHERE step = 'idle' AND p::text <> '1:1:'") == 1
	}, waitFor, 5*time.Millisecond)
	var holder string
	require.NoError(t, f.pool.QueryRow(t.Context(), f.sql("SELECT holder FROM outbox.cursors")).Scan(&holder))
	epoch := f.number("SELECT epoch FROM outbox.cursors")
	c.suspend()

	_, messages := f.subscribe(f.consumer(shortLease), outbox.SubscriberConfig{}, "topic")
	require.Eventually(t, func() bool { return f.number("SELECT epoch FROM outbox.cursors") == epoch+1 }, waitFor, 5*time.Millisecond)
	beat := f.number("SELECT beat::int FROM outbox.processes WHERE holder = $1", holder)
	c.resume()
	published := 0
	for f.number("SELECT beat::int FROM outbox.processes WHERE holder = $1", holder) < beat+3 {
		published++
		publish(published)
		receive(t, messages, 1)
	}
	c.kill()
	for line := range c.lines {
		require.Fail(t, "the woken process handed out a message of the other's topic", line)
	}
	require.Error(t, c.wait())
	require.Positive(t, published)
}

// stuckBeat is a connection on which beats hang from some point on.
type stuckBeat struct {
	db    *pgxpool.Pool
	stuck atomic.Bool
	sent  atomic.Int64 // when the last beat that went through was sent
}

func (s *stuckBeat) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if s.stuck.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	s.sent.Store(time.Now().UnixNano())
	return s.db.Query(ctx, sql, args...)
}

// A holder must have stopped by the time others may take over, which is the
// lease after its last beat. One whose beat hung noticed only when the beat
// timed out, after that.
func TestLeaseEndsBeforeOthersMayTakeIt(t *testing.T) {
	t.Parallel()

	const duration = 4 * time.Second
	f := newFixture(t)
	store := cursor.NewStore(oddSchema, uuid.NewString())
	beat := &stuckBeat{db: f.pool}
	manager := lease.New(store, f.pool, beat, lease.Config{
		Duration: duration, Claim: 20 * time.Millisecond, Checkpoint: time.Second, IdleCheckpoint: time.Minute,
		Timeout: waitFor, Told: func() bool { return false }, Failed: func(error) {}, Logger: watermill.NopLogger{},
	})
	key := cursor.Key{Group: "group", Topic: "topic"}
	f.ensure(t, store, key)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { manager.Run(ctx) })
	defer wg.Wait()
	defer cancel()
	seat, err := manager.Join(key.Of(), nil, func(error) {})
	require.NoError(t, err)
	held, err := seat.Acquire(ctx)
	require.NoError(t, err)
	require.True(t, held.Valid())
	beat.stuck.Store(true)

	<-held.Context().Done()
	require.ErrorIs(t, context.Cause(held.Context()), lease.ErrLost)
	require.False(t, held.Valid())
	require.Less(t, time.Since(time.Unix(0, beat.sent.Load())), duration)
}

// Between the look of a claim and its lock, a process that had only just begun
// took the cursor. The lock showed its row, but the look still saw a time when
// it had no beat, and the claim took the cursor away from it.
func TestClaimDoesNotTakeFromAProcessThatJustBegan(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	content, err := os.ReadFile("../internal/cursor/queries/claim.sql")
	require.NoError(t, err)
	// The look waits for a lock of the test's, and nothing else changes.
	const condition = "WHERE c.holder IS NULL OR c.holder = $1::text\n"
	require.Contains(t, string(content), condition)
	slow := strings.Replace(string(content), condition,
		"WHERE (SELECT pg_advisory_xact_lock_shared(42)) IS NOT NULL AND c.holder IS NULL OR c.holder = $1::text\n", 1)
	claim := func(text, holder string) ([]string, error) {
		rows, err := f.pool.Query(context.Background(), f.sql(text), holder, []string{"group"}, []string{"topic"}, []int{0}, []string{}, []int64{}, []*string{nil})
		if err != nil {
			return nil, err
		}
		return pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
			values, err := row.Values()
			return values[0].(string), err
		})
	}

	store := cursor.NewStore(oddSchema, "beginner")
	f.ensure(t, store, cursor.Key{Group: "group", Topic: "topic"})
	tx, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock(42)")
	require.NoError(t, err)
	type answer struct {
		groups []string
		err    error
	}
	answers := make(chan answer)
	go func() {
		groups, err := claim(slow, "old")
		answers <- answer{groups, err}
	}()
	require.Eventually(t, func() bool {
		return f.number("SELECT count(*)::int FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())") == 1
	}, waitFor, time.Millisecond)
	_, err = store.Beat(t.Context(), f.pool, "", 0)
	require.NoError(t, err)
	groups, err := claim(string(content), "beginner")
	require.NoError(t, err)
	require.Len(t, groups, 1)
	require.NoError(t, tx.Rollback(t.Context()))

	got := <-answers
	require.NoError(t, got.err)
	require.Empty(t, got.groups)
	require.Equal(t, 1, f.number("SELECT count(*)::int FROM outbox.cursors WHERE holder = 'beginner'"))
}

// An operator who raises the epoch, or removes the row, ends the lease of an idle
// holder with its next beat.
func TestBeatNoticesThatTheCursorIsGone(t *testing.T) {
	t.Parallel()

	for name, end := range map[string]string{
		"epoch raised": "UPDATE outbox.cursors SET epoch = epoch + 1, holder = 'operator'",
		"row removed":  "DELETE FROM outbox.cursors",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			_, messages := f.subscribe(f.consumer(shortLease), outbox.SubscriberConfig{CloseTimeout: -1}, "topic")
			require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", newMessages(1)...))
			msg := <-messages
			f.exec(end)
			select {
			case <-msg.Context().Done():
				require.ErrorIs(t, context.Cause(msg.Context()), lease.ErrLost)
			case <-time.After(waitFor):
				require.FailNow(t, "the lease was kept")
			}
		})
	}
}
