// Package window reads the log in snapshot windows and keeps the position of a
// consumer group in it.
//
// # Position
//
// A position is not a number, since messages become visible in the order of
// their commits while ids are drawn when they are written. It is a PostgreSQL
// snapshot P: everything visible in P has been handed out. The next window is
// what a later snapshot C sees and P does not. Windows follow the order of
// commits, so a long transaction holds nobody up: its messages are in the first
// window that sees it. Inside a window rows go out in the order of their ids,
// and that is causal: who saw a commit before publishing drew a higher id, for
// the sequence hands out its numbers in the order of the calls.
//
// For a window (P, C], with floor the highest id handed out in earlier windows
// and top the sequence's last value, read by the statement that took C:
//
//  1. Late rows, id <= floor: of the transactions in xip(P) that C sees, and of
//     those in [xmax(P), xmax(C)) that are not in xip(C). xmax of a snapshot is
//     the latest *completed* transaction plus one, so a transaction may run
//     above it and not be in xip; without the second half its rows are lost.
//  2. Main rows, floor < id <= top: not visible in P, visible in C.
//  3. Done: P := C, floor := top.
//
// Nothing is forgotten: what P cannot see has a transaction id in xip(P) or at
// or above xmax(P), and an id at or below floor (1) or above it (2). Nothing
// comes twice: step 1 takes only ids up to floor, step 2 only those above, and
// P moves when both are through.
//
// # States
//
// A position is in one of four steps:
//
//	past  handing out what other clusters wrote (see Eras)
//	idle  between two windows; P and floor say all
//	late  inside a window, at the late rows: all with id <= at are out
//	main  inside a window, at the main rows: all with id <= at are out
//
// It is stored in the steps' terms, so a reader that starts again in the middle
// of a window goes on in it, with the same C.
//
// A hole is a row that was handed out and not acknowledged. P and the position
// move over holes; after a restart they go out first.
//
// # Rows ahead of P
//
// Rows that come from the write-ahead log are handed out one transaction after
// the other, in the order of their commits, while P stays behind: it moves when
// the stream has passed the place in the log that a snapshot was taken at (a
// sample). Until then the position lists these rows, and windows leave them out.
// The floor decides only in which of its two steps a window finds a row, so it
// may be raised to the highest id that was handed out.
//
// # Eras
//
// Transaction ids mean something only on the cluster that issued them. Each row
// carries the system identifier of its cluster, its era. When the server's is
// another than the position's, the tables were restored or replicated to a new
// cluster: the position of the old era is put aside in Past, the new era starts
// with a P that sees nothing, and the rows of all other eras, which are
// finished, go out first: those that the P put aside for their era does not see.
// When all are out, or this cluster is left before they are, Past says so, for a
// third cluster. For a return to one that was left it keeps P, since that
// cluster's transaction ids go on.
//
// # Lives
//
// After crash recovery or a promotion the same cluster may issue transaction
// ids and message ids again. Every page says in which life of the server it was
// read; a position held in memory must not be used in another life, but read
// again from its cursor, which the same recovery has brought to a consistent
// state.
package window
