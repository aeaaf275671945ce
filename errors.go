package outbox

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/millrace/watermill-outbox/internal/delivery"
	"github.com/millrace/watermill-outbox/internal/lease"
	"github.com/millrace/watermill-outbox/internal/record"
	"github.com/millrace/watermill-outbox/schema"
)

var (
	// ErrPublisherClosed is returned by Publish after Close. The Router closes
	// a handler's publisher when its subscription ends, handlers that still
	// run included; give handlers that publish at the end a publisher of
	// their own that is closed after the Router.
	ErrPublisherClosed = errors.New("outbox: publisher is closed")

	// ErrSubscriberClosed is returned by Subscribe after the Subscriber or its
	// Consumer was closed. Make a new one.
	ErrSubscriberClosed = errors.New("outbox: subscriber is closed")

	// ErrAckDeadline is the cause (context.Cause) with which the context of a
	// message ends whose handler took longer than SubscriberConfig.AckDeadline.
	ErrAckDeadline = delivery.ErrAckDeadline

	// ErrLeaseLost is matched by the cause with which the context of a message
	// ends when its topic is no longer this process's: the database could not be
	// reached for the time of the lease, another process took over, or the server
	// began another life. Its ack counts for nothing.
	ErrLeaseLost = lease.ErrLost

	// ErrNoTransaction is returned by Publish with RequireTx when neither the
	// message's context nor the constructor supplies a transaction. Put one
	// into the context with ContextWithTx and the context on the message with
	// SetContext (a CQRS event bus does the latter).
	ErrNoTransaction = errors.New("outbox: no transaction to publish in")

	// ErrTxFinished is returned by Publish when the transaction has been
	// committed or rolled back already. Nothing was written. Publish before
	// Commit, and do not keep a context with its transaction for longer.
	ErrTxFinished = errors.New("outbox: the transaction is already finished")

	// ErrMixedExecutors is returned by Publish when the messages of one call
	// carry different transactions, or a message carries another one than the
	// publisher was made for: they cannot be written atomically. Nothing was
	// written. Call Publish once per transaction.
	ErrMixedExecutors = errors.New("outbox: messages of one call belong to different transactions")

	// ErrUnsupportedExecutor is returned by NewPublisher and Publish for a
	// database handle of an unknown type. The error names the type.
	ErrUnsupportedExecutor = errors.New("outbox: unsupported database handle")

	// ErrDeadLetterNotFound is returned by DeadLetters for an id that no dead
	// letter has: it was requeued or discarded, or never was one. Its Log says
	// which.
	ErrDeadLetterNotFound = errors.New("outbox: there is no such dead letter")

	// ErrMessageNotFound is returned by DeadLetters.Bury when the topic has no
	// such message, or none that the consumer group is to get: it is meant for
	// another group, retention removed it, or the group does not exist.
	ErrMessageNotFound = errors.New("outbox: there is no such message")

	// ErrInvalidMessage is matched by every *MessageError.
	ErrInvalidMessage = errors.New("outbox: invalid message")

	// ErrInvalidTopic is returned by Publish and Subscribe for a topic that
	// cannot be stored: empty, longer than MaxTopicBytes, not valid UTF-8, or
	// with a NUL. No SQL was run.
	ErrInvalidTopic = record.ErrInvalidTopic

	// ErrCallTooLarge is returned by Publish when the messages of one call are
	// more than one statement can carry through database/sql, or through pgx
	// with scheduled messages among them. Split the call inside one
	// transaction; through pgx, calls without scheduled messages have no such
	// bound. Package watermillsql has a bound of its own.
	ErrCallTooLarge = errors.New("outbox: too many bytes for one call")

	// ErrReadOnly is returned by constructors and Subscribe when the server
	// takes no writes: a hot standby, or default_transaction_read_only. Connect
	// to the primary, for instance with target_session_attrs=read-write.
	ErrReadOnly = errors.New("outbox: the server is read-only")

	// ErrNoWAL is returned by Subscribe in ModeWAL when the write-ahead log
	// cannot be read; the text says what to change: wal_level, free slots and
	// WAL senders, the REPLICATION privilege, the publication, or an address
	// that leads to the server itself and not to a pooler.
	ErrNoWAL = errors.New("outbox: the WAL cannot be read")

	// ErrRowSecurity is returned by NewConsumer when a row-level security
	// policy stands between the role and the messages: it would hide some of
	// them without any error. Grant BYPASSRLS or disable row security there.
	ErrRowSecurity = errors.New("outbox: row-level security hides messages from this role")

	// ErrUnknownGroup is returned by Reshard, Seek and DropGroup for a consumer group
	// that has no position in the topic: it never subscribed to it, or was removed;
	// and by ReshardBatches for one that never subscribed to many topics. Check the
	// names, and which of the two it is; where a new group begins, and its number of
	// shards, is in SubscriberConfig.
	ErrUnknownGroup = errors.New("outbox: the consumer group never subscribed to the topic")

	// ErrNotInstalled is schema.ErrNotInstalled, for callers that import only
	// this package.
	ErrNotInstalled = schema.ErrNotInstalled
)

// MessageError says which message of a Publish call cannot be stored, and why.
// It is returned before any SQL runs: nothing of the call was written, and the
// caller's transaction stays usable. It matches ErrInvalidMessage.
type MessageError struct {
	// Topic is where it was to be stored: for what was in an envelope, its
	// destination.
	Topic string
	// Index is the message's place in the call, from 0.
	Index int
	UUID  string
	// Field is the part at fault: uuid, payload, ordering key, metadata, or
	// message for all of it.
	Field string
	// Problem says what is wrong with it.
	Problem string
	// Err, if not nil, is the cause, such as a *time.ParseError, or what is
	// wrong with an envelope's destination, which matches ErrInvalidTopic.
	Err error
}

// Error implements error.
func (e *MessageError) Error() string {
	return fmt.Sprintf("outbox: message %d (uuid %.200q) for topic %.200q: %s %s", e.Index, e.UUID, e.Topic, e.Field, e.Problem)
}

// Is reports whether target is ErrInvalidMessage.
func (e *MessageError) Is(target error) bool { return target == ErrInvalidMessage }

// Unwrap returns the cause, if any.
func (e *MessageError) Unwrap() error { return e.Err }

// sqlState returns the SQLSTATE of a server's error, whichever driver brought
// it, or "".
func sqlState(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	// lib/pq's *pq.Error, without importing it.
	var coded interface{ SQLState() string }
	if errors.As(err, &coded) {
		return coded.SQLState()
	}
	return ""
}

// SQLSTATEs the package tells apart.
const (
	stateReadOnly       = "25006" // read_only_sql_transaction
	stateUndefinedTable = "42P01"
	stateInvalidSchema  = "3F000"
	statePrivilege      = "42501" // insufficient_privilege
	stateAborted        = "25P02" // in_failed_sql_transaction
	stateFeature        = "0A000" // feature_not_supported

	// What was prepared in another session is not there, or that of another client is.
	stateNoStatement        = "26000" // invalid_sql_statement_name
	stateDuplicateStatement = "42P05" // duplicate_prepared_statement

	stateProtocol = "08P01" // protocol_violation, and all of PgBouncer's own errors
)

// explain adds to a server's error what to do about it.
func explain(err error, schemaName string) error {
	switch sqlState(err) {
	case stateReadOnly:
		return fmt.Errorf("%w: %w", ErrReadOnly, err)
	case stateUndefinedTable, stateInvalidSchema:
		return fmt.Errorf("schema %q: %w: %w", schemaName, schema.ErrNotInstalled, err)
	case statePrivilege:
		return fmt.Errorf("schema %q: the role lacks a privilege, see schema.Grants: %w", schemaName, err)
	case stateNoStatement, stateDuplicateStatement:
		return explainPrepared(err)
	case stateAborted:
		return fmt.Errorf("an earlier statement of the transaction failed, it can only be rolled back: %w", err)
	}
	if isTxFinished(err) {
		return fmt.Errorf("%w: %w", ErrTxFinished, err)
	}
	return err
}

// explainPrepared is explain for what comes of a pooler that nobody has told the
// Publisher about.
func explainPrepared(err error) error {
	switch sqlState(err) {
	case stateNoStatement, stateDuplicateStatement:
		return fmt.Errorf("%w (if this goes through a transaction pooler, such as PgBouncer, set PublisherConfig.TransactionPooler; "+
			"a driver for database/sql must prepare nothing, see there)", err)
	}
	return err
}

func isTxFinished(err error) bool {
	return errors.Is(err, pgx.ErrTxClosed) || errors.Is(err, errSQLTxDone)
}
