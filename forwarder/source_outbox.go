package forwarder

import (
	"cmp"
	"context"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/delivery"
)

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

func (s *outboxSource) validate(config Config) error {
	problem := ""
	switch {
	case s.consumer == nil:
		problem = "FromOutbox needs a Consumer"
	case s.config.Retry.Mode == outbox.RetryDeferred:
		problem = "FromOutbox: deferred retries would break the order: use RetryInPlace"
	case s.config.Retry.MaxAttempts != 0:
		problem = "FromOutbox: Retry.MaxAttempts is the forwarder's, set Config.MaxAttempts"
	case s.config.AckDeadline != 0:
		problem = "FromOutbox: an AckDeadline would spend attempts while a destination is down: use Destination.PublishTimeout"
	case s.config.MaxInFlight != 0:
		problem = "FromOutbox: MaxInFlight is the destination's, set Destination.MaxInFlight"
	}
	if problem != "" {
		return &ConfigError{Field: "Source", Problem: problem}
	}
	if err := s.topics.Validate(); err != nil {
		return &ConfigError{Field: "Source", Problem: err.Error(), Err: err}
	}
	for _, d := range config.Destinations {
		// What NewSubscriber does not like is found here rather than by Run.
		subscriber, err := outbox.NewSubscriber(s.consumer, s.configOf(settings{Config: config, destination: d}), watermill.NopLogger{})
		if err != nil {
			return &ConfigError{Destination: d.Name, Field: "Source", Problem: err.Error(), Err: err}
		}
		if err := subscriber.Close(); err != nil {
			return err
		}
	}
	return nil
}

// configOf returns the configuration of a destination's Subscriber.
func (s *outboxSource) configOf(of settings) outbox.SubscriberConfig {
	config := s.config
	config.ConsumerGroup = cmp.Or(config.ConsumerGroup, DefaultConsumerGroup) + "." + of.destination.Name
	config.Ordering = cmp.Or(config.Ordering, outbox.OrderingByKey)
	if config.Ordering != outbox.OrderingStrict {
		config.MaxInFlight = of.destination.MaxInFlight
	}
	config.Retry.MaxAttempts = max(of.MaxAttempts, 0)
	config.CloseTimeout = cmp.Or(config.CloseTimeout, of.CloseTimeout)
	return config
}

func (s *outboxSource) open(of settings, logger watermill.LoggerAdapter) (feed, error) {
	subscriber, err := outbox.NewSubscriber(s.consumer, s.configOf(of), logger)
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
func (f *outboxFeed) fail(c *consumed, err error, permanent bool) bool {
	if permanent {
		err = outbox.Permanent(err)
	}
	outbox.SetError(c.ctx, err)
	c.Nack()
	return true
}

func (f *outboxFeed) again(c *consumed, err error) bool {
	outbox.SetError(c.ctx, &delivery.ReturnedError{Err: err})
	c.Nack()
	return true
}

func (f *outboxFeed) leave(c *consumed) { c.Nack() }

func (f *outboxFeed) close() error { return f.subscriber.Close() }
