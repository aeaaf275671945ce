package outbox

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/millrace/watermill-outbox/internal/backoff"
)

// gateRetry is the pause between two attempts to reach a host that could not be
// reached.
var gateRetry = backoff.Policy{Min: 100 * time.Millisecond, Max: 5 * time.Second}

// gate spaces the attempts of a whole process to reach a host: while it is down,
// one attempt at a time is made, after a growing pause, and whoever else would
// connect gets the last error at once. Without it every topic tries by itself,
// which keeps a server from coming up. Safe for concurrent use.
type gate struct {
	dial pgconn.DialFunc

	mu    sync.Mutex
	hosts map[string]*blocked // those that could not be reached the last time
}

// blocked is a host that could not be reached.
type blocked struct {
	failures int
	until    time.Time
	trying   bool
	err      error
}

func newGate(dial pgconn.DialFunc) *gate {
	return &gate{dial: dial, hosts: map[string]*blocked{}}
}

// Dial is a pgconn.DialFunc. Whoever gets a connection says by begun that a
// session has begun on it; one that is closed before counts as a failure.
func (g *gate) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	if err := g.enter(address); err != nil {
		return nil, err
	}
	return g.DialAnyway(ctx, network, address)
}

// DialAnyway is Dial that does not wait for others' pauses.
func (g *gate) DialAnyway(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := g.dial(ctx, network, address)
	if err != nil {
		g.leave(ctx, address, err)
		return nil, err
	}
	return &gatedConn{Conn: conn, leave: func(err error) { g.leave(ctx, address, err) }}, nil
}

// gatedConn tells its gate once how the attempt has ended.
type gatedConn struct {
	net.Conn

	once  sync.Once
	leave func(err error)
}

var errNoSession = errors.New("the host takes connections, but no session begins")

// Close implements net.Conn.
func (c *gatedConn) Close() error {
	c.once.Do(func() { c.leave(errNoSession) })
	return c.Conn.Close()
}

// begun says that a session has begun.
func begun(conn *pgconn.PgConn) {
	network := conn.Conn()
	if secured, ok := network.(*tls.Conn); ok {
		network = secured.NetConn()
	}
	if gated, ok := network.(*gatedConn); ok {
		gated.once.Do(func() { gated.leave(nil) })
	}
}

// enter returns an error instead of an attempt.
func (g *gate) enter(address string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	host := g.hosts[address]
	if host == nil {
		return nil
	}
	if wait := time.Until(host.until); wait > 0 || host.trying {
		return fmt.Errorf("not tried again yet, after %d failures: %w", host.failures, host.err)
	}
	host.trying = true
	return nil
}

// leave notes how an attempt ended.
func (g *gate) leave(ctx context.Context, address string, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	host := g.hosts[address]
	switch {
	case err == nil:
		delete(g.hosts, address)
		return
	case host == nil:
		host = &blocked{}
		g.hosts[address] = host
	}
	host.trying = false
	if context.Cause(ctx) == context.Canceled { //nolint:errorlint // the caller gave up, which says nothing of the host
		if host.failures == 0 {
			delete(g.hosts, address)
		}
		return
	}
	if time.Now().Before(host.until) {
		return // attempts that began together count once
	}
	host.failures++
	host.err = err
	host.until = time.Now().Add(gateRetry.Delay(host.failures))
}
