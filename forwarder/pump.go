package forwarder

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/backoff"
)

// pump forwards to one destination.
type pump struct {
	settings

	destinations map[string]*Destination
	handle       message.HandlerFunc
	feed         feed
	breaker      *breaker
	combiner     *combiner // nil if the publisher has no batches
	logger       watermill.LoggerAdapter

	// working ends when nothing more may be begun.
	working context.Context //nolint:containedctx // the pump's own lifetime
	halt    context.CancelFunc

	published, inFlight atomic.Int64

	mu sync.Mutex
	// failed are the messages that fail, and since when: the time of the last
	// failure, by id, for those that the source hands out again.
	failed map[string]time.Time
}

// run forwards the batches until the channel is closed.
func (p *pump) run(batches <-chan []*message.Message) {
	var combining sync.WaitGroup
	if p.combiner != nil {
		ctx, cancel := context.WithCancel(context.Background())
		combining.Go(func() { p.combiner.run(ctx) })
		defer combining.Wait()
		defer cancel()
	}
	defer p.breaker.stop()
	var workers sync.WaitGroup
	defer workers.Wait()
	for batch := range batches {
		p.inFlight.Add(1)
		workers.Go(func() {
			defer p.inFlight.Add(-1)
			p.forward(batch)
		})
	}
}

// forward publishes the messages of a line, one after the other, until one has to
// be left.
func (p *pump) forward(batch []*message.Message) {
	line := make([]*consumed, len(batch))
	for i, msg := range batch {
		line[i] = &consumed{Message: msg, ctx: msg.Context(), origin: p.feed.origin(msg)}
	}
	for len(line) > 0 {
		if !p.one(line[0], line[1:]) {
			break
		}
		line = line[1:]
	}
	for _, c := range line {
		c.Nack() // counts for nothing: the end has come, or it is behind one that failed
	}
}

// ended reports whether nothing may be done with the message any more.
func (p *pump) ended(c *consumed) bool { return p.working.Err() != nil || c.ctx.Err() != nil }

// enter waits at the breaker, for as long as the message is ours.
func (p *pump) enter(c *consumed) (try, ok bool) {
	if p.breaker.closed() {
		return false, !p.ended(c)
	}
	ctx, cancel := context.WithCancel(p.working)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	try, err := p.breaker.enter(ctx)
	if err == nil && p.ended(c) {
		p.breaker.giveUp(try)
		return false, false
	}
	return try, err == nil
}

// one publishes a message, for as long as it takes, and reports whether it is
// settled. If not, it and what is behind it are left.
func (p *pump) one(c *consumed, behind []*consumed) bool {
	for !p.ended(c) {
		if err := p.prepare(c); err != nil {
			fault := FaultMessage
			if outbox.IsPermanent(err) {
				fault = FaultPermanent
			}
			if settled, over := p.blame(c, err, fault); over {
				return settled
			}
			continue
		}
		if len(c.out) == 0 {
			p.forget(c)
			c.Ack()
			return true
		}
		try, ok := p.enter(c)
		if !ok {
			return false
		}
		if try && p.suspect(c) && len(behind) > 0 && c.failures%2 == 0 {
			// The next of its line finds out who is at fault.
			if p.probe(behind[0]) {
				p.breaker.accept()
				return p.giveUp(c, fmt.Errorf("%w (the next message of its line was accepted)", p.lastError()))
			}
			c.failures++
			p.breaker.fail(p.lastError(), try)
			continue
		}
		err := p.publish(c)
		if err == nil {
			p.breaker.accept()
			p.forget(c)
			c.Ack()
			return true
		}
		if p.ended(c) { // which may be why it failed
			p.breaker.giveUp(try)
			return false
		}
		c.failures++
		fault := p.destination.Classify(err)
		if fault == FaultUnknown {
			fault = p.decide(c)
		}
		switch fault {
		case FaultMessage, FaultPermanent:
			// That it is up is known, or said by who knows it.
			p.breaker.giveUp(try)
			if settled, over := p.blame(c, err, fault); over {
				return settled
			}
		case FaultDestination, FaultUnknown:
			if fault == FaultUnknown {
				c.unproven++
			}
			p.breaker.fail(err, try)
			p.log(c, err, "The destination fails; the message waits, and spends no attempt")
			if !try {
				p.pause(c)
			}
		}
	}
	return false
}

// decide says whose fault a failure is of which only the error is known: the
// message's, if the destination took another one since this one failed before, or
// says that it is up.
func (p *pump) decide(c *consumed) Fault {
	p.mu.Lock()
	before, again := p.failed[p.nameOf(c)]
	if len(p.failed) > maxInFlight {
		clear(p.failed) // some that went elsewhere; the others fail once more
	}
	p.failed[p.nameOf(c)] = time.Now()
	p.mu.Unlock()
	if again && p.breaker.upSince(before) {
		return FaultMessage
	}
	if p.destination.Ping == nil {
		return FaultUnknown
	}
	ctx, cancel := context.WithTimeout(c.ctx, p.destination.PublishTimeout)
	defer cancel()
	if err := recovered(func() error { return p.destination.Ping(ctx) }); err != nil {
		return FaultDestination
	}
	return FaultMessage
}

// nameOf is what a message is remembered by.
func (p *pump) nameOf(c *consumed) string {
	if id := c.id(); id != "" {
		return id
	}
	return fmt.Sprintf("%p", c.Message)
}

func (p *pump) forget(c *consumed) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.failed) > 0 {
		delete(p.failed, p.nameOf(c))
	}
}

// suspect reports whether a message has failed so often, without anything to show
// that the destination is up, that it may well be its own fault.
func (p *pump) suspect(c *consumed) bool { return p.MaxAttempts > 0 && c.unproven >= p.MaxAttempts }

// probe reports whether the destination takes a message. It is acked if so.
func (p *pump) probe(c *consumed) bool {
	if p.ended(c) || p.prepare(c) != nil || len(c.out) == 0 {
		return false
	}
	if p.publish(c) != nil {
		return false
	}
	c.Ack()
	return true
}

// blame sees to a message that failed by its own fault. over says that it is out
// of our hands, or settled; otherwise it is to be tried again.
func (p *pump) blame(c *consumed, err error, fault Fault) (settled, over bool) {
	c.attempts++
	spent := max(c.attempts, c.attempt)
	last := fault == FaultPermanent || p.MaxAttempts > 0 && spent >= p.MaxAttempts
	if last {
		return p.giveUp(c, err), true
	}
	if p.feed.fail(c.Message, err, false) {
		return false, true
	}
	p.log(c, err, "A message could not be forwarded; it will be tried again")
	p.pause(c)
	return false, false
}

// giveUp puts a message among the dead letters, and reports whether it is settled.
func (p *pump) giveUp(c *consumed, err error) bool {
	if p.destination.PoisonTopic != "" {
		return p.poison(c, err)
	}
	p.forget(c)
	if p.feed.fail(c.Message, err, true) {
		return false
	}
	// There are no dead letters. What is behind it in its line waits.
	p.logger.Error("A message cannot be forwarded, and there is no PoisonTopic to put it aside: it is tried again", err, p.fields(c))
	c.attempts = 0
	for p.pause(c) {
		if p.prepare(c) == nil && p.publish(c) == nil {
			p.breaker.accept()
			c.Ack()
			return true
		}
		c.failures++
	}
	return false
}

// pause waits before another try, longer with each failure, and reports whether
// there may be one.
func (p *pump) pause(c *consumed) bool {
	ctx, cancel := context.WithCancel(p.working)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	return backoff.Wait(ctx, p.destination.backoff().Delay(max(c.failures, c.attempts, 1)))
}

// lastError is why the destination failed last.
func (p *pump) lastError() error {
	if _, _, err, _ := p.breaker.status(); err != nil {
		return err
	}
	return errors.New("the destination refused it")
}

func (p *pump) fields(c *consumed) watermill.LogFields {
	return watermill.LogFields{"message_uuid": c.UUID, "topic": c.topic, "failures": c.failures}
}

func (p *pump) log(c *consumed, err error, what string) {
	if c.failures&(c.failures-1) == 0 { // the 1st, 2nd, 4th, 8th …
		p.logger.Error(what, err, p.fields(c))
	}
}
