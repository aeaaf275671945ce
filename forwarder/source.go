package forwarder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	outbox "github.com/millrace/watermill-outbox"
)

// Source is where messages come from: made by FromOutbox, FromSubscriber, or
// FromSubscribers.
type Source interface {
	// validate reports what is wrong, given how many destinations there are.
	validate(destinations int) error
	// open returns what one destination reads. It runs no SQL.
	open(settings settings, logger watermill.LoggerAdapter) (feed, error)
}

// settings are what a feed needs to know of the forwarder.
type settings struct {
	Config

	destination Destination
}

// feed hands out the messages for one destination. Its messages come in batches
// of one line, in order.
type feed interface {
	subscribe(ctx context.Context) (<-chan []*message.Message, error)
	// origin says where a message comes from.
	origin(msg *message.Message) origin
	// fail says that a message has spent an attempt, or with permanent that it is
	// to be given up, and leaves the rest of its batch to come again behind it. It
	// reports whether the feed sees to that; otherwise it is the caller's.
	fail(msg *message.Message, err error, permanent bool) bool
	close() error
}

// origin is what is known of a message beside its content.
type origin struct {
	topic, key string
	// era and number are what no other message of the source has, 0 if they are
	// not known.
	era, number int64
	// attempt counts the deliveries, from 1; 0 if they are not counted.
	attempt int
}

// id returns an id that no other message of the source has, "" if none is known.
func (o origin) id() string {
	if o.number == 0 {
		return ""
	}
	return fmt.Sprintf("%d-%d", o.era, o.number)
}

// outboxSource reads the outbox.
type outboxSource struct {
	consumer *outbox.Consumer
	config   outbox.SubscriberConfig
	topics   outbox.Topics
}

// DefaultConsumerGroup begins the names of a forwarder's consumer groups.
const DefaultConsumerGroup = "forwarder"

// FromOutbox reads these topics of the outbox: for each destination with one
// cursor, of a consumer group named after config.ConsumerGroup (by default
// DefaultConsumerGroup), a dot, and the destination.
//
// The zero value of config works. Where it leaves a choice, it becomes
// OrderingByKey, RetryInPlace, and the forwarder's MaxAttempts and CloseTimeout;
// MaxInFlight is the destination's. Retries that are deferred would break the
// order, and are refused. The Consumer stays open, and may serve others.
func FromOutbox(consumer *outbox.Consumer, config outbox.SubscriberConfig, topics outbox.Topics) Source {
	return &outboxSource{consumer: consumer, config: config, topics: topics}
}

func (s *outboxSource) validate(int) error {
	switch {
	case s.consumer == nil:
		return errors.New("forwarder: FromOutbox needs a Consumer")
	case s.config.Retry.Mode == outbox.RetryDeferred:
		return errors.New("forwarder: FromOutbox: deferred retries would break the order: use RetryInPlace")
	case s.config.Retry.MaxAttempts != 0:
		return errors.New("forwarder: FromOutbox: Retry.MaxAttempts is the forwarder's, set Config.MaxAttempts")
	case s.config.AckDeadline != 0:
		return errors.New("forwarder: FromOutbox: an AckDeadline would spend attempts while a destination is down: use Destination.PublishTimeout")
	case s.config.MaxInFlight != 0:
		return errors.New("forwarder: FromOutbox: MaxInFlight is the destination's, set Destination.MaxInFlight")
	}
	return s.topics.Validate()
}

func (s *outboxSource) open(of settings, logger watermill.LoggerAdapter) (feed, error) {
	config := s.config
	config.ConsumerGroup = cmp.Or(config.ConsumerGroup, DefaultConsumerGroup) + "." + of.destination.Name
	config.Ordering = cmp.Or(config.Ordering, outbox.OrderingByKey)
	if config.Ordering != outbox.OrderingStrict {
		config.MaxInFlight = of.destination.MaxInFlight
	}
	config.Retry.MaxAttempts = max(of.MaxAttempts, 0)
	config.CloseTimeout = cmp.Or(config.CloseTimeout, of.CloseTimeout)
	subscriber, err := outbox.NewSubscriber(s.consumer, config, logger)
	if err != nil {
		return nil, err
	}
	return &outboxFeed{subscriber: subscriber, topics: s.topics, batch: of.BatchSize}, nil
}

type outboxFeed struct {
	subscriber *outbox.Subscriber
	topics     outbox.Topics
	batch      int
}

func (f *outboxFeed) subscribe(ctx context.Context) (<-chan []*message.Message, error) {
	return f.subscriber.SubscribeBatches(ctx, f.topics, f.batch)
}

func (f *outboxFeed) origin(msg *message.Message) origin {
	d, _ := outbox.DeliveryFromCtx(msg.Context())
	return origin{topic: d.Topic, key: d.OrderingKey, era: d.Era, number: d.ID, attempt: d.Attempt}
}

// fail leaves the rest to the subscription, which counts attempts durably.
func (f *outboxFeed) fail(msg *message.Message, err error, permanent bool) bool {
	if permanent {
		err = outbox.Permanent(err)
	}
	outbox.SetError(msg.Context(), err)
	msg.Nack()
	return true
}

func (f *outboxFeed) close() error { return f.subscriber.Close() }

// subscriberSource reads any Watermill Pub/Sub.
type subscriberSource struct {
	single bool
	make   func(destination string) (message.Subscriber, error)
	topics []string
}

// FromSubscriber reads these topics of any Subscriber, for one destination. The
// Forwarder closes it.
//
// Messages of one topic and ordering key (outbox.DefaultKeyMetadata) are forwarded
// one after the other, in the order in which the Subscriber hands them out. One
// that fails is tried again in its place and never nacked; it counts attempts from
// the start of the process, and is given up to Destination.PoisonTopic; without
// one it is tried for ever, for there are no dead letters.
func FromSubscriber(subscriber message.Subscriber, topics ...string) Source {
	return &subscriberSource{single: true, topics: topics, make: func(string) (message.Subscriber, error) {
		if subscriber == nil {
			return nil, errors.New("it is nil")
		}
		return subscriber, nil
	}}
}

// FromSubscribers is FromSubscriber for several destinations: open is called with
// the name of each, and returns a Subscriber with progress of its own (another
// consumer group).
func FromSubscribers(open func(destination string) (message.Subscriber, error), topics ...string) Source {
	return &subscriberSource{make: open, topics: topics}
}

func (s *subscriberSource) validate(destinations int) error {
	switch {
	case s.make == nil:
		return errors.New("forwarder: FromSubscribers needs a function")
	case len(s.topics) == 0:
		return errors.New("forwarder: FromSubscriber and FromSubscribers need topics")
	case s.single && destinations > 1:
		return fmt.Errorf("forwarder: one Subscriber cannot serve %d destinations, each of which needs its own progress: use FromSubscribers", destinations)
	}
	return nil
}

func (s *subscriberSource) open(of settings, _ watermill.LoggerAdapter) (feed, error) {
	subscriber, err := s.make(of.destination.Name)
	if err != nil {
		return nil, fmt.Errorf("forwarder: subscriber of destination %q: %w", of.destination.Name, err)
	}
	return &subscriberFeed{subscriber: subscriber, topics: s.topics, inFlight: make(chan struct{}, of.destination.MaxInFlight)}, nil
}

// subscriberFeed puts the messages of a Subscriber into lines.
type subscriberFeed struct {
	subscriber message.Subscriber
	topics     []string
	// inFlight holds a value for each message that is out.
	inFlight chan struct{}

	mu sync.Mutex
	// lines has the last message of each line; the next waits for it.
	lines map[[2]string]*message.Message
}

func (f *subscriberFeed) subscribe(ctx context.Context) (<-chan []*message.Message, error) {
	f.lines = map[[2]string]*message.Message{}
	out := make(chan []*message.Message)
	var running sync.WaitGroup
	for _, topic := range f.topics {
		messages, err := f.subscriber.Subscribe(ctx, topic)
		if err != nil {
			return nil, fmt.Errorf("forwarder: subscribe to topic %q: %w", topic, err)
		}
		running.Go(func() { f.read(ctx, topic, messages, out) })
	}
	go func() {
		running.Wait()
		close(out)
	}()
	return out, nil
}

// read hands on the messages of a topic until the Subscriber's channel ends. When
// the context has ended, what is not taken goes back to the Subscriber.
func (f *subscriberFeed) read(ctx context.Context, topic string, messages <-chan *message.Message, out chan<- []*message.Message) {
	var running sync.WaitGroup
	defer running.Wait()
	for msg := range messages {
		select {
		case f.inFlight <- struct{}{}:
		case <-msg.Context().Done(): // it is not ours any more
			continue
		case <-ctx.Done():
			msg.Nack()
			continue
		}
		msg.SetContext(context.WithValue(msg.Context(), topicKey{}, topic))
		before := f.queue(topic, msg)
		running.Go(func() {
			defer func() { <-f.inFlight }()
			defer f.unqueue(topic, msg)
			if before != nil && !settled(before, msg) {
				return
			}
			select {
			case out <- []*message.Message{msg}:
				settled(msg, msg)
			case <-msg.Context().Done():
			case <-ctx.Done():
				msg.Nack()
			}
		})
	}
}

// settled waits until a message is acked or nacked, or the context of another
// ends, and reports whether it came to the first.
func settled(msg, other *message.Message) bool {
	select {
	case <-msg.Acked():
	case <-msg.Nacked():
	case <-other.Context().Done():
		return false
	}
	return true
}

// queue returns the message in front of this one in its line, nil if none is.
func (f *subscriberFeed) queue(topic string, msg *message.Message) *message.Message {
	key := msg.Metadata.Get(outbox.DefaultKeyMetadata)
	if key == "" {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	line := [2]string{topic, key}
	before := f.lines[line]
	f.lines[line] = msg
	return before
}

func (f *subscriberFeed) unqueue(topic string, msg *message.Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if line := [2]string{topic, msg.Metadata.Get(outbox.DefaultKeyMetadata)}; f.lines[line] == msg {
		delete(f.lines, line)
	}
}

type topicKey struct{}

func (f *subscriberFeed) origin(msg *message.Message) origin {
	topic, _ := msg.Context().Value(topicKey{}).(string)
	return origin{topic: topic, key: msg.Metadata.Get(outbox.DefaultKeyMetadata)}
}

// fail leaves the message to the caller, who tries again: what a Nack leads to is
// different with each Pub/Sub, and may break the order.
func (f *subscriberFeed) fail(*message.Message, error, bool) bool { return false }

func (f *subscriberFeed) close() error { return f.subscriber.Close() }
