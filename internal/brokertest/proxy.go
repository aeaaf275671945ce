package brokertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Action is what a Proxy does with what a client says.
type Action int

const (
	// Forward passes it on. The zero value.
	Forward Action = iota
	// Cut swallows it and resets the connection on both sides.
	Cut
	// LoseReply passes it on, and resets the connection on both sides when the broker
	// next says something, which is swallowed: the broker has a message, and nobody
	// hears that it has.
	LoseReply
)

// Proxy is a TCP proxy in front of a broker which makes connections fail in ways
// a network can. It knows no protocol: faults hit at any byte.
//
// All methods may be called concurrently.
type Proxy struct {
	target string
	addr   string
	cancel context.CancelFunc
	wg     sync.WaitGroup // the accepting goroutines, and two for each connection

	mu       sync.Mutex
	listener net.Listener // nil while refusing
	conns    map[*proxyConn]struct{}
	routes   map[string]string // targets of Dial by the address that it dialled from
	open     chan struct{}     // closed unless paused
	onClient func([]byte) Action
	closed   bool
	ctx      context.Context //nolint:containedctx // the proxy's own life, not a caller's
}

// proxyConn is one connection through a Proxy.
type proxyConn struct {
	client, server net.Conn
	done           chan struct{} // closed by cut
	once           sync.Once
	losing         atomic.Bool // set by LoseReply
}

// NewProxy starts a proxy on a free port of 127.0.0.1 in front of the server at
// target ("host:port"), which need not be up. The caller closes it.
func NewProxy(target string) (*Proxy, error) {
	ctx, cancel := context.WithCancel(context.Background())
	listener, err := Listen(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	p := &Proxy{
		target: target, addr: listener.Addr().String(), ctx: ctx, cancel: cancel,
		listener: listener, conns: map[*proxyConn]struct{}{}, routes: map[string]string{}, open: make(chan struct{}),
	}
	close(p.open)
	p.wg.Go(func() { p.accept(listener) })
	return p, nil
}

// Addr returns the proxy's own address, "127.0.0.1:port".
func (p *Proxy) Addr() string { return p.addr }

// Dial connects to addr through the proxy, whatever its target is: for a client
// that learns the broker's addresses from the broker, as those of Kafka do.
func (p *Proxy) Dial(network, addr string) (net.Conn, error) {
	// Under mu, which whoever accepts the connection needs to look addr up.
	p.mu.Lock()
	defer p.mu.Unlock()
	dialer := net.Dialer{Timeout: PublishTimeout}
	conn, err := dialer.DialContext(p.ctx, network, p.addr)
	if err != nil {
		return nil, err
	}
	p.routes[conn.LocalAddr().String()] = addr
	return conn, nil
}

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
// accepted, but nothing gets through until Resume, which then delivers all of it.
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

// OnClient makes the proxy ask hook what to do with each piece of what clients say, on
// all connections, from now on; nil forwards. A piece is what one read gave: most
// clients write a small message at once, so that it is in one piece. The hook is
// called from many goroutines, for one connection from one at a time. It may block,
// which holds this connection's bytes back, but must have returned before Close.
func (p *Proxy) OnClient(hook func(data []byte) Action) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.onClient = hook
}

// RefuseNew closes the proxy's port, so that new connections are refused, or opens
// it again. Present ones stay. It fails if another process took the port meanwhile.
func (p *Proxy) RefuseNew(refuse bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || refuse == (p.listener == nil) {
		return nil
	}
	if refuse {
		listener := p.listener
		p.listener = nil
		return listener.Close()
	}
	var lc net.ListenConfig
	listener, err := lc.Listen(p.ctx, "tcp", p.addr)
	if err != nil {
		return fmt.Errorf("brokertest: open the proxy's port again: %w", err)
	}
	p.listener = listener
	p.wg.Go(func() { p.accept(listener) })
	return nil
}

// Conns returns how many connections there are now.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns)
}

// Close cuts all connections, closes the port and waits for both.
func (p *Proxy) Close() error {
	err := p.RefuseNew(true)
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.cancel()
	p.CutAll()
	p.wg.Wait()
	return err
}

func (p *Proxy) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of descriptors, say. Clients wait until some are free again.
			select {
			case <-p.ctx.Done():
			case <-time.After(10 * time.Millisecond):
			}
			continue
		}
		p.wg.Go(func() { p.serve(client) })
	}
}

// serve owns one connection until both its directions have ended.
func (p *Proxy) serve(client net.Conn) {
	var dialer net.Dialer
	server, err := dialer.DialContext(p.ctx, "tcp", p.route(client.RemoteAddr().String()))
	if err != nil {
		reset(client)
		return
	}
	c := &proxyConn{client: client, server: server, done: make(chan struct{})}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		c.cut()
		return
	}
	p.conns[c] = struct{}{}
	p.mu.Unlock()

	var wg sync.WaitGroup
	wg.Go(func() { p.pump(c, server, client, func(data []byte) bool { return p.fromClient(c, data) }) })
	p.pump(c, client, server, func([]byte) bool { return !c.losing.Load() })
	wg.Wait()
	_ = client.Close()
	_ = server.Close()

	p.mu.Lock()
	delete(p.conns, c)
	p.mu.Unlock()
}

// route returns the target of the connection from a client's address.
func (p *Proxy) route(from string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	target, ok := p.routes[from]
	if !ok {
		return p.target
	}
	delete(p.routes, from)
	return target
}

// pump passes bytes on from src to dst until src has no more, or until pass says that
// the connection is to be cut.
func (p *Proxy) pump(c *proxyConn, dst, src net.Conn, pass func([]byte) bool) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := src.Read(buffer)
		if n > 0 {
			ok := pass(buffer[:n])
			select {
			case <-p.gate():
			case <-c.done:
				return
			}
			if ok {
				_, writeErr := dst.Write(buffer[:n])
				ok = writeErr == nil
			}
			if !ok {
				c.cut()
				return
			}
		}
		if errors.Is(err, io.EOF) {
			// What the other side has said before hanging up must arrive.
			if tcp, ok := dst.(*net.TCPConn); ok {
				_ = tcp.CloseWrite()
			}
			return
		}
		if err != nil {
			c.cut()
			return
		}
	}
}

// gate returns a channel that is closed while bytes may pass.
func (p *Proxy) gate() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.open
}

// fromClient asks the hook. It returns false if the connection must be cut.
func (p *Proxy) fromClient(c *proxyConn, data []byte) bool {
	p.mu.Lock()
	hook := p.onClient
	p.mu.Unlock()
	if hook == nil {
		return true
	}
	switch hook(data) {
	case Cut:
		return false
	case LoseReply:
		// Before the broker can possibly answer.
		c.losing.Store(true)
	}
	return true
}

// cut resets both sides and ends both pumps.
func (c *proxyConn) cut() {
	c.once.Do(func() {
		close(c.done)
		reset(c.client)
		reset(c.server)
	})
}

// reset closes conn so that the other side sees "connection reset by peer".
func reset(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}
