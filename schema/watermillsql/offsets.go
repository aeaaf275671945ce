package watermillsql

import (
	"fmt"

	"github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
)

// AtomicOffsets is watermill-sql's DefaultPostgreSQLOffsetsAdapter, and makes true
// that a transaction is committed with the ack and not without it.
//
// A sql.Subscriber that is closed while a handler works, or whose AckDeadline
// passes, commits what the handler did in its transaction, does not move the
// offset, and hands the message out again: what was published is there twice.
// With AtomicOffsets that commit fails, and is logged; all of the batch is rolled
// back and comes again.
//
// Each message puts a pair of equal rows into a temporary table where that is
// forbidden, which PostgreSQL looks at when it commits; the ack takes them away.
// The role needs TEMPORARY on the database, which it has unless that was revoked.
// The zero value works, and is safe for concurrent use.
type AtomicOffsets struct {
	sql.DefaultPostgreSQLOffsetsAdapter
}

var _ sql.OffsetsAdapter = AtomicOffsets{}

// ConsumedMessageQuery puts the mark of a message that is not acked.
func (a AtomicOffsets) ConsumedMessageQuery(_ string, row sql.Row, _ string, _ []byte) sql.Query {
	// A connection makes the table once. A block takes no parameters; the values
	// are numbers.
	return sql.Query{Query: fmt.Sprintf(`DO $body$
BEGIN
	IF to_regclass('pg_temp.watermillsql_unacked') IS NULL THEN
		CREATE TEMPORARY TABLE watermillsql_unacked (transaction_id xid8, n bigint,
			CONSTRAINT watermillsql_committed_without_ack UNIQUE (transaction_id, n) DEFERRABLE INITIALLY DEFERRED
		) ON COMMIT DELETE ROWS;
	END IF;
	INSERT INTO pg_temp.watermillsql_unacked SELECT '%[1]d'::xid8, %[2]d FROM generate_series(1, 2);
END $body$`, row.ExtraData["transaction_id"], row.Offset)}
}

// AckMessageQuery moves the offset as the default does, and takes away the marks
// of what it covers. A message of the batch behind it that was handed out and not
// acked keeps its own.
func (a AtomicOffsets) AckMessageQuery(topic string, row sql.Row, consumerGroup string) sql.Query {
	query := a.DefaultPostgreSQLOffsetsAdapter.AckMessageQuery(topic, row, consumerGroup)
	query.Query = fmt.Sprintf(`WITH acked AS (
	DELETE FROM pg_temp.watermillsql_unacked WHERE (transaction_id, n) <= ('%[1]d'::xid8, %[2]d::bigint)
)
`, row.ExtraData["transaction_id"], row.Offset) + query.Query
	return query
}
