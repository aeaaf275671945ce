package replication

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// Start streams from a slot and calls handle with each event, in the stream's
// own goroutine.
//
// handle must not block: while it runs nothing is read and no status is sent. It
// must not call Close. It may be called before Start has returned. An error it
// returns ends the stream, and is its Err.
//
// Streaming begins with the first transaction that ends behind start, or behind
// what the slot has confirmed, whichever is later; zero means the latter. ctx
// governs the start alone. When it succeeds the connection belongs to the
// stream, which is ended by Close. Otherwise it is still the caller's, and open
// unless ctx or the network has ended it.
func Start(ctx context.Context, conn *Conn, slot string, start LSN, options Options, handle func(Event) error) (*Stream, error) {
	return begin(ctx, conn, slot, start, options, func(*Stream, Options) sink { return &handler{handle: handle} })
}

// begin sets the connection to streaming and starts the stream's goroutine.
func begin(ctx context.Context, conn *Conn, slot string, start LSN, options Options, makeSink func(*Stream, Options) sink) (*Stream, error) {
	if conn.taken {
		return nil, ErrConnTaken
	}
	if err := CheckSlotName(slot); err != nil {
		return nil, err
	}
	options, err := conn.startReplication(ctx, slot, start, options)
	if err != nil {
		return nil, err
	}
	conn.taken = true
	s := &Stream{
		conn:     conn,
		net:      conn.pg.Conn(),
		slot:     slot,
		options:  options,
		wake:     make(chan struct{}, 1),
		done:     make(chan struct{}),
		lastRead: time.Now(),
		rate:     rate{least: options.ReadPauseRate},
	}
	s.received.Store(uint64(start))
	s.sink = makeSink(s, options)
	go s.run()
	return s, nil
}

// startReplication does what can be checked before, fills in the options, and
// has the server stream.
func (c *Conn) startReplication(ctx context.Context, slot string, start LSN, options Options) (Options, error) {
	const op = "stream from slot"
	timeout, err := c.senderTimeout(ctx)
	if err != nil {
		return options, wrap(op, slot, aboutConnection, err)
	}
	options, err = options.withDefaults(timeout)
	if err != nil {
		return options, err
	}
	if version := c.ServerVersion(); version < 14 && (options.Binary || options.Messages) {
		return options, fmt.Errorf("%w: Binary and Messages need PostgreSQL 14, the server is %d", ErrUnsupported, version)
	}
	if err := c.checkPublications(ctx, options.Publications); err != nil {
		return options, err
	}
	err = pglogrepl.StartReplication(ctx, c.pg, quoteSlot(slot), pglogrepl.LSN(start), pglogrepl.StartReplicationOptions{
		Mode: pglogrepl.LogicalReplication, PluginArgs: options.pluginArguments(),
	})
	var pgErr *pgconn.PgError
	switch {
	case err == nil:
		return options, nil
	case errors.As(err, &pgErr) && c.finishCommand(ctx) == nil:
		return options, c.explain(ctx, op, slot, err)
	default:
		// The server may be about to stream, so nothing else can be said.
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = c.pg.Close(closing) // the first error counts
		return options, wrap(op, slot, aboutSlot, err)
	}
}

// finishCommand reads up to the end of a command that failed.
func (c *Conn) finishCommand(ctx context.Context) error {
	for {
		message, err := c.pg.ReceiveMessage(ctx)
		if err != nil {
			return err
		}
		if _, done := message.(*pgproto3.ReadyForQuery); done {
			return nil
		}
	}
}

// sink is where the owner of the connection puts what it reads. All but queued
// is called by the owner alone, and must not block.
type sink interface {
	// space returns nil if there is room for a message, or else a channel that
	// gets something when there is again.
	space() <-chan struct{}
	// put takes a frame; it and its body are valid during the call.
	put(f frame, body []byte) error
	// flush says that the next message may be a while; all that it is time for
	// what was put in to be dealt with, whether or not more belongs to it.
	flush(all bool)
	// end says that no more will come, and why.
	end(cause error)
	// queued is how many bytes it holds.
	queued() int
}

// handler is the sink of Start.
type handler struct {
	decoder Decoder
	handle  func(Event) error
}

func (h *handler) space() <-chan struct{} { return nil }

func (h *handler) put(f frame, _ []byte) error {
	event, err := h.decoder.event(f)
	if err != nil {
		return err
	}
	return h.handle(event)
}

func (h *handler) flush(bool)  {}
func (h *handler) end(error)   {}
func (h *handler) queued() int { return 0 }
