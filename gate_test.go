package outbox

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// fakeHosts counts the attempts at each address.
type fakeHosts struct {
	mu       sync.Mutex
	down     map[string]bool
	attempts map[string]int
	takes    time.Duration
}

var errDown = errors.New("connection refused")

func (h *fakeHosts) dial(ctx context.Context, _, address string) (net.Conn, error) {
	h.mu.Lock()
	h.attempts[address]++
	down := h.down[address]
	h.mu.Unlock()
	select {
	case <-time.After(h.takes):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if down {
		return nil, errDown
	}
	client, server := net.Pipe()
	return client, server.Close()
}

// A host that is down for half a minute sees few attempts, however many topics
// would connect, and is found again soon. Field case F47.
func TestGateSpacesAttempts(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		hosts := &fakeHosts{down: map[string]bool{"a": true}, attempts: map[string]int{}}
		g := newGate(hosts.dial)
		dial := func(ctx context.Context, address string) (net.Conn, *attempt, error) {
			a := &attempt{gate: g, judge: true, tried: map[string]bool{}}
			conn, err := a.dial(ctx, "tcp", address)
			return conn, a, err
		}
		ctx, cancel := context.WithCancel(t.Context())
		var topics sync.WaitGroup
		for range 50 {
			topics.Go(func() {
				for ctx.Err() == nil {
					conn, attempt, err := dial(ctx, "a")
					if err != nil {
						require.ErrorIs(t, err, errDown)
						time.Sleep(100 * time.Millisecond)
						continue
					}
					attempt.begun()
					require.NoError(t, conn.Close())
					return
				}
			})
		}
		time.Sleep(30 * time.Second)
		hosts.mu.Lock()
		require.LessOrEqual(t, hosts.attempts["a"], 50+15, "the first of each came together, before anything was known")
		hosts.down["a"] = false
		hosts.mu.Unlock()
		begin := time.Now()
		topics.Wait()
		cancel()
		require.LessOrEqual(t, time.Since(begin), gateRetry.Max+time.Second)
	})
}

// A proxy whose server is down takes every connection and closes it.
func TestGateCountsSessions(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		hosts := &fakeHosts{attempts: map[string]int{}}
		g := newGate(hosts.dial)
		dial := func(ctx context.Context, address string) (net.Conn, *attempt, error) {
			a := &attempt{gate: g, judge: true, tried: map[string]bool{}}
			conn, err := a.dial(ctx, "tcp", address)
			return conn, a, err
		}
		began := time.Now()
		for time.Since(began) < 30*time.Second {
			conn, _, err := dial(t.Context(), "a")
			if err != nil {
				require.ErrorIs(t, err, errNoSession)
				time.Sleep(10 * time.Millisecond)
				continue
			}
			_, _, err = dial(t.Context(), "a")
			if hosts.attempts["a"] > 2 {
				require.ErrorIs(t, err, errNoSession, "one at a time")
			} else {
				require.NoError(t, err, "nothing is known yet")
			}
			require.NoError(t, conn.Close())
		}
		require.LessOrEqual(t, hosts.attempts["a"], 15+5)
		time.Sleep(gateRetry.Max)
		conn, attempt, err := dial(t.Context(), "a")
		require.NoError(t, err)
		attempt.begun()
		require.NoError(t, conn.Close())
		for range 3 {
			_, _, err = dial(t.Context(), "a")
			require.NoError(t, err)
		}
	})
}

// One connection may take several dials: TLS first and then without, and, when a
// session has begun, another one to cancel a statement. None is held back or
// counted.
func TestGateLetsAnAttemptDialAgain(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		hosts := &fakeHosts{attempts: map[string]int{}}
		g := newGate(hosts.dial)
		a := &attempt{gate: g, judge: true, tried: map[string]bool{}}
		conn, err := a.dial(t.Context(), "tcp", "a")
		require.NoError(t, err)
		conn.(*gatedConn).noTLS.Store(true)
		require.NoError(t, conn.Close())
		require.Empty(t, g.hosts, "a server without TLS is not down")
		_, err = a.dial(t.Context(), "tcp", "a")
		require.NoError(t, err)
		a.begun()
		require.Empty(t, g.hosts)
		for range 3 {
			conn, err = a.dial(t.Context(), "tcp", "a")
			require.NoError(t, err)
			require.NoError(t, conn.Close())
			require.Empty(t, g.hosts)
		}
	})
}

// A server without TLS answers N, and the connection is closed for that.
func TestGateKnowsServersWithoutTLS(t *testing.T) {
	t.Parallel()

	client, server := net.Pipe()
	g := newGate(func(context.Context, string, string) (net.Conn, error) { return client, nil })
	a := &attempt{gate: g, judge: true, tried: map[string]bool{}}
	conn, err := a.dial(t.Context(), "tcp", "a")
	require.NoError(t, err)
	go func() { _, _ = server.Write([]byte("N")) }() // read below
	b := make([]byte, 1)
	_, err = conn.Read(b)
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	require.Empty(t, g.hosts)
}

// An attempt that was refused is not let in by its second dial, which is what
// sslmode=prefer does, and an attempt that is not the one that tries does not
// end that one's turn.
func TestGateRefusesTheSecondDialToo(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		hosts := &fakeHosts{down: map[string]bool{"a": true}, attempts: map[string]int{}, takes: time.Second}
		g := newGate(hosts.dial)
		first := &attempt{gate: g, judge: true, tried: map[string]bool{}}
		_, err := first.dial(t.Context(), "tcp", "a")
		require.ErrorIs(t, err, errDown)
		time.Sleep(gateRetry.Max)

		trying := &attempt{gate: g, judge: true, tried: map[string]bool{}}
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = trying.dial(t.Context(), "tcp", "a") // fails
		}()
		synctest.Wait()
		refused := &attempt{gate: g, judge: true, tried: map[string]bool{}}
		for range 2 {
			_, err = refused.dial(t.Context(), "tcp", "a")
			require.ErrorContains(t, err, "not tried again yet")
		}
		lease := &attempt{gate: g, insist: true, judge: true, tried: map[string]bool{}}
		_, err = lease.dial(t.Context(), "tcp", "a")
		require.ErrorIs(t, err, errDown)
		<-done
		require.Equal(t, 3, hosts.attempts["a"])
		require.Nil(t, g.hosts["a"].trying)
	})
}

// A caller that gave a host little time learns nothing of it.
func TestGateGivesAFairTime(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		hosts := &fakeHosts{attempts: map[string]int{}, takes: time.Minute}
		g := newGate(hosts.dial)
		for limit, counts := range map[time.Duration]bool{time.Second: false, 3 * time.Second: true} {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			a := &attempt{gate: g, judge: true, tried: map[string]bool{}}
			_, err := a.dial(ctx, "tcp", limit.String())
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, counts, g.hosts[limit.String()] != nil, limit)
		}
	})
}

// Another host of the same address list is not held back, nor is anybody by a
// caller that gave up.
func TestGateKnowsHosts(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		hosts := &fakeHosts{down: map[string]bool{"a": true}, attempts: map[string]int{}}
		g := newGate(hosts.dial)
		dial := func(ctx context.Context, address string) (net.Conn, *attempt, error) {
			a := &attempt{gate: g, judge: true, tried: map[string]bool{}}
			conn, err := a.dial(ctx, "tcp", address)
			return conn, a, err
		}
		_, _, err := dial(t.Context(), "a")
		require.ErrorIs(t, err, errDown)
		_, _, err = dial(t.Context(), "a")
		require.ErrorContains(t, err, "not tried again yet, after 1 failures")
		require.Equal(t, 1, hosts.attempts["a"])
		_, _, err = dial(t.Context(), "b")
		require.NoError(t, err)

		hosts.takes = time.Second
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		_, _, err = dial(ctx, "c")
		require.ErrorIs(t, err, context.Canceled)
		_, _, err = dial(t.Context(), "c")
		require.NoError(t, err)
	})
}
