package tests

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/replication"
)

// A durable slot goes on behind what was confirmed, and nowhere else.
func TestReplicationResume(t *testing.T) {
	t.Parallel()
	c := newCapture(t, `CREATE TABLE t (id text)`)
	conn := c.connect()
	c.create(conn, false)
	reader := c.start(conn, replication.Options{})
	for _, id := range []string{"1", "2", "3"} {
		c.exec(`INSERT INTO t VALUES ($1), ($1 || 'b')`, id)
	}
	var commits []*replication.Commit
	for range 3 {
		commits = append(commits, commitOf(transaction(t, reader)))
	}
	// The end of the first is confirmed; the second's own position is not its
	// end.
	require.NoError(t, reader.Confirm(commits[0].EndLSN))
	require.NoError(t, reader.Close())
	reader = c.reopen(replication.Options{})
	require.Equal(t, []string{"2", "2b"}, inserted(transaction(t, reader)))
	require.Equal(t, []string{"3", "3b"}, inserted(transaction(t, reader)))

	require.NoError(t, reader.Confirm(commits[1].CommitLSN))
	require.NoError(t, reader.Close())
	reader = c.reopen(replication.Options{})
	require.Equal(t, []string{"2", "2b"}, inserted(transaction(t, reader)), "the commit's own position is one too few")
	require.Equal(t, []string{"3", "3b"}, inserted(transaction(t, reader)))

	// Nothing is confirmed by receiving, nor by keepalives.
	for range 3 {
		reader.Ping()
		time.Sleep(20 * time.Millisecond)
	}
	require.Zero(t, reader.Stats().Sent)
	require.Greater(t, reader.Stats().Received, commits[2].CommitLSN)
	c.exec(`SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1`, c.slot)
	_, err := tryNext(t, reader)
	require.ErrorIs(t, err, replication.ErrShutdown)
	reader = c.reopen(replication.Options{})
	require.Equal(t, []string{"2", "2b"}, inserted(transaction(t, reader)))
	require.Equal(t, []string{"3", "3b"}, inserted(transaction(t, reader)))

	// A position that was kept elsewhere may be ahead of the slot's.
	require.NoError(t, reader.Close())
	conn = c.connect()
	reader, err = replication.StartReader(t.Context(), conn, c.slot, commits[1].EndLSN, replication.Options{Publications: []string{oddPublication}})
	require.NoError(t, err)
	require.Equal(t, []string{"3", "3b"}, inserted(transaction(t, reader)))
	require.NoError(t, reader.Confirm(commits[2].EndLSN))
	require.NoError(t, reader.Close())

	reader = c.reopen(replication.Options{})
	c.exec(`INSERT INTO t VALUES ('4')`)
	require.Equal(t, []string{"4"}, inserted(transaction(t, reader)), "no repeats after a clean end")
}

// A stream for which there is nothing in the WAL must not keep the WAL.
func TestReplicationKeepaliveMovesQuietSlot(t *testing.T) {
	t.Parallel()
	c := newCapture(t, `CREATE TABLE quiet (id text); CREATE TABLE busy (id text); CREATE PUBLICATION quiet FOR TABLE quiet`)
	conn := c.connect()
	c.create(conn, false)
	reader, err := replication.StartReader(t.Context(), conn, c.slot, 0, replication.Options{Publications: []string{"quiet"}})
	require.NoError(t, err)
	defer reader.Close()
	c.exec(`INSERT INTO busy SELECT repeat('x', 1000) FROM generate_series(1, 20000)`)
	var written replication.LSN
	require.NoError(t, c.pool.QueryRow(t.Context(), `SELECT pg_current_wal_lsn()`).Scan(&written))
	// The position may lie a little behind the last record. This makes more.
	c.exec(`INSERT INTO busy VALUES ('x')`)
	for reader.Stats().Sent.Flush < written {
		event, err := reader.Next(t.Context())
		require.NoError(t, err)
		switch event := event.(type) {
		case *replication.Keepalive:
			require.NoError(t, reader.Confirm(event.WALEnd))
			reader.SendStatus()
		case *replication.Commit: // of nothing, before PostgreSQL 15
			require.NoError(t, reader.Confirm(event.EndLSN))
		}
	}
	require.Eventually(t, func() bool {
		slot, err := replication.InspectSlot(t.Context(), c.pool, c.slot)
		require.NoError(t, err)
		return slot.ConfirmedFlushLSN >= written
	}, waitFor, 10*time.Millisecond)
}

// A consumer that is stuck for longer than the server is patient is neither cut
// off nor late with anything.
func TestReplicationStuckConsumer(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t, pgtest.Options{Settings: map[string]string{"wal_sender_timeout": "2s"}})
	for name, rows := range map[string]int{"idle": 10, "under load": 60_000} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := captureOn(t, server, `CREATE TABLE t (id text, filler text)`)
			conn := c.connect()
			c.create(conn, true)
			reader := c.start(conn, replication.Options{QueueBytes: 1 << 20})
			// More than the queue and the buffers of the network hold.
			c.exec(`INSERT INTO t SELECT i::text, repeat('x', 1000) FROM generate_series(1, $1::int) i`, rows)
			time.Sleep(7 * time.Second)
			require.NoError(t, reader.Err())
			stats := reader.Stats()
			require.Equal(t, rows > 1000, !stats.Paused.IsZero())
			require.Less(t, stats.Queued, 1<<20+2000)
			events := transaction(t, reader)
			ids := inserted(events)
			require.Len(t, ids, rows)
			require.Equal(t, strconv.Itoa(rows), ids[rows-1])
			require.NoError(t, reader.Confirm(commitOf(events).EndLSN))
			require.NoError(t, reader.Close())
		})
	}
}

// A handler in the stream's own goroutine, as the fastest way.
func TestReplicationHandler(t *testing.T) {
	t.Parallel()
	c := newCapture(t, `CREATE TABLE t (id text)`)
	conn := c.connect()
	c.create(conn, true)
	enough := errors.New("enough")
	var ids []string
	stream, err := replication.Start(t.Context(), conn, c.slot, 0, replication.Options{Publications: []string{oddPublication}}, func(event replication.Event) error {
		if insert, ok := event.(*replication.Insert); ok {
			ids = append(ids, texts(insert.New)[0])
		}
		if len(ids) == 1000 {
			return enough
		}
		return nil
	})
	require.NoError(t, err)
	for i := range 1000 {
		c.exec(`INSERT INTO t VALUES ($1::int)`, i)
	}
	await(t, stream.Done())
	require.Equal(t, enough, stream.Err())
	for i, id := range ids {
		require.Equal(t, strconv.Itoa(i), id)
	}
	c.slotIsGone()
}

// Shut down, crashed or restarted: the stream ends with an error after which one
// may try again, and nothing is lost.
func TestReplicationServerRestart(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t, pgtest.Options{})
	c := captureOn(t, server, `CREATE TABLE t (id text)`)
	conn := c.connect()
	c.create(conn, false)
	reader := c.start(conn, replication.Options{})
	for i, mode := range []pgtest.Mode{pgtest.Fast, pgtest.Immediate} {
		c.exec(`INSERT INTO t VALUES ($1::int)`, i)
		// Confirmations may be lost with the server, and transactions repeat.
		for id := ""; id != strconv.Itoa(i); {
			events := transaction(t, reader)
			id = inserted(events)[0]
			require.NoError(t, reader.Confirm(commitOf(events).EndLSN))
		}
		stop := confirmAll(t, reader)
		require.NoError(t, server.Restart(t.Context(), mode))
		<-reader.Done()
		stop()
		err := reader.Err()
		t.Log(mode, err)
		require.True(t, replication.IsRetryable(err), err)
		require.False(t, replication.IsSlotGone(err))
		require.Eventually(t, func() bool {
			_, err := c.pool.Exec(t.Context(), `SELECT 1`) // its connections are dead
			return err == nil
		}, waitFor, 10*time.Millisecond)
		reader = c.reopen(replication.Options{})
	}
	c.exec(`INSERT INTO t VALUES ('last')`)
	for id := ""; id != "last"; {
		id = inserted(transaction(t, reader))[0]
	}
}

// confirmAll takes and confirms everything until the stream ends. A server that
// shuts down in an orderly way waits for that.
func confirmAll(t testing.TB, reader *replication.Reader) (wait func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			event, err := reader.Next(t.Context())
			if err != nil {
				return
			}
			switch event := event.(type) {
			case *replication.Commit:
				_ = reader.Confirm(event.EndLSN) // the stream may have ended
			case *replication.Keepalive:
				_ = reader.Confirm(event.WALEnd)
				reader.SendStatus()
			}
		}
	}()
	return func() { await(t, done) }
}

// A consumer that is stuck holds an orderly shutdown of the server back, but not
// for longer than StallTimeout.
func TestReplicationStalledConsumerAndShutdown(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t, pgtest.Options{})
	c := captureOn(t, server, `CREATE TABLE t (id text)`)
	conn := c.connect()
	c.create(conn, false)
	reader := c.start(conn, replication.Options{QueueBytes: 1 << 20, StallTimeout: 3 * time.Second})
	c.exec(`INSERT INTO t SELECT repeat('x', 1000) FROM generate_series(1, 30000)`)
	require.Eventually(t, func() bool { return !reader.Stats().Paused.IsZero() }, waitFor, 5*time.Millisecond)
	began := time.Now()
	require.NoError(t, server.Shutdown(t.Context(), pgtest.Fast))
	took := time.Since(began)
	<-reader.Done()
	require.ErrorIs(t, reader.Err(), replication.ErrStalled)
	require.Greater(t, took, time.Second, "the server waits for the consumer")
	require.Less(t, took, 10*time.Second)
}

// The network fails in the middle of a transaction: that comes again, whole, and
// nothing before it.
func TestReplicationCutInTransaction(t *testing.T) {
	t.Parallel()
	c := newCapture(t, `CREATE TABLE t (id text)`)
	proxy := pgtest.NewProxy(t, pgtest.Shared(t).Addr())
	conn := connectAt(t, proxy.URL(c.url), replication.ConnectOptions{})
	c.create(conn, false)
	rows := 0
	proxy.OnServer(func(m pgtest.Message) pgtest.Action {
		if m.Type == 'd' && m.Body[0] == 'w' && m.Body[25] == 'I' {
			rows++
			if rows == 51 {
				return pgtest.Cut
			}
		}
		return pgtest.Forward
	})
	reader := c.start(conn, replication.Options{})
	c.exec(`INSERT INTO t VALUES ('before')`)
	before := transaction(t, reader)
	require.NoError(t, reader.Confirm(commitOf(before).EndLSN))
	reader.SendStatus()
	require.Eventually(t, func() bool {
		slot, err := replication.InspectSlot(t.Context(), c.pool, c.slot)
		return err == nil && slot.ConfirmedFlushLSN == commitOf(before).EndLSN
	}, waitFor, time.Millisecond)
	c.exec(`INSERT INTO t SELECT i::text FROM generate_series(1, 100) i`)
	var got []string
	var err error
	for err == nil {
		var event replication.Event
		if event, err = tryNext(t, reader); err == nil {
			got = append(got, inserted([]replication.Event{event})...)
		}
	}
	require.ErrorIs(t, err, replication.ErrConnectionLost)
	// What had arrived, unless the reset has swept it away.
	require.Less(t, len(got), 50)
	for i, id := range got {
		require.Equal(t, strconv.Itoa(i+1), id)
	}

	reader = c.reopen(replication.Options{})
	events := transaction(t, reader)
	require.Len(t, inserted(events), 100)
	require.Equal(t, "1", inserted(events)[0])
}

// A network that swallows everything is noticed by ReceiveTimeout.
func TestReplicationBlackHole(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t, pgtest.Options{Settings: map[string]string{"wal_sender_timeout": "2s"}})
	c := captureOn(t, server, `CREATE TABLE t (id text)`)
	proxy := pgtest.NewProxy(t, server.Addr())
	conn := connectAt(t, proxy.URL(c.url), replication.ConnectOptions{})
	c.create(conn, false)
	reader := c.start(conn, replication.Options{ReceiveTimeout: time.Second})
	c.exec(`INSERT INTO t VALUES ('1')`)
	require.Equal(t, []string{"1"}, inserted(transaction(t, reader)))
	time.Sleep(2 * time.Second)
	require.NoError(t, reader.Err(), "a server without news is not silent")
	proxy.Pause()
	began := time.Now()
	c.exec(`INSERT INTO t VALUES ('2')`)
	_, err := tryNext(t, reader)
	require.ErrorIs(t, err, replication.ErrServerSilent)
	require.Less(t, time.Since(began), 3*time.Second)
	<-reader.Done()
	// The server notices by its own time-out, and until then has the slot.
	reader = c.reopen(replication.Options{})
	require.Equal(t, []string{"1"}, inserted(transaction(t, reader)))
	require.Equal(t, []string{"2"}, inserted(transaction(t, reader)))
}

// A slot that is dropped under its consumer.
func TestReplicationSlotDropped(t *testing.T) {
	t.Parallel()
	c := newCapture(t, `CREATE TABLE t (id text)`)
	conn := c.connect()
	c.create(conn, false)
	reader := c.start(conn, replication.Options{})
	c.exec(`SELECT pg_terminate_backend($1)`, conn.PID())
	<-reader.Done()
	require.Eventually(t, func() bool {
		_, err := c.pool.Exec(t.Context(), `SELECT pg_drop_replication_slot($1)`, c.slot)
		return err == nil
	}, waitFor, 10*time.Millisecond)
	_, err := replication.StartReader(t.Context(), c.connect(), c.slot, 0, replication.Options{Publications: []string{oddPublication}})
	require.ErrorIs(t, err, replication.ErrSlotMissing)
	require.True(t, replication.IsSlotGone(err))
	require.False(t, replication.IsRetryable(err))
}

func TestReplicationPublicationMissing(t *testing.T) {
	t.Parallel()
	c := newCapture(t, `CREATE TABLE t (id text)`)
	ctx := t.Context()
	conn := c.connect()
	c.create(conn, false)
	_, err := replication.StartReader(ctx, conn, c.slot, 0, replication.Options{Publications: []string{oddPublication, "none"}})
	require.ErrorIs(t, err, replication.ErrPublicationMissing)
	require.ErrorContains(t, err, `"none"`)
	require.True(t, replication.IsMisconfigured(err))

	if conn.ServerVersion() >= 18 {
		// The server warns in its log, and sends nothing.
		reader := c.start(conn, replication.Options{})
		c.exec(`DROP PUBLICATION ` + pgx.Identifier{oddPublication}.Sanitize())
		c.exec(`INSERT INTO t VALUES ('unseen')`)
		var written replication.LSN
		require.NoError(t, c.pool.QueryRow(ctx, `SELECT pg_current_wal_flush_lsn()`).Scan(&written))
		require.Eventually(t, func() bool {
			reader.Ping()
			event, err := reader.Next(ctx)
			require.NoError(t, err)
			keepalive, ok := event.(*replication.Keepalive)
			require.True(t, ok, "%T", event)
			return keepalive.WALEnd >= written
		}, waitFor, 10*time.Millisecond)
		return
	}
	// Created after the change, it is missing as of the change.
	c.exec(`INSERT INTO t VALUES ('1')`)
	c.exec(`CREATE PUBLICATION late FOR TABLE t`)
	reader, err := replication.StartReader(ctx, conn, c.slot, 0, replication.Options{Publications: []string{"late"}})
	require.NoError(t, err)
	defer reader.Close()
	for err == nil {
		_, err = tryNext(t, reader)
	}
	require.ErrorIs(t, err, replication.ErrPublicationMissing)
	require.ErrorContains(t, err, "late")
	require.False(t, replication.IsRetryable(err))

	// Dropped under the stream, which has read it already.
	reader = c.reopen(replication.Options{})
	require.Equal(t, []string{"1"}, inserted(transaction(t, reader)))
	c.exec(`DROP PUBLICATION ` + pgx.Identifier{oddPublication}.Sanitize())
	c.exec(`INSERT INTO t VALUES ('2')`)
	for err = nil; err == nil; {
		_, err = tryNext(t, reader)
	}
	require.ErrorIs(t, err, replication.ErrPublicationMissing)
}

// A transaction of any size passes in bounded memory. Not parallel: it measures
// the heap of the process.
func TestReplicationHugeTransaction(t *testing.T) {
	rows := 300_000
	if text := os.Getenv("OUTBOX_TEST_HUGE_ROWS"); text != "" {
		var err error
		rows, err = strconv.Atoi(text)
		require.NoError(t, err)
	}
	c := newCapture(t, `CREATE TABLE t (id int8, filler text)`)
	reader := c.stream(replication.Options{Binary: true, QueueBytes: 4 << 20})
	c.exec(`INSERT INTO t SELECT i, repeat('x', 200) FROM generate_series(1, $1::int) i`, rows)
	runtime.GC()
	before := liveHeap()
	began := time.Now()
	var peak uint64
	next := uint64(1)
	var final replication.LSN
	inside := 0
	for done := false; !done; {
		event, err := reader.Next(t.Context())
		require.NoError(t, err)
		switch event := event.(type) {
		case *replication.Begin:
			final = event.FinalLSN
		case *replication.Keepalive:
			// To confirm it does not confirm the transaction.
			if final != 0 {
				require.LessOrEqual(t, event.WALEnd, final)
				require.NoError(t, reader.Confirm(event.WALEnd))
				inside++
			}
		case *replication.Insert:
			data := event.New[0].Data
			id := uint64(0)
			for _, b := range data {
				id = id<<8 | uint64(b)
			}
			if id != next {
				require.Equal(t, next, id)
			}
			next++
			if next%10_000 == 0 {
				peak = max(peak, liveHeap())
				reader.Ping()
			}
			if next == 1000 {
				// Until no more is taken in, which is to be long before the end.
				for queued := -1; queued != reader.Stats().Queued; time.Sleep(200 * time.Millisecond) {
					queued = reader.Stats().Queued
				}
				runtime.GC()
				peak = max(peak, liveHeap())
			}
		case *replication.Commit:
			done = true
		}
	}
	require.Equal(t, rows+1, int(next))
	grown := int64(peak) - int64(before)
	t.Logf("%d rows and %d keepalives in %s; heap in use at most %.1f MB more than before, %.1f MB in all",
		rows, inside, time.Since(began).Round(time.Millisecond), float64(grown)/1e6, float64(peak)/1e6)
	require.Less(t, grown, int64(12<<20))
}

// A single row much larger than the queue.
func TestReplicationHugeRow(t *testing.T) {
	t.Parallel()
	c := newCapture(t, `CREATE TABLE t (id text, filler text); ALTER TABLE t ALTER filler SET STORAGE EXTERNAL`)
	reader := c.stream(replication.Options{QueueBytes: 1 << 10})
	const size = 32 << 20
	for i := range 3 {
		c.exec(`INSERT INTO t VALUES ($1::int, repeat('x', $2::int)), ('small', '')`, i, size)
		events := transaction(t, reader)
		require.Equal(t, []string{strconv.Itoa(i), "small"}, inserted(events))
		require.Len(t, events[1].(*replication.Insert).New[1].Data, size)
	}
}

// Close is prompt, whatever goes on.
func TestReplicationClose(t *testing.T) {
	t.Parallel()
	c := newCapture(t, `CREATE TABLE t (id text PRIMARY KEY, filler text)`)
	c.exec(`INSERT INTO t SELECT i::text, repeat('x', 1000) FROM generate_series(1, 20000) i`)
	states := []struct {
		name  string
		reach func(*replication.Reader)
	}{
		{"just started", func(*replication.Reader) {}},
		{"idle", func(*replication.Reader) { time.Sleep(50 * time.Millisecond) }},
		{"in the middle of a transaction", func(reader *replication.Reader) {
			c.exec(`UPDATE t SET filler = filler || 'y'`)
			nextAs[*replication.Begin](t, reader)
		}},
		{"with a full queue", func(reader *replication.Reader) {
			c.exec(`UPDATE t SET filler = filler || 'z'`)
			require.Eventually(t, func() bool { return !reader.Stats().Paused.IsZero() }, waitFor, time.Millisecond)
		}},
		{"while somebody waits in Next", func(reader *replication.Reader) {
			go func() {
				for {
					if _, err := reader.Next(context.Background()); err != nil {
						return
					}
				}
			}()
		}},
	}
	for _, state := range states {
		conn := c.connect()
		c.create(conn, true)
		reader := c.start(conn, replication.Options{QueueBytes: 64 << 10})
		state.reach(reader)
		began := time.Now()
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if err := reader.Close(); err != nil {
					t.Errorf("%s: %v", state.name, err)
				}
			})
		}
		wg.Wait()
		require.Less(t, time.Since(began), time.Second, state.name)
		require.ErrorIs(t, reader.Err(), replication.ErrClosed)
		_, err := replication.InspectSlot(t.Context(), c.pool, c.slot)
		require.ErrorIs(t, err, replication.ErrSlotMissing, "%s: when Close returns the slot is gone", state.name)
	}
}

// Many writers with savepoints and rollbacks, a stream that is cut again and
// again, and a consumer that keeps what it confirmed: each committed row comes,
// in the order of the commits, and exactly once in terms of what is confirmed.
func TestReplicationWorkload(t *testing.T) {
	t.Parallel()
	c := newCapture(t, `CREATE TABLE t (id text, n int); CREATE TABLE counter (n int PRIMARY KEY); INSERT INTO counter VALUES (0)`)
	proxy := pgtest.NewProxy(t, pgtest.Shared(t).Addr())
	conn := c.connect()
	c.create(conn, false)
	require.NoError(t, conn.Close(t.Context()))

	ctx := t.Context()
	stop := time.Now().Add(1500 * time.Millisecond)
	var writers sync.WaitGroup
	for w := range 6 {
		writers.Go(func() {
			for i := 0; time.Now().Before(stop); i++ {
				if err := write(ctx, c, fmt.Sprintf("%d-%d", w, i)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	finished := make(chan struct{})
	go func() {
		writers.Wait()
		c.exec(`INSERT INTO t VALUES ('end', 0)`)
		close(finished)
	}()
	defer func() { <-finished }()

	var got []string
	cuts, last := 0, 0
	for ended := false; !ended; {
		conn, err := tryConnect(ctx, proxy.URL(c.url), replication.ConnectOptions{})
		require.NoError(t, err)
		reader, err := replication.StartReader(ctx, conn, c.slot, 0, replication.Options{Publications: []string{oddPublication}})
		if err != nil {
			require.ErrorIs(t, err, replication.ErrSlotInUse)
			require.NoError(t, conn.Close(ctx))
			time.Sleep(5 * time.Millisecond)
			continue
		}
		life := time.AfterFunc(time.Duration(rand.IntN(200))*time.Millisecond, proxy.CutAll)
		var open []string
		for {
			event, err := reader.Next(ctx)
			if err != nil {
				require.ErrorIs(t, err, replication.ErrConnectionLost)
				break
			}
			switch event := event.(type) {
			case *replication.Begin:
				open = nil
			case *replication.Insert:
				if event.Relation.Name == "t" {
					open = append(open, texts(event.New)[0])
				}
			case *replication.Update: // of the counter, whose lock orders the commits
				n, err := strconv.Atoi(texts(event.New)[0])
				require.NoError(t, err)
				require.LessOrEqual(t, n, last+1)
				last = n
			case *replication.Commit:
				if !confirmAtOnce(c, reader, event.EndLSN) {
					continue // it will come again
				}
				got = append(got, open...)
				ended = ended || len(open) > 0 && open[0] == "end"
			}
			if ended {
				break
			}
		}
		cuts++
		life.Stop()
		require.NoError(t, reader.Close())
	}
	rows, err := c.pool.Query(ctx, `SELECT id FROM t`)
	require.NoError(t, err)
	want, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.ElementsMatch(t, want, got)
	for _, id := range got {
		require.NotContains(t, id, "undone")
	}
	t.Logf("%d rows over %d streams", len(got), cuts)
}

// confirmAtOnce reports whether the slot has certainly moved.
func confirmAtOnce(c *capture, reader *replication.Reader, lsn replication.LSN) bool {
	if reader.Confirm(lsn) != nil {
		return false
	}
	reader.SendStatus()
	for reader.Err() == nil {
		slot, err := replication.InspectSlot(c.t.Context(), c.pool, c.slot)
		require.NoError(c.t, err)
		if slot.ConfirmedFlushLSN >= lsn {
			return true
		}
	}
	// Cut before it was certain: look once more, when the server has let go.
	var slot replication.SlotInfo
	require.Eventually(c.t, func() bool {
		var err error
		slot, err = replication.InspectSlot(c.t.Context(), c.pool, c.slot)
		require.NoError(c.t, err)
		return slot.ActivePID == 0
	}, waitFor, time.Millisecond)
	return slot.ConfirmedFlushLSN >= lsn
}

// write writes a transaction, some of it or all of it in vain.
func write(ctx context.Context, c *capture, id string) error {
	tx, err := c.pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(ctx)
	if _, err := tx.Exec(ctx, `INSERT INTO t VALUES ($1, 1)`, id); err != nil {
		return err
	}
	if rand.IntN(3) == 0 {
		inner, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		if _, err := inner.Exec(ctx, `INSERT INTO t VALUES ($1, 2)`, id+"-undone"); err != nil {
			return err
		}
		if err := inner.Rollback(ctx); err != nil {
			return err
		}
	}
	if rand.IntN(4) == 0 {
		return nil // rolled back
	}
	if rand.IntN(2) == 0 {
		if _, err := tx.Exec(ctx, `UPDATE counter SET n = n + 1`); err != nil {
			return err
		}
	}
	return tx.Commit(ctx)
}
