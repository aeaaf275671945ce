package replication

import (
	"context"
	"encoding/binary"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"
)

// fakeServer is the server's end of a replication connection that is a pipe, so
// that it can live in a bubble of testing/synctest. It answers what Connect and
// Start ask; then the test says what it says.
type fakeServer struct {
	t       testing.TB
	conn    net.Conn
	mu      sync.Mutex // of the sending side of backend
	backend *pgproto3.Backend
	// statuses are what the client has sent since it streams.
	statuses chan fakeStatus
	// gone is closed when the client has said goodbye, or just gone.
	gone chan struct{}
	// rude servers do not hang up on a goodbye, slow ones take their time.
	rude bool
	slow time.Duration
	// deaf servers do not read while they stream, until it is closed.
	deaf chan struct{}
	// said is whether there was a goodbye; good after gone.
	said bool

	startup map[string]string
	queries []string
	// start is the answer to START_REPLICATION; nil lets it stream.
	start                   *pgproto3.ErrorResponse
	walLevel, senderTimeout string
}

type fakeStatus struct {
	Positions
	reply bool
	at    time.Time
}

// newFake returns a connection to a fake server.
func newFake(t testing.TB) (*Conn, *fakeServer) {
	t.Helper()
	client, server := net.Pipe()
	f := &fakeServer{
		t: t, conn: server, backend: pgproto3.NewBackend(server, server), gone: make(chan struct{}),
		statuses: make(chan fakeStatus, 10_000), walLevel: "logical", senderTimeout: "60000",
	}
	go f.serve()
	config, err := pgconn.ParseConfig("postgres://user@server/db?sslmode=disable")
	require.NoError(t, err)
	config.LookupFunc = func(context.Context, string) ([]string, error) { return []string{"127.0.0.1"}, nil }
	config.DialFunc = func(context.Context, string, string) (net.Conn, error) { return client, nil }
	conn, err := Connect(t.Context(), config, ConnectOptions{})
	require.NoError(t, err)
	require.Empty(t, config.RuntimeParams, "the caller's is left alone")
	t.Cleanup(func() {
		_ = conn.Close(context.WithoutCancel(t.Context())) // nothing if a stream has it
		_ = server.Close()
	})
	return conn, f
}

// startFake returns a stream that is pulled from.
func startFake(t testing.TB, options Options) (*Reader, *fakeServer) {
	t.Helper()
	conn, f := newFake(t)
	options.Publications = []string{"p"}
	reader, err := StartReader(t.Context(), conn, "slot", 0, options)
	require.NoError(t, err)
	t.Cleanup(func() { _ = reader.Close() }) // tests of Close look at its error
	return reader, f
}

// serve reads all that the client says.
func (f *fakeServer) serve() {
	defer close(f.gone)
	first, err := f.backend.ReceiveStartupMessage()
	if err != nil {
		return
	}
	f.startup = first.(*pgproto3.StartupMessage).Parameters
	f.reply(&pgproto3.AuthenticationOk{}, &pgproto3.ParameterStatus{Name: "server_version", Value: "17.2"}, &pgproto3.ReadyForQuery{TxStatus: 'I'})
	for {
		message, err := f.backend.Receive()
		if err != nil {
			return
		}
		switch message := message.(type) {
		case *pgproto3.Query:
			f.queries = append(f.queries, message.String)
			f.answer(message.String)
		case *pgproto3.CopyData:
			positions := message.Data[1:]
			f.statuses <- fakeStatus{
				Positions: Positions{
					Write: LSN(binary.BigEndian.Uint64(positions)),
					Flush: LSN(binary.BigEndian.Uint64(positions[8:])),
					Apply: LSN(binary.BigEndian.Uint64(positions[16:])),
				},
				reply: positions[32] != 0, at: time.Now(),
			}
		case *pgproto3.Terminate:
			f.said = true
			time.Sleep(f.slow)
			if !f.rude {
				_ = f.conn.Close()
			}
			return
		}
	}
}

func (f *fakeServer) answer(query string) {
	rows := func(values ...string) {
		messages := []pgproto3.BackendMessage{&pgproto3.RowDescription{Fields: []pgproto3.FieldDescription{{Name: []byte("c")}}}}
		for _, value := range values {
			messages = append(messages, &pgproto3.DataRow{Values: [][]byte{[]byte(value)}})
		}
		f.reply(append(messages, &pgproto3.CommandComplete{CommandTag: []byte("SELECT")}, &pgproto3.ReadyForQuery{TxStatus: 'I'})...)
	}
	switch {
	case strings.Contains(query, "wal_sender_timeout"):
		rows(f.senderTimeout)
	case strings.Contains(query, "wal_level"):
		rows(f.walLevel)
	case strings.Contains(query, "wal_status = 'lost'"):
		rows("1")
	case strings.Contains(query, "pg_publication"):
		rows("p", "q")
	case strings.HasPrefix(query, "START_REPLICATION") && f.start != nil:
		f.reply(f.start, &pgproto3.ReadyForQuery{TxStatus: 'I'})
	case strings.HasPrefix(query, "START_REPLICATION"):
		f.reply(&pgproto3.CopyBothResponse{})
		if f.deaf != nil {
			<-f.deaf
		}
	}
}

// reply sends messages. It returns when the client has read them, or hung up.
func (f *fakeServer) reply(messages ...pgproto3.BackendMessage) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, message := range messages {
		f.backend.Send(message)
	}
	_ = f.backend.Flush() // the client may be gone
}

// send sends frames of the stream.
func (f *fakeServer) send(frames ...[]byte) {
	for _, frame := range frames {
		f.reply(&pgproto3.CopyData{Data: frame})
	}
}

// status returns the next status.
func (f *fakeServer) status() fakeStatus {
	f.t.Helper()
	select {
	case status := <-f.statuses:
		return status
	case <-time.After(time.Hour):
		require.FailNow(f.t, "no status")
		panic("not reached")
	}
}

// drain forgets the statuses that have come.
func (f *fakeServer) drain() (last fakeStatus, count int) {
	for {
		select {
		case last = <-f.statuses:
			count++
		default:
			return last, count
		}
	}
}

var fakeRelation = &Relation{OID: 5, Schema: "s", Name: "r", Identity: 'd', Columns: []Column{{Name: "c", TypeOID: 25}}}

// rowFrame is an insert into fakeRelation.
func rowFrame(lsn LSN, value string) []byte {
	return data(lsn, encode(&Insert{Relation: fakeRelation, New: Tuple{{Kind: Text, Data: []byte(value)}}}))
}

// value is that of a row of fakeRelation.
func value(event Event) string { return string(event.(*Insert).New[0].Data) }
