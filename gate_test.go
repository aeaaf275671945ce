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
		ctx, cancel := context.WithCancel(t.Context())
		var topics sync.WaitGroup
		for range 50 {
			topics.Go(func() {
				for ctx.Err() == nil {
					conn, err := g.Dial(ctx, "tcp", "a")
					if err != nil {
						require.ErrorIs(t, err, errDown)
						time.Sleep(100 * time.Millisecond)
						continue
					}
					conn.(*gatedConn).once.Do(func() { conn.(*gatedConn).leave(nil) })
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
		began := time.Now()
		for time.Since(began) < 30*time.Second {
			conn, err := g.Dial(t.Context(), "tcp", "a")
			if err != nil {
				require.ErrorIs(t, err, errNoSession)
				time.Sleep(10 * time.Millisecond)
				continue
			}
			_, err = g.Dial(t.Context(), "tcp", "a")
			if hosts.attempts["a"] > 2 {
				require.ErrorIs(t, err, errNoSession, "one at a time")
			} else {
				require.NoError(t, err, "nothing is known yet")
			}
			require.NoError(t, conn.Close())
		}
		require.LessOrEqual(t, hosts.attempts["a"], 15+5)
		time.Sleep(gateRetry.Max)
		conn, err := g.Dial(t.Context(), "tcp", "a")
		require.NoError(t, err)
		conn.(*gatedConn).once.Do(func() { conn.(*gatedConn).leave(nil) })
		require.NoError(t, conn.Close())
		for range 3 {
			_, err = g.Dial(t.Context(), "tcp", "a")
			require.NoError(t, err)
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
		_, err := g.Dial(t.Context(), "tcp", "a")
		require.ErrorIs(t, err, errDown)
		_, err = g.Dial(t.Context(), "tcp", "a")
		require.ErrorContains(t, err, "not tried again yet, after 1 failures")
		require.Equal(t, 1, hosts.attempts["a"])
		_, err = g.Dial(t.Context(), "tcp", "b")
		require.NoError(t, err)

		hosts.takes = time.Second
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		_, err = g.Dial(ctx, "tcp", "c")
		require.ErrorIs(t, err, context.Canceled)
		_, err = g.Dial(t.Context(), "tcp", "c")
		require.NoError(t, err)
	})
}
