package delivery_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/delivery"
)

// What is behind a message that fails comes again with it, behind it: what stands in
// its line by then.
func TestWhatFailedIsFirstOfItsBatch(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		why      error
		attempts []int
	}{
		"counted":  {errors.New("failed"), []int{1, 2, 3}},
		"returned": {&delivery.ReturnedError{Err: errors.New("let it come again")}, []int{0, 0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			synctest.Test(t, func(t *testing.T) {
				out := make(chan []*message.Message)
				b := start(t, ordered(delivery.ByKey, 10), func(e *delivery.Engine) {
					e.Out, e.Batches, e.Batch = nil, out, 3
					e.Reason = func(context.Context) error { return test.why }
				})
				b.pages <- keyed(1, "k", "k")
				batch := <-out
				require.Equal(t, []int64{1, 2}, ids(batch...))
				for i, want := range test.attempts {
					if i == 1 {
						b.pages <- keyed(3, "k", "k")
						synctest.Wait()
					}
					batch[0].Nack()
					synctest.Wait()
					require.ErrorIs(t, context.Cause(batch[1].Context()), delivery.ErrHeldUp)
					for _, msg := range batch[1:] {
						msg.Nack()
					}
					synctest.Wait()
					list, n := b.engine.Retrying(10)
					require.Equal(t, 1, n)
					require.Equal(t, int64(1), list[0].Row.ID)
					require.Equal(t, want, list[0].Attempts)
					batch = <-out
					require.Equal(t, int64(1), ids(batch[0])[0])
					require.EqualError(t, batch[0].Context().Value(reasonKey{}).(error), "attempt "+string(rune('1'+want)))
				}
				require.Equal(t, []int64{1, 2, 3}, ids(batch...), "what came meanwhile is behind it")
				for _, msg := range batch {
					msg.Ack()
				}
				last := <-out
				require.Equal(t, []int64{4}, ids(last...))
				last[0].Ack()
				synctest.Wait()
				state, _, _ := b.tracker.State()
				require.Empty(t, state.Holes)
				require.Equal(t, int64(4), state.Position.Floor)
				require.Empty(t, b.store.settled())
			})
		})
	}
}

// The first of a batch was buried by somebody, or has no attempts left: the rest
// goes on without it.
func TestABatchWithoutItsFirst(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		out := make(chan []*message.Message)
		b := start(t, ordered(delivery.ByKey, 10), func(e *delivery.Engine) {
			e.Out, e.Batches, e.Batch = nil, out, 3
		})
		b.pages <- keyed(1, "k", "k", "k")
		batch := <-out
		require.Equal(t, []int64{1, 2, 3}, ids(batch...))
		b.store.mu.Lock()
		b.store.buried[1] = true
		b.store.mu.Unlock()
		began := time.Now()
		for _, msg := range batch {
			msg.Nack()
		}
		batch = <-out
		require.GreaterOrEqual(t, time.Since(began), 800*time.Millisecond)
		require.Equal(t, []int64{2, 3}, ids(batch...))
		for _, msg := range batch {
			msg.Ack()
		}
		synctest.Wait()
		state, _, _ := b.tracker.State()
		require.Empty(t, state.Holes)
		require.Equal(t, int64(3), state.Position.Floor)
	})
}
