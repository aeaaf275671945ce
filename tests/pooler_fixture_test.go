package tests

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// poolerKind is the environment variable that has the tests use a PgBouncer of
// their own instead of the pooler below, if it is "pgbouncer".
const poolerKind = "OUTBOX_TEST_POOLER"

// poolerName is the application_name of the pooler's connections to the server.
const poolerName = "pooler"

// pooler lends its connections to the server for one transaction each, as
// PgBouncer does in transaction mode. The connection that was idle for longest is
// lent next, so consecutive transactions of a client run in different sessions.
type pooler struct {
	listener net.Listener
	server   *pgconn.Config
	// discard has a session forget everything before it is lent again.
	discard bool

	// idle are the places for connections to the server that nobody uses.
	idle chan *pooledServer
	// loans counts the transactions, trips the requests that wait for an answer.
	loans, trips atomic.Int64
	// running counts the goroutines; all ends with background.
	running    sync.WaitGroup
	background context.Context //nolint:containedctx // the pooler's own lifetime
	stop       context.CancelFunc
	closing    sync.Once

	mu      sync.Mutex
	clients map[uint32]*poolerClient
	lastPID uint32
}

// pooledServer is a place for a connection to the server, nil if there is none.
// It belongs to idle or to one client.
type pooledServer struct {
	conn *pgconn.HijackedConn
	used bool // since it last forgot everything
}

// newPooler starts a pooler with so many connections to the server, which stops
// when the test ends.
func newPooler(t testing.TB, serverURL string, conns int, discard bool) *pooler {
	t.Helper()
	server, err := pgconn.ParseConfig(serverURL)
	require.NoError(t, err)
	server.RuntimeParams["application_name"] = poolerName
	var lc net.ListenConfig
	listener, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &pooler{
		listener: listener, server: server, discard: discard,
		idle: make(chan *pooledServer, conns), clients: map[uint32]*poolerClient{},
	}
	p.background, p.stop = context.WithCancel(context.Background())
	for range conns {
		p.idle <- &pooledServer{}
	}
	p.running.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// close cuts all connections and refuses further ones.
func (p *pooler) close() { p.closing.Do(p.cut) }

func (p *pooler) cut() {
	p.stop()
	_ = p.listener.Close()
	p.mu.Lock()
	for _, client := range p.clients {
		_ = client.conn.Close()
	}
	p.mu.Unlock()
	p.running.Wait()
	for range cap(p.idle) {
		(<-p.idle).close()
	}
}

func (p *pooler) accept() {
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			return
		}
		client := &poolerClient{pooler: p, conn: conn, backend: pgproto3.NewBackend(conn, conn), secret: make([]byte, 4)}
		p.mu.Lock()
		if p.background.Err() != nil {
			p.mu.Unlock()
			_ = conn.Close()
			return
		}
		p.lastPID++
		client.pid = p.lastPID
		p.clients[client.pid] = client
		p.mu.Unlock()
		p.running.Go(func() {
			client.serve()
			_ = conn.Close()
			p.mu.Lock()
			delete(p.clients, client.pid)
			p.mu.Unlock()
		})
	}
}

// seen returns how many clients there have been.
func (p *pooler) seen() uint32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lastPID
}

// cancel passes on a client's wish to end its statement.
func (p *pooler) cancel(pid uint32) {
	p.mu.Lock()
	client := p.clients[pid]
	p.mu.Unlock()
	if client == nil {
		return
	}
	client.mu.Lock()
	defer client.mu.Unlock()
	if client.loan == nil {
		return
	}
	request, err := (&pgproto3.CancelRequest{ProcessID: client.loan.conn.PID, SecretKey: client.loan.conn.SecretKey}).Encode(nil)
	if err != nil {
		return
	}
	conn, err := p.server.DialFunc(p.background, "tcp", net.JoinHostPort(p.server.Host, fmt.Sprint(p.server.Port)))
	if err != nil {
		return
	}
	_, _ = conn.Write(request)
	_ = conn.Close()
}

// borrow returns a place with a connection.
func (p *pooler) borrow() (*pooledServer, error) {
	var server *pooledServer
	select {
	case server = <-p.idle:
	case <-p.background.Done():
		return nil, p.background.Err()
	}
	if server.conn != nil && server.used && p.discard {
		if err := server.forget(); err != nil {
			server.close()
		}
	}
	if server.conn == nil {
		conn, err := pgconn.ConnectConfig(p.background, p.server.Copy())
		if err == nil {
			server.conn, err = conn.Hijack()
		}
		if err != nil {
			p.idle <- server
			return nil, err
		}
	}
	server.used = true
	return server, nil
}

// forget resets the session.
func (s *pooledServer) forget() error {
	s.conn.Frontend.Send(&pgproto3.Query{String: "DISCARD ALL"})
	if err := s.conn.Frontend.Flush(); err != nil {
		return err
	}
	for {
		answer, err := s.conn.Frontend.Receive()
		if err != nil {
			return err
		}
		switch answer := answer.(type) {
		case *pgproto3.ErrorResponse:
			return pgconn.ErrorResponseToPgError(answer)
		case *pgproto3.ReadyForQuery:
			s.used = false
			return nil
		}
	}
}

func (s *pooledServer) close() {
	if s.conn != nil {
		_ = s.conn.Conn.Close()
		s.conn = nil
	}
}

// poolerClient is a connection to the pooler.
type poolerClient struct {
	pooler  *pooler
	conn    net.Conn
	backend *pgproto3.Backend
	pid     uint32
	secret  []byte
	// answering waits for the goroutine that passes on answers.
	answering sync.WaitGroup

	mu   sync.Mutex
	loan *pooledServer // nil outside of transactions
	// pending counts what the server will answer with ReadyForQuery; partial says
	// that more was sent, without a Sync yet.
	pending int
	partial bool
}

// startupParameters are those that PgBouncer takes.
var startupParameters = []string{"user", "database", "application_name", "client_encoding", "DateStyle", "TimeZone", "standard_conforming_strings"}

func (c *poolerClient) serve() {
	if !c.greet() {
		return
	}
	for {
		request, err := c.backend.Receive()
		if err != nil {
			break
		}
		if _, ok := request.(*pgproto3.Terminate); ok {
			break
		}
		if err := c.pass(request); err != nil {
			break
		}
	}
	// A client that leaves inside a transaction takes the server's connection
	// with it.
	c.mu.Lock()
	if c.loan != nil {
		_ = c.loan.conn.Conn.Close()
	}
	c.mu.Unlock()
	c.answering.Wait()
}

// greet answers until the session begins.
func (c *poolerClient) greet() bool {
	for {
		hello, err := c.backend.ReceiveStartupMessage()
		if err != nil {
			return false
		}
		switch hello := hello.(type) {
		case *pgproto3.SSLRequest, *pgproto3.GSSEncRequest:
			if _, err := c.conn.Write([]byte{'N'}); err != nil {
				return false
			}
		case *pgproto3.CancelRequest:
			c.pooler.cancel(hello.ProcessID)
			return false
		case *pgproto3.StartupMessage:
			for name := range hello.Parameters {
				if !slices.Contains(startupParameters, name) {
					c.refuse("unsupported startup parameter: " + name)
					return false
				}
			}
			c.backend.Send(&pgproto3.AuthenticationOk{})
			for _, status := range [][2]string{
				{"server_version", "15.0 (pooler)"}, {"client_encoding", "UTF8"}, {"standard_conforming_strings", "on"}, {"integer_datetimes", "on"},
			} {
				c.backend.Send(&pgproto3.ParameterStatus{Name: status[0], Value: status[1]})
			}
			c.backend.Send(&pgproto3.BackendKeyData{ProcessID: c.pid, SecretKey: c.secret})
			c.backend.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
			return c.backend.Flush() == nil
		}
	}
}

// refuse ends the client's connection with the error that PgBouncer would give.
func (c *poolerClient) refuse(text string) {
	c.backend.Send(&pgproto3.ErrorResponse{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "08P01", Message: text})
	_ = c.backend.Flush()
	_ = c.conn.Close()
}

// pass sends a request to the server that is lent, after borrowing one.
func (c *poolerClient) pass(request pgproto3.FrontendMessage) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.loan == nil {
		// Nobody else sets it. Without the lock, since it may take long.
		c.mu.Unlock()
		c.answering.Wait() // it has sent its last, but may still be at it
		server, err := c.pooler.borrow()
		c.mu.Lock()
		if err != nil {
			c.refuse(err.Error())
			return err
		}
		c.pooler.loans.Add(1)
		c.loan, c.pending, c.partial = server, 0, false
		c.answering.Go(func() { c.answer(server) })
	}
	switch request.(type) {
	case *pgproto3.Sync, *pgproto3.Query, *pgproto3.FunctionCall:
		c.pending++
		c.partial = false
		c.pooler.trips.Add(1)
	case *pgproto3.CopyData, *pgproto3.CopyDone, *pgproto3.CopyFail:
	default:
		c.partial = true
	}
	c.loan.conn.Frontend.Send(request)
	return c.loan.conn.Frontend.Flush()
}

// answer passes on what the server says until the transaction has ended.
func (c *poolerClient) answer(server *pooledServer) {
	for {
		answer, err := server.conn.Frontend.Receive()
		if err != nil {
			c.drop(server)
			c.refuse("server conn crashed?")
			return
		}
		if _, ok := answer.(*pgproto3.ParameterStatus); ok {
			continue // the session is not the client's
		}
		c.backend.Send(answer)
		ready, ok := answer.(*pgproto3.ReadyForQuery)
		if !ok && server.conn.Frontend.ReadBufferLen() > 0 {
			continue // more to send at once
		}
		last := false
		if ok {
			c.mu.Lock()
			c.pending--
			if last = ready.TxStatus == 'I' && c.pending == 0 && !c.partial; last {
				c.loan = nil
			}
			c.mu.Unlock()
		}
		if last {
			// Before the client knows: what it sends next goes to another one.
			c.pooler.idle <- server
		}
		if err := c.backend.Flush(); err != nil {
			_ = c.conn.Close()
			if !last {
				c.drop(server)
			}
			return
		}
		if last {
			return
		}
	}
}

// drop ends the loan of a server whose connection is of no use any more.
func (c *poolerClient) drop(server *pooledServer) {
	c.mu.Lock()
	c.loan = nil
	server.close()
	c.mu.Unlock()
	c.pooler.idle <- server
}

// pooled is a fixture whose consumers connect through a transaction pooler.
type pooled struct {
	*fixture

	// through is the database's URL through the pooler.
	through string
	// pooler is nil if it is a PgBouncer.
	pooler *pooler
}

func newPooled(t testing.TB) *pooled {
	t.Helper()
	return pooledAt(t, newFixture(t), 4, true)
}

// pooledAt puts a pooler before a fixture.
func pooledAt(t testing.TB, f *fixture, conns int, discard bool) *pooled {
	t.Helper()
	p := &pooled{fixture: f}
	switch kind := os.Getenv(poolerKind); kind {
	case "":
		through, err := url.Parse(f.url)
		require.NoError(t, err)
		p.pooler = newPooler(t, f.url, conns, discard)
		through.Host = p.pooler.listener.Addr().String()
		p.through = through.String()
	case "pgbouncer":
		p.through = newBouncer(t, f, conns).url("")
	default:
		require.FailNow(t, poolerKind+" is neither empty nor pgbouncer", kind)
	}
	return p
}

// config is the configuration of a pool that leads to the pooler.
func (p *pooled) config() *pgxpool.Config {
	p.t.Helper()
	config, err := pgxpool.ParseConfig(p.through)
	require.NoError(p.t, err)
	return config
}

// byTransaction changes a configuration to what the pooler needs.
func byTransaction(c *outbox.ConsumerConfig) { c.TransactionPooler, c.Mode = true, "" }

// consumer is a Consumer behind the pooler.
func (p *pooled) consumer(change func(*outbox.ConsumerConfig)) *outbox.Consumer {
	p.t.Helper()
	return p.consumerOn(p.config(), func(c *outbox.ConsumerConfig) {
		byTransaction(c)
		if change != nil {
			change(c)
		}
	})
}
