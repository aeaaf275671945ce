package forwarder

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/backoff"
)

// proofTime is how long a failure may take for what is accepted right after it to
// show that the destination was up. What took longer may have begun before it was.
const proofTime = time.Second

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
	// over is set when the source has closed its channel.
	over atomic.Bool
	// workers forward lines; idle counts those that wait for one.
	workers sync.WaitGroup
	idle    atomic.Int64

	mu sync.Mutex
	// failing are the messages that fail, by what they are remembered by. Those that
	// the source has back, to hand them out again, stay.
	failing map[string]*failure
	// unnamed counts the messages of which the source knows no id.
	unnamed int64
}

// run forwards the batches until the channel is closed.
func (p *pump) run(batches <-chan []*message.Message) {
	defer p.breaker.stop()
	p.employ(batches)
	p.workers.Wait()
}

// employ begins a worker.
func (p *pump) employ(batches <-chan []*message.Message) {
	p.idle.Add(1)
	p.workers.Go(func() { p.work(batches) })
}

// work forwards one batch after the other, and sees to it that somebody waits for
// the next. So there are as many workers as were ever needed at once, and one more:
// to begin one for each batch, whose stack grows anew, costs more than what it does.
func (p *pump) work(batches <-chan []*message.Message) {
	var line []consumed // reused: nobody keeps what is in it
	for batch := range batches {
		if p.idle.Add(-1) == 0 {
			p.employ(batches)
		}
		p.inFlight.Add(1)
		line = p.consume(batch, line[:0])
		p.forward(line)
		if clear(line); cap(line) > DefaultBatchSize {
			line = nil // there may be many workers
		}
		p.inFlight.Add(-1)
		p.idle.Add(1)
	}
	if !p.over.Swap(true) && p.working.Err() == nil {
		p.logger.Info("The source has closed its channel: nothing more comes for this destination", nil)
	}
}

// consume returns the messages of a line, in the room of an empty one if they fit.
func (p *pump) consume(batch []*message.Message, line []consumed) []consumed {
	if cap(line) < len(batch) {
		line = make([]consumed, 0, len(batch))
	}
	for _, msg := range batch {
		line = append(line, consumed{Message: msg, ctx: msg.Context(), origin: p.feed.origin(msg)})
	}
	return line
}

// forward publishes the messages of a line, one after the other, until one has to
// be left.
func (p *pump) forward(line []consumed) {
	for len(line) > 0 && (line[0].settled || p.one(&line[0], line[1:])) {
		line = line[1:]
	}
	for i := range line {
		c := &line[i]
		if c.settled {
			continue
		}
		if !c.failed {
			p.forget(c)
		}
		p.feed.leave(c) // counts for nothing: the end has come, or it is behind one that failed
	}
}

// ended reports whether nothing may be done with the message any more.
func (p *pump) ended(c *consumed) bool { return p.working.Err() != nil || c.ctx.Err() != nil }

// enter waits at the breaker, for as long as the message is ours.
func (p *pump) enter(c *consumed) (turn try, ok bool) {
	if p.breaker.closed() {
		return 0, !p.ended(c)
	}
	ctx, cancel := context.WithCancel(p.working)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	turn, err := p.breaker.enter(ctx)
	if err == nil && p.ended(c) {
		p.breaker.giveUp(turn)
		return 0, false
	}
	return turn, err == nil
}

// one publishes a message, for as long as it takes, and reports whether it is
// settled. If not, it and what is behind it are left.
func (p *pump) one(c *consumed, behind []consumed) bool {
	for !p.ended(c) {
		if err := p.prepare(c); err != nil {
			if p.ended(c) { // which may be why it failed
				break
			}
			fault := FaultMessage
			if outbox.IsPermanent(err) {
				fault = FaultPermanent
			}
			p.note(c, err)
			if settled, over := p.blame(c, err, fault); over {
				return settled
			}
			continue
		}
		if len(c.out) == 0 {
			return p.settle(c)
		}
		turn, ok := p.enter(c)
		if !ok {
			break
		}
		began := time.Now()
		err := p.publish(c)
		if err == nil {
			return p.settle(c)
		}
		took := time.Since(began)
		if p.ended(c) { // which may be why it failed
			p.breaker.giveUp(turn)
			break
		}
		suspect := false
		switch fault := p.faultOf(c, err); fault {
		case FaultMessage, FaultPermanent:
			// That it is up is known, or said by who knows it.
			p.breaker.giveUp(turn)
			if settled, over := p.blame(c, err, fault); over {
				return settled
			}
			continue
		case FaultUnknown:
			suspect = p.doubt(c) && turn != 0
			if suspect && took < proofTime && p.accepts(behind) {
				return p.giveUp(c, fmt.Errorf("%w (the next message of its line was accepted at once)", err))
			}
		case FaultDestination:
		}
		p.breaker.fail(err, turn)
		p.log(c, err, "The destination fails; the message waits, and spends no attempt")
		if suspect && !c.begun && p.feed.again(c, err) {
			// Others get its place, who may show that the destination is up; or there is
			// something behind it by now.
			c.failed = true
			return false
		}
		if turn == 0 {
			p.pause(c)
		}
	}
	return false
}

// settle acks a message that is done, and returns true.
func (p *pump) settle(c *consumed) bool {
	p.forget(c)
	c.settled = true
	c.Ack()
	return true
}

// faultOf says whose fault a failure of the publisher is. One of which only the
// error is known is the message's, if the destination took another one since this
// one failed before, or says that it is up.
func (p *pump) faultOf(c *consumed, err error) Fault {
	proven := p.note(c, err)
	fault := FaultUnknown
	if recovered(func() error {
		fault = p.destination.Classify(err)
		return nil
	}) != nil {
		fault = FaultUnknown
	}
	switch {
	case fault != FaultUnknown:
		return fault
	case proven:
		return FaultMessage
	case p.destination.Ping == nil:
		return FaultUnknown
	}
	ctx, cancel := context.WithTimeout(c.ctx, p.destination.PublishTimeout)
	defer cancel()
	if err := recovered(func() error { return p.destination.Ping(ctx) }); err != nil {
		return FaultDestination
	}
	return FaultMessage
}

// accepts reports whether the destination takes the first of the messages behind
// one that it did not take just now, or a part of it. It is acked if it is whole.
func (p *pump) accepts(behind []consumed) bool {
	if len(behind) == 0 {
		return false
	}
	c := &behind[0]
	if p.ended(c) || c.settled {
		return false
	}
	if p.prepare(c) != nil || len(c.out) == 0 {
		return false
	}
	before := len(c.out)
	if p.publish(c) == nil {
		return p.settle(c)
	}
	return len(c.out) < before
}

// blame sees to a message that failed by its own fault. over says that it is out
// of our hands, or settled; otherwise it is to be tried again.
func (p *pump) blame(c *consumed, err error, fault Fault) (settled, over bool) {
	c.attempts++
	spent := max(c.attempts, c.attempt)
	p.spend(c, spent)
	last := fault == FaultPermanent || p.MaxAttempts > 0 && spent >= p.MaxAttempts
	switch {
	case last && p.destination.PoisonTopic != "":
		return p.poison(c, err), true
	case p.feed.fail(c, err, last):
		c.failed = !last // what is a dead letter does not come again
		return false, true
	case last:
		// There are no dead letters. What is behind it in its line waits.
		p.log(c, err, "A message cannot be forwarded, and there is no PoisonTopic to put it aside: it is tried again")
	default:
		p.log(c, err, "A message could not be forwarded; it will be tried again")
	}
	p.pause(c)
	return false, false
}

// giveUp puts a message among the dead letters, and reports whether it is settled.
func (p *pump) giveUp(c *consumed, err error) bool {
	settled, _ := p.blame(c, err, FaultPermanent)
	return settled
}

// pause waits before another try, longer with each failure, and reports whether
// there may be one.
func (p *pump) pause(c *consumed) bool {
	ctx, cancel := context.WithCancel(p.working)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	return backoff.Wait(ctx, p.destination.backoff().Delay(max(c.failures, 1)))
}

func (p *pump) fields(c *consumed) watermill.LogFields {
	return watermill.LogFields{"message_uuid": c.UUID, "topic": c.topic, "failures": c.failures}
}

func (p *pump) log(c *consumed, err error, what string) {
	if c.failures&(c.failures-1) == 0 { // the 1st, 2nd, 4th, 8th …
		p.logger.Error(what, err, p.fields(c))
	}
}
