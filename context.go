package outbox

import (
	"context"
)

type txKey struct{}

// ContextWithTx returns a context that carries a transaction: a message with
// this context is published in it, by any Publisher. The transaction is a
// pgx.Tx or an *sql.Tx (or a type that embeds one of them); another type, or
// nil, makes Publish fail. It is used, never finished: who began it commits or
// rolls back, and nothing is visible to subscribers before the commit.
//
// It is what makes one long-lived CQRS event bus transactional: the bus sets
// the context of its caller on the message.
func ContextWithTx(ctx context.Context, tx any) context.Context {
	return context.WithValue(ctx, txKey{}, txValue{tx})
}

// TxFromContext returns the transaction that ContextWithTx put into the
// context.
func TxFromContext(ctx context.Context) (tx any, ok bool) {
	v, ok := ctx.Value(txKey{}).(txValue)
	return v.tx, ok
}

// txValue keeps a nil transaction apart from none: the first is a mistake.
type txValue struct{ tx any }
