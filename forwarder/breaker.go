package forwarder

import (
	"context"
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

	mu sync.Mutex
	// failures counts those in a row; pauses the tries that failed since it opened.
	failures, pauses int
	state            BreakerState
	since            time.Time
	err              error
	// accepted is when the destination last took a message.
	accepted time.Time
	waiting  []*waiter
	// free says that it is half-open and nobody was there to try.
	free  bool
	timer *time.Timer
}

// waiter is somebody who waits for the breaker.
type waiter struct {
	// may gets true for a try, false when the breaker has closed.
	may chan bool
}

func newBreaker(limit int, policy backoff.Policy) *breaker {
	return &breaker{limit: limit, backoff: policy, state: BreakerClosed, since: time.Now()}
}

// enter waits until a message may be published. try says that it is the one to
// find out whether the destination is up: done, accept or fail must follow.
func (b *breaker) enter(ctx context.Context) (try bool, err error) {
	b.mu.Lock()
	switch {
	case ctx.Err() != nil:
		b.mu.Unlock()
		return false, context.Cause(ctx)
	case b.state == BreakerClosed:
		b.mu.Unlock()
		return false, nil
	case b.free:
		b.free = false
		b.mu.Unlock()
		return true, nil
	}
	w := &waiter{may: make(chan bool, 1)}
	b.waiting = append(b.waiting, w)
	b.mu.Unlock()
	select {
	case try = <-w.may:
		return try, nil
	case <-ctx.Done():
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, other := range b.waiting {
		if other == w {
			b.waiting = append(b.waiting[:i], b.waiting[i+1:]...)
			return false, context.Cause(ctx)
		}
	}
	if <-w.may { // it came at the same time
		b.next()
	}
	return false, context.Cause(ctx)
}

// closed reports whether nobody has to wait.
func (b *breaker) closed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state == BreakerClosed
}

// next lets somebody try. Called with mu held.
func (b *breaker) next() {
	b.set(BreakerHalfOpen)
	if len(b.waiting) == 0 {
		b.free = true
		return
	}
	w := b.waiting[0]
	b.waiting = b.waiting[1:]
	w.may <- true
}

// giveUp ends a try that said nothing of the destination.
func (b *breaker) giveUp(try bool) {
	if !try {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state == BreakerHalfOpen {
		b.next()
	}
}

// accept notes that the destination took a message: it is up.
func (b *breaker) accept() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.accepted = time.Now()
	b.failures, b.err = 0, nil
	if b.state == BreakerClosed {
		return
	}
	if b.timer != nil {
		b.timer.Stop()
	}
	b.set(BreakerClosed)
	b.pauses, b.free = 0, false
	for _, w := range b.waiting {
		w.may <- false
	}
	b.waiting = nil
}

// fail notes a failure that may be the destination's, and opens the breaker when
// there are too many in a row.
func (b *breaker) fail(err error, try bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.failures++
	b.err = err
	switch {
	case b.state == BreakerClosed && b.failures >= b.limit:
	case b.state == BreakerHalfOpen && try:
	default:
		return // of one that began before it opened
	}
	b.pauses++
	b.set(BreakerOpen)
	b.timer = time.AfterFunc(b.backoff.Delay(b.pauses), func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.state == BreakerOpen {
			b.next()
		}
	})
}

// upSince reports whether the destination took a message after the time.
func (b *breaker) upSince(t time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.accepted.After(t)
}

// set is called with mu held.
func (b *breaker) set(state BreakerState) {
	if b.state != state {
		b.state, b.since = state, time.Now()
	}
}

// stop ends the timer.
func (b *breaker) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.timer != nil {
		b.timer.Stop()
	}
}

// status returns the state, since when, the last error, and how many wait.
func (b *breaker) status() (state BreakerState, since time.Time, err error, waiting int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state, b.since, b.err, len(b.waiting)
}
