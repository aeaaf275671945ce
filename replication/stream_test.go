package replication

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"
)

func TestStatusInterval(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reader, server := startFake(t, Options{StatusInterval: time.Second})
		time.Sleep(10*time.Second + time.Millisecond)
		synctest.Wait()
		last, count := server.drain()
		require.Equal(t, 11, count, "one at the start, and one each second")
		require.Zero(t, last.Positions, "nothing is known yet")
		require.False(t, last.reply)
		require.NoError(t, reader.Err())
	})
}

// A status that is late because much came in is sent all the same.
func TestStatusIntervalUnderLoad(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reader, server := startFake(t, Options{StatusInterval: time.Second})
		server.send(data(1, encode(fakeRelation)))
		go func() {
			for i := range 100 {
				time.Sleep(100 * time.Millisecond)
				server.send(rowFrame(LSN(i+2), "x"))
			}
		}()
		for range 101 {
			_, err := reader.Next(t.Context())
			require.NoError(t, err)
		}
		_, count := server.drain()
		require.InDelta(t, 11, count, 1)
	})
}

// Without an interval of its own a stream sends status often enough for the
// server's patience.
func TestStatusIntervalFollowsServer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		conn, server := newFake(t)
		server.senderTimeout = "2000"
		reader, err := StartReader(t.Context(), conn, "slot", 0, Options{Publications: []string{"p"}})
		require.NoError(t, err)
		defer reader.Close()
		first, second := server.status(), server.status()
		require.Equal(t, 500*time.Millisecond, second.at.Sub(first.at))
	})
}

// The answer to a keepalive depends on nothing the consumer does or does not.
func TestKeepaliveIsAnsweredAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reader, server := startFake(t, Options{})
		synctest.Wait()
		server.drain()
		for i := range 3 {
			time.Sleep(time.Second)
			server.send(keepalive(LSN(100+i), true))
			require.Equal(t, time.Now(), server.status().at)
			server.send(keepalive(LSN(100+i), false))
			synctest.Wait()
			_, count := server.drain()
			require.Zero(t, count, "nothing was asked")
		}
		event, err := reader.Next(t.Context())
		require.NoError(t, err)
		require.Equal(t, LSN(102), event.(*Keepalive).WALEnd, "the last one says it all")
		require.False(t, reader.Buffered())
		require.Equal(t, LSN(102), reader.Stats().Received)
		require.Zero(t, reader.Stats().Sent, "a keepalive confirms nothing")
	})
}

// A full queue keeps the owner from reading, and from nothing else.
func TestQueueFull(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const rows = 100
		reader, server := startFake(t, Options{StatusInterval: time.Second, QueueBytes: 1024})
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			server.send(data(1, encode(fakeRelation)))
			for i := range rows {
				server.send(rowFrame(LSN(i+2), fmt.Sprintf("%0100d", i)))
			}
		}()
		synctest.Wait()
		full := time.Now()
		server.drain()
		time.Sleep(5*time.Minute + time.Millisecond)
		synctest.Wait()
		_, count := server.drain()
		require.Equal(t, 5*60, count, "status goes on")
		stats := reader.Stats()
		require.Equal(t, full, stats.Paused)
		require.Less(t, stats.Queued, 1024+200, "the bound, and one message")
		require.GreaterOrEqual(t, stats.Queued, 1024)
		require.NoError(t, reader.Confirm(stats.Received))
		reader.SendStatus()
		require.Equal(t, stats.Received, server.status().Flush, "orders are carried out")

		_, err := reader.Next(t.Context())
		require.NoError(t, err)
		for i := range rows {
			event, err := reader.Next(t.Context())
			require.NoError(t, err)
			require.Equal(t, fmt.Sprintf("%0100d", i), value(event))
		}
		<-sent
		synctest.Wait()
		require.Zero(t, reader.Stats().Paused)
		require.False(t, reader.Buffered())
	})
}

func TestStallTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reader, server := startFake(t, Options{QueueBytes: 1024, StallTimeout: 30 * time.Second})
		big := strings.Repeat("x", 2000)
		server.send(data(1, encode(fakeRelation)))
		// Full again and again, and never for long.
		for i := range 5 {
			server.send(rowFrame(LSN(i), big))
			synctest.Wait()
			time.Sleep(20 * time.Second)
			for reader.Buffered() {
				_, err := reader.Next(t.Context())
				require.NoError(t, err)
			}
			_, err := reader.Next(quick(t)) // gives the room back
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		began := time.Now()
		server.send(rowFrame(100, big))
		<-reader.Done()
		require.ErrorIs(t, reader.Err(), ErrStalled)
		require.True(t, IsRetryable(reader.Err()))
		require.InDelta(t, 30, time.Since(began).Seconds(), 0.1)
		event, err := reader.Next(t.Context())
		require.NoError(t, err)
		require.Equal(t, big, value(event), "what was received is not lost")
		_, err = reader.Next(t.Context())
		require.ErrorIs(t, err, ErrStalled)
	})
}

func quick(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// A server that says nothing is asked for a sign of life, and given up when it
// gives none.
func TestServerSilent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reader, server := startFake(t, Options{StatusInterval: time.Second, ReceiveTimeout: 10 * time.Second})
		began := time.Now()
		var firstPing time.Time
		for reader.Err() == nil {
			select {
			case status := <-server.statuses:
				if status.reply && firstPing.IsZero() {
					firstPing = status.at
				}
			case <-reader.Done():
			}
		}
		require.Equal(t, 5*time.Second, firstPing.Sub(began))
		require.ErrorIs(t, reader.Err(), ErrServerSilent)
		require.True(t, IsRetryable(reader.Err()))
		require.Equal(t, 10*time.Second, time.Since(began))
		<-server.gone
		require.False(t, server.said, "there is nobody to say goodbye to")
	})
}

// One that answers is alive, however little it has to say; and so is one that
// is not listened to.
func TestServerNotSilent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reader, server := startFake(t, Options{StatusInterval: time.Second, ReceiveTimeout: 10 * time.Second, QueueBytes: 1024})
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				select {
				case status := <-server.statuses:
					if status.reply {
						server.send(keepalive(5, false))
					}
				case <-stop:
					return
				}
			}
		})
		time.Sleep(time.Hour)
		require.NoError(t, reader.Err(), "it answers")
		require.Greater(t, reader.Stats().Messages, uint64(600))
		require.Less(t, reader.Stats().Queued, 30, "of the keepalives the last one is enough")
		require.WithinDuration(t, time.Now(), reader.Stats().LastReceived, 11*time.Second)
		close(stop)
		wg.Wait()
	})
	synctest.Test(t, func(t *testing.T) {
		reader, server := startFake(t, Options{StatusInterval: time.Second, ReceiveTimeout: 10 * time.Second, QueueBytes: 1024})
		server.send(data(1, encode(fakeRelation)), rowFrame(2, strings.Repeat("x", 2000)))
		time.Sleep(time.Hour)
		require.NoError(t, reader.Err(), "the queue is full")
		for range 2 {
			_, err := reader.Next(t.Context())
			require.NoError(t, err)
		}
		_, err := reader.Next(quick(t))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		time.Sleep(9 * time.Second)
		require.NoError(t, reader.Err(), "its time begins anew")
		time.Sleep(9 * time.Second)
		require.ErrorIs(t, reader.Err(), ErrServerSilent)
	})
	synctest.Test(t, func(t *testing.T) {
		reader, _ := startFake(t, Options{ReceiveTimeout: -1})
		time.Sleep(24 * time.Hour)
		require.NoError(t, reader.Err(), "there is no limit")
	})
}

func TestConfirm(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reader, server := startFake(t, Options{StatusInterval: time.Second})
		synctest.Wait()
		server.drain()
		require.ErrorIs(t, reader.Confirm(1), ErrBeyondReceived)
		server.send(keepalive(100, false))
		synctest.Wait()
		require.ErrorIs(t, reader.Confirm(101), ErrBeyondReceived)
		require.ErrorIs(t, reader.Report(Positions{Write: 1, Flush: 1, Apply: 101}), ErrBeyondReceived)
		require.Zero(t, reader.Stats().Reported)

		require.NoError(t, reader.Report(Positions{Write: 90}))
		status := server.status()
		// pglogrepl would make a flushed position of that.
		require.Equal(t, Positions{Write: 90}, status.Positions)
		require.NoError(t, reader.Confirm(50))
		require.Equal(t, Positions{Write: 90, Flush: 50, Apply: 50}, server.status().Positions)
		require.NoError(t, reader.Confirm(40))
		require.Equal(t, Positions{Write: 90, Flush: 50, Apply: 50}, server.status().Positions, "never back")

		// Changes of later transactions may lie before what was received.
		server.send(data(80, encode(fakeRelation)))
		synctest.Wait()
		require.Equal(t, LSN(100), reader.Stats().Received)
		require.NoError(t, reader.Report(Positions{Write: 95}))
		require.Equal(t, LSN(95), server.status().Write)

		require.NoError(t, reader.Report(Positions{Flush: 60}))
		before := time.Now()
		reader.SendStatus()
		status = server.status()
		require.Equal(t, before, status.at, "at once")
		require.Equal(t, LSN(60), status.Flush)
		require.False(t, status.reply)
		reader.Ping()
		require.True(t, server.status().reply)
		require.Equal(t, Positions{Write: 95, Flush: 60, Apply: 50}, reader.Stats().Sent)

		require.NoError(t, reader.Confirm(100))
		require.NoError(t, reader.Close())
		last, count := server.drain()
		require.Equal(t, 1, count)
		require.Equal(t, Positions{Write: 100, Flush: 100, Apply: 100}, last.Positions, "Close sends what was confirmed")
		require.True(t, server.said)
		require.ErrorIs(t, reader.Confirm(100), ErrClosed)
		reader.SendStatus()
		reader.Ping()
	})
}

// A stream that begins at a position may confirm that much.
func TestConfirmStart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		conn, server := newFake(t)
		reader, err := StartReader(t.Context(), conn, "slot", 0x1_00000064, Options{Publications: []string{"q", "p"}, Binary: true, Messages: true})
		require.NoError(t, err)
		defer reader.Close()
		require.Equal(t, `START_REPLICATION SLOT "slot" LOGICAL 1/64 (proto_version '1', publication_names '"q","p"', binary 'true', messages 'true')`,
			strings.TrimSpace(server.queries[len(server.queries)-1]))
		require.NoError(t, reader.Confirm(0x1_00000064))
		require.ErrorIs(t, reader.Confirm(0x1_00000065), ErrBeyondReceived)
	})
}

// Confirm and orders from many goroutines, while everything else goes on.
func TestConfirmStress(t *testing.T) {
	t.Parallel()
	reader, server := startFake(t, Options{StatusInterval: MinStatusInterval})
	const rows = 300
	var wg sync.WaitGroup
	wg.Go(func() {
		server.send(data(1, encode(fakeRelation)))
		for i := range rows {
			server.send(rowFrame(LSN(i+2), "x"), keepalive(LSN(i+2), i%7 == 0))
		}
	})
	seen := make(chan struct{})
	wg.Go(func() {
		defer close(seen)
		for range 1 + 2*rows {
			if _, err := reader.Next(t.Context()); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for range 3 {
		wg.Go(func() {
			for {
				select {
				case <-seen:
					return
				default:
					if err := reader.Confirm(reader.Stats().Received); err != nil {
						t.Error(err)
						return
					}
					reader.SendStatus()
					reader.Ping()
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, reader.Confirm(rows+1))
	require.NoError(t, reader.Close())
	var last Positions
	for len(server.statuses) > 0 {
		status := <-server.statuses
		require.GreaterOrEqual(t, status.Flush, last.Flush)
		last = status.Positions
	}
	require.Equal(t, LSN(rows+1), last.Flush)
}

// However a stream ends: what it says, what Next returns, and whether anybody
// may try again.
func TestEnds(t *testing.T) {
	t.Parallel()
	pgError := func(code string) func(*fakeServer) {
		return func(f *fakeServer) {
			f.reply(&pgproto3.ErrorResponse{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: code, Message: "because"})
		}
	}
	frame := func(body ...byte) func(*fakeServer) { return func(f *fakeServer) { f.send(body) } }
	tests := map[string]struct {
		server    func(*fakeServer)
		reason    error
		text      string
		retryable bool
		rude      bool // no goodbye
	}{
		"connection cut":          {func(f *fakeServer) { _ = f.conn.Close() }, ErrConnectionLost, `slot "slot": connection lost: read`, true, true},
		"backend terminated":      {pgError("57P01"), ErrShutdown, "because (SQLSTATE 57P01)", true, false},
		"publication gone":        {pgError("42704"), ErrPublicationMissing, "no such publication", false, false},
		"WAL gone":                {pgError("58P01"), ErrSlotLost, "lost its WAL", false, false},
		"something internal":      {pgError("XX000"), nil, "because (SQLSTATE XX000)", false, false},
		"out of memory":           {pgError("53200"), nil, "because", true, false},
		"orderly end":             {func(f *fakeServer) { f.reply(&pgproto3.CommandComplete{CommandTag: []byte("COPY 0")}) }, ErrShutdown, "has ended the stream", true, false},
		"an end of copying":       {func(f *fakeServer) { f.reply(&pgproto3.CopyDone{}) }, ErrShutdown, "has ended the stream", true, false},
		"unexpected message":      {func(f *fakeServer) { f.reply(&pgproto3.DataRow{}) }, ErrProtocol, "unexpected message *pgproto3.DataRow", false, false},
		"unknown message type":    {func(f *fakeServer) { _, _ = f.conn.Write([]byte{'?', 0, 0, 0, 4}) }, ErrProtocol, "unknown message type", false, false},
		"negative message length": {func(f *fakeServer) { _, _ = f.conn.Write([]byte{'d', 0xff, 0, 0, 4}) }, ErrProtocol, "invalid message length", false, false},
		"empty frame":             {frame(), ErrProtocol, "is empty", false, false},
		"unknown frame":           {frame('z', 1), ErrProtocol, "message 'z' at 0/0: is of an unknown kind", false, false},
		"short data":              {frame('w', 1, 2), ErrProtocol, "wrong length", false, false},
		"long keepalive":          {frame(append(keepalive(1, false), 0)...), ErrProtocol, "wrong length", false, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				reader, server := startFake(t, Options{})
				server.send(data(1, encode(fakeRelation)), rowFrame(2, "received before"))
				// Notices and the like are no end.
				server.reply(&pgproto3.NoticeResponse{Message: "note"}, &pgproto3.ParameterStatus{Name: "TimeZone", Value: "UTC"})
				require.NoError(t, reader.Confirm(2))
				server.drain()
				go test.server(server)
				<-reader.Done()
				err := reader.Err()
				if test.reason != nil {
					require.ErrorIs(t, err, test.reason)
				}
				require.ErrorContains(t, err, test.text)
				require.Equal(t, test.retryable, IsRetryable(err))
				require.ErrorIs(t, reader.Confirm(2), err)

				_, err = reader.Next(t.Context())
				require.NoError(t, err)
				event, err := reader.Next(t.Context())
				require.NoError(t, err)
				require.Equal(t, "received before", value(event))
				for range 2 {
					require.True(t, reader.Buffered())
					_, err = reader.Next(t.Context())
					require.Equal(t, reader.Err(), err)
				}
				require.NoError(t, reader.Close(), "it had ended before")
				require.NotErrorIs(t, reader.Err(), ErrClosed, "the cause stays")
				<-server.gone
				require.Equal(t, !test.rude, server.said)
				if !test.rude {
					last, _ := server.drain()
					require.Equal(t, LSN(2), last.Flush, "what was confirmed is told")
				}
			})
		})
	}
}

// What cannot be decoded ends the stream, with its position, after what came
// before it.
func TestDecodeErrorEndsStream(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reader, server := startFake(t, Options{})
		go server.send(data(1, encode(fakeRelation)), rowFrame(2, "good"), data(3, []byte{'?'}), rowFrame(4, "never seen"))
		for range 2 {
			_, err := reader.Next(t.Context())
			require.NoError(t, err)
		}
		var decodeErr *DecodeError
		for range 2 {
			_, err := reader.Next(t.Context())
			require.ErrorAs(t, err, &decodeErr)
			require.Equal(t, &DecodeError{LSN: 3, Kind: '?', Problem: "is of an unknown kind"}, decodeErr)
		}
		<-reader.Done()
		require.Equal(t, error(decodeErr), reader.Err())
		require.NoError(t, reader.Close())
	})
	synctest.Test(t, func(t *testing.T) {
		conn, server := newFake(t)
		stream, err := Start(t.Context(), conn, "slot", 0, Options{Publications: []string{"p"}}, func(Event) error { return nil })
		require.NoError(t, err)
		go server.send(data(3, []byte{'?'}))
		<-stream.Done()
		var decodeErr *DecodeError
		require.ErrorAs(t, stream.Err(), &decodeErr)
	})
}

// A handler gets every event in the stream's goroutine, may confirm, and ends
// the stream with an error.
func TestHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		conn, server := newFake(t)
		enough := errors.New("enough")
		var stream *Stream
		started := make(chan struct{})
		var got []string
		stream, err := Start(t.Context(), conn, "slot", 0, Options{Publications: []string{"p"}}, func(event Event) error {
			<-started
			got = append(got, fmt.Sprintf("%T", event))
			if insert, ok := event.(*Insert); ok {
				if value(insert) == "last" {
					return enough
				}
				return stream.Confirm(insert.LSN)
			}
			return nil
		})
		close(started)
		require.NoError(t, err)
		go server.send(data(1, encode(fakeRelation)), rowFrame(2, "x"), keepalive(3, true), rowFrame(4, "last"), rowFrame(5, "never seen"))
		<-stream.Done()
		require.Equal(t, enough, stream.Err())
		require.Equal(t, []string{"*replication.Relation", "*replication.Insert", "*replication.Keepalive", "*replication.Insert"}, got)
		require.NoError(t, stream.Close())
		<-server.gone
		last, _ := server.drain()
		require.Equal(t, LSN(2), last.Flush)
	})
}

// Close in every state, from many goroutines at once.
func TestClose(t *testing.T) {
	t.Parallel()
	states := map[string]func(*Reader, *fakeServer){
		"at once":   func(*Reader, *fakeServer) {},
		"waiting":   func(*Reader, *fakeServer) { synctest.Wait() },
		"with data": func(_ *Reader, f *fakeServer) { f.send(data(1, encode(fakeRelation)), rowFrame(2, "x")) },
		"queue full": func(_ *Reader, f *fakeServer) {
			f.send(data(1, encode(fakeRelation)), rowFrame(2, strings.Repeat("x", 4000)))
			synctest.Wait()
		},
		"in mid-flow": func(_ *Reader, f *fakeServer) {
			go func() {
				f.send(data(1, encode(fakeRelation)))
				for range 1000 {
					f.send(rowFrame(2, strings.Repeat("x", 400)))
				}
			}()
		},
	}
	for name, reach := range states {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				reader, server := startFake(t, Options{QueueBytes: 1024})
				reach(reader, server)
				began := time.Now()
				var wg sync.WaitGroup
				for range 5 {
					wg.Go(func() {
						if err := reader.Close(); err != nil {
							t.Error(err)
						}
					})
				}
				wg.Wait()
				require.Zero(t, time.Since(began), "the server hangs up at once")
				require.ErrorIs(t, reader.Err(), ErrClosed)
				require.False(t, IsRetryable(reader.Err()))
				_, err := reader.Next(t.Context())
				require.ErrorIs(t, err, ErrClosed)
				require.True(t, reader.Buffered())
				<-server.gone
				require.True(t, server.said)
			})
		})
	}
}

func TestCloseWakesNext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reader, _ := startFake(t, Options{})
		waiting := make(chan error)
		go func() {
			_, err := reader.Next(t.Context())
			waiting <- err
		}()
		synctest.Wait()
		require.NoError(t, reader.Close())
		require.ErrorIs(t, <-waiting, ErrClosed)
	})
}

// A server that does not hang up is not waited for for long, and Close says so.
func TestCloseIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reader, server := startFake(t, Options{CloseTimeout: 3 * time.Second})
		server.rude = true
		began := time.Now()
		for range 2 {
			require.ErrorContains(t, reader.Close(), "has not let go of it for 3s")
		}
		require.Equal(t, 3*time.Second, time.Since(began))
		require.ErrorIs(t, reader.Err(), ErrClosed)
	})
}

// A server that does not take what it is told is gone.
func TestServerDeaf(t *testing.T) {
	t.Parallel()
	start := func(t *testing.T) (*Reader, *fakeServer) {
		conn, server := newFake(t)
		server.deaf = make(chan struct{})
		reader, err := StartReader(t.Context(), conn, "slot", 0, Options{Publications: []string{"p"}})
		require.NoError(t, err)
		return reader, server
	}
	synctest.Test(t, func(t *testing.T) {
		reader, server := start(t)
		began := time.Now()
		<-reader.Done()
		require.ErrorIs(t, reader.Err(), ErrConnectionLost)
		require.Equal(t, writeTimeout, time.Since(began))
		require.NoError(t, reader.Close(), "it had ended before")
		close(server.deaf)
	})
	synctest.Test(t, func(t *testing.T) {
		reader, server := start(t)
		synctest.Wait()
		began := time.Now()
		require.ErrorIs(t, reader.Close(), ErrConnectionLost, "nobody knows what was confirmed")
		require.Equal(t, DefaultCloseTimeout, time.Since(began))
		close(server.deaf)
	})
}

// The time limit of an answer once counted from when the owner had begun to
// wait for the question: a server that asked late in the interval was lost.
func TestKeepaliveAfterLongWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reader, server := startFake(t, Options{StatusInterval: 25 * time.Second})
		time.Sleep(24 * time.Second)
		server.drain()
		server.send(keepalive(1, true))
		require.Equal(t, time.Now(), server.status().at)
		require.NoError(t, reader.Err())
		require.Equal(t, time.Now().UnixNano(), reader.Stats().LastReceived.UnixNano())
	})
}

// Close once returned an error when another goroutine went on ordering statuses:
// an order put the deadline into the past with which the owner waited for the
// server to hang up.
func TestOrdersDoNotDisturbClose(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reader, server := startFake(t, Options{})
		server.slow = 500 * time.Millisecond
		var wg sync.WaitGroup
		wg.Go(func() {
			for range 100 {
				time.Sleep(10 * time.Millisecond)
				reader.Ping()
				reader.SendStatus()
				reader.fail(errors.New("too late"))
			}
		})
		began := time.Now()
		require.NoError(t, reader.Close())
		require.Equal(t, 500*time.Millisecond, time.Since(began))
		require.ErrorIs(t, reader.Err(), ErrClosed)
		wg.Wait()
	})
}

// ctx ends the waiting of Next and nothing else.
func TestNextContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reader, server := startFake(t, Options{})
		ctx, cancel := context.WithCancelCause(t.Context())
		stop := errors.New("stop")
		cancel(stop)
		for range 3 {
			_, err := reader.Next(ctx)
			require.ErrorIs(t, err, stop)
			_, err = reader.Next(quick(t))
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		server.send(data(1, encode(fakeRelation)))
		for i := range 10 {
			server.send(rowFrame(LSN(i+2), fmt.Sprint(i)))
			_, err := reader.Next(ctx)
			require.ErrorIs(t, err, stop)
			if i == 0 {
				_, err := reader.Next(t.Context())
				require.NoError(t, err)
			}
			event, err := reader.Next(t.Context())
			require.NoError(t, err)
			require.Equal(t, fmt.Sprint(i), value(event))
		}
		require.NoError(t, reader.Err())

		// A chunk that was given back before a wait in vain is not given back
		// once more after it: the owner would write over what is in it.
		for range 3 {
			server.send(rowFrame(20, "one"), rowFrame(21, "two"))
			_, err := reader.Next(ctx)
			require.ErrorIs(t, err, stop)
			event, err := reader.Next(t.Context())
			require.NoError(t, err)
			require.Equal(t, "one", value(event))
			server.send(rowFrame(22, "666"), rowFrame(23, "777"))
			synctest.Wait()
			for _, want := range []string{"two", "666", "777"} {
				event, err = reader.Next(t.Context())
				require.NoError(t, err)
				require.Equal(t, want, value(event))
			}
			_, err = reader.Next(ctx)
			require.ErrorIs(t, err, stop)
		}
	})
}

// What Start refuses, and who has the connection then.
func TestStartFails(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		slot    string
		options Options
		code    string
		level   string
		reason  error
		text    string
	}{
		"no publication named": {"slot", Options{}, "", "", nil, "Publications is empty"},
		"no such publication":  {"slot", Options{Publications: []string{"p", "x"}}, "", "", ErrPublicationMissing, `"x": there is no such publication`},
		"bad publication name": {"slot", Options{Publications: []string{""}}, "", "", ErrInvalidName, "publication"},
		"bad slot name":        {"Slot", Options{Publications: []string{"p"}}, "", "", ErrInvalidName, `"Slot"`},
		"slot missing":         {"slot", Options{Publications: []string{"p"}}, "42704", "", ErrSlotMissing, "no such slot"},
		"slot in use":          {"slot", Options{Publications: []string{"p"}}, "55006", "", ErrSlotInUse, "is in use"},
		"slot without WAL":     {"slot", Options{Publications: []string{"p"}}, "58P01", "", ErrSlotLost, "lost its WAL"},
		"slot invalidated":     {"slot", Options{Publications: []string{"p"}}, "55000", "", ErrSlotLost, "lost its WAL"},
		"WAL level":            {"slot", Options{Publications: []string{"p"}}, "55000", "replica", ErrWALLevel, "wal_level is replica"},
		"privilege":            {"slot", Options{Publications: []string{"p"}}, "42501", "", ErrNoPrivilege, "lacks a privilege"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn, server := newFake(t)
			if test.code != "" {
				server.start = &pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: test.code, Message: "weil"}
			}
			if test.level != "" {
				server.walLevel = test.level
			}
			reader, err := StartReader(t.Context(), conn, test.slot, 0, test.options)
			require.Nil(t, reader)
			if test.reason != nil {
				require.ErrorIs(t, err, test.reason)
			}
			require.ErrorContains(t, err, test.text)
			if test.code != "" {
				var pgErr *pgconn.PgError
				require.ErrorAs(t, err, &pgErr)
			}
			// The connection is the caller's still, and works.
			server.start = nil
			reader, err = StartReader(t.Context(), conn, "slot", 0, Options{Publications: []string{"p"}})
			require.NoError(t, err)
			require.NoError(t, reader.Close())
		})
	}
}

// A connection that a stream has is nobody else's.
func TestConnTaken(t *testing.T) {
	t.Parallel()
	conn, _ := newFake(t)
	ctx := t.Context()
	options := Options{Publications: []string{"p"}}
	reader, err := StartReader(ctx, conn, "slot", 0, options)
	require.NoError(t, err)
	_, err = StartReader(ctx, conn, "slot", 0, options)
	require.ErrorIs(t, err, ErrConnTaken)
	_, err = conn.IdentifySystem(ctx)
	require.ErrorIs(t, err, ErrConnTaken)
	_, err = conn.CreateSlot(ctx, "slot", SlotOptions{})
	require.ErrorIs(t, err, ErrConnTaken)
	require.ErrorIs(t, conn.DropSlot(ctx, "slot", false), ErrConnTaken)
	_, err = conn.Setting(ctx, "wal_level")
	require.ErrorIs(t, err, ErrConnTaken)
	require.NoError(t, conn.Close(ctx))
	require.NoError(t, reader.Err(), "closing the connection does not end the stream")
	require.NoError(t, reader.Close())
	require.NoError(t, conn.Close(ctx))
}

// Start and Close, over and over, at every moment.
func TestStreamStress(t *testing.T) {
	t.Parallel()
	for i := range 100 {
		reader, server := startFake(t, Options{QueueBytes: 1024, StatusInterval: MinStatusInterval})
		var wg sync.WaitGroup
		wg.Go(func() {
			server.send(data(1, encode(fakeRelation)))
			for {
				select {
				case <-server.gone:
					return
				default:
					server.send(rowFrame(2, strings.Repeat("x", 300)), keepalive(3, true))
				}
			}
		})
		wg.Go(func() {
			for {
				if _, err := reader.Next(t.Context()); err != nil {
					if !errors.Is(err, ErrClosed) {
						t.Error(err)
					}
					return
				}
			}
		})
		time.Sleep(time.Duration(i) * 30 * time.Microsecond)
		wg.Go(func() {
			if err := reader.Close(); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
	}
}
