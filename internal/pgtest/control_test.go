package pgtest

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestRestart(t *testing.T) {
	t.Parallel()
	s := Own(t, Options{})
	url := DatabaseOn(t, s)
	run(t, url, "CREATE TABLE kept (n int)")

	t.Run("fast", func(t *testing.T) {
		conn, err := pgx.Connect(t.Context(), url)
		require.NoError(t, err)
		_, err = conn.Exec(t.Context(), "INSERT INTO kept VALUES (1)")
		require.NoError(t, err)
		require.NoError(t, s.Restart(t.Context(), Fast))
		require.Error(t, conn.Ping(t.Context()))
		require.Equal(t, 1, query[int](t, url, "SELECT count(*) FROM kept"))
		require.False(t, recovered(t, s), "a shutdown is no crash")
	})

	t.Run("crash", func(t *testing.T) {
		run(t, url, "INSERT INTO kept VALUES (2)")
		require.NoError(t, s.Restart(t.Context(), Immediate))
		require.Equal(t, 2, query[int](t, url, "SELECT count(*) FROM kept"))
		require.True(t, recovered(t, s))
	})

	t.Run("kill", func(t *testing.T) {
		// Sessions at work do not notice the postmaster's death at once; Kill
		// waits for them, or the next start would fail.
		conn, err := pgx.Connect(t.Context(), url)
		require.NoError(t, err)
		defer conn.Close(context.WithoutCancel(t.Context()))
		run(t, url, "INSERT INTO kept VALUES (3)")
		require.NoError(t, s.Kill(t.Context()))
		require.ErrorIs(t, s.Kill(t.Context()), ErrDown)
		require.NoError(t, s.StartAgain(t.Context()))
		require.Equal(t, 3, query[int](t, url, "SELECT count(*) FROM kept"))
		require.True(t, recovered(t, s))
	})

	t.Run("down for a while", func(t *testing.T) {
		require.ErrorIs(t, s.StartAgain(t.Context()), ErrRunning)
		require.NoError(t, s.Shutdown(t.Context(), Fast))
		_, err := new(net.Dialer).DialContext(t.Context(), "tcp", s.Addr())
		require.Error(t, err)
		require.ErrorIs(t, s.Shutdown(t.Context(), Fast), ErrDown)
		require.ErrorIs(t, s.Restart(t.Context(), Fast), ErrDown)
		require.NoError(t, s.StartAgain(t.Context()))
		require.Equal(t, 3, query[int](t, url, "SELECT count(*) FROM kept"))
	})

	t.Run("smart", func(t *testing.T) {
		conn, err := pgx.Connect(t.Context(), url)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, s.Shutdown(ctx, Smart), context.DeadlineExceeded, "a client is still there")
		require.NoError(t, conn.Close(t.Context()))
		<-s.sup.running().gone
		require.NoError(t, s.StartAgain(t.Context()))
	})
}

// recovered reports whether the server had to recover when it last started.
func recovered(t *testing.T, s *Server) bool {
	t.Helper()
	log, err := os.ReadFile(s.LogFile())
	require.NoError(t, err)
	runs := strings.Split(string(log), "LOG:  starting PostgreSQL")
	return strings.Contains(runs[len(runs)-1], "automatic recovery in progress")
}

// status returns what the postmaster says about itself on the last line of its
// lock file.
func status(t *testing.T, s *Server) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(s.DataDir(), "postmaster.pid"))
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}

// Any number of goroutines may change the server's state, and Stop ends them
// all.
func TestControlStress(t *testing.T) {
	t.Parallel()
	s := Own(t, Options{})
	changes := []func() error{
		func() error { return s.Restart(t.Context(), Immediate) },
		func() error { return s.Restart(t.Context(), Fast) },
		func() error { return s.Shutdown(t.Context(), Fast) },
		func() error { return s.Kill(t.Context()) },
		func() error { return s.StartAgain(t.Context()) },
		func() error { return s.StartAgain(t.Context()) },
	}
	var wg sync.WaitGroup
	var changed atomic.Int32
	enough := make(chan struct{})
	for _, change := range changes {
		wg.Go(func() {
			for {
				err := change()
				if errors.Is(err, ErrStopped) {
					return
				}
				if err != nil && !errors.Is(err, ErrDown) && !errors.Is(err, ErrRunning) {
					t.Error(err)
					return
				}
				if err == nil && changed.Add(1) == 20 {
					close(enough)
				}
			}
		})
	}
	<-enough
	for range 3 {
		wg.Go(func() {
			if err := s.Stop(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.NoDirExists(t, s.DataDir())
}

// Stop must not wait for a shutdown that waits for a client.
func TestStopDuringShutdown(t *testing.T) {
	t.Parallel()
	s := Own(t, Options{})
	conn, err := pgx.Connect(t.Context(), s.URL())
	require.NoError(t, err)
	defer conn.Close(context.WithoutCancel(t.Context()))
	shutdown := make(chan error)
	go func() { shutdown <- s.Shutdown(t.Context(), Smart) }()
	eventually(t, func() bool { return status(t, s) == "stopping" }, "not shutting down")
	require.NoError(t, s.Stop())
	require.NoError(t, <-shutdown)
}

func TestReconfigure(t *testing.T) {
	t.Parallel()
	s := Own(t, Options{})
	require.NoError(t, s.Reconfigure(t.Context(), map[string]string{"max_replication_slots": "3"}))
	require.Equal(t, "3", query[string](t, s.URL(), "SHOW max_replication_slots"))

	err := s.Reconfigure(t.Context(), map[string]string{"max_connections": "many"})
	require.ErrorContains(t, err, "max_connections")
	require.NoError(t, s.StartAgain(t.Context()), "the bad setting was taken back")
	require.Equal(t, "3", query[string](t, s.URL(), "SHOW max_replication_slots"))
	require.Equal(t, "300", query[string](t, s.URL(), "SHOW max_connections"))

	require.ErrorContains(t, s.Reconfigure(t.Context(), map[string]string{"port": "1"}), "can't be overridden")

	require.NoError(t, s.Shutdown(t.Context(), Fast))
	require.NoError(t, s.Reconfigure(t.Context(), map[string]string{"max_replication_slots": "4"}))
	require.Nil(t, s.sup.running(), "down, it stays down")
	require.NoError(t, s.StartAgain(t.Context()))
	require.Equal(t, "4", query[string](t, s.URL(), "SHOW max_replication_slots"))
}

// The clients know the server's port, so it waits for that rather than take
// another one.
func TestStartAgainWaitsForItsPort(t *testing.T) {
	t.Parallel()
	s := Own(t, Options{})
	require.NoError(t, s.Shutdown(t.Context(), Fast))
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", s.Addr())
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, s.StartAgain(ctx), context.DeadlineExceeded)

	started := make(chan error)
	go func() { started <- s.StartAgain(t.Context()) }()
	require.NoError(t, l.Close())
	require.NoError(t, <-started)
}
