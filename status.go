package outbox

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/millrace/watermill-outbox/internal/delivery"
	"github.com/millrace/watermill-outbox/internal/lease"
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
	// Maintenance is the upkeep of the tables.
	Maintenance MaintenanceStatus
}

// SubscriptionStatus says how one subscription stands.
type SubscriptionStatus struct {
	Topic         string
	ConsumerGroup string
	// Holding says that this subscription has the topic for the group, or shards
	// of it. Otherwise others have it, here or elsewhere, and this one stands by.
	Holding bool
	// Shards are those it has, by number. There is one of a topic that is not
	// divided.
	Shards []ShardStatus
	// Source is where its messages are found now, Since when: SourceTable unless
	// all its shards are read from the WAL.
	Source Source
	Since  time.Time
	// Reason says why it left the WAL the last time, "" if it never was there
	// or is there again.
	Reason string
	// Err is why the last attempt to read failed, nil after one that did not. It is
	// ErrGroupRemoved when there is nothing to read from any more, and matches
	// ErrOtherTopics while the group's cursor is over other topics.
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
	ID  int64
	Era int64
	// Topic is the message's own, whatever the subscription selects.
	Topic       string
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

// ShardStatus says how a subscription stands with a shard that it has.
type ShardStatus struct {
	// Shard is its number, as in the table of cursors; Base is that of the first
	// one of the topic, and Shards how many there are. With each change of their
	// number (Consumer.Reshard) the numbers begin behind those that were.
	Shard, Base, Shards int
	// Ending says that the number of shards was changed: this one is read to
	// where the new ones begin, which wait for it.
	Ending bool
	// Source, Since, Reason and Err are as in SubscriptionStatus.
	Source Source
	Since  time.Time
	Reason string
	Err    error
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
	status := Status{Mode: c.config.Mode, Source: SourceTable, Reason: "ModePoll is configured", Since: c.since, Maintenance: maintenanceStatus(c.upkeep)}
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
	mu sync.Mutex
	// idle is what it is without a shard.
	idle   SubscriptionStatus
	shards []*shardStatus
}

// shardStatus is a ShardStatus that changes. Safe for concurrent use.
type shardStatus struct {
	of *subscriptionStatus
	// now and engine, nil while it delivers nothing, are guarded by of.mu.
	now    ShardStatus
	engine *delivery.Engine
}

func (s *subscriptionStatus) get() SubscriptionStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := s.idle
	if len(s.shards) == 0 {
		return status
	}
	status.Holding, status.Source, status.Since, status.Reason, status.Err = true, SourceWAL, time.Time{}, "", nil
	var errs []error
	for _, shard := range s.shards {
		now := shard.now
		status.Shards = append(status.Shards, now)
		if now.Source == SourceTable {
			status.Source = SourceTable
		}
		status.Reason = cmp.Or(status.Reason, now.Reason)
		if now.Since.After(status.Since) {
			status.Since = now.Since
		}
		if now.Err != nil {
			errs = append(errs, now.Err)
		}
		if shard.engine != nil {
			list, n := shard.engine.Retrying(MaxRetrying)
			status.RetryingCount += n
			for _, r := range list {
				status.Retrying = append(status.Retrying, RetryingMessage{
					ID: r.Row.ID, Era: r.Row.Era, Topic: r.Row.Topic, UUID: r.Row.UUID, OrderingKey: r.Row.Key,
					Attempts: r.Attempts, Err: r.Err, Since: r.Since, Next: r.Next,
				})
			}
		}
	}
	status.Err = errors.Join(errs...)
	slices.SortFunc(status.Retrying, func(a, b RetryingMessage) int { return a.Since.Compare(b.Since) })
	status.Retrying = status.Retrying[:min(len(status.Retrying), MaxRetrying)]
	slices.SortFunc(status.Shards, func(a, b ShardStatus) int { return cmp.Compare(a.Shard, b.Shard) })
	return status
}

// refused notes why it can have no shard, nil if it can.
func (s *subscriptionStatus) refused(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idle.Err = err
}

// removed notes that the group's position is gone, and reports whether that is
// news.
func (s *subscriptionStatus) removed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	news := !errors.Is(s.idle.Err, ErrGroupRemoved)
	s.idle.Err = ErrGroupRemoved
	return news
}

// hold notes that a shard was taken.
func (s *subscriptionStatus) hold(held *lease.Lease) *shardStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	shard := &shardStatus{of: s, now: ShardStatus{
		Shard: held.Key.Shard, Base: held.Base, Shards: held.Shards, Ending: held.Until != nil, Source: SourceTable, Since: time.Now(),
	}}
	if len(s.shards) == 0 {
		// What is told of a topic goes on from one lease to the next.
		shard.now.Since, shard.now.Reason = s.idle.Since, s.idle.Reason
	}
	s.shards = append(s.shards, shard)
	s.idle.Err = nil
	return shard
}

// release notes that a shard is no longer had.
func (s *subscriptionStatus) release(shard *shardStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shards = slices.DeleteFunc(s.shards, func(other *shardStatus) bool { return other == shard })
	if len(s.shards) == 0 {
		s.idle.Source, s.idle.Since, s.idle.Reason = shard.now.Source, shard.now.Since, shard.now.Reason
	}
}

// delivers notes the engine at work, nil for none.
func (s *shardStatus) delivers(engine *delivery.Engine) {
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	s.engine = engine
}

// read notes how an attempt to read has ended.
func (s *shardStatus) read(err error) {
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	s.now.Err = err
}

// source notes where messages are found from now on.
func (s *shardStatus) source(source Source, reason string) {
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	s.now.Source, s.now.Reason, s.now.Since = source, reason, time.Now()
}
