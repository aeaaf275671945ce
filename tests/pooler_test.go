package tests

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/schema"
)

// A transaction pooler refuses start parameters, and the next statement runs in
// another session. Everything is delivered all the same, in its order, and
// positions are stored. Field case F45.
func TestPoolerDelivers(t *testing.T) {
	t.Parallel()

	const total = 500
	for _, ordering := range []outbox.Ordering{outbox.OrderingStrict, outbox.OrderingByKey} {
		t.Run(string(ordering), func(t *testing.T) {
			t.Parallel()

			p := newPooled(t)
			sent := newMessages(total)
			for i, msg := range sent {
				msg.Metadata.Set(outbox.DefaultKeyMetadata, fmt.Sprint(i%7))
				msg.Metadata.Set("odd", "\"quoted\" \\ \t ü 🙂")
			}
			sent[3].Payload, sent[4].Payload = nil, []byte{}
			publisher := p.publisher(outbox.PublisherConfig{})
			require.NoError(t, publisher.Publish("topic", sent[:total-1]...))

			consumer := p.consumer(nil)
			require.Equal(t, outbox.ModePoll, consumer.Status().Mode)
			config := outbox.SubscriberConfig{PageSize: 20, Ordering: ordering}
			subscriber, messages := p.subscribe(consumer, config, "topic")
			received := receive(t, messages, total-1)
			if ordering == outbox.OrderingStrict {
				for i, msg := range received {
					require.Equal(t, sent[i].UUID, msg.UUID)
					require.Equal(t, sent[i].Payload, msg.Payload, "message %d", i)
					require.Equal(t, sent[i].Metadata, msg.Metadata)
				}
			}
			requireKeysInOrder(t, sent[:total-1], received)
			require.NoError(t, subscriber.Close())

			require.NoError(t, publisher.Publish("topic", sent[total-1]))
			_, messages = p.subscribe(p.consumer(nil), config, "topic")
			requireNext(t, messages, sent[total-1])
			p.awaitStored(t, "topic")
		})
	}
}

// requireKeysInOrder fails unless what was received is what was sent, and each
// key's messages are in their order.
func requireKeysInOrder(t testing.TB, sent, received []*message.Message) {
	t.Helper()
	byKey := func(messages []*message.Message) map[string][]string {
		keys := map[string][]string{}
		for _, msg := range messages {
			key := msg.Metadata.Get(outbox.DefaultKeyMetadata)
			keys[key] = append(keys[key], msg.UUID)
		}
		return keys
	}
	require.Equal(t, byKey(sent), byKey(received))
}

// A publisher works through the same pooler, in each way into the table, with a
// pool that is set up for one.
func TestPoolerCarriesPublishers(t *testing.T) {
	t.Parallel()

	p := newPooled(t)
	config := p.config()
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	publisher, err := outbox.NewPublisher(pool, outbox.PublisherConfig{Schema: oddSchema}, nil)
	require.NoError(t, err)
	_, messages := p.subscribe(p.consumer(nil), outbox.SubscriberConfig{}, "topic")
	for _, n := range callSizes {
		sent := newMessages(n)
		require.NoError(t, publisher.Publish("topic", sent...))
		requireDelivered(t, messages, sent)
	}
}

// A topic changes hands through the pooler, at once when its holder ends in good
// order, and when the lease has run out of one that is cut off.
func TestPoolerHandOver(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	sent := newMessages(60)
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	config := outbox.SubscriberConfig{PageSize: 10}
	long := func(c *outbox.ConsumerConfig) { c.Lease = 10 * waitFor }
	p := pooledAt(t, f, 4, true)
	first := p.consumer(long)
	_, messages := f.subscribe(first, config, "topic")
	requireNext(t, messages, sent[:20]...)
	_, others := f.subscribe(p.consumer(long), config, "topic")
	require.NoError(t, first.Close())
	requireNext(t, others, sent[20:40]...)

	if p.pooler == nil {
		t.Skip("the rest cuts a pooler off")
	}
	cut := pooledAt(t, f, 4, true)
	loser, err := outbox.NewConsumer(cut.config(), outbox.ConsumerConfig{
		Schema: oddSchema, TransactionPooler: true, Lease: outbox.MinLease, CheckpointInterval: 20 * time.Millisecond,
	}, newLogBook())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, loser.Close()) })
	require.NoError(t, f.publisher(outbox.PublisherConfig{}).Publish("other topic", sent...))
	_, messages = f.subscribe(loser, config, "other topic")
	requireNext(t, messages, sent[:20]...)
	require.Eventually(t, func() bool {
		return f.number(`SELECT count(*)::int FROM outbox.cursors c JOIN outbox.messages m ON m.topic = c.topic
			WHERE m.topic = 'other topic' AND m.uuid = $1 AND c.at >= m.id AND c.holes = '[]'`, sent[19].UUID) == 1
	}, waitFor, 2*time.Millisecond, "the position was not stored")
	inFlight := nextMessage(t, messages)
	require.Equal(t, sent[20].UUID, inFlight.UUID)
	_, others = f.subscribe(p.consumer(func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease }), config, "other topic")
	cut.pooler.close()
	requireNext(t, others, sent[20:]...)
	await(t, inFlight.Context().Done())
	require.ErrorIs(t, context.Cause(inFlight.Context()), outbox.ErrLeaseLost)
}

// What fails for good becomes a dead letter, what is put off comes again, what
// is scheduled comes when it is due: all of these are written through the pooler.
func TestPoolerFailures(t *testing.T) {
	t.Parallel()

	p := newPooled(t)
	consumer := p.consumer(nil)
	retry := quick(3)
	sent := keyedMessages("k", "k")
	require.NoError(t, p.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	for _, mode := range []outbox.RetryMode{outbox.RetryInPlace, outbox.RetryDeferred} {
		group := fmt.Sprint("group ", mode)
		retry.Mode = mode
		_, messages := p.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: group, Retry: retry}, "topic")
		rest := 1
		for range 3 {
			msg := nextMessage(t, messages)
			if msg.UUID == sent[1].UUID { // passes what was put off
				rest--
				require.True(t, msg.Ack())
				msg = nextMessage(t, messages)
			}
			require.Equal(t, sent[0].UUID, msg.UUID)
			outbox.SetError(msg.Context(), errPoison)
			require.True(t, msg.Nack())
		}
		requireNext(t, messages, sent[len(sent)-rest:]...)
		require.Eventually(t, func() bool { return len(p.deadUUIDs(t, group)) == 1 }, waitFor, 5*time.Millisecond)
		require.Equal(t, 1, p.number("SELECT count(*)::int FROM outbox.dead_letters WHERE consumer_group = $1 AND attempts = 3 AND error = $2", group, errPoison.Error()))
	}
	require.Zero(t, p.number("SELECT count(*)::int FROM outbox.deferred"))
	require.NoError(t, consumer.Close())

	_, messages := p.subscribe(p.consumer(nil), outbox.SubscriberConfig{}, "scheduled")
	msg := dueIn(50 * time.Millisecond)
	require.NoError(t, p.publisher(outbox.PublisherConfig{}).Publish("scheduled", msg))
	requireNext(t, messages, msg)
}

// The connections to the server are shared with others: nothing is left in them
// for whoever uses them next, and none is taken from the pooler while a handler
// runs. Each statement is one round trip.
func TestPoolerSessionsAreLeftAsTheyWere(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	p := pooledAt(t, f, 3, false) // the pooler resets nothing
	probing := p.config()
	probing.MaxConns = 1
	probing.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	probe, err := pgxpool.NewWithConfig(t.Context(), probing)
	require.NoError(t, err)
	t.Cleanup(probe.Close)
	state := func() (text string) {
		require.NoError(t, probe.QueryRow(t.Context(), `
			SELECT (SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) FROM pg_settings
			        WHERE name IN ('row_security', 'search_path', 'jit', 'plan_cache_mode', 'enable_seqscan', 'enable_bitmapscan',
			            'max_parallel_workers_per_gather', 'synchronous_commit', 'default_transaction_isolation', 'transaction_isolation'))
			    || ' prepared=' || (SELECT count(*) FROM pg_prepared_statements WHERE name <> '')
			    || ' locks=' || (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory')
			    || ' channels=' || (SELECT count(*) FROM pg_listening_channels())`).Scan(&text))
		return text
	}
	before := state()
	require.Contains(t, before, "enable_seqscan=on")
	require.Contains(t, before, "synchronous_commit=on")
	require.Contains(t, before, "prepared=0 locks=0 channels=0")
	var loans, trips int64
	if p.pooler != nil {
		loans, trips = p.pooler.loans.Load(), p.pooler.trips.Load()
	}

	sent := newMessages(200)
	publisher := p.publisher(outbox.PublisherConfig{})
	require.NoError(t, publisher.Publish("topic", sent...))
	consumer := p.consumer(nil)
	retry := quick(2)
	retry.Mode = outbox.RetryDeferred
	_, messages := p.subscribe(consumer, outbox.SubscriberConfig{PageSize: 10, Retry: retry}, "topic")
	for i := range sent {
		msg := nextMessage(t, messages)
		if i%20 == 0 {
			// While a handler is at it.
			require.Equal(t, before, state())
			require.Zero(t, p.number(`SELECT count(*)::int FROM pg_stat_activity
				WHERE datname = current_database() AND state LIKE 'idle in transaction%' AND clock_timestamp() - state_change > '100 ms'`))
		}
		require.True(t, msg.Ack())
	}
	msg := message.NewMessage("deferred", nil)
	require.NoError(t, publisher.Publish("topic", msg))
	require.True(t, nextMessage(t, messages).Nack())
	requireNext(t, messages, msg)
	for range 20 {
		require.Equal(t, before, state())
	}
	require.NoError(t, consumer.Close())
	if p.pooler != nil {
		loans, trips = p.pooler.loans.Load()-loans, p.pooler.trips.Load()-trips
		require.Equal(t, loans, trips, "a transaction took more than one round trip")
		require.Greater(t, loans, int64(50))
	}
}

// A statement that worked is not a write: the commit may fail, as for a
// constraint that is checked at the end. A position of which that is so does not
// count as stored, nor does what becomes of a message.
func TestPoolerCommitFails(t *testing.T) {
	t.Parallel()

	p := newPooled(t)
	refuse := func(table, event string) (allow func()) {
		p.exec(`CREATE OR REPLACE FUNCTION outbox.refuse() RETURNS trigger LANGUAGE plpgsql AS $body$ BEGIN RAISE EXCEPTION 'not at the commit'; END $body$`)
		p.exec(`CREATE CONSTRAINT TRIGGER refuse AFTER ` + event + ` ON outbox.` + table + ` DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION outbox.refuse()`)
		return func() { p.exec("DROP TRIGGER refuse ON outbox." + table) }
	}
	sent := keyedMessages("", "k", "k", "")
	require.NoError(t, p.publisher(outbox.PublisherConfig{}).Publish("topic", sent...))
	consumer, book := p.loggedConsumer(p.config(), byTransaction)
	var mu sync.Mutex
	var told []string
	subscriber, messages := p.subscribe(consumer, outbox.SubscriberConfig{
		Retry: quick(1), OnDeadLetter: func(d outbox.DeadLetter) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, d.UUID)
		},
	}, "topic")
	stored := func() string {
		var text string
		require.NoError(t, p.pool.QueryRow(t.Context(), p.sql("SELECT concat_ws(' ', p, step, at, holes) FROM outbox.cursors")).Scan(&text))
		return text
	}

	// Positions.
	msg := nextMessage(t, messages)
	allow := refuse("cursors", "UPDATE")
	before := stored()
	require.True(t, msg.Ack())
	for _, entry := range book.await(t, 2, "Cannot store positions") {
		require.ErrorContains(t, entry.Err, "not at the commit")
	}
	require.Equal(t, before, stored())
	allow()
	require.Eventually(t, func() bool { return stored() != before }, waitFor, 2*time.Millisecond, "the position counted as stored")

	// Dead letters.
	allow = refuse("dead_letters", "INSERT")
	require.True(t, nextMessage(t, messages).Nack())
	for _, entry := range book.await(t, 2, "Cannot store what becomes of a message") {
		require.ErrorContains(t, entry.Err, "not at the commit")
	}
	mu.Lock()
	require.Empty(t, told)
	mu.Unlock()
	select {
	case <-messages:
		require.FailNow(t, "what follows was delivered although the dead letter is not stored")
	default:
	}
	allow()
	requireNext(t, messages, sent[2])
	require.Equal(t, []string{sent[1].UUID}, p.deadUUIDs(t, outbox.DefaultConsumerGroup))

	// The last position: tried again until the time for that is up, or it works.
	allow = refuse("cursors", "UPDATE")
	requireNext(t, messages, sent[3])
	failures := len(book.find("Cannot store positions"))
	book.await(t, failures+1, "Cannot store positions")
	closed := make(chan error, 1)
	go func() { closed <- subscriber.Close() }()
	allow()
	require.NoError(t, await(t, closed))
	last := newMessages(1)
	require.NoError(t, p.publisher(outbox.PublisherConfig{}).Publish("topic", last...))
	_, messages = p.subscribe(p.consumer(nil), outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, last...)
}

// Replicas come and go, the number of shards is changed, and the pooler's
// connections to the server are ended at random, with statements on their way:
// nothing is lost, and what is not a repeat is in its order.
func TestPoolerConnectionsAreEnded(t *testing.T) {
	t.Parallel()

	const writers, replicaCount = 2, 3
	p := newPooled(t)
	w := newWorkload(t, p.fixture, "changes", 20, writers)
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, 0))
	writing, stopWriting := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stopWriting()
	wg.Go(func() { w.run(t, writing, writers, seed) })
	var ended [2]int // idle and active ones
	wg.Go(func() {
		for backoff.Wait(writing, time.Duration(50+random.IntN(100))*time.Millisecond) {
			var active bool
			err := p.pool.QueryRow(context.WithoutCancel(writing), `SELECT coalesce(state = 'active', false) FROM (
				SELECT pid, state FROM pg_stat_activity WHERE datname = current_database() AND application_name = ANY ($1)
				ORDER BY coalesce(state, '') = 'active' DESC, random() LIMIT 1) s WHERE pg_terminate_backend(pid)`, []string{poolerName, "watermill-outbox"}).Scan(&active)
			switch {
			case errors.Is(err, pgx.ErrNoRows):
			case !assert.NoError(t, err):
				return
			case active:
				ended[1]++
			default:
				ended[0]++
			}
		}
	})

	var l ledger
	start := func() *replica {
		book := newLogBook() // errors are what it is about
		config := outbox.ConsumerConfig{
			Schema: oddSchema, PollInterval: 10 * time.Millisecond, CheckpointInterval: 20 * time.Millisecond, Lease: 2 * time.Second, TransactionPooler: true,
		}
		// The first statements may be what is ended, too.
		consumer, err := outbox.NewConsumer(p.config(), config, book)
		for err != nil {
			require.NoError(t, t.Context().Err())
			consumer, err = outbox.NewConsumer(p.config(), config, book)
		}
		subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{PageSize: 20, Shards: 2}, nil)
		require.NoError(t, err)
		messages, err := subscriber.Subscribe(context.Background(), w.topic)
		for err != nil {
			require.NoError(t, t.Context().Err())
			messages, err = subscriber.Subscribe(context.Background(), w.topic)
		}
		one := &replica{consumer: consumer, done: make(chan struct{})}
		go func() {
			defer close(one.done)
			for msg := range messages {
				l.record(t, msg)
				msg.Ack()
			}
		}()
		return one
	}
	var running []*replica
	for range replicaCount {
		running = append(running, start())
	}
	for _, shards := range []int{5, 3} {
		for n := l.len(); l.len() < n+100; time.Sleep(time.Millisecond) {
			require.NoError(t, t.Context().Err())
		}
		for running[0].consumer.Reshard(t.Context(), "", w.topic, shards) != nil {
			require.NoError(t, t.Context().Err())
		}
		require.Eventually(t, func() bool {
			return p.number("SELECT count(*)::int FROM outbox.cursors WHERE shards = $1 AND until IS NULL AND reshard IS NULL", shards) == shards &&
				p.number("SELECT count(*)::int FROM outbox.cursors") == shards
		}, waitFor, 5*time.Millisecond, "the change to %d shards was not made", shards)
		running[1].stop(t)
		running[1] = start()
	}
	stopWriting()
	wg.Wait()
	w.settled(t, &l)
	for _, one := range running {
		one.stop(t)
	}
	v := w.judge(t, &l)
	t.Logf("seed=%d ended: %d idle, %d active; %s", seed, ended[0], ended[1], v)
	require.Zero(t, v.Lost, "lost")
	require.Zero(t, v.Invented, "invented")
	require.Zero(t, v.OutOfOrder, "out of order")
	require.NotZero(t, ended[1])
	require.Greater(t, v.Committed, 200)
	require.Less(t, v.Duplicated, v.Committed)
}

// Without any fault nothing is repeated either, while replicas come and go, and
// the shards are spread and changed as through direct connections.
func TestPoolerShards(t *testing.T) {
	t.Parallel()

	const writers = 2
	p := newPooled(t)
	w := newWorkload(t, p.fixture, "changes", 20, writers)
	var l ledger
	start := func() *replica {
		consumer := p.consumer(func(c *outbox.ConsumerConfig) { c.Lease = 10 * waitFor })
		_, messages := p.subscribe(consumer, outbox.SubscriberConfig{PageSize: 20, Shards: 4}, w.topic)
		one := &replica{consumer: consumer, done: make(chan struct{})}
		go func() {
			defer close(one.done)
			for msg := range messages {
				l.record(t, msg)
				msg.Ack()
			}
		}()
		return one
	}
	writing, stopWriting := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stopWriting()
	wg.Go(func() { w.run(t, writing, writers, uint64(time.Now().UnixNano())) })
	first := start()
	p.awaitEven(w.topic, 1)
	second := start()
	p.awaitEven(w.topic, 2)
	require.NoError(t, second.consumer.Reshard(t.Context(), "", w.topic, 2))
	require.Eventually(t, func() bool {
		return p.number("SELECT count(*)::int FROM outbox.cursors WHERE shards = 2 AND until IS NULL AND holder IS NOT NULL") == 2 &&
			p.number("SELECT count(*)::int FROM outbox.cursors") == 2
	}, waitFor, 5*time.Millisecond, "the number of shards was not changed")
	first.stop(t)
	p.awaitEven(w.topic, 1)
	for n := l.len(); l.len() < n+20; time.Sleep(time.Millisecond) {
		require.NoError(t, t.Context().Err())
	}
	stopWriting()
	wg.Wait()
	w.settled(t, &l)
	second.stop(t)
	v := w.judge(t, &l)
	t.Log(v)
	require.Equal(t, verdict{Committed: v.Committed, Delivered: v.Committed}, v)
}

// A statement that takes too long is given up, on the server as well: neither the
// client's connections nor the pooler's are used up by it.
func TestPoolerStatementThatStalls(t *testing.T) {
	t.Parallel()

	p := newPooled(t)
	consumer, book := p.loggedConsumer(p.config(), func(c *outbox.ConsumerConfig) {
		byTransaction(c)
		c.QueryTimeout, c.Lease = 100*time.Millisecond, 10*waitFor
	})
	_, messages := p.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	publisher := p.publisher(outbox.PublisherConfig{})
	sent := newMessages(2)
	require.NoError(t, publisher.Publish("topic", sent[0]))
	requireNext(t, messages, sent[0])
	tx, err := p.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), p.sql("LOCK TABLE outbox.messages, outbox.cursors"))
	require.NoError(t, err)
	require.ErrorIs(t, book.await(t, 3, "Cannot look for")[0].Err, context.DeadlineExceeded)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, publisher.Publish("topic", sent[1]))
	requireNext(t, messages, sent[1])
	require.Eventually(t, func() bool {
		return p.number(`SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND application_name = ANY ($1)
			AND clock_timestamp() - xact_start > '1 s'`, []string{poolerName, "watermill-outbox"}) == 0
	}, waitFor, 5*time.Millisecond, "a transaction was left behind")
}

// A statement that fails leaves a transaction that can only be rolled back. That
// is done at once: until then the pooler keeps a connection for it. And no
// connection is lost by it.
func TestPoolerStatementThatFails(t *testing.T) {
	t.Parallel()

	p := newPooled(t)
	consumer, book := p.loggedConsumer(p.config(), func(c *outbox.ConsumerConfig) {
		byTransaction(c)
		c.Lease = 3 * time.Second
	})
	_, messages := p.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	publisher := p.publisher(outbox.PublisherConfig{})
	sent := newMessages(3)
	require.NoError(t, publisher.Publish("topic", sent...))
	requireNext(t, messages, sent[0])
	p.exec(`CREATE FUNCTION outbox.refuse() RETURNS trigger LANGUAGE plpgsql AS $body$ BEGIN RAISE EXCEPTION 'refused'; END $body$`)
	for table, says := range map[string]string{"cursors": "Cannot store positions", "processes": "Cannot renew the lease"} {
		var clients uint32
		if p.pooler != nil {
			clients = p.pooler.seen()
		}
		p.exec("CREATE TRIGGER refuse BEFORE UPDATE ON outbox." + table + " FOR EACH ROW EXECUTE FUNCTION outbox.refuse()")
		if table == "cursors" {
			requireNext(t, messages, sent[1])
		}
		for n := 1; n <= 3; n++ {
			require.ErrorContains(t, book.await(t, n, says)[n-1].Err, "refused")
			// The next one may just have failed, too: one that is left behind stays.
			require.Eventually(t, func() bool {
				return p.number(`SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction (aborted)'`) == 0
			}, time.Second, time.Millisecond)
		}
		p.exec("DROP TRIGGER refuse ON outbox." + table)
		if p.pooler != nil && table == "cursors" {
			require.LessOrEqual(t, p.pooler.seen(), clients+outbox.DefaultMaxConns, "connections were lost") // a pool may grow
		}
	}
	requireNext(t, messages, sent[2])
}

// Who does not say that there is a pooler is told of the setting, and what needs
// a direct connection is refused before any is made.
func TestPoolerIsAsked(t *testing.T) {
	t.Parallel()

	for _, mode := range []outbox.Mode{outbox.ModeAuto, outbox.ModeWAL} {
		consumer, err := outbox.NewConsumer(nil, outbox.ConsumerConfig{TransactionPooler: true, Mode: mode}, nil)
		require.Nil(t, consumer)
		for _, text := range []string{"outbox: ConsumerConfig.Mode", "TransactionPooler", fmt.Sprintf("is %q", mode), "replication connection"} {
			require.ErrorContains(t, err, text)
		}
	}
	p := newPooled(t)
	_, err := outbox.NewConsumer(p.config(), outbox.ConsumerConfig{Schema: oddSchema}, nil)
	require.ErrorContains(t, err, "unsupported startup parameter")
	require.ErrorContains(t, err, "ConsumerConfig.TransactionPooler")
	_, err = outbox.NewConsumer(p.config(), outbox.ConsumerConfig{Schema: "nowhere", TransactionPooler: true}, nil)
	require.ErrorIs(t, err, outbox.ErrNotInstalled)
	// It works without a pooler, too.
	consumer, err := outbox.NewConsumer(p.pool.Config(), outbox.ConsumerConfig{Schema: oddSchema, TransactionPooler: true}, nil)
	require.NoError(t, err)
	require.NoError(t, consumer.Close())
}

// A policy would hide messages without any error. It is refused at the start,
// and is an error when it comes later, though no session has row_security off.
func TestPoolerRowSecurity(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("consumer")
	f.grant(schema.Roles{Consumer: role})
	p := pooledAt(t, f, 2, true)
	if p.pooler == nil {
		t.Skip("needs another role")
	}
	server := newPooler(t, f.urlAs(role), 2, true)
	through, err := url.Parse(f.url)
	require.NoError(t, err)
	through.Host = server.listener.Addr().String()
	p.through = through.String()

	f.exec("ALTER TABLE outbox.messages ENABLE ROW LEVEL SECURITY")
	_, err = outbox.NewConsumer(p.config(), outbox.ConsumerConfig{Schema: oddSchema, TransactionPooler: true}, nil)
	require.ErrorIs(t, err, outbox.ErrRowSecurity)
	f.exec("ALTER TABLE outbox.messages DISABLE ROW LEVEL SECURITY")
	consumer, book := f.loggedConsumer(p.config(), byTransaction)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(4)
	require.NoError(t, publisher.Publish("topic", sent[:2]...))
	requireNext(t, messages, sent[:2]...)
	f.exec("ALTER TABLE outbox.messages ENABLE ROW LEVEL SECURITY")
	require.NoError(t, publisher.Publish("topic", sent[2:]...))
	require.ErrorContains(t, book.await(t, 1, "Cannot read messages")[0].Err, "row-level security")
	f.exec("ALTER TABLE outbox.messages DISABLE ROW LEVEL SECURITY")
	requireNext(t, messages, sent[2:]...)
	require.NoError(t, consumer.Close())
}

// Nor does an archive lack what a policy hides, of a partition that is emptied next.
func TestPoolerRowSecurityOfTheArchive(t *testing.T) {
	t.Parallel()

	f := newUpkeep(newFixture(t))
	role := f.role("consumer")
	f.grant(schema.Roles{Consumer: role})
	server := newPooler(t, f.urlAs(role), 3, true)
	through, err := url.Parse(f.url)
	require.NoError(t, err)
	through.Host = server.listener.Addr().String()
	p := &pooled{fixture: f, through: through.String()}
	name, inside := f.past(3)
	f.insertAt(f.pool, "orders", inside, "1", "2", "3")

	var archived atomic.Pointer[string]
	consumer := p.consumer(func(c *outbox.ConsumerConfig) {
		c.Maintenance = outbox.MaintenanceConfig{
			Interval: outbox.MinMaintenanceInterval, Retention: time.Second, SealDelay: time.Nanosecond,
			Archive: func(_ context.Context, p outbox.PartitionStatus, in io.Reader) error {
				content, err := io.ReadAll(in)
				if text := string(content); err == nil && p.Name == name {
					archived.Store(&text)
					err = errors.New("not yet")
				}
				return err
			},
		}
	})
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "orders")
	receive(t, messages, 3)
	require.Eventually(t, func() bool {
		part := partitionOf(consumer.Status().Maintenance, name)
		return part != nil && part.State == outbox.PartitionSealed
	}, waitFor, 5*time.Millisecond)
	f.insertAt(f.pool, "orders", time.Now(), "one more") // the position goes beyond the seal
	receive(t, messages, 1)
	problem := func(text string) func() bool {
		return func() bool { return strings.Contains(problems(consumer.Status().Maintenance), text) }
	}
	require.Eventually(t, problem("not yet"), waitFor, 5*time.Millisecond)
	require.Equal(t, 4, strings.Count(*archived.Load(), "\n"))
	f.exec("ALTER TABLE outbox.messages ENABLE ROW LEVEL SECURITY")
	require.Eventually(t, problem("row-level security"), waitFor, 5*time.Millisecond)
	require.Equal(t, 4, strings.Count(*archived.Load(), "\n"))
	require.Equal(t, 3, f.rowsOf(name))
}
