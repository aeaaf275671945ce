package delivery

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/window"
)

// Strict hands out one message at a time, in the order of the pages. It belongs
// to one subscription; Run belongs to one lease and may be called again for the
// next. All fields are needed.
type Strict struct {
	// Out is the channel of the subscription. Nothing is in it when Run has
	// returned, for it is unbuffered.
	Out chan<- *message.Message
	// Base is the parent of the messages' contexts; only its values count.
	Base context.Context //nolint:containedctx // handed on to messages
	// Stop ends when nothing more may be handed out.
	Stop context.Context //nolint:containedctx // outlives each Run
	// Grace is how long a message in flight keeps its context after Stop.
	Grace time.Duration
	// Backoff is the pause before a nacked message goes out again.
	Backoff backoff.Policy
	// MaxHoles is how many rows may be passed over before handing out stops.
	MaxHoles int
	// Wrap puts what is known of a delivery into its message's context.
	Wrap func(ctx context.Context, row window.Row, attempt int) context.Context
	// Valid reports whether the lease is still good.
	Valid  func() bool
	Logger watermill.LoggerAdapter
}

// outcome is how a row left the engine.
type outcome int

const (
	acked outcome = iota
	// stopped: the subscription or the lease ended first; the row stays unacked.
	stopped
)

// Run hands out the pages as they come and moves the tracker, until Stop or the
// lease's context ends.
func (s *Strict) Run(lease context.Context, tracker *Tracker, pages <-chan window.Page) {
	for {
		select {
		case page := <-pages:
			if !s.page(lease, tracker, page) {
				return
			}
		case <-lease.Done():
			return
		case <-s.Stop.Done():
			return
		}
	}
}

// page hands out one page and reports whether to go on.
func (s *Strict) page(lease context.Context, tracker *Tracker, page window.Page) bool {
	for _, hole := range page.Gone {
		s.Logger.Info("A row that was passed over earlier no longer exists", watermill.LogFields{"outbox_id": hole.ID})
		tracker.FillHole(hole)
	}
	for i, row := range page.Rows {
		hole := window.Hole{Era: row.Era, ID: row.ID, CreatedAt: row.CreatedAt}
		metadata, err := row.DecodeMetadata()
		switch {
		case err != nil && page.Holes:
			s.report(row, err) // still
		case err != nil:
			s.report(row, err)
			if !s.room(lease, tracker) {
				return false
			}
			tracker.AddHole(hole, page.After(i))
		case s.deliver(lease, row, metadata) != acked:
			return false
		case page.Holes:
			tracker.FillHole(hole)
		default:
			tracker.Move(page.After(i), true)
		}
	}
	if len(page.Rows) == 0 && !page.Holes {
		tracker.Move(page.End, false)
	}
	return true
}

// report says that a row cannot become a message.
func (s *Strict) report(row window.Row, err error) {
	s.Logger.Error("A stored row cannot become a message; it is passed over and kept in the cursor's holes", err, watermill.LogFields{
		"outbox_id": row.ID, "message_uuid": row.UUID,
	})
}

// room waits while there are too many holes: then somebody has to look.
func (s *Strict) room(lease context.Context, tracker *Tracker) bool {
	state, _, _ := tracker.State()
	if len(state.Holes) < s.MaxHoles {
		return true
	}
	s.Logger.Error("Too many rows were passed over; delivery stops until they are repaired or deleted and the subscriber is restarted",
		fmt.Errorf("the cursor has %d holes", len(state.Holes)), nil)
	select {
	case <-lease.Done():
	case <-s.Stop.Done():
	}
	return false
}

// deliver hands out one row until its message is acked.
func (s *Strict) deliver(lease context.Context, row window.Row, metadata map[string]string) outcome {
	for attempt := 1; ; attempt++ {
		if !s.Valid() || s.Stop.Err() != nil {
			return stopped
		}
		if attempt > 1 {
			// Each delivery has metadata of its own: handlers may change them.
			metadata, _ = row.DecodeMetadata() // worked before
		}
		payload := row.Payload
		if row.Shared {
			// A handler may change its message.
			payload = bytes.Clone(payload)
		}
		msg := message.NewMessage(row.UUID, payload)
		msg.Metadata = metadata
		ctx, cancel := context.WithCancelCause(s.Base)
		msg.SetContext(s.Wrap(ctx, row, row.Attempt+attempt))
		result, again := s.handOut(lease, msg, cancel)
		cancel(context.Canceled)
		if !again {
			return result
		}
		pause := s.Backoff.Delay(attempt)
		s.Logger.Debug("Message was nacked", watermill.LogFields{
			"message_uuid": row.UUID, "outbox_id": row.ID, "attempt": attempt, "retry_in": pause.String(),
		})
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-lease.Done():
		case <-s.Stop.Done():
		}
		timer.Stop()
	}
}

// handOut sends one message and waits for what becomes of it; again says that
// it was nacked and nothing forbids another try.
func (s *Strict) handOut(lease context.Context, msg *message.Message, cancel context.CancelCauseFunc) (result outcome, again bool) {
	select {
	case s.Out <- msg:
	case <-lease.Done():
		return stopped, false
	case <-s.Stop.Done():
		return stopped, false
	}
	if !s.Valid() {
		// It waited to be taken for longer than the lease was good.
		cancel(cmp.Or(context.Cause(lease), errLeaseOver))
	}
	select {
	case <-msg.Acked():
		return acked, false
	case <-msg.Nacked():
		return stopped, true
	case <-lease.Done():
		cancel(context.Cause(lease))
	case <-s.Stop.Done():
	}
	// The end is near: of the subscription, which gives the handler its grace,
	// or of the lease, when the ack counts for nothing but the handler is given
	// time to end, so that the next lease does not hand out the message beside
	// it.
	grace := time.NewTimer(s.Grace)
	defer grace.Stop()
	for lost := lease.Done(); ; {
		select {
		case <-msg.Acked():
		case <-msg.Nacked():
			return stopped, false
		case <-lost:
			cancel(context.Cause(lease))
			lost = nil
			continue
		case <-grace.C:
		}
		break
	}
	if isDone(msg.Acked()) && lease.Err() == nil {
		return acked, false
	}
	if !isDone(msg.Acked()) {
		s.Logger.Info("A message was neither acked nor nacked in the grace period; it will be delivered again", watermill.LogFields{
			"message_uuid": msg.UUID, "grace": s.Grace.String(),
		})
	}
	return stopped, false
}

var errLeaseOver = errors.New("the lease ran out before the message was taken from the channel")

func isDone(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
