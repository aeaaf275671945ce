package forwarder

import (
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
)

// publish publishes what is left of a message, one by one, and takes each away
// that was accepted, so that it is not published again if a later one fails. When
// nothing is left the message is acked.
func (p *pump) publish(c *consumed) error {
	for len(c.out) > 0 {
		msg, cancel := p.attempt(c, c.out[0])
		var err error
		if p.combiner != nil {
			err = p.combiner.publish(c.out[0].topic, msg)
		} else {
			err = recovered(func() error { return p.destination.Publisher.Publish(c.out[0].topic, msg) })
		}
		cancel()
		if err != nil {
			return fmt.Errorf("forwarder: publish to topic %q of destination %q: %w", c.out[0].topic, p.destination.Name, err)
		}
		c.out = c.out[1:]
		p.published.Add(1)
	}
	return nil
}

// attempt returns a message for one call of the publisher: a copy, since the
// publisher may change it, and its decorators leave marks on it. Its context has
// the deadline, and ends with that of the consumed message.
func (p *pump) attempt(c *consumed, out outgoing) (*message.Message, func()) {
	ctx := newAttemptContext(out.msg.Context(), c.ctx, p.destination.PublishTimeout)
	msg := out.msg.Copy()
	msg.SetContext(ctx)
	return msg, ctx.end
}
