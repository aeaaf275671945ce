package forwarder

import (
	"context"
	"fmt"
	"time"
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
	if err := p.mayBegin(c); err != nil {
		return err
	}
	// A publisher may change its message, and decorators leave marks on it.
	msg := out.msg.Copy()
	ctx := newAttemptContext(out.context(c), p.deadline())
	msg.SetContext(ctx)
	return ctx.result(recovered(func() error { return p.destination.Publisher.Publish(out.topic, msg) }))
}

// mayBegin returns an error if a message must not be published any more.
func (p *pump) mayBegin(c *consumed) error {
	if p.working.Err() != nil {
		return context.Cause(p.working)
	}
	if c.ctx.Err() != nil {
		return context.Cause(c.ctx)
	}
	return nil
}

// deadline is that of a call that begins now.
func (p *pump) deadline() time.Time { return time.Now().Add(p.destination.PublishTimeout) }

// context returns what the contexts of calls are made of, given what it became of.
func (o outgoing) context(of *consumed) context.Context {
	if own := o.msg.Context(); own != of.ctx {
		return valueContext{Context: of.ctx, values: context.WithoutCancel(own)}
	}
	return of.ctx
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
