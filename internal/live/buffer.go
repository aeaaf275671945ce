package live

import (
	"context"
	"errors"
	"time"

	"github.com/millrace/watermill-outbox/internal/window"
)

// Why a reader is detached, beside what ends the stream.
var (
	errRefused = errors.New("its buffer is full: the handlers are slower than the messages come")
	errLagging = errors.New("the stream lags: the server is decoding a large transaction")
	errEnded   = errors.New("the reader has left")
)

const (
	// sampleInterval is how often an idle reader's position moves.
	sampleInterval = time.Second
	// rowsPerMark is from how many rows on the last mark stays where it is.
	rowsPerMark = 64
)

// Buffer holds what one attached reader has not taken yet: rows, and samples in
// between. It belongs to the reader that attached; the session fills it.
type Buffer struct {
	session *session
	topic   *topic
	group   string
	shard   Shard

	// ready gets something when there is something to take, or none will come.
	ready chan struct{}
	// gone is closed when the reader is detached.
	gone chan struct{}

	// Of the reader alone.
	seen window.Snapshot // rows that it sees came from the table

	// The rest is guarded by session.mu.

	rows  []window.Row
	bytes int
	// put and taken count the rows; a mark follows on the row of its number.
	put, taken uint64
	marks      []mark
	// marked and last are how many rows there were, and when, at the last sample.
	marked uint64
	last   time.Time
	closed error
}

// Shard says which of so many shards of a topic a buffer gets the rows of. The
// zero value is all of them.
type Shard struct {
	Shard, Shards int
}

// mark is a sample between the rows.
type mark struct {
	after    uint64
	snapshot window.Snapshot
}

// rowSize is how many bytes a row counts for.
func rowSize(row *window.Row) int {
	return len(row.Metadata) + len(row.Payload) + len(row.Key) + len(row.UUID) + 200
}

// Follow says what the reader had from the table: rows that the snapshot sees
// are left out from now on. It reports whether the stream has all others.
func (b *Buffer) Follow(c window.Snapshot, life window.Life) bool {
	b.seen = c
	return life == b.session.base.life && c.Xmin() >= b.topic.from()
}

// Life is the life of the server that the stream belongs to.
func (b *Buffer) Life() window.Life { return b.session.base.life }

// Next waits for rows, at most as many as the limits say, or a sample, which
// stands behind the rows if there is one. It returns false when the context has
// ended, or when nothing is left in a buffer that was closed; see Err.
func (b *Buffer) Next(ctx context.Context, limits window.Limits) ([]window.Row, window.Snapshot, bool) {
	for {
		rows, snapshot, found, closed := b.take(limits)
		switch {
		case len(rows) > 0 || !snapshot.Empty():
			return rows, snapshot, true
		case found:
			continue // all of it came from the table
		case closed:
			return nil, window.Snapshot{}, false
		}
		select {
		case <-b.ready:
		case <-ctx.Done():
			return nil, window.Snapshot{}, false
		}
	}
}

// take takes what there is, if anything, up to the last sample that stands among
// it.
func (b *Buffer) take(limits window.Limits) (rows []window.Row, snapshot window.Snapshot, found, closed bool) {
	b.session.mu.Lock()
	defer b.session.mu.Unlock()
	n, size := 0, 0
	for n < len(b.rows) && n < limits.Rows && size < limits.Bytes {
		size += rowSize(&b.rows[n])
		n++
	}
	i := len(b.marks) - 1
	for i >= 0 && b.marks[i].after > b.taken+uint64(n) {
		i--
	}
	if i >= 0 {
		snapshot = b.marks[i].snapshot
		n = int(b.marks[i].after - b.taken) //nolint:gosec // at most n
		b.marks = b.marks[i+1:]
	}
	rows = b.rows[:n:n]
	if b.rows = b.rows[n:]; len(b.rows) == 0 {
		b.rows = nil // the reader has the array
	}
	b.taken += uint64(n)
	size = 0
	news := rows[:0]
	for i := range rows {
		size += rowSize(&rows[i])
		if !b.seen.Sees(rows[i].XID) {
			news = append(news, rows[i])
		}
	}
	b.bytes -= size
	b.session.bytes -= size
	return news, snapshot, n > 0, b.closed != nil
}

// Gone is closed when the reader is detached; Err says why.
func (b *Buffer) Gone() <-chan struct{} { return b.gone }

// Err says why the reader was detached; nil while it is not.
func (b *Buffer) Err() error {
	b.session.mu.Lock()
	defer b.session.mu.Unlock()
	return b.closed
}

// Close detaches the reader and drops what it has not taken.
func (b *Buffer) Close() {
	b.session.mu.Lock()
	defer b.session.mu.Unlock()
	b.session.detach(b, errEnded)
}

// The methods below are called with session.mu held.

// add puts a transaction's rows in.
func (b *Buffer) add(rows []bufferedRow) {
	if b.closed != nil {
		return
	}
	n := b.put
	for i := range rows {
		if (rows[i].group != "" && rows[i].group != b.group) || !rows[i].in(b.shard) {
			continue
		}
		b.rows = append(b.rows, rows[i].row)
		size := rowSize(&rows[i].row)
		b.bytes += size
		b.session.bytes += size
		b.put++
	}
	if b.put > n {
		b.signal()
	}
}

// mark puts a sample in. A reader without news gets one from time to time; one
// that has not taken the last mark, and has no news behind it, gets no other.
func (b *Buffer) mark(s sample) {
	switch last := len(b.marks) - 1; {
	case b.closed != nil:
		return
	case last >= 0 && b.put == b.marked:
		b.marks[last].snapshot = s.snapshot
		return
	case last > 0 && b.put-b.marks[last-1].after < rowsPerMark:
		// Moved behind the new rows: marks are not counted, and must stay few.
		b.marks[last] = mark{after: b.put, snapshot: s.snapshot}
	case b.put > b.marked || s.at.Sub(b.last) >= sampleInterval:
		b.marks = append(b.marks, mark{after: b.put, snapshot: s.snapshot})
	default:
		return
	}
	b.marked, b.last = b.put, s.at
	b.signal()
}

func (b *Buffer) signal() {
	select {
	case b.ready <- struct{}{}:
	default:
	}
}
