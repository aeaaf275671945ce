package pgtest

import (
	"bytes"
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

type proxyBundle struct {
	proxy  *Proxy
	direct string // the database's URL
	url    string // the same through the proxy
}

func setupProxy(t *testing.T) *proxyBundle {
	t.Helper()
	direct := Database(t)
	proxy := NewProxy(t, Shared(t).Addr())
	return &proxyBundle{proxy, direct, proxy.URL(direct)}
}

// connect returns a connection through the proxy.
func (b *proxyBundle) connect(t *testing.T) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), b.url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func TestProxyForwards(t *testing.T) {
	t.Parallel()
	b := setupProxy(t)
	conn := b.connect(t)
	long := strings.Repeat("x", 1<<20)
	var echo string
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT $1::text", long).Scan(&echo))
	require.Equal(t, long, echo)
	require.Equal(t, 1, b.proxy.Conns())
	require.NoError(t, conn.Close(t.Context()))
	eventually(t, func() bool { return b.proxy.Conns() == 0 }, "connections left")
}

// A client may ask for encryption first, and is told no.
func TestProxySpeaksNoTLS(t *testing.T) {
	t.Parallel()
	b := setupProxy(t)
	conn, err := pgx.Connect(t.Context(), strings.Replace(b.url, "sslmode=disable", "sslmode=prefer", 1))
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))
}

// The reason that the server gives before it hangs up reaches the client.
func TestProxyPassesLastWords(t *testing.T) {
	t.Parallel()
	b := setupProxy(t)
	_, err := pgx.Connect(t.Context(), b.proxy.URL(Shared(t).URLFor("no_such_database")))
	require.ErrorContains(t, err, "3D000")
}

// A cancel request is a connection of its own, and goes through the proxy too.
func TestProxyForwardsCancel(t *testing.T) {
	t.Parallel()
	b := setupProxy(t)
	conn := b.connect(t)
	ended := make(chan error)
	go func() {
		_, err := conn.Exec(t.Context(), "SELECT pg_sleep(60)")
		ended <- err
	}()
	eventually(t, func() bool {
		return query[bool](t, b.direct, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'SELECT pg_sleep%')")
	}, "not at work")
	require.NoError(t, conn.PgConn().CancelRequest(t.Context()))
	require.ErrorContains(t, <-ended, "57014")
}

func TestProxyCutAll(t *testing.T) {
	t.Parallel()
	b := setupProxy(t)
	conn := b.connect(t)
	pid := conn.PgConn().PID()
	b.proxy.CutAll()
	require.Error(t, conn.Ping(t.Context()))
	// The server has noticed as well.
	eventually(t, func() bool {
		return !query[bool](t, b.direct, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", pid)
	}, "the session is still there")
	require.NoError(t, b.connect(t).Ping(t.Context()), "new connections work")
}

func TestProxyPause(t *testing.T) {
	t.Parallel()
	b := setupProxy(t)
	conn := b.connect(t)
	run(t, b.direct, "CREATE TABLE held (n int)")
	b.proxy.Pause()
	b.proxy.Pause()

	done := make(chan error)
	go func() {
		_, err := conn.Exec(t.Context(), "INSERT INTO held VALUES (1)")
		done <- err
	}()
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := pgx.Connect(short, b.url)
	require.ErrorIs(t, err, context.DeadlineExceeded, "a new connection is accepted and hears nothing")
	require.Zero(t, query[int](t, b.direct, "SELECT count(*) FROM held"))
	select {
	case err := <-done:
		t.Fatal("answered through a paused proxy:", err)
	default:
	}

	b.proxy.Resume()
	b.proxy.Resume()
	require.NoError(t, <-done)
	require.Equal(t, 1, query[int](t, b.direct, "SELECT count(*) FROM held"))

	b.proxy.Pause()
	go func() { done <- conn.Ping(t.Context()) }()
	b.proxy.CutAll()
	require.Error(t, <-done, "what is held back can be cut")
}

func TestProxyRefuseNew(t *testing.T) {
	t.Parallel()
	b := setupProxy(t)
	conn := b.connect(t)
	b.proxy.RefuseNew(true)
	_, err := pgx.Connect(t.Context(), b.url)
	require.Error(t, err)
	require.NoError(t, conn.Ping(t.Context()), "present connections stay")
	b.proxy.RefuseNew(false)
	require.NoError(t, b.connect(t).Ping(t.Context()))
}

func TestProxyServerDown(t *testing.T) {
	t.Parallel()
	proxy := NewProxy(t, "127.0.0.1:1")
	_, err := pgx.Connect(t.Context(), proxy.URL("postgres://postgres@127.0.0.1/postgres"))
	require.Error(t, err)
}

// isQuery reports whether a client's message runs sql, by either protocol.
func isQuery(m Message, sql string) bool {
	return (m.Type == 'Q' || m.Type == 'P') && bytes.Contains(bytes.ToLower(m.Body), []byte(sql))
}

// The classic: the transaction is committed, and its client can't know.
func TestProxyLosesReplyToCommit(t *testing.T) {
	t.Parallel()
	b := setupProxy(t)
	conn := b.connect(t)
	other := b.connect(t)
	run(t, b.direct, "CREATE TABLE kept (n int)")
	b.proxy.OnClient(func(m Message) Action {
		if m.Conn == 1 && isQuery(m, "commit") {
			return LoseReply
		}
		return Forward
	})
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "INSERT INTO kept VALUES (1)")
	require.NoError(t, err)
	require.Error(t, tx.Commit(t.Context()))
	// Committed by the time the client has the error: no wait.
	require.Equal(t, 1, query[int](t, b.direct, "SELECT count(*) FROM kept"))
	require.Error(t, conn.Ping(t.Context()))
	require.NoError(t, other.Ping(t.Context()))
}

// The same for a statement of the extended protocol, which is several messages.
func TestProxyLosesReplyToStatement(t *testing.T) {
	t.Parallel()
	b := setupProxy(t)
	conn := b.connect(t)
	run(t, b.direct, "CREATE TABLE inserted (n int)")
	b.proxy.OnClient(func(m Message) Action {
		if m.Type == 'B' { // Bind
			return LoseReply
		}
		return Forward
	})
	_, err := conn.Exec(t.Context(), "INSERT INTO inserted VALUES ($1)", 1)
	require.Error(t, err)
	require.Equal(t, 1, query[int](t, b.direct, "SELECT count(*) FROM inserted"))
}

// Cut before COMMIT: the other case that looks the same to the client.
func TestProxyCutsBeforeCommit(t *testing.T) {
	t.Parallel()
	b := setupProxy(t)
	conn := b.connect(t)
	run(t, b.direct, "CREATE TABLE lost (n int)")
	b.proxy.OnClient(func(m Message) Action {
		if isQuery(m, "commit") {
			return Cut
		}
		return Forward
	})
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "INSERT INTO lost VALUES (1)")
	require.NoError(t, err)
	require.Error(t, tx.Commit(t.Context()))
	require.Zero(t, query[int](t, b.direct, "SELECT count(*) FROM lost"))
}

func TestProxyHooksOnServer(t *testing.T) {
	t.Parallel()
	b := setupProxy(t)
	conn := b.connect(t)
	var notices atomic.Int32
	b.proxy.OnServer(func(m Message) Action {
		if m.Type == 'N' { // NoticeResponse
			notices.Add(1)
			return Drop
		}
		return Forward
	})
	_, err := conn.Exec(t.Context(), "DROP TABLE IF EXISTS no_such_table")
	require.NoError(t, err)
	require.EqualValues(t, 1, notices.Load())

	b.proxy.OnServer(nil)
	require.NoError(t, conn.Ping(t.Context()))
	b.proxy.OnServer(func(Message) Action { return Cut })
	require.Error(t, conn.Ping(t.Context()))
}

// A hook that pauses holds back the very message it was asked about.
func TestProxyPauseFromHook(t *testing.T) {
	t.Parallel()
	b := setupProxy(t)
	conn := b.connect(t)
	run(t, b.direct, "CREATE TABLE held (n int)")
	asked := make(chan struct{})
	b.proxy.OnClient(func(m Message) Action {
		if isQuery(m, "insert") {
			b.proxy.Pause()
			close(asked)
		}
		return Forward
	})
	done := make(chan error)
	go func() {
		_, err := conn.Exec(t.Context(), "INSERT INTO held VALUES (1)")
		done <- err
	}()
	<-asked
	require.Zero(t, query[int](t, b.direct, "SELECT count(*) FROM held"))
	b.proxy.Resume()
	require.NoError(t, <-done)
}
