package forwarder

import (
	"context"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
)

// publish publishes what is left of a message, one by one, and takes each away
// that was accepted, so that it is not published again if a later one fails. When
// nothing is left the message may be acked.
func (p *pump) publish(c *consumed) error {
	for len(c.out) > 0 {
		out := c.out[0]
		var err error
		if p.combiner != nil {
			err = p.combiner.publish(c, out)
		} else {
			err = p.publishOne(c, out)
		}
		if err != nil {
			return fmt.Errorf("forwarder: publish to topic %q of destination %q: %w", out.topic, p.destination.Name, err)
		}
		c.out, c.begun = c.out[1:], true
		p.published.Add(1)
		p.breaker.accept()
	}
	return nil
}

func (p *pump) publishOne(c *consumed, out outgoing) error {
	call, err := p.begin(c, out)
	if err != nil {
		return err
	}
	return call.end(recovered(func() error { return p.destination.Publisher.Publish(out.topic, call.msg) }))
}

// call is a message on its way through the publisher.
type call struct {
	msg *message.Message
	ctx *attemptContext
}

// begin returns a message for one call of the publisher, which begins now, or an
// error if it must not begin any more. The message is a copy, since the publisher
// may change it, and its decorators leave marks on it.
func (p *pump) begin(c *consumed, out outgoing) (call, error) {
	if err := context.Cause(p.working); err != nil {
		return call{}, err
	}
	if err := context.Cause(c.ctx); err != nil {
		return call{}, err
	}
	parent := c.ctx
	if own := out.msg.Context(); own != parent {
		parent = valueContext{Context: parent, values: context.WithoutCancel(own)}
	}
	ctx := newAttemptContext(parent, p.destination.PublishTimeout)
	msg := out.msg.Copy()
	msg.SetContext(ctx)
	return call{msg: msg, ctx: ctx}, nil
}

// end ends a call, and returns what it came to. A publisher whose time was up need
// not say so in its own error.
func (c call) end(err error) error {
	late := c.ctx.Err()
	c.ctx.end()
	if err != nil && errors.Is(late, context.DeadlineExceeded) && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w: %w", late, err)
	}
	return err
}

// valueContext ends with the consumed message, and has the values that middlewares
// put into the context of what they made of it. That context may have ended: the
// Timeout middleware leaves one behind that has.
type valueContext struct {
	context.Context //nolint:containedctx // is a context

	values context.Context //nolint:containedctx // never ends
}

func (c valueContext) Value(key any) any {
	if value := c.values.Value(key); value != nil {
		return value
	}
	return c.Context.Value(key)
}
