package outbox

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/millrace/watermill-outbox/internal/backoff"
)

// gateRetry is the pause between two attempts to reach a host that could not be
// reached.
var gateRetry = backoff.Policy{Min: 100 * time.Millisecond, Max: 5 * time.Second}

// guardedBy is a BeforeConnect hook that follows on the user's, if there is one.
func guardedBy(g *gate, prepare func(context.Context, *pgx.ConnConfig) error, insist bool) func(context.Context, *pgx.ConnConfig) error {
	return func(ctx context.Context, config *pgx.ConnConfig) error {
		if prepare != nil {
			if err := prepare(ctx, config); err != nil {
				return err
			}
		}
		g.guard(&config.Config, insist, true)
		return nil
	}
}

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

// guard puts the gate into the configuration of one connection to be made; the
// configuration is the caller's own. With insist it does not wait for others'
// pauses. With judge a connection on which no session begins counts as a
// failure; a server that refuses a certain kind of session is not down.
func (g *gate) guard(config *pgconn.Config, insist, judge bool) {
	a := &attempt{gate: g, insist: insist, judge: judge, tried: map[string]bool{}}
	config.DialFunc = a.dial
	validate := config.ValidateConnect
	config.ValidateConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		a.begun()
		if validate == nil {
			return nil
		}
		return validate(ctx, conn)
	}
}

// attempt is the making of one connection, which may dial several times: other
// hosts, without TLS, and later on to cancel a statement.
type attempt struct {
	gate          *gate
	insist, judge bool

	mu      sync.Mutex
	tried   map[string]bool // addresses that were let in
	last    *gatedConn
	session bool
}

func (a *attempt) dial(ctx context.Context, network, address string) (net.Conn, error) {
	a.mu.Lock()
	free := a.session || a.insist || a.tried[address]
	session := a.session
	a.tried[address] = true
	a.mu.Unlock()
	if session {
		return a.gate.dial(ctx, network, address) // to cancel a statement
	}
	if !free {
		if err := a.gate.enter(address); err != nil {
			return nil, err
		}
	}
	conn, err := a.gate.dial(ctx, network, address)
	if err != nil {
		a.gate.leave(ctx, address, err)
		return nil, err
	}
	closed := errNoSession
	if !a.judge {
		closed = nil
	}
	gated := &gatedConn{Conn: conn, leave: func(err error) { a.gate.leave(ctx, address, err) }, closed: closed}
	a.mu.Lock()
	a.last = gated
	a.mu.Unlock()
	return gated, nil
}

// begun says that a session has begun on the connection that was dialled last.
func (a *attempt) begun() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.session = true
	if a.last != nil {
		a.last.once.Do(func() { a.last.leave(nil) })
	}
}

// gatedConn tells its gate once how the attempt has ended.
type gatedConn struct {
	net.Conn

	once  sync.Once
	leave func(err error)
	// closed is what it means that the connection is closed without a session.
	closed error
}

var errNoSession = errors.New("the host takes connections, but no session begins")

// Close implements net.Conn.
func (c *gatedConn) Close() error {
	c.once.Do(func() { c.leave(c.closed) })
	return c.Conn.Close()
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
