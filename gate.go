package outbox

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
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
	trying   *attempt // nil if nobody is
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
		a.answered()
		if validate != nil {
			if err := validate(ctx, conn); err != nil {
				return err
			}
		}
		a.begun()
		return nil
	}
}

// attempt is the making of one connection, which may dial several times: other
// hosts, without TLS, and later on to cancel a statement.
type attempt struct {
	gate          *gate
	insist, judge bool

	mu      sync.Mutex
	tried   map[string]bool // addresses that it was let in to
	last    *gatedConn
	session bool
}

func (a *attempt) dial(ctx context.Context, network, address string) (net.Conn, error) {
	a.mu.Lock()
	session, free := a.session, a.insist || a.tried[address]
	a.mu.Unlock()
	if session {
		return a.gate.dial(ctx, network, address) // to cancel a statement
	}
	if !free {
		if err := a.gate.enter(a, address); err != nil {
			return nil, err
		}
	}
	began := time.Now()
	conn, err := a.gate.dial(ctx, network, address)
	if err != nil {
		a.gate.leave(a, address, verdict(ctx, began, err))
		return nil, err
	}
	gated := &gatedConn{Conn: conn, attempt: a, address: address, failure: func() error {
		if !a.judge {
			return errNothing
		}
		return verdict(ctx, began, errNoSession)
	}}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.tried[address] = true
	a.last = gated
	return gated, nil
}

// answered says that the server at the other end of the last connection has let
// us in.
func (a *attempt) answered() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.last != nil {
		a.last.tell(nil)
	}
}

// begun says that the attempt is over and has succeeded.
func (a *attempt) begun() {
	a.answered()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.session = true
}

var (
	errNoSession = errors.New("the host takes connections, but no session begins")
	// errNothing stands for an end that says nothing of the host.
	errNothing = errors.New("the caller gave up")
)

// fairTime is how long a host is given at least before it counts as down.
const fairTime = 2 * time.Second

// verdict is what a failure says of the host: nothing, if the caller gave up, or
// gave it little time.
func verdict(ctx context.Context, began time.Time, err error) error {
	if errors.Is(ctx.Err(), context.Canceled) || ctx.Err() != nil && time.Since(began) < fairTime {
		return errNothing
	}
	return err
}

// gatedConn tells its gate once how the attempt has ended.
type gatedConn struct {
	net.Conn

	attempt *attempt
	address string
	failure func() error // of a connection on which no session began

	once sync.Once
	told atomic.Bool
	// read counts the bytes that came; noTLS says that it was one, N: the server
	// has no TLS, and the connection is closed for that.
	read  atomic.Int64
	noTLS atomic.Bool
}

func (c *gatedConn) tell(err error) {
	c.once.Do(func() {
		c.told.Store(true)
		c.attempt.gate.leave(c.attempt, c.address, err)
	})
}

// Read implements net.Conn.
func (c *gatedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && !c.told.Load() {
		c.noTLS.Store(c.read.Add(int64(n)) == 1 && b[0] == 'N')
	}
	return n, err
}

// Close implements net.Conn.
func (c *gatedConn) Close() error {
	if c.noTLS.Load() {
		c.tell(errNothing)
	} else {
		c.tell(c.failure())
	}
	return c.Conn.Close()
}

// enter returns an error instead of an attempt.
func (g *gate) enter(a *attempt, address string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	host := g.hosts[address]
	if host == nil {
		return nil
	}
	if wait := time.Until(host.until); wait > 0 || host.trying != nil {
		return fmt.Errorf("not tried again yet, after %d failures: %w", host.failures, host.err)
	}
	host.trying = a
	return nil
}

// leave notes how an attempt ended; errNothing says that nothing is known.
func (g *gate) leave(a *attempt, address string, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	host := g.hosts[address]
	if err == nil {
		delete(g.hosts, address)
		return
	}
	if host != nil && host.trying == a {
		host.trying = nil
	}
	if errors.Is(err, errNothing) {
		return
	}
	if host == nil {
		host = &blocked{}
		g.hosts[address] = host
	}
	if time.Now().Before(host.until) {
		return // attempts that began together count once
	}
	host.failures++
	host.err = err
	host.until = time.Now().Add(gateRetry.Delay(host.failures))
}
