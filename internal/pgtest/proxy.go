package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Action is what a Proxy does with a message.
type Action int

const (
	// Forward passes the message on. The zero value.
	Forward Action = iota
	// Drop swallows the message.
	Drop
	// Cut swallows the message and resets the connection on both sides.
	Cut
	// LoseReply passes a client's message on, and from then on swallows all
	// that the server says, until the server has answered everything it was
	// asked (ReadyForQuery); then it resets the connection on both sides. On
	// COMMIT that gives a transaction which is committed while its client can't
	// know. For a server's message it is the same as Cut.
	LoseReply
)

// Message is one message of the PostgreSQL protocol.
type Message struct {
	// Conn numbers the proxy's connections from 1.
	Conn int
	// Type is the message's first byte, as in pgproto3: 'Q' is a client's
	// Query. It is 0 for a startup message or a cancel request.
	Type byte
	// Body is the rest, without type and length. It is valid during the call.
	Body []byte
}

// Proxy is a TCP proxy in front of a PostgreSQL server which makes connections
// fail in ways a network can. It understands the protocol's frames, so faults
// hit at a message and not at a byte. It speaks no TLS and tells clients so.
//
// All methods may be called concurrently, also from the hooks.
type Proxy struct {
	target   string
	listener net.Listener

	onClient atomic.Pointer[func(Message) Action]
	onServer atomic.Pointer[func(Message) Action]
	refuse   atomic.Bool

	wg sync.WaitGroup // the accepting goroutine and two for each connection

	mu     sync.Mutex
	conns  map[*proxyConn]struct{}
	count  int
	open   chan struct{} // closed unless paused
	closed bool
}

// NewProxy starts a proxy on a free port of 127.0.0.1 in front of the server at
// target ("host:port", see [Server.Addr]), which need not be up. When the test
// ends all connections are cut and the port is closed.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	var lc net.ListenConfig
	listener, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("pgtest: listen for the proxy: %v", err)
	}
	p := &Proxy{target: target, listener: listener, conns: map[*proxyConn]struct{}{}, open: make(chan struct{})}
	close(p.open)
	// A dial under way must end with the proxy, not with its time-out.
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	p.wg.Go(func() { p.accept(ctx) })
	t.Cleanup(func() {
		cancel()
		p.mu.Lock()
		p.closed = true
		p.mu.Unlock()
		if err := listener.Close(); err != nil {
			t.Errorf("pgtest: close the proxy: %v", err)
		}
		p.CutAll()
		p.wg.Wait()
	})
	return p
}

// Addr returns the proxy's own address, "127.0.0.1:port".
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// URL returns serverURL led through the proxy.
func (p *Proxy) URL(serverURL string) string {
	u, err := url.Parse(serverURL)
	if err != nil {
		// Callers pass what Server.URL gave them.
		panic(fmt.Sprintf("pgtest: proxy for a server without a URL: %v", err))
	}
	u.Host = p.Addr()
	query := u.Query()
	query.Set("sslmode", "disable")
	u.RawQuery = query.Encode()
	return u.String()
}

// OnClient makes the proxy ask hook what to do with each message of a client,
// on all connections, from now on; nil forwards. The hook is called from many
// goroutines, for one connection from one at a time. It may block, which holds
// this connection's messages back, but must have returned when the test ends.
func (p *Proxy) OnClient(hook func(Message) Action) { p.onClient.Store(&hook) }

// OnServer is OnClient for the server's messages.
func (p *Proxy) OnServer(hook func(Message) Action) { p.onServer.Store(&hook) }

// CutAll resets all present connections on both sides. Bytes on their way are
// lost.
func (p *Proxy) CutAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.cut()
	}
}

// Pause makes the proxy a black hole: connections stay open and new ones are
// accepted, but nothing gets through until Resume, which then delivers all of
// it. A message for which a hook calls Pause is the first to be held back.
func (p *Proxy) Pause() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.open:
		p.open = make(chan struct{})
	default:
	}
}

// Resume ends Pause.
func (p *Proxy) Resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.open:
	default:
		close(p.open)
	}
}

// RefuseNew makes the proxy reset new connections at once, or stop doing so.
// Present ones stay.
func (p *Proxy) RefuseNew(refuse bool) { p.refuse.Store(refuse) }

// Conns returns how many connections there are now.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns)
}

func (p *Proxy) accept(ctx context.Context) {
	for {
		client, err := p.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of descriptors, say. Clients wait until some are free again.
			select {
			case <-ctx.Done():
			case <-time.After(10 * time.Millisecond):
			}
			continue
		}
		if p.refuse.Load() {
			reset(client)
			continue
		}
		p.wg.Go(func() { p.serve(ctx, client) })
	}
}

// serve owns one connection until both its directions have ended.
func (p *Proxy) serve(ctx context.Context, client net.Conn) {
	var dialer net.Dialer
	server, err := dialer.DialContext(ctx, "tcp", p.target)
	if err != nil {
		reset(client)
		return
	}
	c := &proxyConn{proxy: p, client: client, server: server, done: make(chan struct{})}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		c.cut()
		return
	}
	p.count++
	c.number = p.count
	p.conns[c] = struct{}{}
	p.mu.Unlock()

	c.run()

	p.mu.Lock()
	delete(p.conns, c)
	p.mu.Unlock()
}

// gate returns a channel that is closed while messages may pass.
func (p *Proxy) gate() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.open
}
