package forwarder

import (
	"errors"
	"fmt"
)

var (
	// ErrClosed is returned by Run after Close. Make a new Forwarder.
	ErrClosed = errors.New("forwarder: closed")

	// ErrRunning is returned by Run when it was called before: a Forwarder runs
	// once.
	ErrRunning = errors.New("forwarder: runs already, or did")

	// ErrUnknownDestination is matched by the error of a route to a destination
	// that Config.Destinations does not name.
	ErrUnknownDestination = errors.New("forwarder: no such destination")

	// ErrInvalidTopic is matched by the error of a route or a template that leads
	// to no topic, or one that is not valid UTF-8.
	ErrInvalidTopic = errors.New("forwarder: invalid topic")
)

// ConfigError says what is wrong with a Config. New returns it; nothing has run
// then.
type ConfigError struct {
	// Destination is the one concerned, "" if it is none.
	Destination string
	// Field is that of Config, or of Destination if there is one.
	Field string
	// Problem says what is wrong with it, and what would be right.
	Problem string
	// Err is the cause, nil if there is none.
	Err error
}

func (e *ConfigError) Error() string {
	if e.Destination == "" {
		return fmt.Sprintf("forwarder: Config.%s: %s", e.Field, e.Problem)
	}
	return fmt.Sprintf("forwarder: Destination.%s of %q: %s", e.Field, e.Destination, e.Problem)
}

func (e *ConfigError) Unwrap() error { return e.Err }

// A RouteError says that a message cannot be sent to where it should be: the
// route, or the template of a topic, makes no sense for it. No destination gets
// the message, and it becomes a dead letter. It unwraps to the reason.
type RouteError struct {
	// Topic is where the message comes from.
	Topic string
	// Destination is the destination concerned, "" if the route is as a whole.
	Destination string
	Err         error
}

func (e *RouteError) Error() string {
	if e.Destination == "" {
		return fmt.Sprintf("forwarder: route of a message of topic %q: %s", e.Topic, e.Err)
	}
	return fmt.Sprintf("forwarder: route of a message of topic %q to destination %q: %s", e.Topic, e.Destination, e.Err)
}

func (e *RouteError) Unwrap() error { return e.Err }

// A PanicError is a panic of a middleware, a route, or a publisher.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("forwarder: panic: %v", e.Value) }
