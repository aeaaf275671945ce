// Package outbox is a transactional outbox for Watermill on PostgreSQL: a
// [Publisher] that writes messages inside the caller's transaction, and a
// [Subscriber] that delivers those of committed transactions to consumer groups.
// Both are ordinary Watermill parts: Routers, middlewares, CQRS buses and
// decorators work with them as with any other Pub/Sub.
//
// # Promises
//
//   - Atomic. A message exists if, and only if, its transaction committed. The
//     exception is synchronous_commit=off: a subscriber that polls may then see
//     what a crash of the server makes undone.
//   - Nothing is lost. Every committed message reaches every consumer group at
//     least once: across crashes of processes and of the server, and however
//     long a transaction stays open.
//   - Causal order. When transaction A committed before B published, A's message
//     is delivered before B's. Take the row lock first, then publish: the
//     messages about a row then come in the order of its changes.
//   - No stall. A long transaction delays its own messages only, a slow consumer
//     itself only. No transaction is open while a handler runs.
//   - Few repeats. None after Close; after a crash what was acked since the last
//     checkpoint ([ConsumerConfig].CheckpointInterval).
//
// # Tables
//
// They live in a schema of their own and are made by schema.Migrate, or by the
// script that schema.SQL returns. Publishing and reading run no DDL; the upkeep does,
// by functions of the owner's. The constructors check what is there and say what is
// missing.
//
// # Publishing
//
// Make one Publisher and keep it. It takes the transaction of each message from
// the message's context; pgx and database/sql both do:
//
//	msg := message.NewMessageWithContext(outbox.ContextWithTx(ctx, tx), watermill.NewUUID(), payload)
//	msg.Metadata.Set(outbox.DefaultKeyMetadata, orderID)
//	err := publisher.Publish("orders", msg)
//
// A CQRS event bus passes its caller's context on to the message, so one
// long-lived bus is transactional when it is given ContextWithTx(ctx, tx). A
// message that comes without a transaction is written in one of its own, or
// refused with [PublisherConfig].RequireTx. Messages that a Router's handler
// returns come without one; publish inside the handler instead.
//
// # Subscribing
//
// A [Consumer] is one per process and database. It has connections of its own,
// beside the application's pool, and finds new messages of all topics in one
// stream from the server's write-ahead log, or where that is not to be had with
// one statement per [ConsumerConfig].PollInterval; see [Mode], and
// [Consumer.Status] for what it does now. A Subscriber is one per consumer group
// and costs next to nothing.
//
// Within a group a topic is delivered strictly in order by default: one message is
// in flight, the next follows its Ack, and a Nack brings the same message again
// after a pause that grows. [Ordering] lets keys, or all messages, go in parallel,
// [RetryConfig] bounds attempts and says where a message waits that failed; what
// has no attempts left is a dead letter ([DeadLetters]). Any number of processes
// may subscribe; one of them has the topic, or a shard of it
// ([SubscriberConfig].Shards), another takes over when it closes, or when it has
// been out of touch for [ConsumerConfig].Lease. What is known of a message beside
// its content is in [DeliveryFromCtx]. docs/delivery.md tells more.
//
// A message with Watermill's delay waits in a table of its own and takes its place
// in the order when it is due; it holds up neither its key nor its topic. Watermill
// writes whole seconds, so its delays end up to a second early.
//
// A Subscriber never closes its channel because of a passing failure: it waits,
// connects again and goes on, also across crashes and failovers of the server.
//
// # Storage
//
// Each process with a Consumer takes part in the upkeep of the tables, one at a
// time: partitions of the log are made ahead of time, and emptied and dropped 3 h
// ([DefaultRetention]) after every group had all that was in them. What a group
// has not got stays, however long it takes, and [Consumer.Status] says who holds
// what back. See [MaintenanceConfig], [Maintenance] and docs/storage.md.
//
// # Defaults
//
// The zero value of each configuration works. The write-ahead log is read when
// that is possible ([ModeAuto]); a message that is polled for is seen within 100
// ms ([DefaultPollInterval]), positions are stored every 250 ms
// ([DefaultCheckpointInterval]), a dead process is replaced after 10 s
// ([DefaultLease]), and a Nack costs 100 ms at first, 10 s at most
// ([DefaultMinBackoff], [DefaultMaxBackoff]).
//
// # Shutdown
//
// In this order: the Router (or the contexts given to Subscribe), which ends the
// subscriptions and waits for messages in flight; Subscribers that no Router
// closes; Publishers; the Consumer; the application's pool. A message in flight
// keeps its context for [SubscriberConfig].CloseTimeout and its ack counts in
// that time.
//
// # Errors
//
// Publish refuses bad input before any SQL runs, with [ErrInvalidTopic] or a
// [*MessageError]: the transaction stays usable. An error from the server has
// aborted the transaction, as any failed statement has: roll it back. Errors
// wrap their cause, so errors.As finds the *pgconn.PgError, and say what to do
// where there is something to do. errors.go lists those to test for.
package outbox
