package forwarder

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"

	outbox "github.com/millrace/watermill-outbox"
)

// Fault says whose fault a failure is; see the package documentation for what
// follows.
type Fault int

const (
	// FaultUnknown is the message's if the destination can be shown to be up, and
	// the destination's otherwise.
	FaultUnknown Fault = iota
	// FaultDestination is the destination's: it is down or cannot be reached. No
	// attempt of the message is spent.
	FaultDestination
	// FaultMessage is the message's: it has spent an attempt.
	FaultMessage
	// FaultPermanent is the message's, and no attempt will do better: it becomes a
	// dead letter at once.
	FaultPermanent
)

// Classify is what a Destination uses that has no function of its own. It knows
// failures of connections and time limits, by the types of the standard library,
// and errors of outbox.Permanent. What only a broker's package knows, such as that
// a message is too large, it does not: see docs/forwarder.md for the errors of
// some.
func Classify(err error) Fault {
	var network net.Error
	var errno syscall.Errno
	var temporary interface{ Temporary() bool }
	switch {
	case outbox.IsPermanent(err):
		return FaultPermanent
	case errors.As(err, &network), errors.As(err, &errno),
		errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.ErrClosedPipe), errors.Is(err, net.ErrClosed),
		errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return FaultDestination
	case errors.As(err, &temporary) && temporary.Temporary():
		return FaultDestination
	}
	return FaultUnknown
}
