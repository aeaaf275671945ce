package forwarder

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/millrace/watermill-outbox/internal/backoff"
)

// BreakerState says whether a destination is used.
type BreakerState string

const (
	// BreakerClosed: it is.
	BreakerClosed BreakerState = "closed"
	// BreakerOpen: it failed too often and is left alone for a while.
	BreakerOpen BreakerState = "open"
	// BreakerHalfOpen: one message tries whether it is up again.
	BreakerHalfOpen BreakerState = "half_open"
)

// breaker keeps messages from a destination that fails. While it is open they
// wait, spending nothing; after each pause one of them may try, and they take
// turns at that, since the one that tries may be what fails. Safe for concurrent
// use.
type breaker struct {
	limit   int
	backoff backoff.Policy
	// patience is how long a try stands: one whose publisher hangs must not keep the
	// others out.
	patience time.Duration

	mu sync.Mutex
	// failures counts those in a row; pauses the tries that failed since it opened.
	failures, pauses int
	state            BreakerState
	// since is when it closed, or ceased to be.
	since time.Time
	err   error
	// accepted counts the messages that the destination took.
	accepted uint64
	waiting  []*waiter
	// turn numbers the tries, and the times it opened, so that what comes too late
	// changes nothing: the end of an earlier try, the timer of an earlier pause.
	turn try
	// free says that it is half-open and nobody was there to try.
	free bool
	// timer ends the pause while it is open, and a try while it is half-open.
	timer *time.Timer
}

// try is the right to find out whether the destination is up, 0 if there is none:
// the breaker is closed. Of the others one at a time stands, until accept, fail,
// giveUp or the end of its time.
type try uint64

// errHangs is why a destination failed whose publisher did not return.
var errHangs = errors.New("forwarder: a call of the publisher does not return")

// waiter is somebody who waits for the breaker.
type waiter struct {
	// may gets a try, 0 when the breaker has closed.
	may chan try
}

func newBreaker(limit int, policy backoff.Policy, patience time.Duration) *breaker {
	return &breaker{limit: limit, backoff: policy, patience: patience, state: BreakerClosed, since: time.Now()}
}

// enter waits until a message may be published.
func (b *breaker) enter(ctx context.Context) (try, error) {
	b.mu.Lock()
	switch {
	case ctx.Err() != nil:
		b.mu.Unlock()
		return 0, context.Cause(ctx)
	case b.state == BreakerClosed:
		b.mu.Unlock()
		return 0, nil
	case b.free:
		turn := b.begin()
		b.mu.Unlock()
		return turn, nil
	}
	w := &waiter{may: make(chan try, 1)}
	b.waiting = append(b.waiting, w)
	b.mu.Unlock()
	select {
	case turn := <-w.may:
		return turn, nil
	case <-ctx.Done():
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := slices.Index(b.waiting, w); i >= 0 {
		b.waiting = slices.Delete(b.waiting, i, i+1)
	} else {
		b.pass(<-w.may) // it came at the same time
	}
	return 0, context.Cause(ctx)
}

// closed reports whether nobody has to wait.
func (b *breaker) closed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state == BreakerClosed
}

// next lets somebody try. Called with mu held.
func (b *breaker) next() {
	b.state = BreakerHalfOpen
	b.turn++
	if len(b.waiting) == 0 {
		b.free = true
		return
	}
	w := b.waiting[0]
	b.waiting = slices.Delete(b.waiting, 0, 1)
	w.may <- b.begin()
}

// begin begins a try. Called with mu held.
func (b *breaker) begin() try {
	b.free = false
	b.after(b.patience, func() {
		b.err = errHangs
		b.next()
	})
	return b.turn
}

// after does something when a time is over, unless things have gone on by then.
// Called with mu held, as do is.
func (b *breaker) after(d time.Duration, do func()) {
	if b.timer != nil {
		b.timer.Stop()
	}
	state, turn := b.state, b.turn
	b.timer = time.AfterFunc(d, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.state == state && b.turn == turn {
			do()
		}
	})
}

// standing reports whether the outcome of a try matters. Called with mu held.
func (b *breaker) standing(turn try) bool {
	return b.state == BreakerHalfOpen && turn == b.turn && !b.free
}

// pass lets somebody else try. Called with mu held.
func (b *breaker) pass(turn try) {
	if b.standing(turn) {
		b.next()
	}
}

// giveUp ends a try that said nothing of the destination.
func (b *breaker) giveUp(turn try) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.pass(turn)
}

// accept notes that the destination took a message: it is up.
func (b *breaker) accept() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.accepted++
	b.failures, b.err = 0, nil
	if b.state == BreakerClosed {
		return
	}
	if b.timer != nil {
		b.timer.Stop()
	}
	b.state, b.since = BreakerClosed, time.Now()
	b.pauses, b.free = 0, false
	for _, w := range b.waiting {
		w.may <- 0
	}
	b.waiting = nil
}

// fail notes a failure that may be the destination's, and opens the breaker when
// there are too many in a row, or it was the try that failed.
func (b *breaker) fail(err error, turn try) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.failures++
	b.err = err
	switch {
	case b.state == BreakerClosed && b.failures >= b.limit:
		b.since = time.Now()
	case b.standing(turn):
	default:
		return // of one that began before it opened
	}
	b.pauses++
	b.turn++
	b.state = BreakerOpen
	b.after(b.backoff.Delay(b.pauses), b.next)
}

// acceptances returns how many messages the destination took so far: if that is
// more than it was, it was up in between.
func (b *breaker) acceptances() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.accepted
}

// stop ends the timer.
func (b *breaker) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.timer != nil {
		b.timer.Stop()
	}
}

// status returns the state, since when, how many wait, and the last error.
func (b *breaker) status() (state BreakerState, since time.Time, waiting int, last error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state, b.since, len(b.waiting), b.err
}
