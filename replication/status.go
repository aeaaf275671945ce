package replication

import (
	"fmt"
	"time"
)

// Positions are what a consumer has done with the stream. Each is an LSN up to
// which everything is done; zero is nothing yet.
type Positions struct {
	// Write is up to where it was written down somewhere.
	Write LSN
	// Flush is up to where it will not be needed again. The slot moves by it:
	// after a restart, transactions that end at or before it do not come again.
	Flush LSN
	// Apply is up to where it has taken effect. It counts for synchronous
	// replication with remote_apply.
	Apply LSN
}

// advance raises each position to that in p, and lowers none.
func (p Positions) advance(to Positions) Positions {
	return Positions{Write: max(p.Write, to.Write), Flush: max(p.Flush, to.Flush), Apply: max(p.Apply, to.Apply)}
}

// Stats is where a stream stands.
type Stats struct {
	// Received is the furthest position that has come in: an end of a
	// transaction, a change, or a keepalive's.
	Received LSN
	// Reported is what the consumer has set, and Sent what the server knows of
	// it.
	Reported, Sent Positions
	// Messages and Bytes count what came in, keepalives included.
	Messages, Bytes uint64
	// LastReceived is when the last of it came.
	LastReceived time.Time
	// Queued is how many bytes a Reader has received and not handed out.
	Queued int
	// Paused is since when a Reader's full queue keeps the stream from reading,
	// or the zero time.
	Paused time.Time
}

// Confirm reports that everything up to lsn is written, flushed and applied. It
// is sent with the next status; SendStatus sends one at once. What to confirm:
// see the package's documentation.
//
// A position at or before the last one changes nothing. It returns
// ErrBeyondReceived for one that the stream has not come to, and Err's error
// once the stream has ended. It may be called from any goroutine, and never
// blocks.
func (s *Stream) Confirm(lsn LSN) error {
	return s.Report(Positions{Write: lsn, Flush: lsn, Apply: lsn})
}

// Report is Confirm with three positions of which some may be ahead. Zero
// leaves a position as it is.
func (s *Stream) Report(p Positions) error {
	received := LSN(s.received.Load())
	if furthest := max(p.Write, p.Flush, p.Apply); furthest > received {
		return fmt.Errorf("%w: %s, received was %s", ErrBeyondReceived, furthest, received)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	if s.closing {
		return ErrClosed
	}
	s.reported = s.reported.advance(p)
	return nil
}

// SendStatus has the reported positions sent now. It may be called from any
// goroutine, does not wait, and does nothing once the stream has ended.
func (s *Stream) SendStatus() { s.order(false) }

// Ping is SendStatus with the wish that the server says where it is: a Keepalive
// follows. A server that is at work on a transaction finishes that first.
func (s *Stream) Ping() { s.order(true) }

// Stats returns where the stream stands.
func (s *Stream) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	stats := Stats{
		Received: LSN(s.received.Load()),
		Reported: s.reported,
		Sent:     s.sent,
		Messages: s.messages.Load(),
		Bytes:    s.bytes.Load(),
		Queued:   s.sink.queued(),
		Paused:   s.pausedSince,
	}
	if at := s.lastReceived.Load(); at != 0 {
		stats.LastReceived = time.Unix(0, at)
	}
	return stats
}
