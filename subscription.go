package outbox

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/cursor"
	"github.com/millrace/watermill-outbox/internal/delivery"
	"github.com/millrace/watermill-outbox/internal/lease"
	"github.com/millrace/watermill-outbox/internal/metadata"
	"github.com/millrace/watermill-outbox/internal/window"
)

// subscription is one channel of a Subscriber: it takes the leases of its share
// of the shards, and delivers from each while it lasts.
type subscription struct {
	consumer *Consumer
	config   SubscriberConfig
	topics   window.Topics
	name     string // of the topics, for people
	key      cursor.Topic
	// out or batches, of at most batch messages each.
	out      chan<- *message.Message
	batches  chan<- []*message.Message
	batch    int
	closeOut func()
	base     context.Context //nolint:containedctx // handed on to messages
	logger   watermill.LoggerAdapter
	status   subscriptionStatus
	// slots bounds what is in flight in all shards together.
	slots chan struct{}
	// held says that it has had a lease.
	held atomic.Bool
}

// run returns when stop has ended and nothing is in flight any more.
func (s *subscription) run(stop context.Context) {
	seat, err := s.consumer.leases.Join(s.key, s.topics.Like(), s.refused)
	if err != nil {
		return // the Consumer is closed
	}
	var holding sync.WaitGroup
	defer holding.Wait()
	// Before the leases are released: others see whom to share them with.
	defer seat.Leave()
	for stop.Err() == nil {
		held, err := seat.Acquire(stop)
		if err != nil {
			return // stop has ended
		}
		holding.Go(func() { s.hold(stop, held) })
	}
}

// refused notes that the group's cursor is over other topics, or gone, or with nil
// that it no longer is.
func (s *subscription) refused(err error) {
	if errors.Is(err, lease.ErrNoCursor) {
		// It was removed between Subscribe and the first lease, while nobody could know
		// that somebody is subscribed. Who had a lease learns of it by losing that, and
		// makes it again if a failover has forgotten it.
		if !s.held.Load() && s.status.removed() {
			s.logger.Error("Nothing is delivered any more", ErrGroupRemoved, nil)
		}
		return
	}
	if other := otherTopics(err); other != nil {
		s.logger.Error("The cursor of the group is over other topics; nothing is delivered", other, nil)
		err = other
	}
	s.status.refused(err)
}

// hold delivers from one shard until its lease ends or is recalled, or stop ends.
func (s *subscription) hold(stop context.Context, held *lease.Lease) {
	logger := s.logger
	if held.Shards > 1 {
		logger = logger.With(watermill.LogFields{"shard": held.Key.Shard})
	}
	logger.Debug("Topic taken", nil)
	s.held.Store(true)
	status := s.status.hold(held)
	ending, end := context.WithCancelCause(stop)
	var watching sync.WaitGroup
	watching.Go(func() {
		select {
		case <-held.Recalled():
			end(errRecalled)
		case <-ending.Done():
		}
	})
	s.deliver(ending, held, status, logger)
	end(context.Canceled)
	watching.Wait()
	s.status.release(status)
	cause := context.Cause(held.Context())
	if errors.Is(cause, lease.ErrLost) {
		logger.Info("Topic lost: "+cause.Error(), nil)
	}
	ctx, cancel := context.WithTimeout(context.Background(), min(s.consumer.config.QueryTimeout, releaseTimeout))
	if err := held.Release(ctx); err != nil {
		logger.Error("Cannot store the last position; some messages may be delivered again", err, nil)
	}
	cancel()
	if errors.Is(cause, lease.ErrLost) {
		s.recreate(stop, held)
	}
}

// errRecalled ends the delivery from a shard that others should have.
var errRecalled = errors.New("the shard goes to another subscription")

// recreate makes the cursors again if a life of the server ended that had it and
// the next one has not: their creation is among what was lost in a failover to a
// standby that lagged. In the same life it was removed by somebody, and stays
// so, which is told once. A group that started at the latest begins at the earliest then: where it
// was is unknown, and to begin later could lose messages.
//
// It goes on until the database has answered: the lease may have been lost with
// the server, and nobody would look again.
func (s *subscription) recreate(stop context.Context, held *lease.Lease) {
	for failures := 1; ; failures++ {
		err := s.recreateOnce(stop, held)
		if err == nil || stop.Err() != nil {
			return
		}
		pause := readRetry.Delay(failures)
		s.logger.Error("Cannot see whether the cursor outlived the server", err, watermill.LogFields{"failures": failures, "retry_in": pause.String()})
		backoff.Wait(stop, pause)
	}
}

func (s *subscription) recreateOnce(stop context.Context, held *lease.Lease) error {
	ctx, cancel := context.WithTimeout(stop, s.consumer.config.QueryTimeout)
	defer cancel()
	now, err := s.consumer.queries.Now(ctx, s.consumer.db)
	if err != nil {
		return err
	}
	if now.Life == held.Life {
		known, err := s.consumer.store.Known(ctx, s.consumer.db, s.key)
		if err == nil && !known && s.status.removed() {
			s.logger.Error("Nothing is delivered any more", ErrGroupRemoved, nil)
		}
		return err
	}
	_, err = s.consumer.store.Ensure(ctx, s.consumer.db, s.key, s.topics.Like(), held.Shards, false)
	if otherTopics(err) != nil {
		return nil // the cursors are others' now; refused says so
	}
	return err
}

// deliver reads and hands out until the lease or stop ends.
func (s *subscription) deliver(stop context.Context, held *lease.Lease, status *shardStatus, logger watermill.LoggerAdapter) {
	bounded := s.config.Retry.MaxAttempts > 0
	tracker := delivery.NewTracker(held.Start, bounded, bounded && held.Unclean)
	held.Report(tracker)

	reading, cancel := context.WithCancel(held.Context())
	defer cancel()
	unhook := context.AfterFunc(stop, cancel)
	defer unhook()
	pages := make(chan window.Page)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { s.read(reading, held, pages, status, logger) })

	policy := s.config.policy()
	policy.Batch = s.batch
	engine := delivery.Engine{
		Policy: policy, Out: s.out, Batches: s.batches, Base: s.base, Stop: stop, Slots: s.slots, Alone: s.consumer.alone,
		Wrap: func(ctx context.Context, row *window.Row, attempt int) context.Context {
			return &deliveryContext{Context: ctx, row: row, attempt: attempt, group: s.key.Group}
		},
		Reason: func(ctx context.Context) error { return errorNoteFrom(ctx).get() },
		Valid:  held.Valid, Store: verdicts{s.consumer, held, tracker}, Died: s.died, Logger: logger,
	}
	status.delivers(&engine)
	defer status.delivers(nil)
	engine.Run(held.Context(), tracker, pages)
}

// died tells the hook of a dead letter.
func (s *subscription) died(v delivery.Verdict) {
	if s.config.OnDeadLetter == nil {
		return
	}
	raw := v.Row.Metadata
	if v.Metadata != nil {
		raw = v.Metadata
	}
	decoded, _ := metadata.Decode(raw) // nil, as documented, if it cannot be
	s.config.OnDeadLetter(DeadLetter{
		ConsumerGroup: s.key.Group, Topic: v.Row.Topic, OrderingKey: v.Row.Key, UUID: v.Row.UUID,
		Metadata: decoded, RawMetadata: bytes.Clone(raw), Payload: bytes.Clone(v.Row.Payload),
		Era: v.Row.Era, MessageID: v.Row.ID, PublishedAt: v.Row.CreatedAt, DiedAt: time.Now(),
		Attempts: v.Attempts, Error: v.Error,
	})
}

// verdicts is the engine's store under one lease.
type verdicts struct {
	consumer *Consumer
	held     *lease.Lease
	tracker  *delivery.Tracker
}

func (v verdicts) Save(ctx context.Context) error { return v.held.Save(ctx) }

func (v verdicts) Nudge() { v.held.Nudge() }

func (v verdicts) Buried(ctx context.Context, row window.Row) (bool, error) {
	return v.held.Buried(ctx, row.Era, row.ID)
}

func (v verdicts) Settle(ctx context.Context, entry *delivery.Entry, verdict delivery.Verdict) error {
	err := v.held.Settle(ctx, cursor.Verdict{
		Topic: verdict.Row.Topic, Era: verdict.Row.Era, ID: verdict.Row.ID, Attempts: verdict.Attempts, Metadata: verdict.Metadata,
		Dead: verdict.Dead, Error: verdict.Error, Due: verdict.Due, After: verdict.After,
	}, func() (window.State, uint64, uint64) { return v.tracker.StateWithout(entry) }, entry.Settled)
	if err == nil && !verdict.Dead {
		v.consumer.promoter.Nudge()
	}
	return err
}
