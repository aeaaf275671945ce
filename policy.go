package outbox

import (
	"cmp"
	"fmt"
	"time"

	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/delivery"
)

const (
	// DefaultMaxInFlight is how many messages may be in flight at once with
	// OrderingByKey and OrderingUnordered.
	DefaultMaxInFlight = 64
	// LimitMaxInFlight bounds MaxInFlight.
	LimitMaxInFlight = 10_000

	// DefaultMinBackoff is the pause after the first failure of a message.
	DefaultMinBackoff = 100 * time.Millisecond
	// DefaultMaxBackoff is the longest pause after a failure.
	DefaultMaxBackoff = 10 * time.Second

	// minPending is how many messages a subscription takes in at least, so that
	// keys that have to wait leave others to be found.
	minPending = 1000
	// strictPending is how many with strict order, where one is in flight.
	strictPending = 256
)

// Ordering says which messages of a topic wait for which.
type Ordering string

const (
	// OrderingStrict delivers one message of a topic at a time, in order. One
	// that fails holds back all others.
	OrderingStrict Ordering = "strict"
	// OrderingByKey delivers the messages of an ordering key one at a time, in
	// order, and keys in parallel. Messages without a key wait for none. One that
	// fails holds back its key.
	OrderingByKey Ordering = "by_key"
	// OrderingUnordered delivers messages in parallel, in about the order in which
	// they became visible. One that fails holds back nothing.
	OrderingUnordered Ordering = "unordered"
)

// RetryMode says where a message waits that failed.
type RetryMode string

const (
	// RetryInPlace keeps the message where it is: what is ordered behind it waits,
	// and the order holds.
	RetryInPlace RetryMode = "in_place"
	// RetryDeferred stores the message for later, for its group alone, and goes
	// on: it comes again as a new stored message, behind what was ordered
	// behind it.
	RetryDeferred RetryMode = "deferred"
)

// RetryConfig says what follows a failure: a Nack, or a passed
// SubscriberConfig.AckDeadline.
type RetryConfig struct {
	// MaxAttempts is how many deliveries a message gets before it becomes a dead
	// letter. They are counted across restarts; what a shutdown or a lost lease
	// cuts off does not count, and a message that ends its process does: after
	// a crash what may have been in flight goes out in waves, and after a crash in
	// one of these one at a time, so the one that ends the process is known. Too few give up on messages that an
	// outage fails, and with an order too many hold up what is behind. 0, the
	// default, means any number: nothing is given up by itself, but for stored
	// rows that cannot become messages.
	//
	// With a limit, what is delivered beyond the stored position is bounded, to
	// 64 messages at first and 4096 at most: while positions cannot be stored
	// no more is delivered.
	MaxAttempts int

	// Mode is where a message waits that failed. Defaults to RetryInPlace.
	Mode RetryMode

	// MinBackoff is the pause before a message is delivered again after its
	// first failure. It doubles with each further one, up to MaxBackoff, with up
	// to a fifth taken off at random. With the defaults:
	//
	//	failure    1      2      3      4      5      6      7      8 and later
	//	at most  0.1 s  0.2 s  0.4 s  0.8 s  1.6 s  3.2 s  6.4 s  10 s
	//	at least 0.08   0.16   0.32   0.64   1.28   2.56   5.12   8
	//
	// Defaults to DefaultMinBackoff.
	MinBackoff time.Duration
	// MaxBackoff is the longest pause. At least MinBackoff. Defaults to
	// DefaultMaxBackoff.
	MaxBackoff time.Duration
}

func (c RetryConfig) withDefaults() RetryConfig {
	c.Mode = cmp.Or(c.Mode, RetryInPlace)
	c.MinBackoff = cmp.Or(c.MinBackoff, DefaultMinBackoff)
	c.MaxBackoff = cmp.Or(c.MaxBackoff, max(DefaultMaxBackoff, c.MinBackoff))
	return c
}

func (c RetryConfig) validate() error {
	switch {
	case c.MaxAttempts < 0:
		return fmt.Errorf("outbox: SubscriberConfig.Retry.MaxAttempts must not be negative, is %d", c.MaxAttempts)
	case c.Mode != RetryInPlace && c.Mode != RetryDeferred:
		return fmt.Errorf("outbox: SubscriberConfig.Retry.Mode must be %q or %q, is %q", RetryInPlace, RetryDeferred, c.Mode)
	case c.MinBackoff < 0:
		return fmt.Errorf("outbox: SubscriberConfig.Retry.MinBackoff must not be negative, is %s", c.MinBackoff)
	case c.MaxBackoff < c.MinBackoff:
		return fmt.Errorf("outbox: SubscriberConfig.Retry.MaxBackoff (%s) must not be below MinBackoff (%s)", c.MaxBackoff, c.MinBackoff)
	}
	return nil
}

func (c SubscriberConfig) validateOrdering() error {
	switch {
	case c.Ordering != OrderingStrict && c.Ordering != OrderingByKey && c.Ordering != OrderingUnordered:
		return fmt.Errorf("outbox: SubscriberConfig.Ordering must be %q, %q or %q, is %q", OrderingStrict, OrderingByKey, OrderingUnordered, c.Ordering)
	case c.MaxInFlight < 1 || c.MaxInFlight > LimitMaxInFlight:
		return fmt.Errorf("outbox: SubscriberConfig.MaxInFlight must be between 1 and %d, is %d", LimitMaxInFlight, c.MaxInFlight)
	case c.Ordering == OrderingStrict && c.MaxInFlight > 1:
		return fmt.Errorf("outbox: SubscriberConfig.MaxInFlight is %d, and Ordering %q has one in flight: choose OrderingByKey or OrderingUnordered", c.MaxInFlight, c.Ordering)
	case c.AckDeadline < 0:
		return fmt.Errorf("outbox: SubscriberConfig.AckDeadline must not be negative, is %s", c.AckDeadline)
	}
	return nil
}

// policy is what the engine needs to know.
func (c SubscriberConfig) policy() delivery.Policy {
	policy := delivery.Policy{
		Ordering: delivery.Strict, MaxInFlight: c.MaxInFlight, Pending: min(c.PageSize, strictPending), PendingBytes: c.PageBytes,
		MaxAttempts: c.Retry.MaxAttempts, Deferred: c.Retry.Mode == RetryDeferred,
		Backoff:     backoff.Policy{Min: c.Retry.MinBackoff, Max: c.Retry.MaxBackoff},
		AckDeadline: c.AckDeadline, Grace: max(c.CloseTimeout, 0),
	}
	switch c.Ordering {
	case OrderingStrict:
		return policy
	case OrderingByKey:
		policy.Ordering = delivery.ByKey
	case OrderingUnordered:
		policy.Ordering = delivery.Unordered
	}
	policy.Pending = max(4*c.MaxInFlight, minPending)
	return policy
}
