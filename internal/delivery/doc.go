// Package delivery is the engine between a source of rows and the channel that
// Watermill reads: rows in, messages out, acknowledgements back.
//
// # States of a row
//
//	waiting    in a page that the source has read
//	taken in   the tracker has it, in the order of the log; it is ready, or stands
//	           in the line of its key behind others
//	in flight  a worker hands it out, or waits for what becomes of it
//	failed     it waits for its next try, and keeps its place in its line
//	settled    acked, or its fate is stored elsewhere (deferred, a dead letter)
//
// How much is taken in and not settled is bounded, in number and bytes. Workers
// are as many as may be in flight; the engine has no goroutine of its own beside
// the one that takes pages in.
//
// # What is stored
//
// The position behind the last row that is settled or was tried, and what is open
// up to there as holes, with the attempts that each had. What is in flight beyond
// it comes again from the position. Settled neighbours are kept as one, so the
// state is as large as what is open, however long that takes.
//
// # What each failure leads to
//
//	handler fails        counted; then in place: the same message again, in a new
//	                     object, after a backoff with jitter, its line waits;
//	                     or deferred: stored for later, the line goes on; or, with
//	                     no attempts left, a dead letter. The verdict, the hole it
//	                     fills and the check of the epoch are one statement. While
//	                     that cannot be stored, the row stays what it is
//	handler puts off     Watermill's DelayOnError changes the delay metadata of a
//	                     message it lets fail: deferred until then
//	handler takes too    the context ends with ErrAckDeadline; after the grace
//	long                 period that is a failure
//	handler never ends   without a deadline it keeps its place in flight; Close
//	                     waits for the grace period and gives up
//	lease lost           contexts end with the cause, acks are ignored, since
//	                     another process has the rows now; nothing is counted
//	server's life ends   the same; the position is read again from the cursor
//	database away        what was taken in goes out; the position is stored when it
//	                     is back; acks are kept in memory meanwhile
//	row cannot become    a dead letter at once, with its bytes
//	a message
//
// # Processes that die
//
// What was acked since the last checkpoint comes again. A message may be what ended
// the process, and nobody can nack it. With a bound on attempts, the stored state
// says how many rows may have been handed out beyond it (its reach), and no more
// are. After an unclean end these, and the holes, are suspects. They go out in
// waves, of what may be in flight at once, beside nothing else, when that is stored
// (Hole.Among): a process that was killed by something else is through with them
// soon. What takes more than a few seconds keeps only its own line waiting after that,
// and stays accused while it is out, for it may yet end the process. If the process ends of a wave, each of it goes out by itself the next time,
// and so does what has failed before, when it is stored that it does (Hole.Starts).
// If the process ends then, that one has failed, and none of its neighbours. Since
// it was in flight when the process ended before, once or twice, that counts, too:
// it dies after as many ends as it has attempts, as if it had been by itself from the
// first. With fewer than three there are no waves.
//
// # Shutdown
//
// Close, and the end of the context given to Subscribe, stop the handing out at
// once. What is in flight keeps its context for the grace period, and an ack in
// that time counts; a Nack does not. Then the last position is stored and the
// cursor released in one statement, and the channel is closed.
package delivery
