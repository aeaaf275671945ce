// Package upkeep looks after the partitions of the log: it makes them ahead of
// time, finds out when all of one was delivered, empties and drops it; it clears the
// DEFAULT partition, and sweeps what is finished in other tables. Every process with
// subscriptions has an Upkeep; a lease in the table upkeep has one of them at work at
// a time.
//
// A pass is a list of steps, and each step is one call of an SQL function of
// migration 5, in a transaction of its own. The functions decide what is safe; this
// package decides what to try, and tells how it went. Nothing rests on the lease:
// steps of two passes take turns, and each finds what the other has left.
//
// # A partition's way
//
//	(range)   made one interval or more before it begins, up to the look-ahead
//	open      rows come
//	waiting   its range has passed by SealDelay; those who were writing to the log
//	          then are waited for, at the following passes
//	sealed    seal is a snapshot that sees all of it. A position with a P that covers
//	          the seal has all of it. When that is so for every reader of every
//	          topic in it, and none of their holes lies in it, it is delivered
//	freed     emptied by TRUNCATE, when it was delivered Retention ago (and archived)
//	(gone)    dropped, when nobody is on the log who would make others wait
//
// A row that the seal cannot see, since it was inserted into the past (a clock that
// was set back), is looked for at each pass, and once more with the partition locked
// before that is emptied. It is published again as a new row, of a time behind all
// that was ever sealed, and the old one is deleted in the same transaction. When none
// is left, and nobody is writing there, the seal is void: the partition is open.
// Readers that remember the seal learn of that from the first statement that sees it
// (voids in table upkeep).
//
// The DEFAULT partition is never sealed: its range is what nobody else has. What is
// in it is marked by a snapshot instead, and when every P covers that, and Retention
// has passed, the rows that it sees are deleted, a thousand in a transaction.
//
// # What can go wrong
//
//	a partition is detached by others   what was in it is not delivered, unless the
//	                                    groups Seek back once it is attached again:
//	                                    nothing is removed before somebody says so
//	a lock is not to be had in 50 ms    the step, and those like it, are left for
//	                                    the next pass; nobody waited longer
//	the process dies                    between two steps; the lease runs out
//	a reader has stopped                nothing of what it has not got goes; said in
//	                                    the table, in the status and in the log
//	a table is in the way, the owner    said, with the name of the object; the other
//	is somebody else, a bad setting     steps go on
//	the archive fails                   the partition stays
//	upkeep does not run                 messages go into the DEFAULT partition and are
//	                                    delivered from there
package upkeep
