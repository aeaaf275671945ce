package delivery

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// Why a message's context ends, beside its Ack or Nack.
var (
	// ErrAckDeadline is the cause when its handler took too long.
	ErrAckDeadline = errors.New("the ack deadline has passed")
	// ErrHeldUp is the cause when a message before it in its batch has failed.
	ErrHeldUp    = errors.New("a message before it in its batch was not acked")
	errLeaseOver = errors.New("the lease ran out before the message was taken from the channel")
)

// handout is what a worker has in flight: a message, or the batch of a line.
type handout struct {
	*run

	out []handed
	// end is the grace that all have when the subscription or the lease ends.
	end grace
}

// handed is one item of it.
type handed struct {
	*item

	msg *message.Message
	// ctx is what the engine gave its message, whatever it has by now.
	ctx    context.Context //nolint:containedctx // of the message
	cancel context.CancelCauseFunc
}

// handOut sends messages and sees to what becomes of each, in their order. What is
// behind one that is not acked is withdrawn, unless it is acked by then.
func (r *run) handOut(batch []*item) {
	if !r.enter() {
		batch[0].result = stopped
		return
	}
	defer r.leave()
	h := &handout{run: r, out: make([]handed, len(batch))}
	for i, it := range batch {
		h.out[i] = r.hand(it)
	}
	defer h.cancelFrom(0, context.Canceled)
	if !h.send() {
		batch[0].result = stopped
		return
	}
	if !r.Valid() {
		// They waited to be taken for longer than the lease was good.
		h.cancelFrom(0, cmp.Or(context.Cause(r.lease), errLeaseOver))
	}
	for i, m := range h.out {
		m.result = h.outcome(i)
		if m.result != settled {
			h.withdraw(i + 1)
			m.result = r.judge(m)
			return
		}
		m.cancel(context.Canceled)
		m.entry.Settled()
	}
}

// enter waits for a place among all that is in flight, and reports whether
// anything may be handed out.
func (r *run) enter() bool {
	if r.Slots != nil {
		select {
		case r.Slots <- struct{}{}:
		case <-r.over:
			return false
		}
	}
	if !r.going() {
		r.leave()
		return false
	}
	return true
}

func (r *run) leave() {
	if r.Slots != nil {
		<-r.Slots
	}
}

// hand makes the message of an item.
func (r *run) hand(it *item) handed {
	// A handler may change its message, of which others and the next delivery
	// have to know nothing.
	msg := message.NewMessage(it.row.UUID, bytes.Clone(it.row.Payload))
	msg.Metadata, it.metadata = it.metadata, nil
	ctx, cancel := context.WithCancelCause(r.Base)
	ctx = r.Wrap(ctx, &it.row, it.attempts+1)
	msg.SetContext(ctx)
	return handed{item: it, msg: msg, ctx: ctx, cancel: cancel}
}

// cancelFrom ends the contexts of those from the i-th on.
func (h *handout) cancelFrom(i int, cause error) {
	for _, m := range h.out[i:] {
		m.cancel(cause)
	}
}

// send sends what is handed out, and reports whether it was taken.
func (h *handout) send() bool {
	var one *message.Message
	var messages []*message.Message
	if h.Batches == nil {
		one = h.out[0].msg
	} else {
		messages = make([]*message.Message, len(h.out))
		for i, m := range h.out {
			messages[i] = m.msg
		}
	}
	select {
	case h.Out <- one:
	case h.Batches <- messages:
	case <-h.over:
		return false
	}
	return true
}

// outcome waits for the i-th message, those before which are settled.
func (h *handout) outcome(i int) outcome {
	m := h.out[i]
	var deadline <-chan time.Time
	if h.AckDeadline > 0 {
		timer := time.NewTimer(h.AckDeadline)
		defer timer.Stop()
		deadline = timer.C
	}
	select {
	case <-m.msg.Acked():
		return settled
	case <-m.msg.Nacked():
		// What fails because the end has come did not fail.
		if !h.going() {
			return stopped
		}
		return nacked
	case <-deadline:
		m.cancel(ErrAckDeadline)
		var grace grace
		return h.grant(i, &grace, overdue)
	case <-h.over:
		if h.lease.Err() != nil {
			h.cancelFrom(i, context.Cause(h.lease)) // however short the grace is
		}
	}
	// The end is near: of the subscription, which gives the handler its grace,
	// or of the lease, when the ack counts for nothing but the handler is given
	// time to end, so that the next lease does not hand out the message beside
	// it.
	return h.grant(i, &h.end, stopped)
}

// grant gives the handler of the i-th message its grace. Without an ack in that
// time the outcome is otherwise; one after the lease is lost counts for nothing.
func (h *handout) grant(i int, grace *grace, otherwise outcome) outcome {
	timer := grace.timer(h.Grace)
	defer timer.Stop()
	msg := h.out[i].msg
	for lost := h.lease.Done(); ; {
		select {
		case <-msg.Acked():
		case <-msg.Nacked():
		case <-lost:
			h.cancelFrom(i, context.Cause(h.lease))
			lost = nil
			continue
		case <-timer.C:
		}
		break
	}
	acked := isDone(msg.Acked())
	if !acked && !isDone(msg.Nacked()) {
		h.Logger.Info("A message was neither acked nor nacked in the grace period; it will be delivered again", watermill.LogFields{
			"message_uuid": msg.UUID, "grace": h.Grace.String(),
		})
	}
	switch {
	case h.lease.Err() != nil:
		return stopped
	case acked:
		return settled
	case h.Stop.Err() != nil:
		return stopped
	}
	return otherwise
}

// withdraw takes back those from the i-th on, since the one before was not acked.
func (h *handout) withdraw(i int) {
	var grace grace
	if !h.going() {
		grace = h.end // which has begun
	}
	h.cancelFrom(i, cmp.Or(context.Cause(h.lease), ErrHeldUp))
	items := make([]*item, 0, len(h.out)-i)
	for ; i < len(h.out); i++ {
		if h.grant(i, &grace, withdrawn) == settled {
			h.out[i].entry.Settled()
			h.out[i].result = settled
		} else {
			items = append(items, h.out[i].item)
		}
	}
	h.giveBack(items)
}

// giveBack puts items in front of their line, before the one in front of them can
// come again.
func (r *run) giveBack(items []*item) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, it := range slices.Backward(items) {
		r.queue.unfollow(it)
	}
}

// judge sees to what follows for one that was not acked.
func (r *run) judge(h handed) outcome {
	failure := r.Reason(h.ctx)
	msg := h.msg
	switch h.result {
	case nacked:
	case overdue:
		failure = cmp.Or(failure, ErrAckDeadline)
		if !isDone(msg.Nacked()) {
			msg = nil // its handler may be changing it
		}
	case settled, stopped, again, withdrawn:
		return h.result
	}
	return r.failed(h.item, msg, failure)
}

// grace is a time that begins when it is first asked for. The zero value has not
// begun.
type grace struct{ until time.Time }

// timer returns one that fires when the time is over, which is so long.
func (g *grace) timer(d time.Duration) *time.Timer {
	if g.until.IsZero() {
		g.until = time.Now().Add(d)
	}
	return time.NewTimer(time.Until(g.until))
}

func isDone(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
