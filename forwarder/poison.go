package forwarder

import (
	"fmt"

	"github.com/millrace/watermill-outbox/internal/metadata"
)

// poison publishes a message that is given up to the PoisonTopic, and reports
// whether it is there. Until it is, the message stays what it was: it is acked if
// and only if it is stored. What the topic refuses for good goes back to the source,
// as a dead letter.
func (p *pump) poison(c *consumed, reason error) bool {
	msg := c.Message.Copy()
	msg.SetContext(c.ctx)
	msg.Metadata.Set(metadata.ReasonForPoisonedKey, metadata.Storable(reason.Error()))
	msg.Metadata.Set(metadata.PoisonedTopicKey, c.topic)
	msg.Metadata.Set(metadata.PoisonedHandlerKey, "forwarder")
	msg.Metadata.Set(metadata.PoisonedSubscriberKey, p.destination.Name)
	dead := &consumed{Message: c.Message, origin: c.origin, ctx: c.ctx, prepared: true, name: c.name}
	for {
		dead.out = []outgoing{{topic: p.destination.PoisonTopic, msg: msg}}
		turn, ok := p.enter(c)
		if !ok {
			return false
		}
		err := p.publish(dead)
		if err == nil {
			p.logger.Info("A message was given up to the poison topic", p.fields(c).Add(map[string]any{"reason": reason.Error()}))
			return p.settle(c)
		}
		if p.ended(c) { // which may be why it failed
			p.breaker.giveUp(turn)
			return false
		}
		switch fault := p.faultOf(dead, err); fault {
		case FaultMessage, FaultPermanent:
			p.breaker.giveUp(turn)
			turn = 0
			dead.attempts++
			refused := fault == FaultPermanent || p.MaxAttempts > 0 && dead.attempts >= p.MaxAttempts
			// What is too large for one topic is so for the other. It is a dead letter
			// of the source then, if that has such.
			if refused && p.feed.fail(c, fmt.Errorf("%w (and the poison topic does not take it: %w)", reason, err), true) {
				p.forget(c)
				return false
			}
		case FaultDestination, FaultUnknown:
			p.breaker.fail(err, turn)
		}
		p.log(dead, err, "A message that is given up could not be published to the poison topic; it is tried again")
		if turn == 0 && !p.pause(dead) {
			return false
		}
	}
}
