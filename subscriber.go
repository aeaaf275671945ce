package outbox

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/internal/cursor"
	"github.com/millrace/watermill-outbox/internal/window"
)

const (
	// DefaultConsumerGroup is the group of a Subscriber that names none.
	DefaultConsumerGroup = "default"

	// DefaultPageSize is how many messages a page holds at most.
	DefaultPageSize = 1000
	// MaxPageSize bounds PageSize.
	MaxPageSize = 100_000
	// DefaultPageBytes is how many bytes of messages a page holds at most.
	DefaultPageBytes = 8 << 20
	// DefaultShards is into how many shards a topic is divided for a group.
	DefaultShards = 1
	// MaxShards bounds the number of shards.
	MaxShards = 256

	// MaxPageBytes bounds PageBytes.
	MaxPageBytes = 1 << 30

	// DefaultCloseTimeout is how long Close waits for a message in flight.
	DefaultCloseTimeout = 5 * time.Second

	// releaseTimeout bounds the last write of a position on Close.
	releaseTimeout = 5 * time.Second
)

// StartPosition says where a consumer group begins that has never subscribed to
// a topic before. It has no effect on a group that has.
type StartPosition string

const (
	// StartEarliest delivers everything that is still stored.
	StartEarliest StartPosition = "earliest"
	// StartLatest delivers what commits after Subscribe has returned.
	StartLatest StartPosition = "latest"
)

// SubscriberConfig configures a Subscriber. The zero value works.
type SubscriberConfig struct {
	// ConsumerGroup shares a topic's messages among the Subscribers of one
	// group; every group gets all messages. Any valid UTF-8 of at most
	// MaxConsumerGroupBytes. Defaults to DefaultConsumerGroup.
	ConsumerGroup string

	// StartFrom is where a new group begins. Defaults to StartEarliest.
	StartFrom StartPosition

	// Shards is into how many parts a topic is divided for a new group, by its
	// ordering keys (by the message where there is none). The Subscribers of the group, in all processes, share them
	// evenly, so it bounds how many of them can work at the same time; each costs
	// a cursor, and a statement whenever the topic has news. It has no effect on a
	// group that has subscribed to the topic before, or that others begin with
	// another number: see Consumer.Reshard. At most MaxShards. Defaults to
	// DefaultShards.
	Shards int

	// PageSize is how many messages are read at once, at most MaxPageSize.
	// Larger pages drain a backlog faster and hold more in memory: two pages
	// per shard, beside what is taken in for delivery. Defaults to
	// DefaultPageSize.
	PageSize int

	// PageBytes bounds a page by the size of its messages, so that large ones
	// come in smaller pages, and what is taken in for delivery; either may pass
	// it by one message. At most MaxPageBytes. Defaults to DefaultPageBytes.
	PageBytes int

	// Ordering says which messages wait for which. Defaults to OrderingStrict.
	Ordering Ordering

	// MaxInFlight is how many messages may be with handlers at once, at most
	// LimitMaxInFlight. A subscription takes in four times as many, and 1000 at
	// least, to find some that need not wait: when all of these wait behind
	// messages that failed, nothing goes on. More serve slow handlers, and are
	// repeated after a crash. Always 1 with OrderingStrict; defaults to
	// DefaultMaxInFlight otherwise.
	MaxInFlight int

	// AckDeadline is how long a handler may take until its message's context
	// ends with ErrAckDeadline. When it has not acked after CloseTimeout more,
	// the delivery has failed, and the message may be delivered again although
	// its handler still runs. Without one a handler may take for ever, and its
	// lease is renewed meanwhile. Too short fights with retries inside the
	// handler. Defaults to 0, none.
	AckDeadline time.Duration

	// Retry says what follows a failure.
	Retry RetryConfig

	// OnDeadLetter is called for each message that becomes a dead letter, after
	// it is stored (DeadLetter.ID is 0, and DiedAt by this process's clock). A
	// place in flight is kept until it returns; it may be called concurrently.
	OnDeadLetter func(DeadLetter)

	// CloseTimeout is how long a message in flight keeps its context when the
	// subscription ends; an ack in that time counts. Too short repeats
	// messages whose handlers were cut off, too long delays the end of a
	// process whose handler hangs. Negative means not to wait. Defaults to
	// DefaultCloseTimeout.
	CloseTimeout time.Duration
}

func (c SubscriberConfig) withDefaults() SubscriberConfig {
	c.ConsumerGroup = cmp.Or(c.ConsumerGroup, DefaultConsumerGroup)
	c.StartFrom = cmp.Or(c.StartFrom, StartEarliest)
	c.Shards = cmp.Or(c.Shards, DefaultShards)
	c.PageSize = cmp.Or(c.PageSize, DefaultPageSize)
	c.PageBytes = cmp.Or(c.PageBytes, DefaultPageBytes)
	c.Ordering = cmp.Or(c.Ordering, OrderingStrict)
	if c.Ordering == OrderingStrict {
		c.MaxInFlight = cmp.Or(c.MaxInFlight, 1)
	}
	c.MaxInFlight = cmp.Or(c.MaxInFlight, DefaultMaxInFlight)
	c.Retry = c.Retry.withDefaults()
	c.CloseTimeout = cmp.Or(c.CloseTimeout, DefaultCloseTimeout)
	return c
}

func (c SubscriberConfig) validate() error {
	if problem := textProblem(c.ConsumerGroup, MaxConsumerGroupBytes); problem != "" {
		return fmt.Errorf("outbox: SubscriberConfig.ConsumerGroup %.200q %s", c.ConsumerGroup, problem)
	}
	switch {
	case c.StartFrom != StartEarliest && c.StartFrom != StartLatest:
		return fmt.Errorf("outbox: SubscriberConfig.StartFrom must be %q or %q, is %q", StartEarliest, StartLatest, c.StartFrom)
	case c.Shards < 1 || c.Shards > MaxShards:
		return fmt.Errorf("outbox: SubscriberConfig.Shards must be between 1 and %d, is %d", MaxShards, c.Shards)
	case c.PageSize < 1 || c.PageSize > MaxPageSize:
		return fmt.Errorf("outbox: SubscriberConfig.PageSize must be between 1 and %d, is %d", MaxPageSize, c.PageSize)
	case c.PageBytes < 1 || c.PageBytes > MaxPageBytes:
		return fmt.Errorf("outbox: SubscriberConfig.PageBytes must be between 1 and %d, is %d", MaxPageBytes, c.PageBytes)
	}
	if err := c.validateOrdering(); err != nil {
		return err
	}
	return c.Retry.validate()
}

// Subscriber emits committed messages: those of a transaction that committed,
// all of them, at least once to each consumer group, in causal order per
// ordering key. It implements message.Subscriber and SubscribeInitializer and
// is safe for concurrent use.
//
// SubscriberConfig.Ordering says how many messages of a topic are in flight; by
// default one, and the next follows its Ack. Of several Subscribers of a group, in this and other
// processes, one at a time has a topic; another takes over when it closes, or
// when its process has been out of touch for the lease (ConsumerConfig.Lease).
// With SubscriberConfig.Shards that is so for each shard, and the Subscribers
// share them evenly: when one comes, others hand shards over, each after its
// message in flight.
//
// It survives restarts of the database by itself and never closes a channel for
// a passing error.
type Subscriber struct {
	consumer *Consumer
	config   SubscriberConfig
	logger   watermill.LoggerAdapter

	// stopping ends all subscriptions.
	stopping context.Context //nolint:containedctx // the Subscriber's own lifetime
	stop     context.CancelCauseFunc

	mu      sync.Mutex
	closed  bool
	running sync.WaitGroup
}

var (
	_ message.Subscriber           = (*Subscriber)(nil)
	_ message.SubscribeInitializer = (*Subscriber)(nil)
)

// NewSubscriber returns a Subscriber that reads through the Consumer. It costs
// nothing until it subscribes; make as many as there are consumer groups. A nil
// logger means the Consumer's.
func NewSubscriber(consumer *Consumer, config SubscriberConfig, logger watermill.LoggerAdapter) (*Subscriber, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	if consumer == nil {
		return nil, fmt.Errorf("outbox: NewSubscriber needs a Consumer")
	}
	if logger == nil {
		logger = consumer.logger
	}
	s := &Subscriber{
		consumer: consumer, config: config,
		logger: logger.With(watermill.LogFields{"consumer_group": config.ConsumerGroup}),
	}
	s.stopping, s.stop = context.WithCancelCause(context.Background())
	if err := consumer.register(s); err != nil {
		return nil, err
	}
	return s, nil
}

// SubscribeInitialize fixes the group's start position in the topic, as
// Subscribe does. It may be called any number of times, from anywhere.
func (s *Subscriber) SubscribeInitialize(topic string) error {
	if err := ValidateTopic(topic); err != nil {
		return err
	}
	return s.initialize(context.Background(), window.One(topic), topic)
}

// initialize makes the cursors; name is for errors and logs.
func (s *Subscriber) initialize(ctx context.Context, topics window.Topics, name string) error {
	if s.stopping.Err() != nil {
		return ErrSubscriberClosed
	}
	ctx, cancel := context.WithTimeout(ctx, constructTimeout)
	defer cancel()
	defer context.AfterFunc(s.stopping, cancel)()
	shards, err := s.consumer.store.Ensure(ctx, s.consumer.db, s.key(topics), topics.Like(), s.config.Shards, s.config.StartFrom == StartLatest)
	if other := otherTopics(err); other != nil {
		return other
	}
	if err != nil {
		return fmt.Errorf("outbox: subscribe to topic %q: %w", name, explain(err, s.consumer.config.Schema))
	}
	if shards > 0 && shards != s.config.Shards && s.config.Shards > 1 {
		s.logger.Info("The group has another number of shards already, which stands; Consumer.Reshard changes it", watermill.LogFields{
			"topic": name, "shards": shards, "configured": s.config.Shards,
		})
	}
	return nil
}

// requireWAL refuses topics in ModeWAL when the WAL cannot be read.
func (s *Subscriber) requireWAL(ctx context.Context, name string) error {
	if s.stopping.Err() != nil {
		return ErrSubscriberClosed
	}
	ctx, cancel := context.WithTimeout(ctx, constructTimeout)
	defer cancel()
	defer context.AfterFunc(s.stopping, cancel)()
	if err := s.consumer.requireWAL(ctx); err != nil {
		return fmt.Errorf("outbox: subscribe to topic %q: %w", name, err)
	}
	return nil
}

// key is that of the cursors: of many topics, which no topic's name is.
func (s *Subscriber) key(topics window.Topics) cursor.Topic {
	name, _ := topics.Single()
	return cursor.Topic{Group: s.config.ConsumerGroup, Topic: name}
}

// Subscribe returns the channel on which the topic's messages come. The group's
// start position is fixed when it returns; taking the topic over from another
// Subscriber, and reading, happen in the background. An error means that the
// database did not answer within ten seconds, or refused.
//
// The context's end ends this subscription and closes its channel, as Close
// does for all: a message in flight is given SubscriberConfig.CloseTimeout, and
// its ack is stored. Messages carry the context's values; their own contexts
// end with Ack, Nack, the end of that grace period, and when another process
// took the topic over.
func (s *Subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	if err := ValidateTopic(topic); err != nil {
		return nil, err
	}
	out := make(chan *message.Message)
	sub := &subscription{topics: window.One(topic), name: topic, out: out, closeOut: func() { close(out) }}
	if err := s.subscribe(ctx, sub); err != nil {
		return nil, err
	}
	return out, nil
}

// SubscribeBatches returns a channel of the messages of many topics, in batches of
// at most limit messages. One cursor stands for all the topics, so they cost no
// more than one, however many there are, and those that are first published to
// later need nothing; rows of other topics are read past, so for few topics
// beside much other traffic Subscribe is better. DeliveryFromCtx tells the topic
// of a message.
//
// A consumer group has one such cursor, in as many shards as SubscriberConfig.Shards
// and Consumer.ReshardBatches say. What was not selected has no position in it, so
// another selection is refused with ErrOtherTopics; of those that match the same
// topics, ListTopics in any order and patterns with more than one * in a row are
// the same. If the cursor is removed while this subscription lasts, and others make
// one of another selection, it is not taken: SubscriptionStatus.Err matches
// ErrOtherTopics, and nothing is delivered until there is one over its topics.
//
// A batch holds messages of one topic and ordering key, in order (with
// OrderingStrict, of any); those without a key come alone. One that has failed
// before is the first of its batch. MaxInFlight counts batches. Ack each message by itself, as soon
// as it is done; Nack the first that fails, and it is tried again as always. The
// contexts of those behind it end then: leave them alone, or Nack them, which
// counts for nothing, and they come again behind it. What is acked stays acked,
// in whatever order.
//
// Everything else is as with Subscribe. The two do not know of each other: a group
// that does both with a topic gets its messages twice.
func (s *Subscriber) SubscribeBatches(ctx context.Context, topics Topics, limit int) (<-chan []*message.Message, error) {
	if err := topics.Validate(); err != nil {
		return nil, err
	}
	if limit < 1 || limit > LimitMaxInFlight {
		return nil, fmt.Errorf("outbox: SubscribeBatches needs a limit between 1 and %d, has %d", LimitMaxInFlight, limit)
	}
	out := make(chan []*message.Message)
	sub := &subscription{
		topics: window.Matching(topics.patterns...), name: topics.String(), batches: out, batch: limit, closeOut: func() { close(out) },
	}
	if err := s.subscribe(ctx, sub); err != nil {
		return nil, err
	}
	return out, nil
}

// subscribe begins a subscription whose topics and channel are given.
func (s *Subscriber) subscribe(ctx context.Context, sub *subscription) error {
	// In this order: a refused Subscribe fixes no start position.
	if err := s.requireWAL(ctx, sub.name); err != nil {
		return err
	}
	if err := s.initialize(ctx, sub.topics, sub.name); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrSubscriberClosed
	}
	s.consumer.start()
	sub.consumer, sub.config, sub.key = s.consumer, s.config, s.key(sub.topics)
	sub.base = context.WithoutCancel(ctx)
	sub.logger = s.logger.With(watermill.LogFields{"topic": sub.name})
	if s.config.Ordering != OrderingStrict {
		sub.slots = make(chan struct{}, s.config.MaxInFlight)
	}
	sub.status.idle = SubscriptionStatus{Topic: sub.name, ConsumerGroup: s.config.ConsumerGroup, Source: SourceTable, Since: time.Now()}
	s.consumer.opened(sub)
	stop, cancel := context.WithCancelCause(ctx)
	unhook := context.AfterFunc(s.stopping, func() { cancel(ErrSubscriberClosed) })
	s.running.Go(func() {
		// The channel is closed before Close learns of it.
		defer sub.closeOut()
		defer s.consumer.ended(sub)
		defer unhook()
		defer cancel(context.Canceled)
		sub.run(stop)
	})
	s.logger.Info("Subscribed", watermill.LogFields{"topic": sub.name})
	return nil
}

// Close ends all subscriptions and returns when their channels are closed and
// their positions stored. Messages in flight are waited for, for
// SubscriberConfig.CloseTimeout at most. Un-acked messages are available to
// other Subscribers of the group at once. It may be called more than once and
// always returns nil; the Consumer stays open.
func (s *Subscriber) Close() error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.mu.Unlock()
	s.stop(ErrSubscriberClosed)
	s.running.Wait()
	if first {
		s.consumer.unregister(s)
		s.logger.Info("Subscriber closed", nil)
	}
	return nil
}
