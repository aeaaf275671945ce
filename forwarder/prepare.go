package forwarder

import (
	"context"
	"fmt"
	"runtime/debug"

	"github.com/ThreeDotsLabs/watermill/message"

	outbox "github.com/millrace/watermill-outbox"
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
	// failures counts those in a row, unproven those of them that were not known to
	// be its own.
	failures, unproven int
	// attempts counts those it has spent here, where the source does not.
	attempts int
}

// prepare runs the middlewares and the route. Its errors are the message's fault.
func (p *pump) prepare(c *consumed) error {
	if c.prepared {
		return nil
	}
	msg, topic := c.Message, c.topic
	if len(p.Middlewares) > 0 {
		msg = c.Message.Copy() // which they may change
		msg.SetContext(c.ctx)
	}
	if p.UnwrapTopic != "" && topic == p.UnwrapTopic {
		destination, inner, err := unwrap(msg)
		if err != nil {
			return outbox.Permanent(err)
		}
		topic, msg = destination, inner
	}
	var produced []*message.Message
	if err := recovered(func() (err error) {
		produced, err = p.handle(msg)
		return err
	}); err != nil {
		return fmt.Errorf("forwarder: middleware: %w", err)
	}
	var out []outgoing
	n := 0
	for _, msg := range produced {
		topics, err := p.route(msg, topic, c.key)
		if err != nil {
			return err
		}
		for _, topic := range topics {
			next := msg
			if p.destination.DeduplicationKey != "" {
				id := c.id()
				if p.destination.DeduplicateBy == ByUUID {
					id = msg.UUID
				}
				if id = numbered(id, n); id != "" {
					next = msg.Copy()
					next.SetContext(msg.Context())
					next.Metadata.Set(p.destination.DeduplicationKey, id)
				}
			}
			n++
			if p.destination.EnvelopeTopic != "" {
				if next, err = wrap(topic, next); err != nil {
					return outbox.Permanent(err)
				}
				topic = p.destination.EnvelopeTopic
			}
			out = append(out, outgoing{topic: topic, msg: next})
		}
	}
	c.out, c.prepared = out, true
	return nil
}

// route returns the topics of this destination that a message goes to. A route is
// looked at as a whole, so that one that makes no sense leads nowhere: not to one
// destination, and for the other into the dead letters.
func (p *pump) route(msg *message.Message, topic, key string) ([]string, error) {
	targets := []Target{{Destination: p.destination.Name}}
	if p.Route != nil {
		if err := recovered(func() (err error) {
			targets, err = p.Route(msg, topic)
			return err
		}); err != nil {
			return nil, outbox.Permanent(&RouteError{Topic: topic, Err: err})
		}
	}
	var topics []string
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
	returned := false
	defer func() {
		if returned {
			return
		}
		if p := recover(); p != nil {
			err = &PanicError{Value: p, Stack: debug.Stack()}
		}
	}()
	err = f()
	returned = true
	return err
}
