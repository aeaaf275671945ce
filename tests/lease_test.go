package tests

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/lease"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// A process that was stopped for longer than its lease (a debugger, a laptop's
// lid, a machine that migrates) wakes up when another one has gone on with its
// topics, and the first thing that works again is the renewal of its beat. What
// it held is lost all the same: it hands out nothing, and stores nothing over
// the position of its successor. Field cases F92 and F93.
func TestProcessThatWasStoppedForLongerThanItsLease(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	g := f.startChildren(t, 2, "topic", time.Second)
	last := 0
	publish := func(n int) {
		publishNumbers(t, publisher, "topic", last+1, last+n)
		last += n
	}
	// take waits for the latest number and counts what came from whom.
	delivered := map[string]int{}
	take := func() map[*child]int {
		from := map[*child]int{}
		for {
			l := g.next()
			delivered[l.line]++
			from[l.child]++
			if l.line == strconv.Itoa(last) {
				return from
			}
		}
	}
	for range 3 {
		publish(10)
		from := take()
		require.Len(t, from, 1, "two processes had the topic at once")
		f.awaitStored(t, "topic")
		var stopped *child
		for stopped = range from {
		}
		stopped.suspend()
		publish(10)
		from = take()
		require.Zero(t, from[stopped])
		f.awaitStored(t, "topic")

		stopped.resume()
		// It has renewed its beat, and looked at the topic.
		f.awaitBeats(t, stopped, 2)
		publish(10)
		from = take()
		require.Zero(t, from[stopped], "it handed out what another process has")
		f.awaitStored(t, "topic")
	}
	for i := 1; i <= last; i++ {
		require.Equal(t, 1, delivered[strconv.Itoa(i)], "number %d", i)
	}
}

// awaitBeats waits until a child has renewed its beat n times.
func (f *fixture) awaitBeats(t testing.TB, c *child, n int) {
	t.Helper()
	beat := func() int {
		return f.number("SELECT beat::int FROM outbox.processes WHERE pid = $1", c.command.Process.Pid)
	}
	before := beat()
	require.Eventually(t, func() bool { return beat() >= before+n }, waitFor, 5*time.Millisecond, "the process does not renew its beat")
}

// A cursor's row that goes away under a running subscriber ends its lease: the
// message in flight is told so, its ack counts for nothing, and nothing more is
// handed out. Whoever subscribes again begins anew.
func TestCursorDeletedUnderARunningSubscriber(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(5)
	require.NoError(t, publisher.Publish("topic", sent...))
	consumer, book := f.loggedConsumer(f.pool.Config(), nil)
	subscriber, messages := f.subscribe(consumer, outbox.SubscriberConfig{CloseTimeout: time.Millisecond}, "topic")
	requireNext(t, messages, sent[0])
	f.awaitAt(t, sent[0].UUID)
	f.exec("DELETE FROM outbox.cursors")
	requireNext(t, messages, sent[1])
	// The next checkpoint finds out.
	inFlight := nextMessage(t, messages)
	select {
	case <-inFlight.Context().Done():
	case <-time.After(waitFor):
		require.FailNow(t, "the message in flight was not told")
	}
	require.True(t, errors.Is(contextCause(inFlight), lease.ErrLost))
	lost := book.await(t, 1, "Topic lost")[0]
	require.Contains(t, lost.Text, `group "default", topic "topic"`)
	require.Equal(t, "topic", lost.Fields["topic"])
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.cursors"), "a checkpoint must not insert")

	require.NoError(t, subscriber.Close())
	_, open := <-messages
	require.False(t, open, "nothing was handed out after that")
	_, messages = f.subscribe(consumer, outbox.SubscriberConfig{}, "topic")
	requireNext(t, messages, sent...)
}

// awaitAt waits until the stored position covers a message.
func (f *fixture) awaitAt(t testing.TB, uuid string) {
	t.Helper()
	require.Eventually(t, func() bool {
		return f.number(`SELECT count(*)::int FROM outbox.cursors c JOIN outbox.messages m ON m.topic = c.topic WHERE m.uuid = $1
			AND (pg_visible_in_snapshot(m.xid, c.p) OR (c.step = 'main' AND pg_visible_in_snapshot(m.xid, c.c) AND m.id <= c.at))`, uuid) == 1
	}, waitFor, 2*time.Millisecond, "the position was not stored")
}

func contextCause(msg *message.Message) error { return context.Cause(msg.Context()) }

// statementHolder is a proxy's hook that holds back the answers to a statement.
type statementHolder struct {
	text string

	mu    sync.Mutex
	names map[int]string // the prepared statement, by connection
	asked map[int]bool   // it was executed there and is not answered
	open  chan struct{}
	held  chan struct{} // closed when the first answer is held back
	once  sync.Once
}

func newStatementHolder(text string) *statementHolder {
	return &statementHolder{text: text, names: map[int]string{}, asked: map[int]bool{}, open: make(chan struct{}), held: make(chan struct{})}
}

func (h *statementHolder) client(msg pgtest.Message) {
	parts := strings.SplitN(string(msg.Body), "\x00", 3)
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case msg.Type == 'P' && len(parts) > 1 && strings.Contains(parts[1], h.text):
		h.names[msg.Conn] = parts[0]
	case msg.Type == 'B' && len(parts) > 1:
		if name, ok := h.names[msg.Conn]; ok && parts[1] == name {
			h.asked[msg.Conn] = true
		}
	}
}

func (h *statementHolder) server(msg pgtest.Message) pgtest.Action {
	h.mu.Lock()
	asked := h.asked[msg.Conn]
	h.mu.Unlock()
	if asked {
		h.once.Do(func() { close(h.held) })
		<-h.open
	}
	return pgtest.Forward
}

// The answer to a claim may take long, too, while the beat is not renewed. When
// both come through again, somebody else has taken the cursor, and the claim is
// worth nothing.
func TestClaimAnsweredAfterTheLease(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	proxy := f.proxy(t)
	const claimText, lookText, beatText = "FOR UPDATE OF c SKIP LOCKED", "FROM wanted w", "SET beat = p.beat + 1"
	holder := newStatementHolder(claimText)
	release := sync.OnceFunc(func() { close(holder.open) })
	defer release()
	var noBeat atomic.Bool
	proxy.OnServer(holder.server)
	proxy.OnClient(func(msg pgtest.Message) pgtest.Action {
		holder.client(msg)
		if noBeat.Load() && msg.Type == 'P' && strings.Contains(string(msg.Body), beatText) {
			return pgtest.Cut
		}
		return pgtest.Forward
	})
	shortLease := func(c *outbox.ConsumerConfig) { c.Lease = outbox.MinLease }
	db, err := pgxpool.ParseConfig(proxy.URL(f.url))
	require.NoError(t, err)
	// Each beat is a text of its own, so that it can be told from the others.
	db.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	looks := &statementCounter{text: lookText}
	db.ConnConfig.Tracer = looks
	slow := f.consumerOn(db, shortLease)
	_, slowly := f.subscribe(slow, outbox.SubscriberConfig{}, "topic")
	await(t, holder.held)
	noBeat.Store(true)

	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(2)
	_, quickly := f.subscribe(f.consumer(shortLease), outbox.SubscriberConfig{}, "topic")
	require.NoError(t, publisher.Publish("topic", sent[0]))
	requireNext(t, quickly, sent[0])

	noBeat.Store(false)
	beats := func() int {
		return f.number(`SELECT coalesce(sum(p.beat), 0)::int FROM outbox.processes p
			WHERE NOT EXISTS (SELECT FROM outbox.cursors c WHERE c.holder = p.holder)`)
	}
	before := beats()
	require.Eventually(t, func() bool { return beats() > before }, waitFor, 5*time.Millisecond, "the slow one does not renew its beat again")
	asked := looks.n.Load()
	release()
	// It finds out, and looks again, or hands out what it must not.
	for looks.n.Load() < asked+2 {
		select {
		case <-slowly:
			require.FailNow(t, "a message was handed out beside the one who has the topic")
		case <-time.After(time.Millisecond):
		}
	}
	require.NoError(t, publisher.Publish("topic", sent[1]))
	requireNext(t, quickly, sent[1])
}
