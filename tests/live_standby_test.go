package tests

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// barrierStatement is part of the statement by which a consumer finds out what
// other sessions can see.
const barrierStatement = "pg_walfile_name"

// stallCommits makes commits wait for a standby that never comes, or lets them
// go on. Those that wait are in the WAL, and invisible to other sessions.
func (f *fixture) stallCommits(stall bool) {
	f.t.Helper()
	if !stall {
		f.endStall()
		return
	}
	f.exec("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
	f.exec("SELECT pg_reload_conf()")
	// It has taken effect when a commit waits.
	conn, err := pgx.Connect(f.t.Context(), withParameter(f.t, f.url, "application_name", stallProbe))
	require.NoError(f.t, err)
	ctx := context.WithoutCancel(f.t.Context())
	var effective atomic.Bool
	probed := make(chan struct{})
	go func() {
		defer close(probed)
		for !effective.Load() {
			_, err := conn.Exec(ctx, "SELECT pg_logical_emit_message(true, 'probe', '')")
			if !assert.NoError(f.t, err) {
				break
			}
		}
		_ = conn.Close(ctx)
	}()
	f.t.Cleanup(func() {
		f.endStall()
		effective.Store(true)
		<-probed
	})
	require.Eventually(f.t, func() bool {
		return f.number("SELECT count(*)::int FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'SyncRep'", conn.PgConn().PID()) == 1
	}, waitFor, time.Millisecond, "commits do not wait")
	effective.Store(true)
}

// stallProbe is the application name of a session that has no other purpose.
const stallProbe = "probe"

// endStall also ends what the test left, before whatever would wait for it.
func (f *fixture) endStall() {
	ctx := context.WithoutCancel(f.t.Context())
	for _, text := range []string{"ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_reload_conf()"} {
		_, err := f.pool.Exec(ctx, text)
		assert.NoError(f.t, err)
	}
}

// stalled is how many sessions of the application wait for the standby.
func (f *fixture) stalled() int {
	f.t.Helper()
	return f.number(`SELECT count(*)::int FROM pg_stat_activity
		WHERE datname = current_database() AND wait_event = 'SyncRep' AND application_name NOT IN ('watermill-outbox', $1)`, stallProbe)
}

// awaitStalled waits until n sessions of the application do.
func (f *fixture) awaitStalled(n int) {
	f.t.Helper()
	require.Eventually(f.t, func() bool { return f.stalled() >= n }, waitFor, 2*time.Millisecond, "no commit waits for the standby")
}

// committing is a transaction whose commit was called and has not returned yet.
type committing struct {
	sent []*message.Message
	done chan error
}

// commitStalled publishes messages in a transaction, and commits it, which
// waits.
func (f *fixture) commitStalled(publisher *outbox.Publisher, topic string, messages ...*message.Message) *committing {
	f.t.Helper()
	conn := f.connect(f.t)
	f.t.Cleanup(f.endStall) // before the connection is closed
	tx, err := conn.Begin(f.t.Context())
	require.NoError(f.t, err)
	require.NoError(f.t, publishIn(f.t.Context(), publisher, tx, topic, messages...))
	before := f.stalled()
	c := &committing{sent: messages, done: make(chan error, 1)}
	ctx := context.WithoutCancel(f.t.Context())
	go func() { c.done <- tx.Commit(ctx) }()
	f.awaitStalled(before + 1)
	return c
}

// publishLocally publishes messages in a transaction that waits for no standby.
func (f *fixture) publishLocally(publisher *outbox.Publisher, topic string, messages ...*message.Message) {
	f.t.Helper()
	tx, err := f.pool.Begin(f.t.Context())
	require.NoError(f.t, err)
	defer tx.Rollback(f.t.Context())
	_, err = tx.Exec(f.t.Context(), "SET LOCAL synchronous_commit = local")
	require.NoError(f.t, err)
	require.NoError(f.t, publishIn(f.t.Context(), publisher, tx, topic, messages...))
	require.NoError(f.t, tx.Commit(f.t.Context()))
}

// countedConsumer is a Consumer whose looks at what is visible can be waited
// for.
func (f *fixture) countedConsumer(change func(*outbox.ConsumerConfig)) (consumer *outbox.Consumer, awaitLooks func(n int64)) {
	f.t.Helper()
	looks := &statementCounter{text: barrierStatement}
	db := f.pool.Config()
	db.ConnConfig.Tracer = looks
	configure := func(c *outbox.ConsumerConfig) {
		liveAuto(c)
		change(c)
	}
	return f.consumerOn(db, configure), func(n int64) {
		f.t.Helper()
		before := looks.n.Load()
		require.Eventually(f.t, func() bool { return looks.n.Load() >= before+n }, waitFor, time.Millisecond, "nobody asks what is visible")
	}
}

// A commit that waits for a synchronous standby is in the WAL, is decoded, and
// no other session sees it. A reader that hands it out at once has a handler
// look for a row that is not there; one that drops it, or that begins its stream
// in the middle of the wait, never hands it out. Field case F37.
func TestSyncStandby(t *testing.T) {
	t.Parallel()

	server := pgtest.Own(t, pgtest.Options{})
	newServerFixture := func(t *testing.T) *fixture {
		t.Helper()
		return fixtureAt(t, pgtest.DatabaseOn(t, server))
	}

	t.Run("a handler finds the row its message is about", func(t *testing.T) {
		const writers, stalls = 8, 8
		f := newServerFixture(t)
		w := newWorkload(t, f, "changes", 20, writers)
		consumer, awaitLooks := f.countedConsumer(func(*outbox.ConsumerConfig) {})
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, w.topic)
		awaitLive(t, consumer)
		var l ledger
		var missed, live atomic.Int64
		handled := make(chan struct{})
		conn := f.connect(t)
		go func() {
			defer close(handled)
			for msg := range messages {
				var c change
				assert.NoError(t, json.Unmarshal(msg.Payload, &c))
				var version int
				assert.NoError(t, conn.QueryRow(context.Background(), "SELECT version FROM aggregates WHERE id = $1", c.Aggregate).Scan(&version))
				if version < c.Version {
					missed.Add(1)
				}
				if fromWAL(consumer) {
					live.Add(1)
				}
				l.record(t, msg)
				msg.Ack()
			}
		}()

		writing, stop := context.WithCancel(t.Context())
		written := make(chan struct{})
		go func() {
			defer close(written)
			w.run(t, writing, writers, uint64(time.Now().UnixNano()))
		}()
		defer func() {
			stop()
			f.endStall()
			<-written
		}()
		stalled := 0
		for range stalls {
			before := l.len()
			f.stallCommits(true)
			f.awaitStalled(1) // it may have the locks that all others wait for
			awaitLooks(20)
			stalled += f.stalled()
			f.stallCommits(false)
			require.Eventually(t, func() bool { return l.len() > before+20 }, waitFor, time.Millisecond, "nothing comes after the stall")
		}
		stop()
		<-written
		w.settled(t, &l)
		v := w.judge(t, &l)
		require.NoError(t, consumer.Close())
		<-handled
		t.Logf("stalls=%d stalled_commits=%d live=%d missed=%d %s", stalls, stalled, live.Load(), missed.Load(), v)
		require.Zero(t, missed.Load(), "a handler did not find its row")
		require.Greater(t, int(live.Load()), v.Committed/2, "most came from the table: the test proves little")
		requireClean(t, v)
	})

	// For longer than the lease, too: what a process notes of itself waits for
	// nobody.
	t.Run("others are delivered meanwhile", func(t *testing.T) {
		const lease = 2 * time.Second
		f := newServerFixture(t)
		publisher := f.publisher(outbox.PublisherConfig{})
		consumer, awaitLooks := f.countedConsumer(func(c *outbox.ConsumerConfig) { c.Lease = lease })
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
		awaitLive(t, consumer)
		waiting, after := newMessages(3), newMessages(1)
		meanwhile, live := 0, 0

		f.stallCommits(true)
		stalled := f.commitStalled(publisher, "topic", waiting...)
		for began := time.Now(); time.Since(began) < lease+lease/2; meanwhile++ {
			local := newMessages(1)
			f.publishLocally(publisher, "topic", local...)
			requireNext(t, messages, local...)
			if fromWAL(consumer) {
				live++
			}
		}
		awaitLooks(20)
		select {
		case msg := <-messages:
			require.FailNow(t, "a message was delivered that nobody can see", msg.UUID)
		case err := <-stalled.done:
			require.FailNow(t, "the commit did not wait", "%v", err)
		default:
		}
		require.Equal(t, meanwhile, f.number("SELECT count(*)::int FROM outbox.messages"))
		began := time.Now()
		f.stallCommits(false)
		requireNext(t, messages, waiting...)
		took := time.Since(began)
		require.NoError(t, await(t, stalled.done))
		require.NoError(t, publisher.Publish("topic", after...))
		requireNext(t, messages, after...)
		t.Logf("delivered_meanwhile=%d live=%d held=%d delivered_after_release_in=%s", meanwhile, live, len(waiting), took.Round(time.Millisecond))
		require.Greater(t, live, meanwhile/2, "most came from the table: the test proves little")
	})

	// While the creation of a slot waits for some other transaction, commits go
	// on: their records are older than the slot, so they are not in its stream,
	// and as long as they wait for the standby no snapshot sees them either.
	t.Run("a stream begins meanwhile", func(t *testing.T) {
		f := newServerFixture(t)
		publisher := f.publisher(outbox.PublisherConfig{})
		consumer, awaitLooks := f.countedConsumer(func(*outbox.ConsumerConfig) {})
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
		awaitLive(t, consumer)
		before, local, after := newMessages(5), newMessages(5), newMessages(5)
		require.NoError(t, publisher.Publish("topic", before...))
		requireNext(t, messages, before...)

		// A slot is made in steps, each of which waits for what runs.
		earlier, running := &lateTransaction{f: f, t: t}, &lateTransaction{f: f, t: t}
		earlier.begin()
		earlier.exec("SELECT pg_current_xact_id()")
		slot := consumer.Status().Slot
		require.Equal(t, 1, f.number("SELECT count(pg_terminate_backend(active_pid))::int FROM pg_replication_slots WHERE slot_name = $1", slot))
		f.awaitSlotWaits(earlier)
		running.begin()
		running.exec("SELECT pg_current_xact_id()")
		require.NoError(t, earlier.tx.Rollback(t.Context()))
		f.awaitSlotWaits(running)
		f.stallCommits(true)
		var stalled []*committing
		for range 3 {
			stalled = append(stalled, f.commitStalled(publisher, "topic", newMessages(3)...))
		}
		require.NoError(t, running.tx.Rollback(t.Context()))
		require.Eventually(t, func() bool {
			now := consumer.Status().Slot
			return now != "" && now != slot
		}, waitFor, time.Millisecond, "no stream is opened")
		for range 3 {
			stalled = append(stalled, f.commitStalled(publisher, "topic", newMessages(3)...))
		}
		f.publishLocally(publisher, "topic", local...)
		requireNext(t, messages, local...)
		awaitLooks(20)
		awaitPolling(t, consumer, "was running when the slot was made")
		f.stallCommits(false)

		lost, disorder := requireTransactions(t, messages, stalled)
		awaitLive(t, consumer)
		require.NoError(t, publisher.Publish("topic", after...))
		requireNext(t, messages, after...)
		t.Logf("committed=%d lost=%d out_of_order=%d", 3*len(stalled), lost, disorder)
		require.Zero(t, lost)
		require.Zero(t, disorder)
	})

	// Without another transaction to wait for, it waits for them.
	t.Run("a stream waits to begin", func(t *testing.T) {
		f := newServerFixture(t)
		publisher := f.publisher(outbox.PublisherConfig{})
		consumer := f.consumer(liveAuto)
		_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
		awaitLive(t, consumer)
		slot := consumer.Status().Slot
		f.stallCommits(true)
		var stalled []*committing
		for range 5 {
			stalled = append(stalled, f.commitStalled(publisher, "topic", newMessages(3)...))
		}
		require.Equal(t, 1, f.number("SELECT count(pg_terminate_backend(active_pid))::int FROM pg_replication_slots WHERE slot_name = $1", slot))
		f.awaitSlotWaits(nil)
		local, after := newMessages(5), newMessages(5)
		f.publishLocally(publisher, "topic", local...)
		requireNext(t, messages, local...)
		f.stallCommits(false)
		lost, disorder := requireTransactions(t, messages, stalled)
		awaitLive(t, consumer)
		require.NoError(t, publisher.Publish("topic", after...))
		requireNext(t, messages, after...)
		t.Logf("committed=%d lost=%d out_of_order=%d", 3*len(stalled), lost, disorder)
		require.Zero(t, lost)
		require.Zero(t, disorder)
	})
}

// awaitSlotWaits waits until the creation of a slot waits for a transaction.
func (f *fixture) awaitSlotWaits(of *lateTransaction) {
	f.t.Helper()
	var pid uint32
	if of != nil {
		pid = of.tx.Conn().PgConn().PID()
	}
	require.Eventually(f.t, func() bool {
		return f.number(`SELECT count(*)::int FROM pg_stat_activity
			WHERE backend_type = 'walsender' AND datname = current_database() AND wait_event_type = 'Lock'
			    AND ($1::int = 0 OR $1::int = ANY (pg_blocking_pids(pid)))`, int(pid)) > 0
	}, waitFor, time.Millisecond, "no slot is being made")
}

// requireTransactions receives the messages of transactions whose commits
// return now, and counts those that are missing and those that are not in the
// order of their transaction. Others, and repeats, end the test.
func requireTransactions(t *testing.T, messages <-chan *message.Message, transactions []*committing) (lost, disorder int) {
	t.Helper()
	type place struct{ transaction, number int }
	places := map[string]place{}
	for n, c := range transactions {
		require.NoError(t, await(t, c.done))
		for i, msg := range c.sent {
			places[msg.UUID] = place{n, i}
		}
	}
	total := len(places)
	next := map[int]int{}
	timeout := time.After(waitFor)
	for received := 0; received < total; received++ {
		select {
		case msg := <-messages:
			msg.Ack()
			at, known := places[msg.UUID]
			require.True(t, known, "repeated, or another message: %s", msg.UUID)
			delete(places, msg.UUID)
			if at.number != next[at.transaction] {
				disorder++
			}
			next[at.transaction]++
		case <-timeout:
			return len(places), disorder
		}
	}
	return len(places), disorder
}

// A commit is decoded a moment before other sessions see it, and with a
// synchronous standby that moment is as long as the way there and back. A
// handler that looks for the row its message is about finds none, takes the
// message for handled already, and the row stays unprocessed for ever. Field
// case F37.
func TestHandlerFindsItsRow(t *testing.T) {
	t.Parallel()

	const transactions, writers = 5000, 16
	f, server := newOwnFixture(t, pgtest.Options{Settings: map[string]string{"max_connections": "50"}})
	f.exec("CREATE TABLE business (id int PRIMARY KEY)")
	f.standby(t, server)
	// By its name: any name would be that of the stream, too.
	var name string
	require.NoError(t, f.pool.QueryRow(t.Context(), "SELECT application_name FROM pg_stat_replication").Scan(&name))
	f.exec("ALTER SYSTEM SET synchronous_standby_names = '" + quoteIdentifier(name) + "'")
	f.exec("SELECT pg_reload_conf()")
	require.Eventually(t, func() bool {
		return f.number("SELECT count(*)::int FROM pg_stat_replication WHERE sync_state = 'sync'") == 1
	}, waitFor, 5*time.Millisecond, "commits wait for nobody")
	publisher := f.publisher(outbox.PublisherConfig{RequireTx: true})
	consumer := f.consumer(liveAuto)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	awaitLive(t, consumer)

	ctx, cancel := context.WithCancel(t.Context())
	// Few are on their way at once: a handler with a backlog looks late.
	room := make(chan struct{}, 2*writers)
	var next atomic.Int64
	var writing sync.WaitGroup
	write := func(conn *pgx.Conn, id int) error {
		tx, err := conn.Begin(ctx)
		if err != nil {
			return err
		}
		defer tx.Rollback(ctx)
		if _, err := tx.Exec(ctx, "INSERT INTO business VALUES ($1)", id); err != nil {
			return err
		}
		payload := binary.BigEndian.AppendUint32(nil, uint32(id))
		if err := publishIn(ctx, publisher, tx, "topic", message.NewMessage(watermill.NewUUID(), payload)); err != nil {
			return err
		}
		return tx.Commit(ctx)
	}
	for range writers {
		conn := f.connect(t)
		writing.Go(func() {
			for {
				id := int(next.Add(1))
				if id > transactions {
					return
				}
				select {
				case room <- struct{}{}:
				case <-ctx.Done():
					return
				}
				if !assert.NoError(t, write(conn, id)) {
					return
				}
			}
		})
	}
	defer writing.Wait()
	defer cancel()

	conn := f.connect(t)
	found, live := 0, 0
	delivered := map[uint32]bool{}
	began := time.Now()
	receiveWith(t, messages, transactions, func(_ int, msg *message.Message) {
		id := binary.BigEndian.Uint32(msg.Payload)
		var n int
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*)::int FROM business WHERE id = $1", id).Scan(&n))
		found += n
		delivered[id] = true
		if fromWAL(consumer) {
			live++
		}
		<-room
	})
	writing.Wait() // who has received the last message may be faster than who committed it
	t.Logf("committed=%d delivered=%d live=%d found=%d in %s", transactions, len(delivered), live, found, time.Since(began).Round(time.Millisecond))
	require.Equal(t, transactions, found, "a handler did not find its row")
	require.Len(t, delivered, transactions)
	require.Greater(t, live, transactions/2, "most came from the table: the test proves little")
}

// Commits that are not yet on disk are visible, and a reader of the tables
// delivers them. When the server crashes it forgets them, so that events were
// delivered of what never happened. The WAL is sent when it is on disk: what
// came from it stays. Field case F111.
func TestCrashForgetsNothingThatCameFromTheWAL(t *testing.T) {
	t.Parallel()

	const rounds, flushes, perFlush, rest = 3, 10, 10, 100
	f, _ := newOwnFixture(t, pgtest.Options{Settings: map[string]string{
		"synchronous_commit": "off", "wal_writer_delay": "10s", "bgwriter_lru_maxpages": "0", "max_connections": "50",
	}})
	f.exec("CREATE TABLE business (uuid text PRIMARY KEY)")
	publisher := f.publisher(outbox.PublisherConfig{RequireTx: true})
	// Consumers that write little: what they write to disk takes with it what was
	// committed before.
	configure := func(mode outbox.Mode) func(*outbox.ConsumerConfig) {
		return func(c *outbox.ConsumerConfig) { c.Mode, c.Lease, c.CheckpointInterval = mode, time.Minute, time.Minute }
	}
	consumer := f.consumer(configure(outbox.ModeAuto))
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	// Beside it one that polls, to see what the crash takes with it.
	polling := f.consumer(configure(outbox.ModePoll))
	_, polled := f.subscribe(polling, outbox.SubscriberConfig{ConsumerGroup: "polling"}, "topic")

	type deliveries struct {
		mu   sync.Mutex
		list map[string]time.Time // since when the subscription reads from where it does
	}
	follow := func(consumer *outbox.Consumer, messages <-chan *message.Message) *deliveries {
		d := &deliveries{list: map[string]time.Time{}}
		go func() {
			for msg := range messages {
				since := time.Time{}
				if subs := consumer.Status().Subscriptions; len(subs) == 1 && subs[0].Source == outbox.SourceWAL {
					since = subs[0].Since
				}
				d.mu.Lock()
				if _, again := d.list[msg.UUID]; !again {
					d.list[msg.UUID] = since
				}
				d.mu.Unlock()
				msg.Ack()
			}
		}()
		return d
	}
	awaitAll := func(d *deliveries, uuids []string) {
		t.Helper()
		require.Eventually(t, func() bool {
			d.mu.Lock()
			defer d.mu.Unlock()
			for _, uuid := range uuids {
				if _, ok := d.list[uuid]; !ok {
					return false
				}
			}
			return true
		}, waitFor, 2*time.Millisecond, "messages missing")
	}
	live, byTable := follow(consumer, messages), follow(polling, polled)

	commit := func(flush string) string {
		tx, err := f.pool.Begin(t.Context())
		require.NoError(t, err)
		defer tx.Rollback(t.Context())
		_, err = tx.Exec(t.Context(), "SET LOCAL synchronous_commit = "+flush)
		require.NoError(t, err)
		msg := message.NewMessage(watermill.NewUUID(), nil)
		_, err = tx.Exec(t.Context(), "INSERT INTO business VALUES ($1)", msg.UUID)
		require.NoError(t, err)
		require.NoError(t, publishIn(t.Context(), publisher, tx, "topic", msg))
		require.NoError(t, tx.Commit(t.Context()))
		return msg.UUID
	}
	present := func() (uuids []string) {
		rows, err := f.pool.Query(t.Context(), "SELECT uuid FROM business")
		require.NoError(t, err)
		uuids, err = pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return uuids
	}

	committed, fromWAL, ghosts, ghostsPolled := 0, 0, 0, 0
	for range rounds {
		awaitLive(t, consumer)
		since := consumer.Status().Subscriptions[0].Since
		walwriter := f.stopWalwriter()
		var safe, unsafe []string
		for range flushes {
			for range perFlush - 1 {
				safe = append(safe, commit("off"))
			}
			safe = append(safe, commit("on"))
		}
		for range rest {
			unsafe = append(unsafe, commit("off"))
		}
		awaitAll(live, safe)
		awaitAll(byTable, unsafe)
		committed += len(safe) + len(unsafe)
		stored := f.number("SELECT count(*)::int FROM business")
		require.NoError(t, syscall.Kill(walwriter, syscall.SIGKILL))
		require.Eventually(t, func() bool {
			f.pool.Reset()
			var left int
			err := f.pool.QueryRow(t.Context(), "SELECT count(*)::int FROM business").Scan(&left)
			return err == nil && left < stored
		}, waitFor, 5*time.Millisecond, "the server did not recover without what was not on disk")

		exists := map[string]bool{}
		for _, uuid := range present() {
			exists[uuid] = true
		}
		live.mu.Lock()
		for uuid, at := range live.list {
			if at.Equal(since) {
				fromWAL++
				if !exists[uuid] {
					ghosts++
				}
			}
		}
		live.mu.Unlock()
		byTable.mu.Lock()
		for _, uuid := range unsafe {
			if !exists[uuid] {
				ghostsPolled++
			}
		}
		byTable.mu.Unlock()
		awaitAll(live, present())
	}
	t.Logf("crashes=%d committed=%d delivered_from_wal=%d ghosts=%d ghosts_polled=%d lost=0", rounds, committed, fromWAL, ghosts, ghostsPolled)
	require.Zero(t, ghosts, "a message came from the WAL whose transaction the crash forgot")
	require.GreaterOrEqual(t, fromWAL, rounds*flushes*perFlush)
	require.Positive(t, ghostsPolled, "the crashes forgot nothing: the test proves nothing")
}
