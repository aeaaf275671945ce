package tests

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

const (
	// probeInterval is the time between two messages of a probe.
	probeInterval = 20 * time.Millisecond
	// maxDelay is how late a message of a probe may be, on a machine that many
	// tests share. The promise is a second.
	maxDelay = 5 * time.Second
)

// readsWAL makes a Consumer read the WAL when it can, whatever the other tests
// are to do.
func readsWAL(c *outbox.ConsumerConfig) { c.Mode = outbox.ModeAuto }

// awaitStatus waits until the consumer's status is as it should be.
func awaitStatus(t testing.TB, consumer *outbox.Consumer, patience time.Duration, fits func(outbox.Status) bool) {
	t.Helper()
	if !assert.Eventually(t, func() bool { return fits(consumer.Status()) }, patience, 2*time.Millisecond) {
		require.FailNow(t, "waited in vain", "%+v", consumer.Status())
	}
}

// probe publishes numbers to a topic of its own all the time, and sees whether
// each arrives, once, in order, and how late.
type probe struct {
	t    testing.TB
	stop func() // waits until nothing is published any more

	mu        sync.Mutex
	sent      []time.Time // when Publish had returned
	received  []time.Time
	unordered []string
	// looked and slowest are of worst: how many were looked at, and the latest
	// of all.
	looked  int
	slowest time.Duration
}

// probe subscribes and begins to publish.
func (f *fixture) probe(t testing.TB, consumer *outbox.Consumer) *probe {
	t.Helper()
	const topic = "probe"
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	p := &probe{t: t, stop: func() { cancel(); running.Wait() }}
	t.Cleanup(p.stop)
	publisher := f.publisher(outbox.PublisherConfig{})
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, topic)
	running.Go(func() {
		ticker := time.NewTicker(probeInterval)
		defer ticker.Stop()
		for n := 0; ; n++ {
			msg := message.NewMessage(watermill.NewUUID(), []byte(strconv.Itoa(n)))
			if !assert.NoError(t, publisher.Publish(topic, msg)) {
				return
			}
			p.mu.Lock()
			p.sent = append(p.sent, time.Now())
			p.mu.Unlock()
			select {
			case <-ticker.C:
			case <-ctx.Done():
				return
			}
		}
	})
	go func() {
		for msg := range messages {
			p.mu.Lock()
			if want := strconv.Itoa(len(p.received)); string(msg.Payload) != want {
				p.unordered = append(p.unordered, fmt.Sprintf("%s instead of %s", msg.Payload, want))
			}
			p.received = append(p.received, time.Now())
			p.mu.Unlock()
			msg.Ack()
		}
	}()
	return p
}

// awaitAll waits until all that was sent by now has arrived, and returns the
// longest delay since the last call.
func (p *probe) awaitAll() time.Duration {
	p.t.Helper()
	p.mu.Lock()
	sent := len(p.sent)
	p.mu.Unlock()
	require.Eventually(p.t, func() bool { return p.count() >= sent }, waitFor, time.Millisecond, "messages of the probe are missing")
	p.mu.Lock()
	defer p.mu.Unlock()
	require.Empty(p.t, p.unordered, "lost, repeated or out of order")
	var worst time.Duration
	for ; p.looked < min(len(p.sent), len(p.received)); p.looked++ {
		worst = max(worst, p.received[p.looked].Sub(p.sent[p.looked]))
	}
	p.slowest = max(p.slowest, worst)
	return worst
}

// worst is awaitAll when nothing may be late.
func (p *probe) worst() time.Duration {
	p.t.Helper()
	worst := p.awaitAll()
	require.Less(p.t, worst, maxDelay)
	return worst
}

// count returns how many have arrived.
func (p *probe) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.received)
}

// end stops publishing, and returns how many there were and the longest delay.
func (p *probe) end() (n int, slowest time.Duration) {
	p.t.Helper()
	p.stop()
	p.worst()
	p.mu.Lock()
	defer p.mu.Unlock()
	require.Len(p.t, p.received, len(p.sent), "more than were sent")
	return len(p.sent), p.slowest
}

// TestLiveBounds tries what keeps a reader of the WAL from going on, or makes it
// take what is not its own, one after the other: the creation of a slot waits for
// the transactions of all databases. A probe shows that messages keep coming.
func TestLiveBounds(t *testing.T) {
	t.Parallel()

	server := pgtest.Own(t, pgtest.Options{Settings: map[string]string{"logical_decoding_work_mem": "64kB"}})
	for _, test := range []struct {
		name string
		run  func(t *testing.T, f *fixture)
	}{
		{"a long transaction keeps too much WAL", testLongTransactionPinsWAL},
		{"much WAL at once", testMuchWALAtOnce},
		{"a huge transaction of another table", testHugeForeignTransaction},
		{"a large transaction of messages", testLargeTransaction},
		{"a huge transaction of messages", testHugeTransaction},
		{"rows of all sizes", testRowsOfAllSizes},
		{"changes that are no messages", testChangesThatAreNoMessages},
		{"a new partition", testNewPartition},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, fixtureAt(t, pgtest.DatabaseOn(t, server))) })
	}
}

// slots counts the slots of streams, in all databases of the server.
func (f *fixture) slots() int {
	f.t.Helper()
	return f.number(`SELECT count(*)::int FROM pg_replication_slots WHERE slot_name LIKE 'watermill\_outbox\_%'`)
}

// A transaction that somebody has forgotten keeps the slot's WAL, however prompt
// its reader is, until the disk is full. Its slot is given up, for as long as
// the transaction lasts, and the reason says which one it is.
func testLongTransactionPinsWAL(t *testing.T, f *fixture) {
	consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) {
		c.Mode, c.MaxSlotWAL = outbox.ModeAuto, outbox.MinMaxSlotWAL
	})
	p := f.probe(t, consumer)
	awaitLive(t, consumer)
	f.writeWAL(0)
	late := &lateTransaction{f: f, t: t}
	late.begin()
	late.exec("INSERT INTO public.ballast VALUES (1, 'forgotten')")
	f.exec("CHECKPOINT") // the slot moves up to the transaction, and no further
	f.writeWAL(24)
	awaitPolling(t, consumer, "a transaction has been running for long")
	var xid string
	require.NoError(t, late.tx.QueryRow(t.Context(), "SELECT pg_current_xact_id()::text").Scan(&xid))
	require.Contains(t, consumer.Status().Reason, xid)
	closing, streams := p.worst(), len(book.find("Messages are read from the WAL"))
	require.Eventually(t, func() bool { return f.slots() == 0 }, waitFor, 5*time.Millisecond, "the slot is still there")

	// Nor is there another one while it goes on.
	f.writeWAL(24)
	f.exec("CHECKPOINT")
	sent := p.count()
	require.Eventually(t, func() bool { return p.count() > sent+60 }, waitFor, time.Millisecond)
	require.Zero(t, f.slots())
	polling := p.worst()
	require.Len(t, book.find("Messages are read from the WAL"), streams)
	late.commit()
	begin := time.Now()
	awaitLive(t, consumer)
	again := time.Since(begin)
	n, slowest := p.end()
	t.Logf("%d messages, latest %s: %s when the stream was closed, %s while polled; live again %s after the transaction's end", n, slowest, closing, polling, again)
}

// A slot moves when the server notes which transactions run, every 15 s. What is
// written in between is kept without anybody being to blame, least of all a
// transaction that has just begun: the stream stays until it is far too much.
func testMuchWALAtOnce(t *testing.T, f *fixture) {
	consumer, book := f.loggedConsumer(f.pool.Config(), func(c *outbox.ConsumerConfig) {
		c.Mode, c.MaxSlotWAL = outbox.ModeAuto, outbox.MinMaxSlotWAL
	})
	p := f.probe(t, consumer)
	awaitLive(t, consumer)
	ctx, cancel := context.WithCancel(t.Context())
	var others sync.WaitGroup
	others.Go(func() { // there always is a short transaction
		for ctx.Err() == nil {
			_, err := f.pool.Exec(context.WithoutCancel(ctx), "SELECT pg_current_xact_id(), pg_sleep(0.05)")
			assert.NoError(t, err)
		}
	})
	defer others.Wait()
	defer cancel()
	said := func() []logEntry { return book.find("Messages are polled: the slot keeps too much WAL") }
	// Twice the bound, for as long as it takes to look at the slot twice.
	f.writeWAL(32)
	before, begin := p.count(), time.Now()
	require.Eventually(t, func() bool { return p.count() > before+100 && time.Since(begin) > 5*time.Second }, waitFor, time.Millisecond)
	awaitLive(t, consumer)
	require.Empty(t, book.find("Messages are polled: a transaction has been running"), "nobody is to blame")
	require.Empty(t, said())
	much := p.worst()
	megabytes := 0
	for ; len(said()) == 0 && megabytes < 800; megabytes += 8 {
		f.writeWAL(8)
		f.awaitDecoded(t, consumer)
	}
	awaitPolling(t, consumer, "the slot keeps too much WAL")
	require.Eventually(t, func() bool { return f.slots() == 0 }, waitFor, 5*time.Millisecond, "the slot is still there")
	require.Empty(t, book.find("Messages are polled: a transaction has been running"), "nobody is to blame")
	n, slowest := p.end()
	t.Logf("%d messages, latest %s, %s live with much WAL; given up %d MB later: %s", n, slowest, much, megabytes, said()[0].Text)
}

// A nightly job updates a large table, and the server sends nothing until it has
// decoded all of that, to throw it away.
func testHugeForeignTransaction(t *testing.T, f *fixture) {
	f.exec("CREATE TABLE public.orders AS SELECT n, 0 AS version FROM generate_series(1, 300000) n")
	consumer, book := f.loggedConsumer(f.pool.Config(), readsWAL)
	p := f.probe(t, consumer)
	awaitLive(t, consumer)
	f.exec("UPDATE public.orders SET version = version + 1")
	f.awaitReceived(t, consumer)
	awaitLive(t, consumer)
	n, slowest := p.end()
	t.Logf("%d messages, latest %s, polled %d times", n, slowest, len(book.find("Topic is polled")))
}

// Elsewhere a transaction that is decoded in pieces loses the last row of each,
// or what is rolled back is delivered. Nothing of a transaction comes before its
// commit, everything after it, and nothing after a rollback; others do not wait
// for it. Field case F16.
func testLargeTransaction(t *testing.T, f *fixture) {
	const chunks, perChunk, others = 20, 1000, 10
	consumer := f.consumer(readsWAL)
	p := f.probe(t, consumer)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	awaitLive(t, consumer)
	publisher := f.publisher(outbox.PublisherConfig{})
	other := 0
	requireOthers := func(n int) {
		t.Helper()
		for range n {
			other--
			require.NoError(t, publisher.Publish("topic", numbered(other, 1)))
			require.Equal(t, other, numberOf(t, receive(t, messages, 1)[0]))
		}
	}
	var delays []time.Duration
	for _, commits := range []bool{true, false} {
		late := &lateTransaction{f: f, t: t}
		late.begin()
		for chunk := range chunks {
			batch := make([]*message.Message, perChunk)
			for i := range batch {
				batch[i] = numbered(chunk*perChunk+i, 200)
			}
			require.NoError(t, publishIn(t.Context(), publisher, late.tx, "topic", batch...))
			requireOthers(others)
		}
		if commits {
			late.commit()
			for n := range chunks * perChunk {
				require.Equal(t, n, numberOf(t, receive(t, messages, 1)[0]), "lost, repeated or out of order")
			}
		} else {
			require.NoError(t, late.tx.Rollback(t.Context()))
		}
		requireOthers(1)
		delays = append(delays, p.worst())
		awaitLive(t, consumer)
		require.Eventually(t, func() bool {
			return f.number("SELECT coalesce(sum(spill_txns), 0)::int FROM pg_stat_replication_slots") > 0
		}, waitFor, 10*time.Millisecond, "it was not decoded in pieces: the test proves nothing")
	}
	n, _ := p.end()
	t.Logf("probe: %d messages, latest %s with the commit, %s with the rollback", n, delays[0], delays[1])
}

// A transaction of many megabytes, here sixty, is held in memory until its last
// row is there, the process is killed for it, and so is the next one. Field case
// F36.
func testHugeTransaction(t *testing.T, f *fixture) {
	const rows, size, liveBytes = 30_000, 2000, 4 << 20
	c := f.startLiveChild(t, liveChildConfig{Topic: "topic", LiveBytes: liveBytes, PausesEvery: 5000, Pause: 200 * time.Millisecond})
	require.Equal(t, childLive, await(t, c.lines))
	consumer := f.consumer(readsWAL)
	p := f.probe(t, consumer)
	begin := time.Now()
	f.exec(`INSERT INTO outbox.messages (topic, uuid, payload)
		SELECT 'topic', n::text, convert_to(n || ' ' || repeat('x', $2), 'UTF8') FROM generate_series(0, $1 - 1) n`, rows, size)
	written := time.Since(begin)
	for n := range rows {
		require.Equal(t, childMessage+strconv.Itoa(n), await(t, c.lines), "lost, repeated or out of order")
	}
	took := time.Since(begin)
	n, slowest := p.end()
	c.stop()
	line := await(t, c.lines)
	heap, err := strconv.Atoi(strings.TrimPrefix(line, childHeap))
	require.NoError(t, err, line)
	_, more := <-c.lines
	require.False(t, more)
	require.NoError(t, c.wait())
	t.Logf("%d messages of %d bytes in %s, of which %s for writing; heap at most %d MB; probe: %d messages, latest %s",
		rows, size, took, written, heap>>20, n, slowest)
	require.Less(t, heap, 32<<20)
}

// A row of many megabytes cannot be decoded, and everything behind it waits for
// ever; or an update of one makes it come again, without its content, which is
// not in the WAL then. Field cases F34, F42.
func testRowsOfAllSizes(t *testing.T, f *fixture) {
	consumer := f.consumer(readsWAL)
	p := f.probe(t, consumer)
	_, live := f.subscribe(consumer, outbox.SubscriberConfig{ConsumerGroup: "live"}, "topic")
	_, polled := f.subscribe(f.consumer(func(c *outbox.ConsumerConfig) { c.Mode = outbox.ModePoll }),
		outbox.SubscriberConfig{ConsumerGroup: "polled"}, "topic")
	small := f.consumer(func(c *outbox.ConsumerConfig) { c.Mode, c.LiveBytes = outbox.ModeAuto, outbox.MinLiveBytes })
	_, refused := f.subscribe(small, outbox.SubscriberConfig{ConsumerGroup: "refused"}, "topic")
	publisher := f.publisher(outbox.PublisherConfig{})
	var delays []string
	for _, size := range []int{1, 1 << 20, 64 << 20} {
		awaitLive(t, consumer)
		awaitLive(t, small)
		payload := make([]byte, size)
		_, err := rand.Read(payload)
		require.NoError(t, err)
		msg := message.NewMessage(watermill.NewUUID(), payload)
		require.NoError(t, publisher.Publish("topic", msg))
		for name, messages := range map[string]<-chan *message.Message{"live": live, "polled": polled, "refused": refused} {
			got := receive(t, messages, 1)[0]
			require.Equal(t, msg.UUID, got.UUID)
			require.True(t, bytes.Equal(payload, got.Payload), "%s: another payload", name)
		}
		source := subscriptionOf(t, consumer, "topic").Source // the table, if it was too much at once
		for i := range 3 {
			f.exec("UPDATE outbox.messages SET attempt = $2 WHERE uuid = $1", msg.UUID, i+1)
		}
		delays = append(delays, fmt.Sprintf("%s with %d bytes (%s)", p.worst(), size, source))
	}
	last := newMessages(1)
	require.NoError(t, publisher.Publish("topic", last...))
	for _, messages := range []<-chan *message.Message{live, polled, refused} {
		requireNext(t, messages, last...)
	}
	n, _ := p.end()
	t.Logf("probe: %d messages, latest %s", n, strings.Join(delays, ", "))
}

// Somebody adds tables and actions to the publication, and a slot whose reader
// ignores what it does not know, without saying so to the server, keeps all of
// it; as it does when other tables are busy and the outbox is not. Field cases
// F19, F20, F34.
func testChangesThatAreNoMessages(t *testing.T, f *fixture) {
	publication := quoteIdentifier(oddSchema)
	f.exec("CREATE TABLE public.second (n int PRIMARY KEY, content text)")
	f.execRaw("ALTER PUBLICATION " + publication + " ADD TABLE public.second")
	f.execRaw("ALTER PUBLICATION " + publication + " SET (publish = 'insert, update, delete, truncate')")
	for _, partition := range f.partitions() {
		f.exec("ALTER TABLE outbox." + quoteIdentifier(partition) + " REPLICA IDENTITY FULL")
	}
	consumer := f.consumer(readsWAL)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	awaitLive(t, consumer)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := []*message.Message{numbered(1, 1<<20), numbered(2, 1)}
	require.NoError(t, publisher.Publish("topic", sent...))
	requireNext(t, messages, sent...)

	awaitConfirmed := func() time.Duration {
		t.Helper()
		begin := time.Now()
		f.exec("CHECKPOINT")
		require.Eventually(t, func() bool {
			return f.number(`SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), confirmed_flush_lsn)::int FROM pg_replication_slots
				WHERE slot_name = $1`, consumer.Status().Slot) < 1<<20
		}, 15*time.Second, 10*time.Millisecond, "the slot stays behind")
		require.Eventually(t, func() bool {
			f.exec("CHECKPOINT")
			return f.slotState(t).retained < 32<<20
		}, waitFor, 50*time.Millisecond, "the slot keeps WAL")
		return time.Since(begin)
	}
	f.exec("INSERT INTO public.second SELECT n, repeat('x', 500) FROM generate_series(1, 20000) n")
	f.exec("UPDATE public.second SET content = 'y'")
	f.exec("DELETE FROM public.second WHERE n % 2 = 0")
	for range 3 {
		f.exec("UPDATE outbox.messages SET attempt = attempt + 1")
	}
	f.exec("DELETE FROM outbox.messages WHERE uuid = $1", sent[1].UUID)
	f.exec("TRUNCATE public.second")
	published := awaitConfirmed()
	f.writeWAL(64)
	unpublished := awaitConfirmed()

	last := newMessages(1)
	require.NoError(t, publisher.Publish("topic", last...))
	requireNext(t, messages, last...)
	awaitLive(t, consumer)
	t.Logf("confirmed and let go of %s after changes of published tables, %s after 64 MB of another", published, unpublished)
}

// All goes well until the next partition begins: it is not published, or its
// rows come under its own name and are thrown away. Field case F32.
func testNewPartition(t *testing.T, f *fixture) {
	consumer := f.consumer(readsWAL)
	p := f.probe(t, consumer)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	awaitLive(t, consumer)
	slot := consumer.Status().Slot
	f.exec("CREATE TABLE outbox.later PARTITION OF outbox.messages FOR VALUES FROM ('2100-01-01') TO ('2101-01-01')")
	f.exec("INSERT INTO outbox.messages (topic, uuid, created_at) VALUES ('topic', 'through the parent', '2100-02-01')")
	require.Equal(t, "through the parent", receive(t, messages, 1)[0].UUID)
	f.exec(`INSERT INTO outbox.later (id, topic, uuid, created_at) OVERRIDING SYSTEM VALUE
		VALUES (nextval($1::text::regclass), 'topic', 'directly', '2100-03-01')`, quoteIdentifier(oddSchema)+".messages_id_seq")
	require.Equal(t, "directly", receive(t, messages, 1)[0].UUID)
	n, slowest := p.end()
	awaitLive(t, consumer)
	require.Equal(t, slot, consumer.Status().Slot, "it is another stream")
	t.Logf("probe: %d messages, latest %s", n, slowest)
}

// TestLivePatience tries what takes a while and little else: what a person
// has to repair is looked at no more often.
func TestLivePatience(t *testing.T) {
	t.Parallel()

	server := pgtest.Own(t, pgtest.Options{})
	t.Run("the publication is changed", func(t *testing.T) {
		t.Parallel()
		testPublicationIsChanged(t, server)
	})
	t.Run("a handler takes longer than the sender waits", func(t *testing.T) {
		t.Parallel()
		testHandlerTakesLong(t, fixtureAt(t, pgtest.DatabaseOn(t, server)))
	})
}

// A publication that is altered under the stream leaves rows out in silence, and
// one that was dropped ends it, or not, as versions go; and when it is back, the
// server looks it up as of the change that it decodes, and fails for ever. All
// that is published meanwhile arrives, the reason is there to be read, and the
// stream comes back after the repair. Field cases F31, F100.
func testPublicationIsChanged(t *testing.T, server *pgtest.Server) {
	type attempt struct {
		breaks, repairs string
		// reason is what is said of it, "" if it is repaired at once.
		reason   string
		f        *fixture
		consumer *outbox.Consumer
		book     *logBook
		probe    *probe
	}
	table := quoteIdentifier(oddSchema) + ".messages"
	alter := "ALTER PUBLICATION " + quoteIdentifier(oddSchema)
	drop, create := "DROP PUBLICATION "+quoteIdentifier(oddSchema), publicationSQL(t, oddSchema)
	all := []*attempt{
		{breaks: alter + " DROP TABLE " + table, repairs: alter + " ADD TABLE " + table, reason: "without table messages"},
		{breaks: alter + " DROP TABLE " + table, repairs: alter + " ADD TABLE " + table},
		{breaks: alter + " SET (publish = 'update')", repairs: alter + " SET (publish = 'insert')", reason: "without inserts"},
		{
			breaks: alter + " SET (publish_via_partition_root = false)", repairs: alter + " SET (publish_via_partition_root = true)",
			reason: "not via the partition root",
		},
		{breaks: drop, repairs: create, reason: "missing"},
		{breaks: drop, repairs: create},
	}
	if fixtureAt(t, pgtest.DatabaseOn(t, server)).number("SELECT current_setting('server_version_num')::int") >= 150000 {
		all = append(all,
			&attempt{breaks: alter + " SET TABLE " + table + " WHERE (topic = 'another')", repairs: alter + " SET TABLE " + table, reason: "with a row filter"},
			&attempt{breaks: alter + " SET TABLE " + table + " (id, xid, topic)", repairs: alter + " SET TABLE " + table, reason: "with a column list"})
	}
	for _, a := range all {
		a.f = fixtureAt(t, pgtest.DatabaseOn(t, server))
		a.consumer, a.book = a.f.loggedConsumer(a.f.pool.Config(), readsWAL)
		a.probe = a.f.probe(t, a.consumer)
	}
	said := func(a *attempt) int {
		n := 0
		for _, entry := range a.book.find("Messages are polled") {
			if strings.Contains(entry.Text, "publication") && strings.Contains(entry.Text, a.reason) {
				n++
			}
		}
		return n
	}
	for _, a := range all {
		awaitLive(t, a.consumer)
		a.f.execRaw(a.breaks)
		if a.reason == "" {
			a.f.execRaw(a.repairs)
		}
	}
	for _, a := range all {
		if a.reason == "" {
			require.Eventually(t, func() bool { return said(a) > 0 }, waitFor, 5*time.Millisecond, "%s: no reason was given", a.breaks)
			continue
		}
		awaitPolling(t, a.consumer, a.reason)
		require.NoError(t, a.consumer.Status().Ready(), "messages come, if by another way")
		a.probe.worst()
		a.f.execRaw(a.repairs)
	}
	repaired := time.Now()
	var delays []string
	for _, a := range all {
		awaitStatus(t, a.consumer, 60*time.Second, func(s outbox.Status) bool {
			return s.Source == outbox.SourceWAL && s.Subscriptions[0].Source == outbox.SourceWAL
		})
		_, slowest := a.probe.end()
		delays = append(delays, slowest.String())
		if a.reason != "" {
			require.Equal(t, 1, said(a), "%+v", a.book.find("Messages are polled"))
		}
	}
	t.Logf("latest %s; all live again %s after the repair", strings.Join(delays, ", "), time.Since(repaired))
}

// A handler takes its time with the first message of a large transaction, the
// server hears nothing meanwhile, ends the stream, and sends the same
// transaction again, for ever. Field case F35.
func testHandlerTakesLong(t *testing.T, f *fixture) {
	const rows, pause = 20_000, 12 * time.Second // the server waits for 10 s
	consumer := f.consumer(readsWAL)
	p := f.probe(t, consumer)
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	awaitLive(t, consumer)
	slot := consumer.Status().Slot
	f.exec(`INSERT INTO outbox.messages (topic, uuid, payload)
		SELECT 'topic', n::text, convert_to(n || ' ' || repeat('x', 500), 'UTF8') FROM generate_series(0, $1 - 1) n`, rows)
	first := nextMessage(t, messages)
	time.Sleep(pause) // it is what the test is about
	require.True(t, first.Ack())
	for n := 1; n < rows; n++ {
		require.Equal(t, n, numberOf(t, receive(t, messages, 1)[0]), "lost, repeated or out of order")
	}
	require.Equal(t, slot, consumer.Status().Slot, "it is another stream")
	n, slowest := p.end()
	t.Logf("%d messages behind one that took %s, on one stream; probe: %d messages, latest %s", rows, pause, n, slowest)
}
