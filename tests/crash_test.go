package tests

import (
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// TestServerCrash crashes the server under publishers whose commits were not
// yet on disk, while the consumer lives on: the server forgets them and issues
// their transaction ids and message ids again, to other messages. A consumer
// that goes on with what it has in memory takes those for handled. Whatever the
// table holds in the end must have arrived.
func TestServerCrash(t *testing.T) {
	t.Parallel()

	f, _ := newOwnFixture(t, pgtest.Options{Settings: map[string]string{
		"synchronous_commit": "off", "bgwriter_lru_maxpages": "0", "max_connections": "50",
	}})
	// By polling: what comes from the WAL is safe, see
	// TestCrashForgetsNothingThatCameFromTheWAL.
	consumer := f.consumer(func(c *outbox.ConsumerConfig) {
		c.CheckpointInterval, c.Mode = 10*time.Millisecond, outbox.ModePoll
	})
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{PageSize: 20}, "topic")

	type delivery struct {
		id   int64
		uuid string
	}
	delivered := make(chan delivery, 10_000)
	go func() {
		for msg := range messages {
			d, _ := outbox.DeliveryFromCtx(msg.Context())
			delivered <- delivery{d.ID, msg.UUID}
			msg.Ack()
		}
		close(delivered)
	}()
	uuidOf := map[int64]string{} // as delivered first
	got := map[string]int{}
	reissued := 0
	take := func(d delivery) {
		got[d.uuid]++
		if earlier, ok := uuidOf[d.id]; ok && earlier != d.uuid {
			reissued++
		}
		uuidOf[d.id] = d.uuid
	}

	const rounds, perRound = 3, 150
	publisher := f.publisher(outbox.PublisherConfig{})
	publish := func() (sent []string) {
		for range perRound {
			msg := message.NewMessage(watermill.NewUUID(), nil)
			require.NoError(t, publisher.Publish("topic", msg))
			sent = append(sent, msg.UUID)
		}
		return sent
	}
	// The tables survive, and so does the lease.
	require.NoError(t, publisher.Publish("topic", newMessages(1)...))
	take(<-delivered)
	f.exec("CHECKPOINT")
	forgotten := 0
	for range rounds {
		walwriter := f.stopWalwriter()
		for _, uuid := range publish() {
			for got[uuid] == 0 {
				select {
				case d := <-delivered:
					take(d)
				case <-time.After(waitFor):
					require.FailNow(t, "message missing before the crash")
				}
			}
		}
		stored := f.number("SELECT count(*)::int FROM outbox.messages")
		require.NoError(t, syscall.Kill(walwriter, syscall.SIGKILL))
		left := stored
		require.Eventually(t, func() bool {
			f.pool.Reset()
			err := f.pool.QueryRow(t.Context(), f.sql("SELECT count(*)::int FROM outbox.messages")).Scan(&left)
			return err == nil && left < stored
		}, waitFor, 5*time.Millisecond, "the server did not recover without what was not on disk")
		forgotten += stored - left
	}
	publish()

	rows, err := f.pool.Query(t.Context(), f.sql("SELECT uuid FROM outbox.messages"))
	require.NoError(t, err)
	var uuid string
	missing := map[string]bool{}
	for rows.Next() {
		require.NoError(t, rows.Scan(&uuid))
		if got[uuid] == 0 {
			missing[uuid] = true
		}
	}
	require.NoError(t, rows.Err())
	timeout := time.After(waitFor)
	for len(missing) > 0 {
		select {
		case d := <-delivered:
			take(d)
			delete(missing, d.uuid)
		case <-timeout:
			require.FailNow(t, "messages lost", "%d messages of the table never arrived", len(missing))
		}
	}
	t.Logf("crashes=%d forgotten=%d delivered=%d ids_issued_again=%d lost=0", rounds, forgotten, len(got), reissued)
	require.Positive(t, reissued, "no id was issued twice: the test proves nothing")
}

// stopWalwriter stops the process that writes asynchronous commits to disk, and
// returns its id. Without it they stay in memory; killing it then is a crash of
// the server, which recovers by itself.
func (f *fixture) stopWalwriter() int {
	f.t.Helper()
	pid := f.number("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'")
	require.NoError(f.t, syscall.Kill(pid, syscall.SIGSTOP))
	return pid
}
