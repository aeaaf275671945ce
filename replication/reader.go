package replication

import (
	"cmp"
	"context"
	"encoding/binary"
)

// Reader is a stream from which events are pulled, through a queue bounded by
// bytes. Next and Buffered have one caller at a time; the other methods may be
// called from any goroutine.
type Reader struct {
	*Stream

	queue   *queue
	decoder Decoder
	chunk   []byte // all of it, to be given back
	rest    []byte // what of it is not handed out
	err     error
}

// StartReader streams from a slot like Start, into a queue of at most
// Options.QueueBytes from which Next takes.
func StartReader(ctx context.Context, conn *Conn, slot string, start LSN, options Options) (*Reader, error) {
	r := &Reader{}
	stream, err := begin(ctx, conn, slot, start, options, func(_ *Stream, filled Options) sink {
		r.queue = newQueue(filled.QueueBytes)
		return r.queue
	})
	if err != nil {
		return nil, err
	}
	r.Stream = stream
	return r, nil
}

// Next returns the next event, and waits for it if need be. The event is valid
// until the next call. ctx ends the waiting; the stream goes on, and so may the
// caller. Who waits is woken when a transaction is complete, or 64 KiB of it, or
// a status is due.
//
// When the stream has ended Next returns the events received before, and then
// always its cause. After Close it returns ErrClosed at once.
func (r *Reader) Next(ctx context.Context) (Event, error) {
	if r.closed.Load() {
		return nil, cmp.Or(r.Err(), ErrClosed)
	}
	if len(r.rest) == 0 {
		chunk, err := r.nextChunk(ctx)
		if err != nil {
			return nil, err
		}
		r.chunk, r.rest = chunk, chunk
	}
	length := binary.BigEndian.Uint32(r.rest)
	body := r.rest[frameLength : frameLength+length]
	r.rest = r.rest[frameLength+length:]
	f, err := parseFrame(body)
	var event Event
	if err == nil {
		event, err = r.decoder.event(f)
	}
	if err != nil {
		r.end(err)
		return nil, err
	}
	return event, nil
}

// Buffered reports whether Next would return at once.
func (r *Reader) Buffered() bool {
	return len(r.rest) > 0 || r.err != nil || r.closed.Load() || r.queue.hasChunk()
}

func (r *Reader) nextChunk(ctx context.Context) ([]byte, error) {
	if r.err != nil {
		return nil, r.err
	}
	if r.chunk != nil {
		r.queue.giveBack(r.chunk)
		r.chunk = nil
	}
	chunk, err := r.queue.next(ctx)
	if err != nil && ctx.Err() == nil {
		r.err = err
	}
	return chunk, err
}

// end makes err the cause of the stream's end, and the last that Next returns.
func (r *Reader) end(err error) {
	r.err, r.rest = err, nil
	r.fail(err)
}
