package tests

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// TestKill kills the consuming process at random points, again and again, under
// a stream of concurrent transactions. Nothing may be lost; nothing comes again
// that the position covered which was stored at the time of the kill; order per
// key holds apart from the repeats. OUTBOX_TEST_KILLS sets how often.
func TestKill(t *testing.T) {
	t.Parallel()

	const writers, topic = 4, "changes"
	const lease = time.Second
	kills := number("OUTBOX_TEST_KILLS", 50)
	f := newFixture(t)
	w := newWorkload(t, f, topic, 20, writers)
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, 0))

	writing, stopWriting := context.WithCancel(t.Context())
	written := make(chan struct{})
	go func() {
		defer close(written)
		w.run(t, writing, writers, seed)
	}()
	defer func() {
		stopWriting()
		<-written
	}()

	var l ledger
	delivered, covered := map[change]bool{}, map[change]bool{}
	repeated := 0
	take := func(line string) {
		l.record(t, message.NewMessage("", []byte(line)))
		var c change
		require.NoError(t, json.Unmarshal([]byte(line), &c))
		if delivered[c] {
			repeated++
		}
		require.False(t, covered[c], "%v came again although the stored position covered it; seed %d", c, seed)
		delivered[c] = true
	}

	for i := range kills {
		c := f.startChild(t, topic, lease)
		end := 1 + random.IntN(60) // messages until the kill
		next := func() {
			select {
			case line, ok := <-c.lines:
				require.True(t, ok, "child ended by itself: %v", c.command.ProcessState)
				take(line)
			case <-time.After(waitFor):
				require.FailNow(t, "no message from the child")
			}
		}
		for range end {
			next()
		}
		if i%2 == 1 { // not before it has stored a position
			for stored := len(covered); len(w.covered(t)) <= stored; {
				next()
			}
		}
		c.kill()
		for line := range c.lines {
			take(line)
		}
		require.Error(t, c.wait())
		for _, c := range w.covered(t) {
			covered[c] = true
		}
	}
	stopWriting()
	<-written

	c := f.startChild(t, topic, lease)
	committed := f.number("SELECT count(*)::int FROM outbox.messages WHERE topic = $1", topic)
	for len(delivered) < committed {
		select {
		case line, ok := <-c.lines:
			require.True(t, ok)
			take(line)
		case <-time.After(waitFor):
			require.FailNow(t, "messages lost", "%d of %d arrived; seed %d", len(delivered), committed, seed)
		}
	}
	c.stop()
	for line := range c.lines {
		take(line)
	}
	require.NoError(t, c.wait())

	// After a clean stop nothing comes again.
	before := l.len()
	c = f.startChild(t, topic, lease)
	w.run(t, withTimeout(t, 100*time.Millisecond), 1, seed+1)
	committed = f.number("SELECT count(*)::int FROM outbox.messages WHERE topic = $1", topic)
	require.Greater(t, committed, len(delivered))
	afterStop := repeated
	for len(delivered) < committed {
		select {
		case line := <-c.lines:
			take(line)
		case <-time.After(waitFor):
			require.FailNow(t, "messages lost after a clean stop")
		}
	}
	c.stop()
	for line := range c.lines {
		take(line)
	}
	require.NoError(t, c.wait())
	require.Equal(t, afterStop, repeated, "repeated after a clean stop")
	require.Greater(t, l.len(), before)

	v := w.judge(t, &l)
	t.Logf("seed=%d kills=%d repeated=%d %s", seed, kills, repeated, v)
	require.Zero(t, v.Lost, "lost")
	require.Zero(t, v.Invented, "invented")
	require.Zero(t, v.OutOfOrder, "out of order")
	require.NotEmpty(t, covered, "no position was ever stored")
	require.Less(t, repeated, v.Committed, "everything came again: positions are hardly ever stored")
}

// covered returns the messages that the stored position says were handed out:
// the definition of a position, in SQL.
func (w *workload) covered(t *testing.T) []change {
	t.Helper()
	rows, err := w.f.pool.Query(t.Context(), w.f.sql(`
		SELECT m.payload FROM outbox.messages m JOIN outbox.cursors c ON c.topic = m.topic
		WHERE m.topic = $1 AND (
			pg_visible_in_snapshot(m.xid, c.p)
			OR (c.step = 'late' AND pg_visible_in_snapshot(m.xid, c.c) AND m.id <= c.at)
			OR (c.step = 'main' AND pg_visible_in_snapshot(m.xid, c.c) AND m.id <= greatest(c.at, c.floor)))`), w.topic)
	require.NoError(t, err)
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (c change, err error) {
		var payload []byte
		if err := row.Scan(&payload); err != nil {
			return c, err
		}
		return c, json.Unmarshal(payload, &c)
	})
	require.NoError(t, err)
	return list
}

func withTimeout(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
