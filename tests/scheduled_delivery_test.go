package tests

import (
	"context"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/promote"
)

// Messages come when they are due, by the database's clock, in the order of their
// due times and as they were published, with all that was published with them.
func TestScheduledIsDeliveredWhenDue(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "orders")
	begin := time.Now().Add(2 * time.Second) // when all have been published
	var sent []*message.Message
	for i := range 40 {
		msg := dueAt(begin.Add(time.Duration(i/2) * 37_003 * time.Microsecond)) // two and two at the same time
		msg.Metadata[delay.DelayedForKey] = "1s"
		msg.Metadata[outbox.DefaultKeyMetadata] = strconv.Itoa(i % 3)
		sent = append(sent, msg)
	}
	order := rand.Perm(20)
	for _, i := range order {
		require.NoError(t, publisher.Publish("orders", sent[2*i], sent[2*i+1]))
	}
	delivered := receiveWith(t, messages, len(sent), func(i int, msg *message.Message) {
		requireNeverEarly(t, msg)
		delivery, _ := outbox.DeliveryFromCtx(msg.Context())
		require.Equal(t, sent[i].Metadata.Get(outbox.DefaultKeyMetadata), delivery.OrderingKey)
		require.Equal(t, 1, delivery.Attempt)
	})
	require.Equal(t, contents(sent), contents(delivered))
	require.Empty(t, f.deferred(t, "orders"))
}

// What is scheduled holds up nothing: not its key, not its topic.
func TestScheduledBlocksNoKey(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "orders")
	key := func(msg *message.Message) *message.Message {
		msg.Metadata.Set(outbox.DefaultKeyMetadata, "order 1")
		return msg
	}
	first, scheduled, second := key(newMessages(1)[0]), key(dueIn(time.Hour)), key(newMessages(1)[0])
	require.NoError(t, publisher.Publish("orders", first, scheduled, second))
	requireNext(t, messages, first, second)
	f.exec("UPDATE outbox.deferred SET due_at = now()")
	requireNext(t, messages, scheduled)
}

// The promoter sleeps until the next message is due; one that comes meanwhile and
// is due sooner does not wait for that.
func TestScheduledSoonerThanTheNext(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "orders")
	require.NoError(t, publisher.Publish("orders", dueIn(time.Hour)))
	for range 5 {
		sent := dueIn(50 * time.Millisecond)
		require.NoError(t, publisher.Publish("orders", sent))
		msg := nextMessage(t, messages)
		require.Equal(t, sent.UUID, msg.UUID)
		requireNeverEarly(t, msg)
		require.True(t, msg.Ack())
	}
	require.Len(t, f.deferred(t, "orders"), 1)
}

// Its transaction commits when the message is long due, and others that were due
// later have been delivered: it is found all the same.
func TestScheduledThatCommitsLate(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "orders")
	tx, err := f.connect(t).Begin(t.Context())
	require.NoError(t, err)
	late := dueIn(50 * time.Millisecond)
	require.NoError(t, publishIn(t.Context(), publisher, tx, "orders", late))
	other := dueIn(1500 * time.Millisecond) // by then it is out of a quick look's reach
	require.NoError(t, publisher.Publish("orders", other))
	requireNext(t, messages, other)
	require.NoError(t, tx.Commit(t.Context()))
	requireNext(t, messages, late)
}

// By SQL as well, where a time may be none that ever comes.
func TestScheduledBySQL(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	for _, deliverAt := range []string{"'infinity'", "now() + interval '1 hour'"} {
		_, err := f.callPublish(t, `'orders', 'x', deliver_at => `+deliverAt)
		require.NoError(t, err)
	}
	soon, err := f.callPublish(t, `'orders', '\x00ff', '{"a": "b"}', 'key', deliver_at => clock_timestamp() + interval '1 s'`)
	require.NoError(t, err)
	require.Len(t, f.deferredNames(t, "orders"), 3)
	f.exec("INSERT INTO outbox.deferred (due_at, topic, uuid) VALUES ('-infinity', 'orders', 'long ago')")

	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "orders")
	require.Equal(t, "long ago", receive(t, messages, 1)[0].UUID)
	receiveWith(t, messages, 1, func(_ int, msg *message.Message) {
		delivery, _ := outbox.DeliveryFromCtx(msg.Context())
		require.Equal(t, soon, msg.UUID)
		require.Equal(t, "key", delivery.OrderingKey)
		require.Equal(t, message.Metadata{"a": "b"}, msg.Metadata)
		require.Equal(t, message.Payload{0, 0xff}, msg.Payload)
	})
	require.Len(t, f.deferredNames(t, "orders"), 2)
}

// deferredNames returns the names of the messages that wait, whose times may be
// infinite.
func (f *fixture) deferredNames(t testing.TB, topic string) []string {
	t.Helper()
	rows, err := f.pool.Query(t.Context(), f.sql("SELECT uuid FROM outbox.deferred WHERE topic = $1 ORDER BY due_at, id"), topic)
	require.NoError(t, err)
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return list
}

// A retry of one group goes the same way, and stays that group's; its attempts
// come along.
func TestScheduledRetriesKeepGroupAndAttempt(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.exec(`INSERT INTO outbox.deferred (due_at, topic, key, uuid, metadata, payload, target_group, attempt, origin_era, origin_id)
		VALUES (now(), 'orders', 'k', 'u', '{"a":"b"}', '\x0102', 'mine', 7, 1, 2)`)
	promoter, _ := f.promoter(f.pool, nil)
	f.promote(t, promoter)
	require.Equal(t, 1, f.number(`SELECT count(*) FROM outbox.messages WHERE topic = 'orders' AND key = 'k' AND uuid = 'u'
		AND metadata::text = '{"a":"b"}' AND payload = '\x0102' AND target_group = 'mine' AND attempt = 7`))
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("orders", withMetadata("end", nil, nil)))
	consumer := f.consumer(nil)
	_, others := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "other"}, "orders")
	require.Equal(t, "end", receive(t, others, 1)[0].UUID)
	_, mine := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "mine"}, "orders")
	require.Equal(t, []string{"u", "end"}, uuids(receive(t, mine, 2)))
}

// The ids follow the due times, over all batches, whatever the order of
// publishing; of equal times it is that order which counts.
func TestScheduledOrder(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.exec(`INSERT INTO outbox.deferred (due_at, topic, uuid)
		SELECT now() - make_interval(secs => (g * 7919 % 5000) / 10), 'orders', g::text FROM generate_series(1, 5000) g`)
	var want []string
	rows, err := f.pool.Query(t.Context(), f.sql("SELECT uuid FROM outbox.deferred ORDER BY due_at, id"))
	require.NoError(t, err)
	want, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	promoter, _ := f.promoter(f.pool, nil)
	f.promote(t, promoter)
	require.Equal(t, want, f.storedUUIDs(t, "orders"))
}

// A batch is bounded by bytes as well, so that no statement takes for ever; a
// message that is larger than that goes alone.
func TestScheduledLargeMessages(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	var sent []*message.Message
	for i := range 6 {
		msg := dueAt(time.Now().Add(time.Hour + time.Duration(i)*time.Second))
		msg.Payload = make([]byte, 10<<20)
		_, _ = rand.NewChaCha8([32]byte{byte(i)}).Read(msg.Payload)
		sent = append(sent, msg)
	}
	sent[3].Payload = append(sent[3].Payload, make([]byte, 10<<20)...)
	require.NoError(t, publisher.Publish("orders", sent...))
	f.exec("UPDATE outbox.deferred SET due_at = due_at - interval '1 day'")
	promoter, _ := f.promoter(f.pool, nil)
	steps := 0
	for f.number("SELECT count(*)::int FROM outbox.deferred") > 0 {
		_, err := promoter.Step(t.Context())
		require.NoError(t, err)
		steps++
	}
	require.Greater(t, steps, 1)
	require.LessOrEqual(t, steps, 5)
	f.requireStored(t, "orders", sent)
}

// However many processes there are, each message is moved once, and in order,
// while their sessions are killed and messages come in.
func TestScheduledIsMovedOnce(t *testing.T) {
	t.Parallel()

	const n, promoters = 20_000, 3
	f := newFixture(t)
	f.exec(`INSERT INTO outbox.deferred (due_at, topic, uuid)
		SELECT now() - make_interval(secs => $1::int - g), 'orders', g::text FROM generate_series(1, $1::int) g`, n)
	pool := f.poolNamed(t, "promoter under test")
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range promoters {
		promoter, _ := f.promoter(pool, func(c *promote.Config) { c.Interval = time.Millisecond })
		wg.Go(func() { promoter.Run(ctx) })
	}
	killed, last := 0, n
	remaining := func() int { return f.number("SELECT count(*)::int FROM outbox.deferred") }
	if !assert.Eventually(t, func() bool {
		left := remaining()
		if left < last { // so that a busy machine gets on between two kills
			last = left
			killed += f.number(`SELECT count(pg_terminate_backend(pid))::int FROM (
				SELECT pid FROM pg_stat_activity WHERE application_name = 'promoter under test' AND datname = current_database() AND state = 'active'
				ORDER BY random() LIMIT 1) a`)
		}
		return left == 0
	}, 3*waitFor, 5*time.Millisecond) {
		t.Errorf("%d are left", remaining())
	}
	cancel()
	wg.Wait()
	t.Logf("%d sessions killed", killed)
	stored := f.storedUUIDs(t, "orders")
	require.Equal(t, n, len(stored)) // Len would print them all
	for i, uuid := range stored {
		require.Equal(t, strconv.Itoa(i+1), uuid)
	}
}

// Two outboxes in one database do not keep each other from moving messages.
func TestScheduledWhileAnotherHasTheLock(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.fillDeferred("orders", 3, -10)
	tx, err := f.connect(t).Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	_, err = tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock($1), pg_advisory_xact_lock($2)", promote.LockKey(oddSchema), promote.LockKey("other"))
	require.NoError(t, err)
	promoter, _ := f.promoter(f.pool, nil)
	for range 3 {
		pause, err := promoter.Step(t.Context())
		require.NoError(t, err)
		require.Positive(t, pause, "it waits")
	}
	require.Len(t, f.deferred(t, "orders"), 3)
	require.NoError(t, tx.Rollback(t.Context()))

	tx, err = f.connect(t).Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	_, err = tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock($1)", promote.LockKey("other"))
	require.NoError(t, err)
	f.promote(t, promoter)
	require.Empty(t, f.deferred(t, "orders"))
}

// A row that somebody has locked, perhaps to delete it, is left until he is done.
func TestScheduledRowThatIsLocked(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.fillDeferred("orders", 5, -10)
	promoter, _ := f.promoter(f.pool, nil)
	tx, err := f.connect(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), f.sql("DELETE FROM outbox.deferred WHERE uuid = '1'"))
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), f.sql("UPDATE outbox.deferred SET topic = 'moved' WHERE uuid = '3'"))
	require.NoError(t, err)
	f.promote(t, promoter)
	require.Equal(t, []string{"0", "2", "4"}, f.storedUUIDs(t, "orders"))
	require.NoError(t, tx.Commit(t.Context()))
	require.Eventually(t, func() bool { // in the next full look
		f.promote(t, promoter)
		return len(f.storedUUIDs(t, "moved")) == 1
	}, waitFor, 5*time.Millisecond)
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.deferred"))
}

// A Consumer without a subscription does nothing; with one it moves messages of
// all topics, for whoever reads them.
func TestScheduledNeedsASubscription(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.fillDeferred("orders", 3, -10)
	consumer := f.consumer(nil)
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	require.NoError(t, err)
	require.Len(t, f.deferred(t, "orders"), 3)
	_, err = subscriber.Subscribe(t.Context(), "another")
	require.NoError(t, err)
	f.awaitDeferred(t, 0)
	stored := f.storedUUIDs(t, "orders")
	require.True(t, slices.IsSorted(stored))
	require.Len(t, stored, 3)
}
