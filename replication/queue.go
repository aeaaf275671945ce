package replication

import (
	"context"
	"encoding/binary"
	"sync"
)

// chunkBytes is how much memory of a queue is handed over at once.
const chunkBytes = 64 << 10

// queue is the sink of a Reader: a queue bounded by bytes between the owner of
// the connection and the consumer. Frames go in one by one, with their lengths
// before them, and come out in chunks. Chunks are used again.
type queue struct {
	limit int
	// room gets something when the consumer has made room, and ready when the
	// owner has put something in or the end has come.
	room, ready chan struct{}

	mu     sync.Mutex
	chunks [][]byte
	// idle says that the last frame of the last chunk is a keepalive.
	idle bool
	// whole says that a transaction, or something outside of any, is complete.
	whole   bool
	size    int  // of chunks, and of the one that the consumer has
	taken   int  // size of the one that the consumer has
	full    bool // the owner waits for room
	waiting bool // the consumer waits
	free    []byte
	ended   error
}

func newQueue(limit int) *queue {
	return &queue{limit: limit, room: make(chan struct{}, 1), ready: make(chan struct{}, 1)}
}

// space implements sink.
func (q *queue) space() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.full = q.size >= q.limit
	if q.full {
		q.signal()
		return q.room
	}
	return nil
}

// put implements sink. A keepalive takes the place of one right before it: for a
// consumer that is away for long, an idle server must not fill the queue.
func (q *queue) put(f frame, body []byte) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	need := frameLength + len(body)
	last := len(q.chunks) - 1
	if f.kind == frameKeepalive && q.idle {
		copy(q.chunks[last][len(q.chunks[last])-len(body):], body)
		return nil
	}
	q.idle = f.kind == frameKeepalive
	q.whole = q.whole || !f.goesOn()
	if last < 0 || cap(q.chunks[last])-len(q.chunks[last]) < need {
		if last >= 0 {
			q.signal()
		}
		q.chunks = append(q.chunks, q.chunk(need))
		last++
	}
	// The frame came with a length of 32 bits.
	q.chunks[last] = binary.BigEndian.AppendUint32(q.chunks[last], uint32(len(body))) //nolint:gosec // see above
	q.chunks[last] = append(q.chunks[last], body...)
	q.size += need
	return nil
}

// frameLength is how many bytes the length of a frame takes.
const frameLength = 4

// chunk returns an empty chunk with room for need bytes. Called with mu held.
func (q *queue) chunk(need int) []byte {
	if cap(q.free) >= need {
		chunk := q.free[:0]
		q.free = nil
		return chunk
	}
	return make([]byte, 0, max(need, chunkBytes))
}

// flush implements sink. The consumer is not woken for each frame, which would be
// dearer than the frame, but for a transaction, or for a chunk of a large one.
func (q *queue) flush(all bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.chunks) > 0 && (all || q.whole) {
		q.signal()
	}
}

// signal wakes the consumer if it waits. Called with mu held.
func (q *queue) signal() {
	if !q.waiting {
		return
	}
	q.waiting = false
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// end implements sink.
func (q *queue) end(cause error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended = cause
	q.signal()
}

// queued implements sink.
func (q *queue) queued() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.size
}

// next waits for a chunk. Only the consumer calls it, having given back the
// last one.
func (q *queue) next(ctx context.Context) ([]byte, error) {
	for {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		chunk, err := q.poll()
		if chunk != nil || err != nil {
			return chunk, err
		}
		select {
		case <-q.ready:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// giveBack makes room by the chunk that the consumer has, which it must not use
// any more: the owner may write into it at once.
func (q *queue) giveBack(used []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.size -= q.taken
	q.taken = 0
	// What is larger was for one message.
	if cap(used) == chunkBytes {
		q.free = used
	}
	if q.full && q.size < q.limit {
		q.full = false
		select {
		case q.room <- struct{}{}:
		default:
		}
	}
}

// poll returns a chunk if there is one, or the end if there will be none.
func (q *queue) poll() ([]byte, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.chunks) == 0 {
		q.waiting = q.ended == nil
		return nil, q.ended
	}
	chunk := q.chunks[0]
	q.chunks[0] = nil
	q.chunks = q.chunks[1:]
	q.idle = q.idle && len(q.chunks) > 0
	q.whole = q.whole && len(q.chunks) > 0
	q.taken = len(chunk)
	return chunk, nil
}

// hasChunk reports whether next would return at once.
func (q *queue) hasChunk() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.chunks) > 0 || q.ended != nil
}
