package forwarder

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/backoff"
)

// It opens after so many failures in a row, lets one at a time try after pauses that
// grow, in turn, and closes for all.
func TestBreaker(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := newBreaker(3, backoff.Policy{Min: time.Second, Max: 4 * time.Second}, time.Hour)
		enter := func() try {
			turn, err := b.enter(t.Context())
			require.NoError(t, err)
			return turn
		}
		b.fail(errDown, enter())
		b.fail(errDown, enter())
		b.accept()
		b.fail(errDown, enter())
		b.fail(errDown, enter())
		require.Equal(t, try(0), enter(), "only failures in a row count")
		b.fail(errDown, 0)
		opened := time.Now()
		b.fail(errDown, 0) // of a call that began before

		var mu sync.Mutex
		var tries []string
		var closed sync.WaitGroup
		for _, name := range []string{"a", "b", "c"} {
			closed.Go(func() {
				for {
					turn, err := b.enter(t.Context())
					if err != nil || turn == 0 {
						return
					}
					mu.Lock()
					tries = append(tries, name)
					mu.Unlock()
					b.fail(errDown, turn)
				}
			})
			synctest.Wait()
		}
		for _, pause := range []time.Duration{1, 2, 4, 4} {
			time.Sleep(pause * time.Second)
			synctest.Wait()
		}
		mu.Lock()
		require.GreaterOrEqual(t, len(tries), 4)
		require.Equal(t, []string{"a", "b", "c", "a"}, tries[:4], "they take turns")
		mu.Unlock()
		state, since, waiting, err := b.status()
		require.Equal(t, BreakerOpen, state)
		require.Equal(t, opened, since, "since it is not closed any more")
		require.ErrorIs(t, err, errDown)
		require.Equal(t, 3, waiting)
		b.accept()
		closed.Wait()
		state, _, waiting, err = b.status()
		require.Equal(t, BreakerClosed, state)
		require.NoError(t, err)
		require.Zero(t, waiting)
		b.stop()
	})
}

// What comes too late changes nothing: the end of a try whose breaker has closed and
// opened again since, and somebody who is called up just when he leaves.
func TestBreakerTurns(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := newBreaker(1, backoff.Policy{Min: time.Second, Max: time.Second}, time.Hour)
		b.fail(errDown, 0)
		time.Sleep(time.Second)
		old, err := b.enter(t.Context())
		require.NoError(t, err)
		require.NotZero(t, old)
		b.accept() // of a call that began before
		b.fail(errDown, 0)
		time.Sleep(time.Second)
		turn, err := b.enter(t.Context())
		require.NoError(t, err)
		require.NotZero(t, turn)
		b.giveUp(old)
		b.fail(errDown, old)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err = b.enter(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded, "one try at a time")

		b.giveUp(turn)
		again, err := b.enter(t.Context())
		require.NoError(t, err)
		require.NotZero(t, again)
		b.giveUp(again)

		// Whoever is called up just when he leaves passes the turn on.
		third, err := b.enter(t.Context())
		require.NoError(t, err)
		leaving, leave := context.WithCancel(t.Context())
		left := make(chan error, 1)
		go func() {
			_, err := b.enter(leaving)
			left <- err
		}()
		synctest.Wait()
		leave()
		b.giveUp(third)
		if <-left == nil {
			b.giveUp(b.turn) // he was quicker
		}
		fourth, err := b.enter(t.Context())
		require.NoError(t, err)
		require.NotZero(t, fourth)
		b.stop()
	})
}

// A try whose publisher hangs does not keep the others out: when its time is over
// another one may try, whether it waits already or comes later, and what the first
// one says then is of no account, unless it is a success.
func TestBreakerTurnsEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const limit = time.Minute
		b := newBreaker(1, backoff.Policy{Min: time.Second, Max: time.Second}, limit)
		enter := func(wait time.Duration) try {
			t.Helper()
			began := time.Now()
			turn, err := b.enter(t.Context())
			require.NoError(t, err)
			require.LessOrEqual(t, time.Since(began), wait)
			require.GreaterOrEqual(t, time.Since(began), wait*4/5, "pauses are shorter at random")
			return turn
		}
		b.fail(errDown, enter(0))
		first := enter(time.Second)
		second := enter(limit)
		require.NotEqual(t, first, second)
		state, _, _, err := b.status()
		require.Equal(t, BreakerHalfOpen, state)
		require.ErrorIs(t, err, errHangs)
		b.fail(errDown, first)
		state, _, _, _ = b.status()
		require.Equal(t, BreakerHalfOpen, state, "the second still tries")

		// Nobody waits when the time of the second is over.
		time.Sleep(10 * limit)
		third := enter(0)
		time.Sleep(limit - time.Second)
		b.fail(errDown, third) // in time
		fourth := enter(time.Second)
		time.Sleep(limit - 2*time.Second) // the third's would be over by then
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = b.enter(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded, "each has a time of its own")
		b.giveUp(fourth)
		b.accept() // the first one's call has returned after all
		require.Equal(t, try(0), enter(0))
		b.stop()
	})
}
