package replication

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"
)

var (
	// ErrClosed is what Err, Next and Confirm return after Close. Start another
	// stream, on another connection.
	ErrClosed = errors.New("replication: closed")

	// ErrConnTaken is returned by a Conn's methods after a stream was started
	// on it. Use another Conn.
	ErrConnTaken = errors.New("replication: the connection belongs to a stream")

	// ErrConnectionLost ends a stream whose connection broke: the network, a
	// killed backend, or a server that had not heard from us for its
	// wal_sender_timeout. Connect again, with a back-off.
	ErrConnectionLost = errors.New("replication: connection lost")

	// ErrServerSilent ends a stream that got nothing for ReceiveTimeout, not
	// even an answer when it asked for one. Connect again, with a back-off.
	ErrServerSilent = errors.New("replication: the server is silent")

	// ErrStalled ends a stream whose queue has been full for StallTimeout.
	// Connect again when the consumer gets on.
	ErrStalled = errors.New("replication: the consumer does not take its events")

	// ErrShutdown is returned when the server shuts down or starts up, or
	// somebody has ended the backend (pg_terminate_backend; also what befalls
	// the user of a slot that has exceeded max_slot_wal_keep_size). Connect
	// again, with a back-off.
	ErrShutdown = errors.New("replication: the server or its backend is shut down")

	// ErrProtocol ends a stream whose server says what a server must not say. A
	// message of the output plugin that cannot be decoded is a *DecodeError.
	// Trying again is not likely to help.
	ErrProtocol = errors.New("replication: protocol violation")

	// ErrSlotInUse is returned by Start and DropSlot while another connection
	// streams from the slot, for instance one whose client is gone without the
	// server knowing. Try again; pg_replication_slots tells the process.
	ErrSlotInUse = errors.New("replication: the slot is in use")

	// ErrSlotMissing is returned by Start, DropSlot and InspectSlot when there
	// is no slot of this name. What was not received before is not to be had
	// from a new one; catch up from the table first.
	ErrSlotMissing = errors.New("replication: there is no such slot")

	// ErrSlotLost is returned by Start when the server has removed WAL that the
	// slot still needed (max_slot_wal_keep_size), or has invalidated it for
	// another reason. Drop it; the rest is as with ErrSlotMissing.
	ErrSlotLost = errors.New("replication: the slot has lost its WAL")

	// ErrSlotExists is returned by CreateSlot. Whose it is and where it stands,
	// InspectSlot tells.
	ErrSlotExists = errors.New("replication: the slot exists already")

	// ErrNoFreeSlot is returned by CreateSlot when max_replication_slots is
	// reached. Drop one that is not needed, or raise the setting.
	ErrNoFreeSlot = errors.New("replication: all replication slots are taken")

	// ErrNoFreeSender is returned by Connect when max_wal_senders or
	// max_connections is reached. Try again, or raise the setting.
	ErrNoFreeSender = errors.New("replication: all WAL senders or connections are taken")

	// ErrLockTimeout is returned by CreateSlot when a transaction that was
	// running before is running still after the session's lock_timeout, see
	// ConnectOptions.Settings. No slot is left. Try again later.
	ErrLockTimeout = errors.New("replication: gave up waiting for a running transaction")

	// ErrNoPrivilege is returned when the server does not let the role in, or
	// not do what it asks for: no REPLICATION attribute, no line in
	// pg_hba.conf, a wrong password, no CREATE on the database, a table that
	// is not its own.
	ErrNoPrivilege = errors.New("replication: the role lacks a privilege")

	// ErrWALLevel is returned by CreateSlot and Start when the server's
	// wal_level is not logical. It takes a restart of the server to change.
	ErrWALLevel = errors.New("replication: wal_level is not logical")

	// ErrPublicationMissing is returned by Start when a publication does not
	// exist, and ends a stream when it did not exist as of the change that is
	// decoded: create the publication before the slot.
	ErrPublicationMissing = errors.New("replication: there is no such publication")

	// ErrPublicationExists is returned by CreatePublication.
	ErrPublicationExists = errors.New("replication: the publication exists already")

	// ErrUnsupported is returned when the server, or a pooler in front of it,
	// cannot do what it is asked for: an old version, a standby up to
	// PostgreSQL 15, a pooler that knows no replication. Connect to the primary
	// directly.
	ErrUnsupported = errors.New("replication: not supported there")

	// ErrInvalidName is returned for the name of a slot or publication that no
	// server would take. Nothing was sent.
	ErrInvalidName = errors.New("replication: invalid name")

	// ErrBeyondReceived is returned by Confirm and Report for a position the
	// stream has not come to: one of another server, or of another stream.
	// Nothing was changed.
	ErrBeyondReceived = errors.New("replication: position is ahead of what was received")
)

// Error says which operation failed, on what, and why. It matches its Reason,
// one of the package's sentinels, and what caused it, such as a
// *pgconn.PgError.
type Error struct {
	// Op is what was tried, such as "create slot".
	Op string
	// Name is the slot or publication it was tried on, or "".
	Name string
	// Reason is a sentinel of this package, or nil if none fits.
	Reason error
	// Err is the cause, or nil.
	Err error
}

// Error implements error.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("replication: " + e.Op)
	if e.Name != "" {
		fmt.Fprintf(&b, " %q", e.Name)
	}
	if e.Reason != nil {
		b.WriteString(": " + strings.TrimPrefix(e.Reason.Error(), "replication: "))
	}
	if e.Err != nil {
		b.WriteString(": " + e.Err.Error())
	}
	return b.String()
}

// Unwrap returns the reason and the cause.
func (e *Error) Unwrap() []error {
	var errs []error
	for _, err := range []error{e.Reason, e.Err} {
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// DecodeError says that a message of the output plugin is malformed, or of a
// kind that this package does not know. It ends the stream: what cannot be read
// must not be skipped. Trying again meets the same message, unless it was
// damaged on its way; read the change from the table instead.
type DecodeError struct {
	// LSN is the position that came with the message. It is zero if not even
	// that could be read.
	LSN LSN
	// Kind is the first byte of the message, or 0 if it is empty.
	Kind byte
	// Problem says what is wrong with it.
	Problem string
}

// Error implements error.
func (e *DecodeError) Error() string {
	return fmt.Sprintf("replication: message %q at %s: %s", rune(e.Kind), e.LSN, e.Problem)
}

// IsRetryable reports whether the same may well succeed a little later without
// anybody changing anything: connect again then, with a back-off.
func IsRetryable(err error) bool {
	for _, reason := range []error{
		ErrConnectionLost, ErrServerSilent, ErrStalled, ErrShutdown,
		ErrSlotInUse, ErrLockTimeout, ErrNoFreeSlot, ErrNoFreeSender,
	} {
		if errors.Is(err, reason) {
			return true
		}
	}
	switch sqlClass(err) {
	case "08", "40", "53", "57", "58": // connections, rollbacks, resources, intervention, system
		return !errors.Is(err, ErrUnsupported) && !errors.Is(err, ErrSlotLost)
	}
	return false
}

// IsSlotGone reports whether the slot cannot be streamed from any more. What it
// would have sent is to be read elsewhere, and another slot to be made.
func IsSlotGone(err error) bool {
	return errors.Is(err, ErrSlotMissing) || errors.Is(err, ErrSlotLost)
}

// IsMisconfigured reports whether a person has to change something first: the
// server's settings, the role's privileges, the publication, the address.
func IsMisconfigured(err error) bool {
	for _, reason := range []error{
		ErrNoPrivilege, ErrWALLevel, ErrPublicationMissing, ErrUnsupported, ErrInvalidName,
	} {
		if errors.Is(err, reason) {
			return true
		}
	}
	switch sqlClass(err) {
	case "3D", "22", "42": // no such database, settings with wrong values or names
		return !errors.Is(err, ErrSlotMissing) && !errors.Is(err, ErrSlotExists) && !errors.Is(err, ErrPublicationExists)
	}
	return false
}

// SQLSTATEs that the package tells apart.
const (
	stateProtocol      = "08P01" // protocol_violation
	stateUnsupported   = "0A000" // feature_not_supported
	stateAuthorization = "28000" // invalid_authorization_specification
	statePassword      = "28P01" // invalid_password
	statePrivilege     = "42501" // insufficient_privilege
	stateUndefined     = "42704" // undefined_object
	stateDuplicate     = "42710" // duplicate_object
	stateTooMany       = "53300" // too_many_connections
	stateConfigLimit   = "53400" // configuration_limit_exceeded
	statePrerequisite  = "55000" // object_not_in_prerequisite_state
	stateInUse         = "55006" // object_in_use
	stateLock          = "55P03" // lock_not_available
	stateAdminShutdown = "57P01"
	stateCrashShutdown = "57P02"
	stateCannotConnect = "57P03"
	stateUndefinedFile = "58P01"
)

// subject is what a server's error is about, where the SQLSTATE leaves it open.
type subject int

const (
	aboutConnection subject = iota
	aboutSlot
	aboutStream
	aboutPublication
)

// reason returns the sentinel for a server's error, or nil.
func reason(about subject, pgErr *pgconn.PgError) error {
	switch pgErr.Code {
	case stateAdminShutdown, stateCrashShutdown, stateCannotConnect:
		return ErrShutdown
	case statePrivilege, stateAuthorization, statePassword:
		return ErrNoPrivilege
	case stateTooMany:
		return ErrNoFreeSender
	case stateConfigLimit:
		return ErrNoFreeSlot
	case stateLock:
		return ErrLockTimeout
	case stateUnsupported:
		return ErrUnsupported
	}
	switch about {
	case aboutConnection:
		if pgErr.Code == stateProtocol {
			// Only a pooler says that to a client that has said hello.
			return ErrUnsupported
		}
	case aboutSlot:
		switch pgErr.Code {
		case stateInUse:
			return ErrSlotInUse
		case stateUndefined:
			return ErrSlotMissing
		case stateDuplicate:
			return ErrSlotExists
		case stateUndefinedFile:
			return ErrSlotLost
		}
	case aboutStream:
		switch pgErr.Code {
		case stateUndefined:
			return ErrPublicationMissing
		case stateUndefinedFile:
			return ErrSlotLost
		}
	case aboutPublication:
		if pgErr.Code == stateDuplicate {
			return ErrPublicationExists
		}
	}
	return nil
}

// wrap makes an *Error of what an operation returned.
func wrap(op, name string, about subject, err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return &Error{Op: op, Name: name, Reason: reason(about, pgErr), Err: err}
	}
	var why error
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		// The caller's doing.
	case isNetwork(err):
		why = ErrConnectionLost
	}
	return &Error{Op: op, Name: name, Reason: why, Err: err}
}

// isNetwork reports whether err comes from the connection, and not from what
// was said over it.
func isNetwork(err error) bool {
	var netErr net.Error
	var errno syscall.Errno
	return errors.As(err, &netErr) || errors.As(err, &errno) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, pgconn.ErrConnClosed)
}

// sqlClass returns the first two characters of the SQLSTATE in err, or "".
func sqlClass(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && len(pgErr.Code) == 5 {
		return pgErr.Code[:2]
	}
	return ""
}
