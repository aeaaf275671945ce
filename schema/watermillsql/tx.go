package watermillsql

import (
	"context"

	"github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
)

// TxFromContext finds the transaction in which a sql.Subscriber consumes, in the
// context of a message it delivered. It is meant for
// outbox.PublisherConfig.TxResolver: a handler that publishes with the context
// of its message then publishes in that transaction. Give the Subscriber
// AtomicOffsets, so that it is committed with the ack only.
//
// A Nack rolls nothing back: watermill-sql hands the message out once more in the
// same transaction. A handler must not publish and fail afterwards, or what it
// published is there twice.
func TxFromContext(ctx context.Context) (tx any, ok bool) {
	if tx, ok := sql.TxFromContext(ctx); ok {
		return tx, true
	}
	return nil, false
}
