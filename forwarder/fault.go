package forwarder

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/url"
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
// and errors of outbox.Permanent. The rest is unknown: what only a broker's package
// knows, such as that a message is too large (see docs/forwarder.md for the errors of
// some), and what cannot be an address, a URL or a request, which is the message's
// if its topic or metadata are in it, and the destination's if not.
func Classify(err error) Fault {
	switch {
	case outbox.IsPermanent(err):
		return FaultPermanent
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.ErrClosedPipe), errors.Is(err, net.ErrClosed),
		errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), evidenceOf(err) == ofConnection:
		return FaultDestination
	}
	return FaultUnknown
}

// evidence is what an error says of a connection, in rising order of what counts
// when several are joined.
type evidence int

const (
	// ofNothing: it says nothing.
	ofNothing evidence = iota
	// ofRequest: what was asked of it is at fault.
	ofRequest
	// ofConnection: the connection is.
	ofConnection
)

// evidenceOf looks at an error and all that it wraps. What is inside knows more.
func evidenceOf(err error) evidence {
	inside := ofNothing
	switch e := err.(type) { //nolint:errorlint // each is looked at by itself
	case interface{ Unwrap() error }:
		inside = evidenceOf(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			inside = max(inside, evidenceOf(one))
		}
	}
	if inside != ofNothing {
		return inside
	}
	return evidenceAlone(err)
}

// evidenceAlone looks at an error without what it wraps.
func evidenceAlone(err error) evidence {
	switch e := err.(type) { //nolint:errorlint // without what it wraps
	case *url.Error:
		return ofNothing // net/http makes one of everything, and each is a net.Error
	case *net.AddrError, *net.ParseError, net.InvalidAddrError, net.UnknownNetworkError:
		return ofRequest // each is a net.Error
	case *net.OpError:
		if e.Op == "readfrom" || e.Op == "writeto" {
			return ofNothing // the other side of the copy failed
		}
		return ofConnection
	case syscall.Errno:
		switch e {
		case syscall.EMSGSIZE, syscall.ENAMETOOLONG, syscall.EINVAL:
			return ofRequest
		}
		return ofConnection
	case net.Error, *tls.CertificateVerificationError, tls.RecordHeaderError, tls.AlertError:
		return ofConnection
	case interface{ Temporary() bool }:
		if e.Temporary() {
			return ofConnection
		}
	}
	return ofNothing
}
