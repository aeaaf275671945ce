package forwarder

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/internal/backoff"
)

const (
	// DefaultDestination is the name of a destination that has none.
	DefaultDestination = "default"
	// DefaultTopic is the template of topics: a message keeps its own.
	DefaultTopic = "{topic}"
	// DefaultMaxInFlight is how many lines of messages are published at once.
	DefaultMaxInFlight = 64
	// DefaultPublishTimeout is how long a publisher may take for a message.
	DefaultPublishTimeout = 30 * time.Second

	// DefaultFailures is how many failures in a row open the breaker.
	DefaultFailures = 5
	// DefaultMinBackoff is the shortest pause before a destination is tried again.
	DefaultMinBackoff = 100 * time.Millisecond
	// DefaultMaxBackoff is the longest.
	DefaultMaxBackoff = 10 * time.Second
)

// Metadata keys by which brokers recognise a message that was published before,
// for Destination.DeduplicationKey.
const (
	// NATSMessageID is JetStream's. The window in which it recognises one is the
	// stream's Duplicates, two minutes by default: a forwarder that is away for
	// longer may repeat what it had in flight. The ids are unique, so one stream
	// may take messages of several subjects.
	NATSMessageID = "Nats-Msg-Id"
	// RabbitMQDeduplication is that of the plugin rabbitmq-message-deduplication.
	RabbitMQDeduplication = "x-deduplication-header"
	// IdempotencyKey is the HTTP header of that draft standard, for publishers that
	// send metadata as headers.
	IdempotencyKey = "Idempotency-Key"
)

// DeduplicateBy says what a DeduplicationKey is set to.
type DeduplicateBy string

const (
	// ByStoredID makes an id of the era and the id of the stored message (see
	// outbox.Delivery), which no other message has. A dead letter that is requeued
	// has a new one.
	ByStoredID DeduplicateBy = "stored_id"
	// ByUUID takes the message's UUID: messages that share one, which Watermill
	// allows, are one to the broker.
	ByUUID DeduplicateBy = "uuid"
)

// Destination is where messages go. Only Publisher is needed. Each destination
// has its own progress (a consumer group of its own), so one that is slow or dead
// delays only itself.
type Destination struct {
	// Name tells it from others, in routes, logs and the name of its consumer
	// group: who changes it begins anew. Defaults to DefaultDestination.
	Name string

	// Publisher gets the messages, with UUID, metadata and payload unchanged. It
	// must return nil only for what is safe: set the broker's publisher to wait
	// for confirmation. Publish is called concurrently, for one message at a time;
	// see BatchPublisher for more. The Forwarder does not close it.
	Publisher message.Publisher

	// Topic is a template of the topic to publish to: text with {topic}, {key} (the
	// ordering key) and {metadata:NAME} in it. Defaults to DefaultTopic.
	Topic string

	// DeduplicationKey, unless "", is a metadata key to set to an id by which the
	// broker can recognise a message that it has, such as NATSMessageID: what is
	// published again after a crash or a timeout is then not there twice.
	DeduplicationKey string
	// DeduplicateBy says what the id is made of. Defaults to ByStoredID.
	DeduplicateBy DeduplicateBy

	// EnvelopeTopic, unless "", is a topic that all messages are published to, in
	// the envelope of Watermill's own forwarder component, for one that runs
	// behind the broker.
	EnvelopeTopic string

	// PoisonTopic, unless "", gets the messages that are given up, with the
	// metadata of Watermill's PoisonQueue, instead of the outbox's dead letters.
	// They are acked when they are there.
	PoisonTopic string

	// MaxInFlight is how many lines (of messages of one topic and ordering key) are
	// published at once. More use a broker that takes its time, and are repeated
	// after a crash. Defaults to DefaultMaxInFlight.
	MaxInFlight int

	// PublishTimeout is the deadline of the context that a message carries to the
	// publisher. One that does not heed it holds up its line until it returns:
	// going on would break the order. After twice that time it holds up no others.
	// Defaults to DefaultPublishTimeout.
	PublishTimeout time.Duration

	// Classify says whose fault a publisher's error is. Defaults to the function
	// Classify. It is called concurrently.
	Classify func(error) Fault
	// Ping, unless nil, asks the destination whether it is up: nil says so. It is
	// called, concurrently, when a message fails and nothing else shows it.
	Ping func(context.Context) error

	// Failures is how many failures in a row, of any messages, open the breaker.
	// Defaults to DefaultFailures.
	Failures int
	// MinBackoff is the pause before a message, or a destination whose breaker is
	// open, is tried again. It doubles with each failure, up to MaxBackoff, with up
	// to a fifth taken off at random. Default to DefaultMinBackoff and
	// DefaultMaxBackoff.
	MinBackoff, MaxBackoff time.Duration

	template template
}

func (d Destination) withDefaults() Destination {
	d.Name = cmp.Or(d.Name, DefaultDestination)
	d.Topic = cmp.Or(d.Topic, DefaultTopic)
	d.DeduplicateBy = cmp.Or(d.DeduplicateBy, ByStoredID)
	d.MaxInFlight = cmp.Or(d.MaxInFlight, DefaultMaxInFlight)
	d.PublishTimeout = cmp.Or(d.PublishTimeout, DefaultPublishTimeout)
	d.Failures = cmp.Or(d.Failures, DefaultFailures)
	d.MinBackoff = cmp.Or(d.MinBackoff, DefaultMinBackoff)
	d.MaxBackoff = cmp.Or(d.MaxBackoff, max(DefaultMaxBackoff, d.MinBackoff))
	if d.Classify == nil {
		d.Classify = Classify
	}
	return d
}

func (d *Destination) validate() error {
	wrong := func(field, format string, args ...any) error {
		return &ConfigError{Destination: d.Name, Field: field, Problem: fmt.Sprintf(format, args...)}
	}
	switch {
	case d.Publisher == nil:
		return wrong("Publisher", "is missing")
	case d.DeduplicateBy != ByStoredID && d.DeduplicateBy != ByUUID:
		return wrong("DeduplicateBy", "must be %q or %q, is %q", ByStoredID, ByUUID, d.DeduplicateBy)
	case d.MaxInFlight < 1 || d.MaxInFlight > maxInFlight:
		return wrong("MaxInFlight", "must be between 1 and %d, is %d", maxInFlight, d.MaxInFlight)
	case d.PublishTimeout < 0:
		return wrong("PublishTimeout", "must not be negative, is %s", d.PublishTimeout)
	case d.Failures < 0:
		return wrong("Failures", "must not be negative, is %d", d.Failures)
	case d.MinBackoff < 0:
		return wrong("MinBackoff", "must not be negative, is %s", d.MinBackoff)
	case d.MaxBackoff < d.MinBackoff:
		return wrong("MaxBackoff", "(%s) must not be below MinBackoff (%s)", d.MaxBackoff, d.MinBackoff)
	}
	var err error
	if d.template, err = parseTemplate(d.Topic); err != nil {
		return &ConfigError{Destination: d.Name, Field: "Topic", Problem: err.Error(), Err: err}
	}
	for field, topic := range map[string]string{"EnvelopeTopic": d.EnvelopeTopic, "PoisonTopic": d.PoisonTopic} {
		if topic == "" {
			continue
		}
		if err := checkTopic(topic); err != nil {
			return &ConfigError{Destination: d.Name, Field: field, Problem: err.Error(), Err: err}
		}
	}
	return nil
}

// patience is how long a call of the publisher, and a Ping after it, take if they
// heed their contexts. What takes longer hangs.
func (d *Destination) patience() time.Duration {
	return 2 * min(d.PublishTimeout, math.MaxInt64/2)
}

func (d *Destination) backoff() backoff.Policy {
	return backoff.Policy{Min: d.MinBackoff, Max: d.MaxBackoff}
}
