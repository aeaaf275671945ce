package main

import (
	"context"
	"io"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// The soak says that upkeep kept no writer waiting. Here somebody does, and it says
// whether that was upkeep.
func TestSoakSeesWritersThatWaitForUpkeep(t *testing.T) {
	t.Parallel()

	var running servers
	t.Cleanup(func() { require.NoError(t, running.stop()) })
	b := &bench{
		options: options{rounds: 1, scale: 1}, progress: io.Discard,
		server: func(ctx context.Context) (*pgtest.Server, error) { return running.get(ctx, false) },
	}
	d, err := b.database(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.close(t.Context())) }()
	connect := func(name string) *pgx.Conn { return d.connectAs(t, name) }
	exec := func(conn *pgx.Conn, sql string) {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	looking := connect("looking")
	// until looks until it has seen what it should.
	until := func(w *soakWatch, seen func() bool) {
		for began := time.Now(); !seen(); time.Sleep(time.Millisecond) {
			require.NoError(t, w.lookAtLocks(t.Context(), looking))
			require.Less(t, time.Since(began), meterPatience)
		}
	}
	queue := func(conn *pgx.Conn, sql string) <-chan error {
		done := make(chan error, 1)
		go func() {
			_, err := conn.Exec(t.Context(), sql)
			done <- err
		}()
		return done
	}
	const publish = "INSERT INTO outbox.messages (topic, uuid, payload) VALUES ('orders', 'u', 'x')"
	const lockAll = "LOCK TABLE outbox.messages IN ACCESS EXCLUSIVE MODE"
	holder, writer, between := connect(soakConsumerName), connect(soakWriterName), connect("between")

	// Somebody else of that name: a page that is read, say.
	w := &soakWatch{database: d}
	exec(holder, "BEGIN")
	exec(holder, lockAll)
	done := queue(writer, publish)
	until(w, func() bool { return w.byAll > soakMaxWait })
	require.Zero(t, w.byUpkeep)

	// Upkeep itself.
	exec(holder, "SELECT 1 AS upkeep_drop")
	until(w, func() bool { return w.byUpkeep > soakMaxWait })
	require.Contains(t, w.culprit, "upkeep_drop")
	exec(holder, "ROLLBACK")
	require.NoError(t, <-done)

	// Somebody who waits for upkeep, with the writer behind in the queue.
	w = &soakWatch{database: d}
	exec(holder, "BEGIN")
	exec(holder, "LOCK TABLE outbox.messages IN ACCESS SHARE MODE")
	exec(holder, "SELECT 1 AS upkeep_look")
	exec(between, "BEGIN")
	locked := queue(between, lockAll)
	until(w, func() bool {
		var waiting bool
		require.NoError(t, looking.QueryRow(t.Context(),
			"SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'between' AND wait_event_type = 'Lock')").Scan(&waiting))
		return waiting
	})
	require.Zero(t, w.byAll)
	done = queue(writer, publish)
	until(w, func() bool { return w.byUpkeep > soakMaxWait })
	require.Contains(t, w.culprit, "upkeep_look")
	exec(holder, "ROLLBACK")
	require.NoError(t, <-locked)
	exec(between, "ROLLBACK")
	require.NoError(t, <-done)
}

func TestSoakThirds(t *testing.T) {
	t.Parallel()

	w := &soakWatch{}
	for second := range 12 {
		w.samples = append(w.samples, soakSample{at: time.Duration(second) * time.Second, log: float64(second)})
	}
	size := func(s soakSample) float64 { return s.log }
	middle, last := w.thirds(9*time.Second, size)
	require.Equal(t, series{5}, middle)
	require.Equal(t, series{8}, last, "what comes later does not count")
	middle, last = w.thirds(36*time.Second, size)
	require.Nil(t, middle)
	require.Nil(t, last)
}

// connectAs opens a connection of an application of this name, until the test ends.
func (d *database) connectAs(t *testing.T, name string) *pgx.Conn {
	t.Helper()
	config, err := pgx.ParseConfig(d.url())
	require.NoError(t, err)
	config.RuntimeParams["application_name"] = name
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}
