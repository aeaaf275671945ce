package replication

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// Stream is a replication stream in progress. Its methods may be called from any
// goroutine.
type Stream struct {
	conn    *Conn
	net     net.Conn
	slot    string
	options Options
	sink    sink

	// Fields of the owner, the goroutine of run.
	nextStatus time.Time // also the deadline for reading, unless an order is pending
	lastRead   time.Time // when something came in, or a pause was over
	hasRead    bool      // something came in since the last sleep for ReadPause
	paused     bool      // the sink was full in the last turn
	rate       rate
	out        [64]byte

	received     atomic.Uint64 // an LSN
	messages     atomic.Uint64
	bytes        atomic.Uint64
	lastReceived atomic.Int64 // Unix time in nanoseconds

	// pending says that mu guards news for the owner.
	pending atomic.Bool
	// wake gets something, too, for an owner that does not read.
	wake chan struct{}
	// closed says that Close was called.
	closed atomic.Bool

	mu          sync.Mutex
	reported    Positions
	sent        Positions
	ping        bool
	closing     bool
	failure     error // from the consumer's side
	err         error // the cause, once it has ended
	goodbye     error // what went wrong after Close
	pausedSince time.Time

	done chan struct{}
}

// Done is closed when the stream has ended and everything of it is cleaned up.
func (s *Stream) Done() <-chan struct{} { return s.done }

// Err returns nil while the stream goes on, and then why it ended: ErrClosed
// after Close, an *Error, a *DecodeError, or what the handler has returned.
func (s *Stream) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Close ends the stream and waits for its end, which is bounded by
// CloseTimeout. What was confirmed is sent to the server before. It returns nil
// if the server has seen that and let go of the slot, or the stream had ended
// before; otherwise the last confirmations may be lost, and the slot may stay
// in use for a moment. It may be called any number of times, in any state.
func (s *Stream) Close() error {
	s.mu.Lock()
	if !s.closing {
		s.closing = true
		s.closed.Store(true)
		if s.err == nil {
			// For a status that the server does not take. An error means that
			// the connection is closed.
			_ = s.net.SetWriteDeadline(time.Now().Add(s.options.CloseTimeout))
		}
		s.interrupt()
	}
	s.mu.Unlock()
	<-s.done
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.goodbye
}

// fail ends the stream from the consumer's side.
func (s *Stream) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failure == nil {
		s.failure = err
		s.interrupt()
	}
}

// order has the owner send a status.
func (s *Stream) order(ping bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ping = s.ping || ping
	s.interrupt()
}

// interrupt gets the owner's attention, whatever it waits for. Called with mu
// held.
//
// A deadline in the past ends a read that is under way. The owner sets the next
// one with mu held, in the same critical section in which it takes its orders.
// So this sequence leads to a read that ends at once, and not to one that misses
// an order: the owner takes its orders and sets its deadline; an order comes and
// sets the deadline to the past; the owner begins to read.
//
// Once the stream has ended the deadline is that of the goodbye.
func (s *Stream) interrupt() {
	if s.err != nil {
		return
	}
	s.pending.Store(true)
	// An error means that the connection is closed: that ends a read, too.
	_ = s.net.SetReadDeadline(time.Unix(1, 0))
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// run owns the connection until the stream has ended.
func (s *Stream) run() {
	defer close(s.done)
	var err error
	for err == nil {
		err = s.step()
	}
	s.mu.Lock()
	s.err = err
	s.pausedSince = time.Time{}
	closing := s.closing
	s.mu.Unlock()
	// The consumer learns of it first: what follows may take its time.
	s.sink.end(err)
	goodbye := s.hangUp(err)
	if closing {
		s.mu.Lock()
		s.goodbye = goodbye
		s.mu.Unlock()
	}
}

// step does one turn of the owner: it sends a status if there is occasion, and
// takes at most one message. It returns the cause of the stream's end, or nil.
func (s *Stream) step() error {
	now := time.Now()
	if s.pending.Load() || !now.Before(s.nextStatus) {
		if err := s.attend(now); err != nil {
			return err
		}
	}
	if space := s.sink.space(); space != nil {
		return s.pause(now, space)
	}
	if s.paused {
		s.resume()
	}
	frontend := s.conn.pg.Frontend()
	waits := frontend.ReadBufferLen() == 0 && s.conn.in.Buffered() == 0
	if waits {
		s.sink.flush(false)
		if s.hasRead && s.options.ReadPause > 0 && s.rate.reached() {
			s.hasRead = false
			time.Sleep(s.options.ReadPause)
		}
	}
	message, err := frontend.Receive()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return s.checkSilence()
	}
	if err != nil {
		return s.broken("read", err)
	}
	if waits {
		now = time.Now()
	}
	s.rate.count(now)
	s.lastRead, s.hasRead = now, true
	return s.take(now, message)
}

// attend takes the orders and sends a status.
func (s *Stream) attend(now time.Time) error {
	s.mu.Lock()
	if s.failure != nil || s.closing {
		defer s.mu.Unlock()
		if s.failure != nil {
			return s.failure
		}
		return ErrClosed
	}
	ping := s.ping
	s.ping = false
	s.pending.Store(false)
	s.nextStatus = now.Add(s.options.StatusInterval)
	err := s.net.SetReadDeadline(s.nextStatus)
	s.mu.Unlock()
	if err != nil {
		return s.broken("read", err)
	}
	if s.options.ReceiveTimeout > 0 && now.Sub(s.lastRead) >= s.options.ReceiveTimeout/2 {
		ping = true
	}
	s.sink.flush(true)
	return s.sendStatus(now, ping)
}

// pause waits for room in the sink, or for something to attend to.
func (s *Stream) pause(now time.Time, space <-chan struct{}) error {
	s.paused = true
	s.mu.Lock()
	if s.pausedSince.IsZero() {
		s.pausedSince = now
	}
	stalled := now.Sub(s.pausedSince)
	s.mu.Unlock()
	wait := s.nextStatus.Sub(now)
	if limit := s.options.StallTimeout; limit > 0 {
		if stalled >= limit {
			return &Error{Op: "stream from slot", Name: s.slot, Reason: ErrStalled, Err: fmt.Errorf("for %s", stalled.Round(time.Millisecond))}
		}
		wait = min(wait, limit-stalled)
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.wake:
	case <-space:
	}
	return nil
}

// resume ends a pause.
func (s *Stream) resume() {
	s.paused = false
	// Not having read is no silence of the server's.
	s.lastRead = time.Now()
	s.mu.Lock()
	s.pausedSince = time.Time{}
	s.mu.Unlock()
}

// checkSilence is called when nothing has come in.
func (s *Stream) checkSilence() error {
	silent := time.Since(s.lastRead)
	if s.options.ReceiveTimeout < 0 || silent < s.options.ReceiveTimeout {
		return nil
	}
	return &Error{Op: "stream from slot", Name: s.slot, Reason: ErrServerSilent, Err: fmt.Errorf("for %s", silent.Round(time.Millisecond))}
}

// take deals with one message of the server.
func (s *Stream) take(now time.Time, message pgproto3.BackendMessage) error {
	switch message := message.(type) {
	case *pgproto3.CopyData:
		return s.takeData(now, message.Data)
	case *pgproto3.ErrorResponse:
		return wrap("stream from slot", s.slot, aboutStream, pgconn.ErrorResponseToPgError(message))
	case *pgproto3.CopyDone, *pgproto3.CommandComplete:
		// The server ends a stream by itself only when it shuts down.
		return &Error{Op: "stream from slot", Name: s.slot, Reason: ErrShutdown, Err: errors.New("the server has ended the stream")}
	case *pgproto3.NoticeResponse, *pgproto3.ParameterStatus:
		// A warning is in the server's log, too.
		return nil
	default:
		return &Error{Op: "stream from slot", Name: s.slot, Reason: ErrProtocol, Err: fmt.Errorf("unexpected message %T", message)}
	}
}

func (s *Stream) takeData(now time.Time, body []byte) error {
	f, err := parseFrame(body)
	if err != nil {
		return err
	}
	if uint64(f.lsn) > s.received.Load() {
		s.received.Store(uint64(f.lsn))
	}
	s.messages.Add(1)
	s.bytes.Add(uint64(len(body)))
	s.lastReceived.Store(now.UnixNano())
	// Before the sink, which may take longer than it should.
	if f.replyRequested {
		if err := s.sendStatus(now, false); err != nil {
			return err
		}
	}
	return s.sink.put(f, body)
}

// sendStatus tells the server the reported positions.
func (s *Stream) sendStatus(now time.Time, ping bool) error {
	s.mu.Lock()
	timeout := writeTimeout
	if s.closing {
		timeout = s.options.CloseTimeout
	}
	err := s.net.SetWriteDeadline(now.Add(timeout))
	s.mu.Unlock()
	if err != nil {
		return s.broken("send status", err)
	}
	return s.writeStatus(now, ping)
}

// writeStatus is sendStatus with the deadline that there is.
func (s *Stream) writeStatus(now time.Time, ping bool) error {
	s.mu.Lock()
	positions := s.reported
	s.mu.Unlock()
	if err := s.conn.pg.Frontend().SendUnbufferedEncodedCopyData(appendStatus(s.out[:0], positions, now, ping)); err != nil {
		return s.broken("send status", err)
	}
	s.mu.Lock()
	s.sent = positions
	s.mu.Unlock()
	return nil
}

// broken returns the cause for an error of reading or writing.
func (s *Stream) broken(what string, err error) error {
	why := ErrConnectionLost
	if !isNetwork(err) {
		// The framing of messages is not what it must be.
		why = ErrProtocol
	}
	return &Error{Op: "stream from slot", Name: s.slot, Reason: why, Err: fmt.Errorf("%s: %w", what, err)}
}

// hangUp closes the connection, after a last status if it still stands. It
// returns nil if the server has got that and has let go of the slot: then it
// hangs up, too.
func (s *Stream) hangUp(cause error) error {
	// Its goodbye would go to a closed connection; it only is to know.
	defer s.conn.pg.Close(context.Background()) //nolint:errcheck // see above
	defer s.net.Close()                         //nolint:errcheck // nothing is expected of it any more
	if errors.Is(cause, ErrConnectionLost) || errors.Is(cause, ErrServerSilent) {
		return cause
	}
	now := time.Now()
	if err := s.net.SetDeadline(now.Add(s.options.CloseTimeout)); err != nil {
		return s.broken("close", err)
	}
	if err := s.writeStatus(now, false); err != nil {
		return err
	}
	frontend := s.conn.pg.Frontend()
	frontend.Send(&pgproto3.Terminate{})
	if err := frontend.Flush(); err != nil {
		return s.broken("close", err)
	}
	// What is still on its way must be read. A connection that is closed with
	// something unread is reset, and the reset may overtake the last status.
	_, err := io.Copy(io.Discard, s.net)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return &Error{Op: "close stream from slot", Name: s.slot, Err: fmt.Errorf("the server has not let go of it for %s: %w", s.options.CloseTimeout, err)}
	}
	return nil
}
