package pgtest

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
)

// Codes in place of a protocol version in a client's first message.
const (
	codeCancel     = 80877102
	codeSSL        = 80877103
	codeGSSEncrypt = 80877104
)

// proxyConn is one connection through a Proxy. Two goroutines pump messages,
// one for each direction.
type proxyConn struct {
	proxy  *Proxy
	number int
	client net.Conn
	server net.Conn

	cutOnce sync.Once
	done    chan struct{} // closed by cut

	// losing is set by LoseReply: the server's messages are swallowed.
	losing atomic.Bool
	// unanswered counts the client's requests whose ReadyForQuery is still to
	// come.
	unanswered atomic.Int64
}

// frame is one message as it is on the wire.
type frame struct {
	kind byte   // 0 if the message has no type
	raw  []byte // all of it
	body []byte // the part after type and length
}

// run pumps messages in both directions until both have ended.
func (c *proxyConn) run() {
	var wg sync.WaitGroup
	wg.Go(c.pumpServer)
	c.pumpClient()
	wg.Wait()
	_ = c.client.Close()
	_ = c.server.Close()
}

// cut resets both sides and ends both pumps.
func (c *proxyConn) cut() {
	c.cutOnce.Do(func() {
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

// pumpClient passes the client's messages on until it hangs up.
func (c *proxyConn) pumpClient() {
	r := bufio.NewReader(c.client)
	started := false
	for {
		f, err := readFrame(r, started)
		if err != nil {
			hangUp(c.server)
			return
		}
		if !started {
			switch code := startupCode(f); code {
			case codeSSL, codeGSSEncrypt:
				if _, err := c.client.Write([]byte{'N'}); err != nil {
					c.cut()
					return
				}
				continue
			case codeCancel:
			default:
				c.unanswered.Add(1)
			}
			started = true
		}
		if !c.forwardClient(f) {
			c.cut()
			return
		}
	}
}

// forwardClient treats one message as the hook says. It returns false if the
// connection must be cut.
func (c *proxyConn) forwardClient(f frame) bool {
	switch c.ask(c.proxy.onClient.Load(), f) {
	case Drop:
		return true
	case Cut:
		return false
	case LoseReply:
		// Before the server can possibly answer.
		c.losing.Store(true)
	}
	switch f.kind {
	case 'Q', 'S', 'F': // Query, Sync, FunctionCall
		c.unanswered.Add(1)
	}
	return c.write(c.server, f)
}

// pumpServer passes the server's messages on until it hangs up.
func (c *proxyConn) pumpServer() {
	r := bufio.NewReader(c.server)
	for {
		f, err := readFrame(r, true)
		if err != nil {
			if c.losing.Load() {
				c.cut()
				return
			}
			hangUp(c.client)
			return
		}
		if !c.forwardServer(f) {
			c.cut()
			return
		}
	}
}

// forwardServer is forwardClient for the server's messages.
func (c *proxyConn) forwardServer(f frame) bool {
	action := c.ask(c.proxy.onServer.Load(), f)
	if action == Cut || action == LoseReply {
		return false
	}
	last := f.kind == 'Z' && c.unanswered.Add(-1) == 0 // ReadyForQuery
	if c.losing.Load() {
		return !last
	}
	if action == Drop {
		return true
	}
	return c.write(c.client, f)
}

func (c *proxyConn) ask(hook *func(Message) Action, f frame) Action {
	if hook == nil || *hook == nil {
		return Forward
	}
	return (*hook)(Message{Conn: c.number, Type: f.kind, Body: f.body})
}

// write sends f to dst as soon as the proxy is not paused. It returns false if
// that is not possible any more.
func (c *proxyConn) write(dst net.Conn, f frame) bool {
	select {
	case <-c.proxy.gate():
	case <-c.done:
		return false
	}
	_, err := dst.Write(f.raw)
	return err == nil
}

// hangUp tells dst that there is no more to come, and lets it finish: what the
// other side has said before hanging up must arrive.
func hangUp(dst net.Conn) {
	if tcp, ok := dst.(*net.TCPConn); ok {
		_ = tcp.CloseWrite()
	}
}

// readFrame reads one message. Only a client's first messages have no type.
func readFrame(r *bufio.Reader, typed bool) (frame, error) {
	var f frame
	header := make([]byte, 4, 5)
	if typed {
		header = header[:5]
	}
	if _, err := io.ReadFull(r, header); err != nil {
		return frame{}, err
	}
	if typed {
		f.kind = header[0]
	}
	length := binary.BigEndian.Uint32(header[len(header)-4:])
	if length < 4 || length > 1<<30 {
		return frame{}, fmt.Errorf("pgtest: message %q says it is %d bytes long", f.kind, length)
	}
	f.raw = make([]byte, len(header)+int(length)-4)
	copy(f.raw, header)
	f.body = f.raw[len(header):]
	_, err := io.ReadFull(r, f.body)
	return f, err
}

// startupCode returns the protocol version or request code that a client's
// first message begins with.
func startupCode(f frame) uint32 {
	if len(f.body) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(f.body)
}
