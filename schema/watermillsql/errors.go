package watermillsql

import (
	"errors"
	"fmt"
)

var (
	// ErrWriteOnly is what a sql.Subscriber's BackoffManager gets, and logs,
	// when the subscriber was given an Adapter: the tables have no offsets that
	// it could read by. Subscribe with outbox.NewSubscriber.
	ErrWriteOnly = errors.New("watermillsql: the adapter only writes: subscribe with outbox.NewSubscriber")

	// ErrUnknownGroup is returned by Drain for a consumer group that has no
	// position in the old tables: moving all rows would repeat what it has had
	// under another name. Check both names. For a table that nobody ever
	// subscribed to, docs/watermill-sql.md has the statement that makes a
	// position.
	ErrUnknownGroup = errors.New("watermillsql: the consumer group has no position in the old tables")

	// ErrIsolation is returned by Drain in a transaction that is not READ
	// COMMITTED: its snapshot may be older than the locks, and hide rows that
	// were written meanwhile. Begin one with the default isolation level.
	ErrIsolation = errors.New("watermillsql: the transaction must be READ COMMITTED")

	// ErrPayloadType is returned by Drain when the payload column of the old
	// table is of a type that it does not know. It knows json, jsonb, text,
	// varchar and bytea.
	ErrPayloadType = errors.New("watermillsql: unknown type of the payload column")
)

// RowError says which row of the old table the outbox cannot store, and why. It
// is returned by Drain before it moved anything. Delete or correct the row, or
// drain with a Router, which treats rows one by one.
type RowError struct {
	// Table is the old table, as quoted in SQL.
	Table string
	// Offset and UUID are the row's.
	Offset int64
	UUID   string
	// Problem says what is wrong, as the end of a sentence.
	Problem string
}

// Error implements error.
func (e *RowError) Error() string {
	return fmt.Sprintf("watermillsql: row of %s with offset %d (uuid %.200q) %s", e.Table, e.Offset, e.UUID, e.Problem)
}
