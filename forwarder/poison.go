package forwarder

import (
	"github.com/millrace/watermill-outbox/internal/metadata"
)

// The keys of Watermill's poison queue middleware, whose package would bring its
// dependencies along.
const (
	reasonForPoisonedKey  = "reason_poisoned"
	poisonedTopicKey      = "topic_poisoned"
	poisonedHandlerKey    = "handler_poisoned"
	poisonedSubscriberKey = "subscriber_poisoned"
)

// poison publishes a message that is given up to the PoisonTopic, and reports
// whether it is there. Until it is, the message stays what it was: it is acked if
// and only if it is stored.
func (p *pump) poison(c *consumed, reason error) bool {
	msg := c.Message.Copy()
	msg.SetContext(c.ctx)
	msg.Metadata.Set(reasonForPoisonedKey, metadata.Storable(reason.Error()))
	msg.Metadata.Set(poisonedTopicKey, c.topic)
	msg.Metadata.Set(poisonedHandlerKey, "forwarder")
	msg.Metadata.Set(poisonedSubscriberKey, p.destination.Name)
	dead := &consumed{Message: c.Message, origin: c.origin, ctx: c.ctx, prepared: true, failures: 1}
	for {
		dead.out = []outgoing{{topic: p.destination.PoisonTopic, msg: msg}}
		try, ok := p.enter(c)
		if !ok {
			return false
		}
		err := p.publish(dead)
		if err == nil {
			p.breaker.accept()
			p.forget(c)
			p.logger.Info("A message was given up to the poison topic", p.fields(c).Add(map[string]any{"reason": reason.Error()}))
			return c.Ack()
		}
		p.breaker.fail(err, try)
		p.log(dead, err, "A message that is given up could not be published to the poison topic; it is tried again")
		dead.failures++
		if !p.pause(dead) {
			return false
		}
	}
}
