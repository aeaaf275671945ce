// Package replication is typed streaming over PostgreSQL's logical replication:
// connections, slots, publications, and the changes of any table as events. It
// knows nothing of what the tables mean; an outbox, change data capture or a
// cache that must be invalidated can stand on it.
//
//	config, err := pgconn.ParseConfig(dsn)
//	conn, err := replication.Connect(ctx, config, replication.ConnectOptions{})
//	slot, err := conn.CreateSlot(ctx, "orders", replication.SlotOptions{Temporary: true})
//	reader, err := replication.StartReader(ctx, conn, "orders", slot.ConsistentPoint,
//		replication.Options{Publications: []string{"orders"}, Binary: true})
//	for {
//		event, err := reader.Next(ctx)
//		switch event := event.(type) {
//		case *replication.Insert:
//		case *replication.Commit:
//			err = reader.Confirm(event.EndLSN)
//		case *replication.Keepalive:
//			err = reader.Confirm(event.WALEnd)
//		}
//	}
//
// # States
//
//	Conn    open ── Start ──▶ taken ── the stream ends ──▶ closed
//	        open ── Close, or an error of the network ───▶ closed
//
//	Stream  streaming ⇄ paused (a Reader's queue is full)
//	        streaming, paused ── Close, failure ──▶ ended ──▶ done
//
// An open [Conn] runs commands for its caller. A started [Stream] takes it over
// for good. When Start fails the Conn is the caller's still, to use or to close.
//
// A stream ends once, for one cause. From then on Err returns it. Then the
// server is told goodbye, if there is still a connection, and when the
// connection is closed and the stream's goroutine at its end, Done is closed.
//
// # Who does what
//
// One goroutine owns the connection of a stream. It alone reads from it and
// writes to it. In each turn it
//
//  1. sends a status if one is due or ordered,
//  2. reads one message, or waits for it until the next status is due,
//  3. answers if the server asked for an answer,
//  4. gives the message to the sink.
//
// The core pushes: a sink is called by the owner and must not block. There are
// two sinks. [Start] takes a function, which gets decoded events; the owner
// never stops reading, so it is up to that function to be quick, or to put what
// it gets into buffers that may refuse. [StartReader] takes a queue bounded by
// bytes, out of which [Reader.Next] pulls; it decodes in the goroutine of its
// caller. Pulling stands on pushing because the reverse would need a second
// goroutine between the connection and a caller that wants every event at once.
//
// When the queue is full the owner stops reading and goes on sending status. The
// server needs to hear from its client once in wal_sender_timeout; it needs not
// be listened to. So a stuck consumer is never cut off, and TCP holds the server
// back. What a stuck consumer does cost is on the server, and is why a consumer
// that can read its backlog elsewhere should rather end its stream:
//
//   - the slot keeps WAL from being removed, and catalog rows from vacuum, from
//     what was confirmed on;
//   - an orderly shutdown of the server waits for the stream to be read to its
//     end and confirmed, unless it is cut; see Options.StallTimeout.
//
// # Throughput
//
// A server that streams small transactions sends each of their messages by
// itself. A client that is always ready to read is woken for each of them, and
// how well both sides then get on depends on the machine. Options.ReadPause lets
// messages come together in the kernel, ConnectOptions.ReadBuffer lets one read
// take them all: measure both together. A Reader costs a switch between
// goroutines for each transaction that comes alone; Start costs none.
//
// # Positions
//
// An [LSN] is a place in the WAL. The server sends transactions whole, in the
// order of their commits. Within a transaction the LSNs of its changes go back
// behind those of transactions that came earlier, so only two kinds of LSN are
// ever good to be confirmed or compared:
//
//   - [Commit].EndLSN: with it everything up to and including this transaction
//     is confirmed. The commit's own LSN is one too few: the server would send
//     the transaction again.
//   - [Keepalive].WALEnd: every transaction that committed before it has been
//     sent before this keepalive. Confirming it keeps the slot from holding WAL
//     in which there was nothing for this stream. It is safe as soon as all the
//     events before it are done with, and not earlier. A Reader keeps only the
//     last of several that follow one another.
//
// Three positions are reported to the server: written, flushed and applied. The
// slot moves by the flushed one; the others are for pg_stat_replication and for
// synchronous replication. All three are always sent, as the consumer has set
// them, and zero means "none yet", which the server takes as no news. Nothing
// but the consumer moves them: not what was received, not a keepalive.
//
// # Invariants
//
//   - Reported positions never decrease, and never pass what was received.
//   - A status is sent at least once in StatusInterval, and at once when the
//     server asks for one, whatever the consumer does.
//   - Every message becomes an event, in the order received, or ends the stream
//     with an error. None is skipped.
//   - What was confirmed before Close is sent to the server by Close.
//   - Memory is bounded by ReadBuffer, QueueBytes and twice the largest message;
//     not by the size of a transaction, since the server sends row by row what
//     has been committed (the streaming of transactions in progress is never
//     asked for).
//
// # What each failure leads to
//
//	the consumer is slow or stuck       nothing, or ErrStalled with StallTimeout
//	the consumer returns an error       the stream ends with it
//	network cut, walsender killed       ErrConnectionLost
//	the network swallows everything     ErrServerSilent after ReceiveTimeout
//	server shut down, backend ended     ErrShutdown
//	the slot has no WAL any more        ErrSlotLost, by Start
//	the slot was dropped                ErrSlotMissing, by Start; in use it cannot be dropped
//	publication dropped while streaming up to PostgreSQL 17 ErrPublicationMissing at the next change;
//	                                    from 18 on the server warns in its log and sends nothing
//	unknown or malformed message        *DecodeError with the message's LSN
//	wrong use of the protocol           ErrProtocol
//
// Whatever the cause, a temporary slot vanishes with the connection, and a
// durable one keeps its confirmed position: the next stream begins with the
// first transaction whose end was not confirmed. A transaction that was cut in
// its middle comes again, from its Begin. Events that a Reader had received
// before the failure are still returned, before the cause; after Close they are
// dropped. [IsRetryable], [IsSlotGone] and [IsMisconfigured] say what to do next.
//
// # Synchronous replication
//
// A walsender with the application_name of an entry in
// synchronous_standby_names, where '*' is any name, counts as a synchronous
// standby, and commits on the server wait for what this consumer confirms. Name
// standbys there explicitly.
package replication
