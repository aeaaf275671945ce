package tests

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// liveAuto makes a consumer read the WAL, whatever OUTBOX_TEST_MODE says.
func liveAuto(c *outbox.ConsumerConfig) { c.Mode = outbox.ModeAuto }

// fromWAL reports whether the messages of the consumer's one subscription come
// from the WAL at the moment.
func fromWAL(consumer *outbox.Consumer) bool {
	subscriptions := consumer.Status().Subscriptions
	return len(subscriptions) == 1 && subscriptions[0].Source == outbox.SourceWAL
}

// requireClean requires what holds for a consumer that was there all the time.
func requireClean(t testing.TB, v verdict) {
	t.Helper()
	require.Positive(t, v.Committed)
	require.Zero(t, v.Lost, "lost")
	require.Zero(t, v.Invented, "invented")
	require.Zero(t, v.Duplicated, "duplicated")
	require.Zero(t, v.OutOfOrder, "out of order")
}

// liveRun is a workload in progress whose messages come from the WAL to begin
// with.
type liveRun struct {
	*workload
	t        *testing.T
	consumer *outbox.Consumer
	book     *logBook
	ledger   ledger
	// refused counts the transactions that failed with the server.
	refused atomic.Int64
	stop    func()
}

// startLiveRun starts a workload whose writers try again when the server goes
// away, and a consumer that connects as db says.
func startLiveRun(t *testing.T, f *fixture, db *pgxpool.Config) *liveRun {
	t.Helper()
	const writers = 6
	r := &liveRun{workload: newWorkload(t, f, "changes", 20, writers), t: t}
	r.consumer, r.book = f.loggedConsumer(db, liveAuto)
	_, messages := f.subscribe(r.consumer, outbox.SubscriberConfig{PageSize: 50}, r.topic)
	go func() {
		for msg := range messages {
			r.ledger.record(t, msg)
			msg.Ack()
		}
	}()
	awaitLive(t, r.consumer)
	ctx, cancel := context.WithCancel(t.Context())
	var writing sync.WaitGroup
	for i := range writers {
		writing.Go(func() {
			random := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), uint64(i)))
			for ctx.Err() == nil {
				if err := r.transaction(context.WithoutCancel(ctx), random, i == 0); err != nil {
					r.refused.Add(1)
					time.Sleep(10 * time.Millisecond) // nothing says when the server is back
				}
			}
		})
	}
	r.stop = sync.OnceFunc(func() {
		cancel()
		writing.Wait()
	})
	t.Cleanup(r.stop)
	return r
}

// slot is the replication slot of the stream.
func (r *liveRun) slot() string {
	r.t.Helper()
	slot := r.consumer.Status().Slot
	require.NotEmpty(r.t, slot)
	return slot
}

// awaitReturn waits until the stream has another slot and all messages come from
// the WAL again, under load.
func (r *liveRun) awaitReturn(from string) {
	r.t.Helper()
	require.Eventually(r.t, func() bool {
		slot := r.consumer.Status().Slot
		return slot != "" && slot != from
	}, waitFor, 2*time.Millisecond, "no other stream is opened")
	awaitLive(r.t, r.consumer)
}

// awaitMore waits until n more messages were delivered.
func (r *liveRun) awaitMore(n int) {
	r.t.Helper()
	before := r.ledger.len()
	require.Eventually(r.t, func() bool { return r.ledger.len() >= before+n }, waitFor, 2*time.Millisecond, "nothing is delivered")
}

// finish ends the writing and judges.
func (r *liveRun) finish() verdict {
	r.t.Helper()
	r.awaitMore(20)
	r.stop()
	r.settled(r.t, &r.ledger)
	return r.judge(r.t, &r.ledger)
}

// streamFaults does harm to replication connections that go through a proxy,
// and to no others.
type streamFaults struct {
	mu      sync.Mutex
	streams map[int]bool // the proxy's connections that are streams
	inserts int          // until the fault
	hold    bool
	armed   bool
	held    map[int]bool  // the connections that are held
	open    chan struct{} // closed when they are let go on
	struck  chan struct{} // closed when the fault has come
}

// newStreamFaults installs the faults on a proxy.
func newStreamFaults(t testing.TB, proxy *pgtest.Proxy) *streamFaults {
	s := &streamFaults{streams: map[int]bool{}, held: map[int]bool{}, open: make(chan struct{})}
	proxy.OnClient(s.client)
	proxy.OnServer(s.server)
	t.Cleanup(s.release)
	return s
}

// arm has the present stream cut, or held, when so many more rows have come.
// The channel is closed when that has happened.
func (s *streamFaults) arm(inserts int, hold bool) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inserts, s.hold, s.armed, s.struck = inserts, hold, true, make(chan struct{})
	return s.struck
}

// release lets held connections go on.
func (s *streamFaults) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.open)
	s.open, s.held = make(chan struct{}), map[int]bool{}
}

func (s *streamFaults) client(msg pgtest.Message) pgtest.Action {
	if msg.Type == 0 && bytes.Contains(msg.Body, []byte("replication\x00database\x00")) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.streams[msg.Conn] = true
	}
	return pgtest.Forward
}

func (s *streamFaults) server(msg pgtest.Message) pgtest.Action {
	s.mu.Lock()
	action := s.judge(msg)
	held, open := s.held[msg.Conn], s.open
	s.mu.Unlock()
	if held {
		<-open
	}
	return action
}

// judge is called with mu held.
func (s *streamFaults) judge(msg pgtest.Message) pgtest.Action {
	const header = 1 + 3*8 // of XLogData; a message of the output plugin follows
	insert := msg.Type == 'd' && len(msg.Body) > header && msg.Body[0] == 'w' && msg.Body[header] == 'I'
	if !s.armed || !s.streams[msg.Conn] || (s.inserts > 0 && !insert) {
		return pgtest.Forward
	}
	if s.inserts > 0 {
		s.inserts--
		return pgtest.Forward
	}
	s.armed = false
	close(s.struck)
	if s.hold {
		s.held[msg.Conn] = true
		return pgtest.Forward
	}
	return pgtest.Cut
}

// Slots are lost: their walsender is killed, they are dropped, the server
// removes the WAL they need, restarts, crashes, the network fails. A reader that
// begins again where a new slot begins has a gap; one that begins again where it
// was repeats, or finds that it cannot. Here the table has what is missing.
// Field cases F27, F28, F29 and F35.
func TestSlotLoss(t *testing.T) {
	t.Parallel()

	shared := pgtest.Own(t, pgtest.Options{})

	for name, drop := range map[string]bool{"walsender terminated": false, "slot dropped": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			const rounds = 3
			f := fixtureAt(t, pgtest.DatabaseOn(t, shared))
			r := startLiveRun(t, f, f.pool.Config())
			for range rounds {
				slot := r.slot()
				r.awaitMore(20)
				if drop {
					_, err := f.pool.Exec(t.Context(), "SELECT pg_drop_replication_slot($1)", slot)
					require.Equal(t, "55006", code(err), "a slot in use cannot be dropped: %v", err)
				}
				require.Equal(t, 1, f.number("SELECT count(pg_terminate_backend(active_pid))::int FROM pg_replication_slots WHERE slot_name = $1", slot))
				if drop {
					for dropped := false; !dropped; {
						_, err := f.pool.Exec(t.Context(), "SELECT pg_drop_replication_slot($1)", slot)
						dropped = err == nil || code(err) == "42704" // it went with its walsender
						require.True(t, dropped || code(err) == "55006", "%v", err)
					}
				}
				r.awaitReturn(slot)
			}
			v := r.finish()
			t.Logf("rounds=%d streams=%d %s", rounds, len(r.book.find("Messages are read from the WAL")), v)
			requireClean(t, v)
		})
	}

	t.Run("more WAL than max_slot_wal_keep_size", func(t *testing.T) {
		t.Parallel()

		f, server := newOwnFixture(t, pgtest.Options{Settings: map[string]string{
			"max_slot_wal_keep_size": "1MB", "wal_keep_size": "0", "min_wal_size": "32MB", "max_connections": "50",
		}})
		f.exec("CREATE TABLE filler (content text)")
		proxy := f.proxy(t)
		faults := newStreamFaults(t, proxy)
		db, err := pgxpool.ParseConfig(proxy.URL(f.url))
		require.NoError(t, err)
		r := startLiveRun(t, f, db)
		slot := r.slot()
		pid := f.number("SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1", slot)
		r.awaitMore(20)

		await(t, faults.arm(0, true))
		awaitPolling(t, r.consumer, "the stream lags")
		r.awaitMore(20)
		segments := 0
		lost := "terminating process " + strconv.Itoa(pid) + " to release replication slot \"" + slot + "\""
		require.Eventually(t, func() bool {
			f.exec("INSERT INTO filler SELECT repeat('x', 1000) FROM generate_series(1, 1000)")
			f.exec("SELECT pg_switch_wal()")
			f.exec("CHECKPOINT")
			segments++
			text, err := os.ReadFile(server.LogFile())
			require.NoError(t, err)
			return strings.Contains(string(text), lost)
		}, waitFor, 5*time.Millisecond, "the server does not take the slot away")
		r.awaitMore(20)
		faults.release()
		r.awaitReturn(slot)
		v := r.finish()
		t.Logf("segments_written=%d streams=%d %s", segments, len(r.book.find("Messages are read from the WAL")), v)
		requireClean(t, v)
	})

	for name, mode := range map[string]pgtest.Mode{"server restarted": pgtest.Fast, "server crashed": pgtest.Immediate} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			const rounds = 2
			f, server := newOwnFixture(t, pgtest.Options{Settings: map[string]string{"max_connections": "50"}})
			r := startLiveRun(t, f, f.pool.Config())
			var down time.Duration
			for range rounds {
				slot := r.slot()
				r.awaitMore(50)
				began := time.Now()
				require.NoError(t, server.Restart(t.Context(), mode))
				down = max(down, time.Since(began))
				f.pool.Reset()
				r.awaitReturn(slot)
			}
			v := r.finish()
			t.Logf("restarts=%d longest=%s transactions_refused=%d streams=%d %s", rounds, down.Round(time.Millisecond),
				r.refused.Load(), len(r.book.find("Messages are read from the WAL")), v)
			require.Positive(t, r.refused.Load(), "the server was not missed: the test proves nothing")
			if mode == pgtest.Immediate {
				v.Duplicated = 0 // what was not stored yet comes again
			}
			requireClean(t, v)
		})
	}

	for name, hold := range map[string]bool{"network cut in a large transaction": false, "network silent in a large transaction": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			const rounds, rows = 2, 4000
			f := fixtureAt(t, pgtest.DatabaseOn(t, shared))
			proxy := f.proxy(t)
			faults := newStreamFaults(t, proxy)
			db, err := pgxpool.ParseConfig(proxy.URL(f.url))
			require.NoError(t, err)
			r := startLiveRun(t, f, db)
			_, messages := f.subscribe(r.consumer, outbox.SubscriberConfig{}, "bulk")
			awaitLive(t, r.consumer)
			publisher := f.publisher(outbox.PublisherConfig{})
			var took []time.Duration
			for round := range rounds {
				slot := r.slot()
				struck := faults.arm(rows/2, hold)
				sent := newMessages(rows)
				require.NoError(t, publisher.Publish("bulk", sent...))
				await(t, struck)
				began := time.Now()
				requireNext(t, messages, sent...)
				took = append(took, time.Since(began).Round(time.Millisecond))
				r.awaitMore(20)
				if hold && round == 0 {
					faults.release() // it was only a pause, and the stream goes on
					awaitLive(t, r.consumer)
					require.Equal(t, slot, r.slot())
				} else {
					r.awaitReturn(slot)
				}
				last := newMessages(3)
				require.NoError(t, publisher.Publish("bulk", last...))
				requireNext(t, messages, last...)
			}
			v := r.finish()
			t.Logf("all_delivered_after_the_fault=%v bulk=%d streams=%d %s", took, rounds*rows, len(r.book.find("Messages are read from the WAL")), v)
			for _, d := range took {
				require.Less(t, d, 5*time.Second)
			}
			requireClean(t, v)
		})
	}
}

// code is the SQLSTATE of a server's error, or "".
func code(err error) string {
	if pgErr, ok := err.(*pgconn.PgError); ok { //nolint:errorlint // as it comes from the server
		return pgErr.Code
	}
	return ""
}

// A slot has one reader, so in a rolling update the new process finds it in use,
// and dies of that or hangs. Here each process has its own. Field case F30.
func TestTwoStreams(t *testing.T) {
	t.Parallel()

	f, _ := newOwnFixture(t, pgtest.Options{Settings: map[string]string{"max_connections": "50"}})
	first, firstBook := f.loggedConsumer(f.pool.Config(), liveAuto)
	second, secondBook := f.loggedConsumer(f.pool.Config(), liveAuto)
	publisher := f.publisher(outbox.PublisherConfig{})
	_, one := f.subscribe(first, outbox.SubscriberConfig{}, "one")
	_, two := f.subscribe(second, outbox.SubscriberConfig{}, "two")
	awaitLive(t, first)
	awaitLive(t, second)
	for range 10 {
		sent := newMessages(2)
		require.NoError(t, publisher.Publish("one", sent[0]))
		require.NoError(t, publisher.Publish("two", sent[1]))
		requireNext(t, one, sent[0])
		requireNext(t, two, sent[1])
	}
	slots := map[string]bool{first.Status().Slot: true, second.Status().Slot: true}
	require.Len(t, slots, 2)
	for slot := range slots {
		require.Equal(t, 1, f.number("SELECT count(*)::int FROM pg_replication_slots WHERE slot_name = $1 AND active AND temporary", slot))
	}

	// Both subscribe to a third topic for one group, and one stands by.
	holder, held := f.subscribe(first, outbox.SubscriberConfig{}, "shared")
	awaitLive(t, first)
	_, taken := f.subscribe(second, outbox.SubscriberConfig{}, "shared")
	shared := func(consumer *outbox.Consumer) outbox.SubscriptionStatus {
		for _, sub := range consumer.Status().Subscriptions {
			if sub.Topic == "shared" {
				return sub
			}
		}
		return outbox.SubscriptionStatus{}
	}
	before := newMessages(20)
	require.NoError(t, publisher.Publish("shared", before...))
	requireNext(t, held, before...)
	require.True(t, shared(first).Holding)
	require.False(t, shared(second).Holding)
	require.NoError(t, second.Status().Ready())

	const meanwhile = 100
	published := make(chan error, 1)
	sent := make([]*message.Message, meanwhile)
	half := make(chan struct{})
	go func() {
		published <- func() error {
			for i := range sent {
				sent[i] = message.NewMessage("", binary.BigEndian.AppendUint32(nil, uint32(i)))
				if err := publisher.Publish("shared", sent[i]); err != nil {
					return err
				}
				if i == meanwhile/2 {
					close(half)
				}
			}
			return nil
		}()
	}()
	var arrived []uint32
	closed := make(chan error, 1)
	began := time.Now()
	go func() {
		<-half
		began = time.Now()
		closed <- holder.Close()
	}()
	for held != nil || len(arrived) < meanwhile {
		var msg *message.Message
		var open bool
		select {
		case msg, open = <-held:
			if !open {
				held = nil
				continue
			}
		case msg = <-taken:
		case <-time.After(waitFor):
			require.FailNow(t, "messages missing", "%d of %d arrived", len(arrived), meanwhile)
		}
		arrived = append(arrived, binary.BigEndian.Uint32(msg.Payload))
		msg.Ack()
	}
	require.NoError(t, await(t, closed))
	require.NoError(t, await(t, published))
	took := time.Since(began)
	for i, n := range arrived {
		require.Equal(t, uint32(i), n, "lost, repeated or out of order")
	}
	awaitLive(t, second)
	require.True(t, shared(second).Holding)
	after := newMessages(1)
	require.NoError(t, publisher.Publish("shared", after...))
	requireNext(t, taken, after...)
	for _, book := range []*logBook{firstBook, secondBook} {
		require.Empty(t, book.errors())
		for _, entry := range book.find("Messages are polled") {
			require.NotContains(t, entry.Text, "in use")
		}
	}
	t.Logf("published=%d delivered=%d lost=0 duplicated=0 handed_over_in=%s", meanwhile, len(arrived), took.Round(time.Millisecond))
}
