package forwarder

import (
	"context"
	"fmt"
	"maps"
	"runtime/debug"

	"github.com/ThreeDotsLabs/watermill/message"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/envelope"
)

// Target is one place that a message goes to.
type Target struct {
	// Destination is the name of one. Defaults to DefaultDestination.
	Destination string
	// Topic is where the message goes there, "" to leave it to Destination.Topic.
	Topic string
}

// outgoing is a message on its way to the publisher.
type outgoing struct {
	topic string
	msg   *message.Message
}

// consumed is a message of the source.
type consumed struct {
	*message.Message
	origin

	// ctx is the message's own, whatever middlewares leave on it.
	ctx context.Context //nolint:containedctx // of the message
	// out is what it became, without what was published already; prepared says that
	// it is known.
	out      []outgoing
	prepared bool
	// single holds out, which is one message as a rule.
	single [1]outgoing
	// failures counts those in this process.
	failures int
	// attempts counts those it has spent here, where the source does not.
	attempts int
	// begun says that a part of what it became was published; settled that it was
	// acked; failed that the source has it back as one that fails.
	begun, settled, failed bool
	// name is what it is remembered by when it fails, "" until then.
	name string
}

// prepare runs the middlewares and the route. Its errors are the message's fault,
// and it runs again after one.
func (p *pump) prepare(c *consumed) error {
	if c.prepared {
		return nil
	}
	var out []outgoing
	err := recovered(func() (err error) {
		out, err = p.transform(c)
		return err
	})
	if err != nil {
		return err
	}
	c.out, c.prepared = out, true
	return nil
}

// transform returns what becomes of a message for this destination.
func (p *pump) transform(c *consumed) ([]outgoing, error) {
	msg, topic := c.Message, c.topic
	if len(p.Middlewares) > 0 {
		msg = c.Message.Copy() // which they may change
		msg.SetContext(c.ctx)
	}
	if p.UnwrapTopic != "" && topic == p.UnwrapTopic {
		destination, inner, err := envelope.Unwrap(msg)
		if err != nil {
			return nil, outbox.Permanent(err)
		}
		topic, msg = destination, inner
	}
	produced := []*message.Message{msg}
	if len(p.Middlewares) > 0 {
		var err error
		if produced, err = p.handle(msg); err != nil {
			return nil, fmt.Errorf("forwarder: middleware: %w", err)
		}
	}
	out := c.single[:0]
	for _, msg := range produced {
		var single [1]string
		topics, err := p.route(single[:0], msg, topic, c.key)
		if err != nil {
			return nil, err
		}
		for _, topic := range topics {
			next, err := p.address(c, msg, topic, len(out))
			if err != nil {
				return nil, err
			}
			out = append(out, next)
		}
	}
	return out, nil
}

// address makes a message ready for its topic; before it others became of the
// same one, so many.
func (p *pump) address(c *consumed, msg *message.Message, topic string, before int) (outgoing, error) {
	id := ""
	if p.destination.DeduplicationKey != "" {
		id = c.id()
		if p.destination.DeduplicateBy == ByUUID {
			id = msg.UUID
		}
		id = numbered(id, before)
	}
	if p.destination.EnvelopeTopic != "" {
		outer, err := envelope.Wrap(topic, msg)
		if err != nil {
			return outgoing{}, outbox.Permanent(err)
		}
		topic, msg = p.destination.EnvelopeTopic, outer
	}
	if id != "" {
		// On the envelope, if there is one: that is what the broker sees.
		msg = withMetadata(msg, p.destination.DeduplicationKey, id)
	}
	return outgoing{topic: topic, msg: msg}, nil
}

// withMetadata returns a message with something added to its metadata, and all else
// the same.
func withMetadata(msg *message.Message, key, value string) *message.Message {
	with := &message.Message{UUID: msg.UUID, Metadata: make(message.Metadata, len(msg.Metadata)+1), Payload: msg.Payload}
	with.SetContext(msg.Context())
	maps.Copy(with.Metadata, msg.Metadata)
	with.Metadata[key] = value
	return with
}

// route appends the topics of this destination that a message goes to. A route is
// looked at as a whole, so that one that makes no sense leads nowhere: not to one
// destination, and for the other into the dead letters.
func (p *pump) route(topics []string, msg *message.Message, topic, key string) ([]string, error) {
	targets := []Target{{Destination: p.destination.Name}}
	if p.Route != nil {
		if err := recovered(func() (err error) {
			targets, err = p.Route(msg, topic)
			return err
		}); err != nil {
			return nil, outbox.Permanent(&RouteError{Topic: topic, Err: err})
		}
	}
	for _, target := range targets {
		if target.Destination == "" {
			target.Destination = DefaultDestination
		}
		d, known := p.destinations[target.Destination]
		if !known {
			return nil, outbox.Permanent(&RouteError{Topic: topic, Destination: target.Destination, Err: ErrUnknownDestination})
		}
		to, err := target.Topic, error(nil)
		if to == "" {
			to, err = d.template.topic(topic, key, msg.Metadata)
		} else {
			err = checkTopic(to)
		}
		if err != nil {
			return nil, outbox.Permanent(&RouteError{Topic: topic, Destination: target.Destination, Err: err})
		}
		if d.Name == p.destination.Name {
			topics = append(topics, to)
		}
	}
	return topics, nil
}

// numbered adds a number to the id of what is not the first that became of its
// message.
func numbered(id string, i int) string {
	if id == "" || i == 0 {
		return id
	}
	return fmt.Sprintf("%s-%d", id, i)
}

// chain puts the middlewares around a handler that passes messages on, the first
// one outermost as in a Router.
func chain(middlewares []message.HandlerMiddleware) message.HandlerFunc {
	handler := message.PassthroughHandler
	for i := len(middlewares) - 1; i >= 0; i-- {
		handler = middlewares[i](handler)
	}
	return handler
}

// recovered returns a panic as an error.
func recovered(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &PanicError{Value: p, Stack: debug.Stack()}
		}
	}()
	return f()
}
