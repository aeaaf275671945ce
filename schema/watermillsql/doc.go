// Package watermillsql lets code that uses watermill-sql (v3) move to the outbox
// without a rewrite.
//
//   - [Adapter] is a SchemaAdapter with which existing sql.NewPublisher(tx, …)
//     code writes rows of the outbox.
//   - [TxFromContext] lets a handler that consumes from watermill-sql publish to
//     the outbox in the transaction it consumes in, and [AtomicOffsets] makes that
//     transaction end as the message does.
//   - [Drain] moves what is left in a table of watermill-sql.
//
// docs/watermill-sql.md has the steps of a move.
package watermillsql
