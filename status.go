package outbox

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/millrace/watermill-outbox/internal/delivery"
	"github.com/millrace/watermill-outbox/internal/live"
	"github.com/millrace/watermill-outbox/replication"
)

// Source says where messages are found.
type Source string

const (
	// SourceTable is the log's table, by polling.
	SourceTable Source = "table"
	// SourceWAL is the write-ahead log.
	SourceWAL Source = "wal"
)

// Status says how the reading of a Consumer stands.
type Status struct {
	// Mode is the configured one.
	Mode Mode
	// Source is SourceWAL while there is a stream that keeps up; subscriptions
	// then attach to it when they are caught up. Reason says why it is
	// SourceTable, and Since when it became what it is.
	Source Source
	Reason string
	Since  time.Time
	// Slot is the temporary replication slot of the stream, "" if there is none.
	Slot string
	// ReceivedLSN is how far the stream has come.
	ReceivedLSN replication.LSN
	// BufferedBytes is what was received and not yet taken by subscriptions.
	BufferedBytes int
	// Subscriptions are the open ones, by topic and group.
	Subscriptions []SubscriptionStatus
}

// SubscriptionStatus says how one subscription stands.
type SubscriptionStatus struct {
	Topic         string
	ConsumerGroup string
	// Holding says that this process has the topic for the group. Otherwise
	// another Subscriber has it, here or elsewhere, and this one stands by.
	Holding bool
	// Source is where its messages are found now, Since when.
	Source Source
	Since  time.Time
	// Reason says why it left the WAL the last time, "" if it never was there
	// or is there again.
	Reason string
	// Err is why the last attempt to read failed, nil after one that did not.
	Err error
	// Retrying are the messages that failed and wait in place for their next
	// delivery, those that have failed for longest first, at most MaxRetrying of
	// them; RetryingCount is how many there are. With an order, each holds back
	// what follows it: everything, or its key.
	Retrying      []RetryingMessage
	RetryingCount int
}

// MaxRetrying is how many messages SubscriptionStatus.Retrying names.
const MaxRetrying = 100

// RetryingMessage is one that failed and waits for its next delivery.
type RetryingMessage struct {
	// ID and Era identify the stored message, see Delivery.
	ID          int64
	Era         int64
	UUID        string
	OrderingKey string
	// Attempts is how many deliveries have failed, Err why the last did, nil if
	// unknown (see KeepError).
	Attempts int
	Err      error
	// Since is when it failed first in this process, Next when it is due.
	Since time.Time
	Next  time.Time
}

// Ready returns nil when every subscription could read the last time it tried,
// and otherwise why not. A subscription that stands by is ready.
func (s Status) Ready() error {
	var problems []error
	for _, sub := range s.Subscriptions {
		if sub.Err != nil {
			problems = append(problems, fmt.Errorf("outbox: topic %q, consumer group %q: %w", sub.Topic, sub.ConsumerGroup, sub.Err))
		}
	}
	return errors.Join(problems...)
}

// Status returns how the reading stands. It asks no database, and may be called
// at any time.
func (c *Consumer) Status() Status {
	status := Status{Mode: c.config.Mode, Source: SourceTable, Reason: "ModePoll is configured", Since: c.since}
	if c.live != nil {
		stream := c.live.Status()
		status.Reason, status.Since = stream.Reason, stream.Since
		status.Slot, status.ReceivedLSN, status.BufferedBytes = stream.Slot, stream.Received, stream.Buffered
		switch stream.State {
		case live.Open:
			status.Source = SourceWAL
		case live.Idle:
			status.Reason = "nobody subscribes"
		case live.Opening:
			status.Reason = cmp.Or(stream.Reason, "the stream is being opened")
		case live.Lagging, live.Waiting:
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for sub := range c.subscriptions {
		status.Subscriptions = append(status.Subscriptions, sub.status.get())
	}
	slices.SortFunc(status.Subscriptions, func(a, b SubscriptionStatus) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.ConsumerGroup, b.ConsumerGroup))
	})
	return status
}

// subscriptionStatus is a SubscriptionStatus that changes. Safe for concurrent
// use.
type subscriptionStatus struct {
	mu     sync.Mutex
	now    SubscriptionStatus
	engine *delivery.Engine // nil while it holds nothing
}

func (s *subscriptionStatus) get() SubscriptionStatus {
	s.mu.Lock()
	now, engine := s.now, s.engine
	s.mu.Unlock()
	if engine == nil {
		return now
	}
	list, n := engine.Retrying(MaxRetrying)
	now.RetryingCount = n
	for _, r := range list {
		now.Retrying = append(now.Retrying, RetryingMessage{
			ID: r.Row.ID, Era: r.Row.Era, UUID: r.Row.UUID, OrderingKey: r.Row.Key,
			Attempts: r.Attempts, Err: r.Err, Since: r.Since, Next: r.Next,
		})
	}
	return now
}

// delivers notes the engine at work, nil for none.
func (s *subscriptionStatus) delivers(engine *delivery.Engine) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.engine = engine
}

func (s *subscriptionStatus) hold(holding bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.Holding = holding
	s.now.Err = nil
}

// read notes how an attempt to read has ended.
func (s *subscriptionStatus) read(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.Err = err
}

// source notes where messages are found from now on.
func (s *subscriptionStatus) source(source Source, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.Source, s.now.Reason, s.now.Since = source, reason, time.Now()
}
