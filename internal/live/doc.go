// Package live reads the log from the write-ahead log (WAL): one stream for all
// readers of a process, on a temporary replication slot, beside the reading of
// the tables, which stays the truth. A reader that is caught up attaches to the
// stream and gets each transaction as it commits; whatever happens to the
// stream, the reader goes on by the tables from its position.
//
// # States
//
//	stream  idle ── a reader wants it ──▶ opening ──▶ open ⇄ lagging
//	        opening, open, lagging ── cannot be, lost, void, holds too much WAL ──▶ waiting
//	        waiting ── the reason is gone, or a while later ──▶ opening
//
//	reader  polling ── Attach, then a window ──▶ live
//	        live ── its buffer refused a row, the stream lags or ended ──▶ polling
//
// # What is where
//
//	session.receive  the stream's own goroutine: decodes rows into transactions
//	session.run      the dispatcher: asks the barrier, hands over to buffers
//	Buffer           between the dispatcher and one reader
//	Source           opens sessions, and says how things stand
//
// # Nothing is lost between the tables and the stream
//
// After the slot exists a transaction id N is drawn. A reader registers its
// buffer, then takes a snapshot C with xmin(C) >= N, and after what C sees it
// takes from the buffer what C does not see. A transaction that C does not see
// has an id of at least N, so it began when the slot was there, and is in the
// stream. It was handed to the buffers after the barrier saw it; had that been
// before the buffer was registered, C would see it too. A topic that nobody
// wanted when the stream was opened has an N of its own, since its rows were
// left out until then.
//
// # The barrier
//
// A commit can be decoded before other sessions see it. Each batch asks for a
// snapshot; transactions that it sees go out, in the order of their commits, the
// others are held, alone. So a handler always finds the row its message is
// about. A held transaction is not overtaken by one that depends on it: who saw
// its effects came after it had become visible.
//
// # Samples
//
// The snapshot of a barrier, together with the position of the log that was read
// after it, is a sample. When the stream has passed that position, and what it
// brought went through a later barrier, everything that the sample sees is in
// the buffers; then the sample follows into each of them, and a reader that takes
// it out moves its P there. Being in the buffer's order, it says nothing of rows
// that the buffer refused.
//
// A sample of another life or timeline of the server, or with another
// publication, is void and ends the stream; so are those before it that the
// stream has not passed.
//
// # Bounds
//
// The receiver never stops reading, and the dispatcher confirms what came in with
// each batch and tick: nothing on the server waits for a reader. One bound of bytes covers all that
// is between the connection and the readers. A row that does not fit closes the
// fullest buffer. A buffer that is closed, for whatever reason, is emptied: the
// reader finds in the table what it has not taken, so what a stuck one holds
// counts against nobody.
// The server begins to send a transaction when it has committed, so its rows pass
// one by one, however many there are.
//
// # What each failure leads to
//
//	a reader is slow          its buffer is closed; the others stay live
//	a huge transaction        the server decodes it; samples are not passed: all
//	                          readers poll until the stream has caught up
//	a long transaction        keeps the slot's WAL: beyond the bound the stream is
//	                          closed until that transaction has ended
//	connection lost           the stream is opened again, with a back-off
//	failover, crash           the same
//	publication altered       the same
//	this process killed       the slot goes with the connection; while it is being
//	                          created, lock_timeout ends the wait
package live
