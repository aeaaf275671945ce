package tests

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// everyMode runs a test in each way of reading.
func everyMode(t *testing.T, test func(t *testing.T, mode outbox.Mode)) {
	t.Helper()
	for _, mode := range []outbox.Mode{outbox.ModePoll, outbox.ModeAuto, outbox.ModeWAL} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			test(t, mode)
		})
	}
}

// replica is a process of a group, as far as one can be within a process: a
// Consumer with a pool of its own, whose subscription acks what it records.
type replica struct {
	consumer *outbox.Consumer
	done     chan struct{}
}

// replicas record what they are handed.
type replicas struct {
	t      *testing.T
	f      *fixture
	change func(*outbox.ConsumerConfig)
	config outbox.SubscriberConfig
	topic  string
	record func(msg *message.Message)
}

func (r *replicas) start() *replica {
	r.t.Helper()
	consumer := r.f.consumer(r.change)
	_, messages := r.f.subscribe(consumer, r.config, r.topic)
	one := &replica{consumer: consumer, done: make(chan struct{})}
	go func() {
		defer close(one.done)
		for msg := range messages {
			r.record(msg)
			msg.Ack()
		}
	}()
	return one
}

func (r *replica) stop(t testing.TB) {
	t.Helper()
	require.NoError(t, r.consumer.Close())
	await(t, r.done)
}

// holdings returns how many cursors of the topic each process holds, without
// those that nobody does, which are free.
func (f *fixture) holdings(topic string) (held map[string]int, free int) {
	f.t.Helper()
	rows, err := f.pool.Query(f.t.Context(), f.sql("SELECT coalesce(holder, ''), count(*)::int FROM outbox.cursors WHERE topic = $1 GROUP BY 1"), topic)
	require.NoError(f.t, err)
	held = map[string]int{}
	var holder string
	var n int
	_, err = pgx.ForEachRow(rows, []any{&holder, &n}, func() error {
		held[holder] = n
		return nil
	})
	require.NoError(f.t, err)
	free = held[""]
	delete(held, "")
	return held, free
}

// awaitEven waits until so many processes hold all shards of the topic, none two
// more than another, and returns how long that took.
func (f *fixture) awaitEven(topic string, processes int) time.Duration {
	f.t.Helper()
	began := time.Now()
	var held map[string]int
	var free int
	even := func() bool {
		held, free = f.holdings(topic)
		low, high := 1<<30, 0
		for _, n := range held {
			low, high = min(low, n), max(high, n)
		}
		return free == 0 && len(held) == processes && high-low <= 1
	}
	if !assert.Eventually(f.t, even, waitFor, 5*time.Millisecond) {
		require.FailNow(f.t, "the shards are not spread evenly", "%d processes: %v, %d free", processes, held, free)
	}
	return time.Since(began)
}

// Replicas come and go while much is written. All of them work, every message is
// delivered, once, for all that happens happens in good order, and the messages
// of a key in theirs, whoever had it before.
func TestShardsKeepTheOrderPerKeyWhileReplicasComeAndGo(t *testing.T) {
	t.Parallel()

	everyMode(t, func(t *testing.T, mode outbox.Mode) {
		const writers, shards, most = 3, 8, 4
		f := newFixture(t)
		w := newWorkload(t, f, "changes", 40, writers)
		var l ledger
		group := &replicas{
			t: t, f: f, topic: w.topic, config: outbox.SubscriberConfig{Shards: shards, PageSize: 20},
			change: func(c *outbox.ConsumerConfig) { c.Mode, c.Lease = mode, 10*waitFor },
			record: func(msg *message.Message) { l.record(t, msg) },
		}
		writing, stopWriting := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer stopWriting()
		seed := uint64(time.Now().UnixNano())
		wg.Go(func() { w.run(t, writing, writers, seed) })

		random := rand.New(rand.NewPCG(seed, 0))
		running := []*replica{group.start()}
		for range 8 {
			if n := len(running); n == 1 || n < most && random.IntN(2) == 0 {
				running = append(running, group.start())
			} else {
				i := random.IntN(n)
				running[i].stop(t)
				running = append(running[:i], running[i+1:]...)
			}
			f.awaitEven(w.topic, len(running))
			for n := l.len(); l.len() < n+20; time.Sleep(time.Millisecond) {
				require.NoError(t, t.Context().Err())
			}
		}
		stopWriting()
		wg.Wait()
		w.settled(t, &l)
		for _, one := range running {
			one.stop(t)
		}
		v := w.judge(t, &l)
		t.Logf("seed=%d %s", seed, v)
		require.Zero(t, v.Lost, "lost")
		require.Zero(t, v.Invented, "invented")
		require.Zero(t, v.OutOfOrder, "out of order")
		require.Zero(t, v.Duplicated, "repeated")
		require.Zero(t, f.number("SELECT count(*)::int FROM outbox.members"), "members that are gone")
	})
}

// Three replicas have three, three and two of eight shards within the lease of
// any change, and each works on its own.
func TestShardsAreSpreadEvenly(t *testing.T) {
	t.Parallel()

	const shards, lease = 8, 10 * time.Second
	f := newFixture(t)
	handled := newTally(0)
	group := &replicas{
		t: t, f: f, topic: "topic", config: outbox.SubscriberConfig{Shards: shards},
		change: func(c *outbox.ConsumerConfig) { c.Lease = lease },
		record: handled.add,
	}
	took := map[string]time.Duration{}
	a := group.start()
	took["first"] = f.awaitEven("topic", 1)
	b := group.start()
	took["second"] = f.awaitEven("topic", 2)
	c := group.start()
	took["third"] = f.awaitEven("topic", 3)
	a.stop(t)
	took["one stopped"] = f.awaitEven("topic", 2)
	_, second := f.subscribe(b.consumer, group.config, "topic")
	go func() {
		for msg := range second {
			msg.Ack()
		}
	}()
	// Of three subscriptions two are in one process: it has two thirds.
	require.Eventually(t, func() bool {
		held, free := f.holdings("topic")
		low, high := 8, 0
		for _, n := range held {
			low, high = min(low, n), max(high, n)
		}
		return free == 0 && low >= 2 && low <= 3 && high+low == shards
	}, waitFor, 5*time.Millisecond)
	var counts []int
	for _, sub := range b.consumer.Status().Subscriptions {
		counts = append(counts, len(sub.Shards))
	}
	require.Len(t, counts, 2)
	b.stop(t)
	took["the other stopped"] = f.awaitEven("topic", 1)
	c.stop(t)
	t.Log(took)
	for what, d := range took {
		require.Less(t, d, lease, what)
	}
}

// A replica that stops in good order leaves its shards to the others at once:
// they do not wait for its lease, nor for their next look.
func TestShardsAreHandedOverOnACleanStop(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	group := &replicas{
		t: t, f: f, topic: "topic", config: outbox.SubscriberConfig{Shards: 6},
		change: func(c *outbox.ConsumerConfig) { c.Lease = 10 * waitFor },
		record: func(*message.Message) {},
	}
	stays := group.start()
	for range 5 {
		goes := group.start()
		f.awaitEven("topic", 2)
		goes.stop(t)
		t.Logf("all shards were taken %s after the stop", f.awaitEven("topic", 1))
	}
	stays.stop(t)
}

// The division is changed while much is written and three replicas work: one
// shard becomes eight, three, and one again. Nothing is lost or repeated, and the
// order per key stands.
func TestShardsAreChangedUnderLoad(t *testing.T) {
	t.Parallel()

	everyMode(t, func(t *testing.T, mode outbox.Mode) {
		const writers = 3
		f := newFixture(t)
		w := newWorkload(t, f, "changes", 30, writers)
		var l ledger
		group := &replicas{
			t: t, f: f, topic: w.topic, config: outbox.SubscriberConfig{PageSize: 20},
			change: func(c *outbox.ConsumerConfig) { c.Mode, c.Lease = mode, 3*time.Second },
			record: func(msg *message.Message) { l.record(t, msg) },
		}
		writing, stopWriting := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer stopWriting()
		seed := uint64(time.Now().UnixNano())
		wg.Go(func() { w.run(t, writing, writers, seed) })
		var running []*replica
		for range 3 {
			running = append(running, group.start())
		}
		for _, shards := range []int{8, 3, 1} {
			for n := l.len(); l.len() < n+50; time.Sleep(time.Millisecond) {
				require.NoError(t, t.Context().Err())
			}
			began := time.Now()
			require.NoError(t, running[shards%3].consumer.Reshard(t.Context(), "", w.topic, shards))
			require.Eventually(t, func() bool {
				return f.number("SELECT count(*)::int FROM outbox.cursors WHERE shards = $1 AND until IS NULL AND reshard IS NULL AND holder IS NOT NULL", shards) == shards &&
					f.number("SELECT count(*)::int FROM outbox.cursors") == shards
			}, waitFor, 5*time.Millisecond, "the change to %d shards was not made", shards)
			t.Logf("%d shards after %s", shards, time.Since(began))
		}
		stopWriting()
		wg.Wait()
		w.settled(t, &l)
		for _, one := range running {
			one.stop(t)
		}
		v := w.judge(t, &l)
		t.Logf("seed=%d %s", seed, v)
		require.Zero(t, v.Lost, "lost")
		require.Zero(t, v.Invented, "invented")
		require.Zero(t, v.OutOfOrder, "out of order")
		require.Zero(t, v.Duplicated, "repeated")
	})
}

// Eight subscribers begin at once, where nobody has before, each with another
// number of shards in mind: one of them decides for all. Field case F91.
func TestShardsOfConcurrentFirstSubscribers(t *testing.T) {
	t.Parallel()

	const subscribers, total = 8, 200
	rounds := number("OUTBOX_TEST_ROUNDS", 20)
	f := newFixture(t)
	sent := newMessages(total)
	for i, msg := range sent {
		msg.Metadata.Set(outbox.DefaultKeyMetadata, fmt.Sprint(i%17))
	}
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	consumers := []*outbox.Consumer{f.consumer(nil), f.consumer(nil)}
	for round := range rounds {
		counted := newTally(total)
		start := make(chan struct{})
		var starting, receiving sync.WaitGroup
		all := make([]*outbox.Subscriber, subscribers)
		group := fmt.Sprintf("group %d", round)
		for i := range all {
			subscriber, err := outbox.NewSubscriber(consumers[i%2], outbox.SubscriberConfig{ConsumerGroup: group, Shards: 1 + i}, nil)
			require.NoError(t, err)
			all[i] = subscriber
			starting.Go(func() {
				<-start
				messages, err := subscriber.Subscribe(context.Background(), "topic")
				if !assert.NoError(t, err) {
					return
				}
				receiving.Go(func() {
					for msg := range messages {
						counted.add(msg)
						msg.Ack()
					}
				})
			})
		}
		close(start)
		starting.Wait()
		await(t, counted.full)
		for _, subscriber := range all {
			require.NoError(t, subscriber.Close())
		}
		receiving.Wait()
		counted.requireOnce(t, sent)
		require.Equal(t, 1, f.number("SELECT count(DISTINCT shards)::int FROM outbox.cursors WHERE consumer_group = $1", group))
		require.Equal(t, f.number("SELECT max(shards) FROM outbox.cursors WHERE consumer_group = $1", group),
			f.number("SELECT count(*)::int FROM outbox.cursors WHERE consumer_group = $1", group))
	}
}

// What cannot be is refused by name, before anything is asked of the database.
func TestShardsAreRefused(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	load := &loadCounter{}
	db := f.pool.Config()
	db.ConnConfig.Tracer = load
	consumer := f.consumerOn(db, nil)
	before := load.statements.Load()
	for _, shards := range []int{-1, outbox.MaxShards + 1} {
		_, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{Shards: shards}, nil)
		require.ErrorContains(t, err, "SubscriberConfig.Shards")
		require.ErrorContains(t, err, fmt.Sprint(shards))
	}
	for _, shards := range []int{-1, 0, outbox.MaxShards + 1} {
		err := consumer.Reshard(t.Context(), "group", "topic", shards)
		require.ErrorContains(t, err, "shards must be")
		require.ErrorContains(t, err, fmt.Sprint(shards))
	}
	require.ErrorIs(t, consumer.Reshard(t.Context(), "group", "", 2), outbox.ErrInvalidTopic)
	require.Equal(t, before, load.statements.Load())

	err := consumer.Reshard(t.Context(), "group", "topic", 2)
	require.ErrorIs(t, err, outbox.ErrUnknownGroup)
	require.ErrorContains(t, err, `group "group", topic "topic"`)
}

// A group's number of shards was decided when it began. Another configuration
// changes nothing, and says so.
func TestShardsStoredNumberStands(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	first, _ := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{Shards: 4}, "topic")
	require.NoError(t, first.Close())
	consumer, book := f.loggedConsumer(f.pool.Config(), nil)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{Shards: 6}, "topic")
	said := book.await(t, 1, "The group has another number of shards already")
	require.Equal(t, "info", said[0].Level)
	require.Equal(t, 4, said[0].Fields["shards"])
	require.Equal(t, 6, said[0].Fields["configured"])
	require.Equal(t, 4, f.number("SELECT count(*)::int FROM outbox.cursors"))
	sent := newMessages(50)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	require.ElementsMatch(t, uuids(sent), uuids(receive(t, messages, len(sent))))
	require.Eventually(t, func() bool { return len(consumer.Status().Subscriptions[0].Shards) == 4 }, waitFor, time.Millisecond)
	for i, shard := range consumer.Status().Subscriptions[0].Shards {
		require.Equal(t, i, shard.Shard)
		require.Equal(t, 4, shard.Shards)
		require.False(t, shard.Ending)
	}

	// A row that was removed begins anew with the next Subscribe.
	require.NoError(t, consumer.Close())
	f.exec("DELETE FROM outbox.cursors WHERE shard = 2")
	_, _ = f.subscribe(f.consumer(nil), outbox.SubscriberConfig{Shards: 9}, "topic")
	require.Equal(t, 4, f.number("SELECT count(*)::int FROM outbox.cursors WHERE shards = 4"))
}

// Messages that fail again and again stay holes. A change of the number of shards
// takes them along instead of waiting for them.
func TestShardsAreChangedInSpiteOfHoles(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	for i := range 5 {
		f.exec("INSERT INTO outbox.messages (topic, uuid, key, payload) VALUES ('topic', $1, $1, 'bad')", fmt.Sprint("bad ", i))
	}
	sent := newMessages(4)
	require.NoError(t, publisher.Publish("topic", sent[:2]...))
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{
		Ordering: outbox.OrderingByKey, Retry: outbox.RetryConfig{MinBackoff: 50 * time.Millisecond, MaxBackoff: 50 * time.Millisecond},
	}, "topic")
	good := make(chan string, len(sent))
	go func() {
		for msg := range messages {
			if string(msg.Payload) == "bad" {
				msg.Nack()
				continue
			}
			good <- msg.UUID
			msg.Ack()
		}
	}()
	two := func() []string {
		t.Helper()
		var received []string
		for range 2 {
			select {
			case uuid := <-good:
				received = append(received, uuid)
			case <-time.After(waitFor):
				require.FailNow(t, "a message is missing")
			}
		}
		return received
	}
	require.ElementsMatch(t, uuids(sent[:2]), two())
	require.Eventually(t, func() bool {
		return f.number("SELECT coalesce(sum(jsonb_array_length(holes)), 0)::int FROM outbox.cursors") == 5
	}, waitFor, 5*time.Millisecond)
	require.NoError(t, consumer.Reshard(t.Context(), "", "topic", 3))
	require.NoError(t, publisher.Publish("topic", sent[2:]...))
	require.ElementsMatch(t, uuids(sent[2:]), two())
	require.Eventually(t, func() bool { return f.number("SELECT count(*)::int FROM outbox.cursors") == 3 }, waitFor, 5*time.Millisecond)
	require.Equal(t, 5, f.number(`SELECT count(*)::int FROM outbox.cursors c, jsonb_array_elements(c.holes) h
		JOIN outbox.messages m ON m.id = (h->>'id')::bigint
		WHERE c.shard = c.base + outbox.shard(m.key, m.id, c.shards) AND (h->>'attempts')::int > 0`))
}

// The number is changed again before the first change is through: each division
// waits for the one before, and nothing is lost, repeated or out of order.
func TestShardsAreChangedAgainMeanwhile(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(30)
	for i, msg := range sent {
		msg.Metadata.Set(outbox.DefaultKeyMetadata, fmt.Sprint("key ", i%7))
	}
	require.NoError(t, publisher.Publish("topic", sent[:10]...))
	consumer := f.consumer(func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{CloseTimeout: waitFor}, "topic")
	divisions := func(want string) {
		t.Helper()
		require.Eventually(t, func() bool {
			var found string
			require.NoError(t, f.pool.QueryRow(t.Context(), f.sql(`SELECT coalesce(string_agg(n, ' ' ORDER BY base), '') FROM (
				SELECT base, count(*) || CASE WHEN bool_and(until IS NULL) THEN '' ELSE ' ending' END AS n FROM outbox.cursors GROUP BY base) AS d`)).Scan(&found))
			return found == want
		}, waitFor, 5*time.Millisecond, "the divisions are not %q", want)
	}
	first := nextMessage(t, messages)
	require.NoError(t, consumer.Reshard(t.Context(), "", "topic", 4))
	require.NoError(t, consumer.Reshard(t.Context(), "", "topic", 2)) // thought better of it
	require.True(t, first.Ack())
	divisions("1 ending 2")
	require.NoError(t, publisher.Publish("topic", sent[10:20]...))
	second := nextMessage(t, messages)
	require.NoError(t, consumer.Reshard(t.Context(), "", "topic", 5))
	divisions("1 ending 2 ending 5")
	require.NoError(t, publisher.Publish("topic", sent[20:]...))
	require.Equal(t, 0, consumer.Status().Subscriptions[0].Shards[0].Shard)
	require.True(t, consumer.Status().Subscriptions[0].Shards[0].Ending)
	require.True(t, second.Ack())
	received := append([]*message.Message{first, second}, receive(t, messages, 28)...)
	require.Equal(t, uuids(sent[:10]), uuids(received[:10]), "one shard keeps the order of all")
	require.ElementsMatch(t, uuids(sent[10:20]), uuids(received[10:20]))
	require.ElementsMatch(t, uuids(sent[20:]), uuids(received[20:]))
	last := map[string]byte{}
	for _, msg := range received {
		key := msg.Metadata.Get(outbox.DefaultKeyMetadata)
		require.GreaterOrEqual(t, msg.Payload[2], last[key], "order of %s", key)
		last[key] = msg.Payload[2]
	}
	divisions("5")
}

// Poolers that move a session from one server connection to another, such as
// PgBouncer in transaction mode, take some ways to run a statement and not
// others. Shards work in all of them.
func TestShardsInEachQueryMode(t *testing.T) {
	t.Parallel()

	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()

			f := newFixture(t)
			db := f.pool.Config()
			db.ConnConfig.DefaultQueryExecMode = mode
			consumer := f.consumerOn(db, func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease })
			_, messages := f.subscribe(consumer, outbox.SubscriberConfig{Shards: 3, PageSize: 4}, "topic")
			publisher := f.publisher(outbox.PublisherConfig{})
			for shards := range 3 {
				sent := newMessages(40)
				for i, msg := range sent {
					if i%3 > 0 {
						msg.Metadata.Set(outbox.DefaultKeyMetadata, fmt.Sprint("key ", i%7))
					}
				}
				require.NoError(t, publisher.Publish("topic", sent...))
				require.ElementsMatch(t, uuids(sent), uuids(receive(t, messages, len(sent))))
				require.NoError(t, consumer.Reshard(t.Context(), "", "topic", 4+shards))
				require.Eventually(t, func() bool {
					return f.number("SELECT count(*)::int FROM outbox.cursors WHERE shards = $1 AND holder IS NOT NULL", 4+shards) == 4+shards
				}, waitFor, 5*time.Millisecond)
			}
		})
	}
}

// In balance there is nothing to look for: an idle process asks no more than
// without shards, beside a look at the others every tenth of the lease.
func TestShardsCostLittleWhileIdle(t *testing.T) {
	t.Parallel()

	const seconds = 5
	f := newFixture(t)
	load := &loadCounter{}
	db := f.pool.Config()
	db.ConnConfig.Tracer = load
	counted := f.consumerOn(db, func(c *outbox.ConsumerConfig) {
		c.Mode, c.PollInterval, c.CheckpointInterval = outbox.ModePoll, outbox.DefaultPollInterval, outbox.DefaultCheckpointInterval
	})
	config := outbox.SubscriberConfig{Shards: 8}
	f.subscribe(counted, config, "topic")
	f.subscribe(f.consumer(nil), config, "topic")
	f.awaitEven("topic", 2)
	before, begin := load.statements.Load(), time.Now()
	time.Sleep(seconds * time.Second) // the time in which nothing is to happen
	statements, took := load.statements.Load()-before, time.Since(begin).Seconds()
	t.Logf("%d statements in %.1f s", statements, took)
	require.Less(t, float64(statements), 12*took+10)
}
