// Package delivery is the engine between a source of rows and the channel that
// Watermill reads: rows in, messages out, acknowledgements back.
//
// # States of a row
//
//	waiting    in a page that the source has read
//	in flight  its message was taken from the channel
//	acked      its handler succeeded; the position moves over it
//	nacked     its handler failed; it waits out a backoff and goes out again
//	a hole     the position has moved over it although it was not acked
//
// With strict order one row is in flight and the others wait for it, so the
// position is that of the last acked row and there are no holes, with one
// exception: a row that cannot become a message. It is reported, kept as a hole
// and passed over, since it would block its topic for ever.
//
// # What each failure leads to
//
//	handler fails        the same message again, in a new object, after a
//	                     backoff with jitter; the others wait (order)
//	handler never ends   nothing more is handed out; Close waits for the grace
//	                     period, cancels the message's context and gives up
//	lease lost           the message's context is cancelled with the cause, its
//	                     ack is ignored, since another process has the row now
//	server's life ends   the same; the position is read again from the cursor
//	database away        what was read goes out; the position is stored when it
//	                     is back; acks are kept in memory meanwhile
//	process killed       what was acked since the last checkpoint comes again
//
// # Shutdown
//
// Close, and the end of the context given to Subscribe, stop the handing out at
// once. A message in flight keeps its context for the grace period, and its ack
// in that time counts. Then the last position is stored and the cursor released
// in one statement, and the channel is closed.
package delivery
