package delivery_test

import (
	"context"
	"errors"
	"slices"
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

// inBatches makes an engine of ordered lines that go out in batches.
func inBatches(t *testing.T, limit int, change ...func(*delivery.Engine)) (*bench, chan []*message.Message) {
	out := make(chan []*message.Message)
	return start(t, append(change, ordered(delivery.ByKey, 10), func(e *delivery.Engine) {
		e.Out, e.Batches, e.Batch = nil, out, limit
	})...), out
}

// The end of the subscription is the same moment for all of a batch: they share its
// grace, however late those in front are acked in it.
func TestABatchHasOneGrace(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b, out := inBatches(t, 3)
		b.pages <- keyed(1, "k", "k", "k", "k")
		batch := <-out
		require.Len(t, batch, 3)
		b.stop()
		began := time.Now()
		time.Sleep(50 * time.Second)
		batch[0].Ack()
		<-b.done
		require.Equal(t, time.Minute, time.Since(began))
		state, _, _ := b.tracker.State()
		require.Empty(t, state.Holes)
		require.Equal(t, int64(1), state.Position.At+state.Position.Floor, "what was acked in that time counts")
	})
}

// When the lease is lost or a message has failed, all that stand behind it are told
// at once, not each when the one in front of it is done with.
func TestABatchEndsAsAWhole(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		end  func(b *bench, first *message.Message)
		why  error
		from int
	}{
		"lease lost": {func(b *bench, _ *message.Message) { b.lose(errLost) }, errLost, 0},
		"failure":    {func(_ *bench, first *message.Message) { first.Nack() }, delivery.ErrHeldUp, 1},
		"too slow":   {func(*bench, *message.Message) { time.Sleep(2 * time.Minute) }, delivery.ErrHeldUp, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			synctest.Test(t, func(t *testing.T) {
				b, out := inBatches(t, 3, func(e *delivery.Engine) { e.AckDeadline = time.Minute })
				b.pages <- keyed(1, "k", "k", "k")
				batch := <-out
				synctest.Wait()
				test.end(b, batch[0])
				synctest.Wait()
				for _, msg := range batch[test.from:] {
					require.ErrorIs(t, context.Cause(msg.Context()), test.why)
				}
				for _, msg := range batch {
					msg.Nack()
				}
				synctest.Wait()
			})
		})
	}
}

var errLost = errors.New("lost")

// A message that comes from the table of those that are deferred has failed before,
// in whatever process: it is the first of its batch, so that it holds up nobody but
// those behind it.
func TestARetryIsFirstOfItsBatch(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b, out := inBatches(t, 3)
		page := keyed(1, "k", "k", "k", "k")
		page.Rows[2].Attempt = 2
		b.pages <- page
		for _, want := range [][]int64{{1, 2}, {3, 4}} {
			batch := <-out
			require.Equal(t, want, ids(batch...))
			for _, msg := range batch {
				msg.Ack()
			}
		}
	})
}

// A row of which no message can be made stands in a line that goes out in batches.
// What was behind it, or in front, and had never been out, was left for good when it
// was buried or given back: the line stood still until the next lease.
func TestABatchAroundARowThatIsNoMessage(t *testing.T) {
	t.Parallel()

	for name, bad := range map[string]int{"first": 0, "in the middle": 1, "last": 2} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			synctest.Test(t, func(t *testing.T) {
				b, out := inBatches(t, 3)
				page := keyed(1, "k", "k", "k", "k")
				page.Rows[bad].Metadata = []byte(`{"a": 1}`)
				b.pages <- page
				var got []int64
				for {
					synctest.Wait()
					select {
					case batch := <-out:
						got = append(got, ids(batch...)...)
						for _, msg := range batch {
							msg.Ack()
						}
						continue
					default:
					}
					break
				}
				want := slices.Delete([]int64{1, 2, 3, 4}, bad, bad+1)
				require.Equal(t, want, got)
				verdicts := b.store.settled()
				require.Len(t, verdicts, 1)
				require.Equal(t, int64(bad+1), verdicts[0].Row.ID)
				state, _, _ := b.tracker.State()
				require.Empty(t, state.Holes)
				require.Equal(t, int64(4), state.Position.Floor)
			})
		})
	}
}

// stopping is a context whose children take their time to leave it.
type stopping struct {
	context.Context //nolint:containedctx // is a context

	takes time.Duration
}

func (stopping) Done() <-chan struct{} { return make(chan struct{}) }

func (c stopping) AfterFunc(func()) func() bool {
	return func() bool {
		time.Sleep(c.takes)
		return true
	}
}

// A worker that has begun the pause of a message and is held up after that, by a busy
// machine as a rule, found the message in the hands of the next worker when it came to
// note how it had left: it took that for its own, and let the next of the line go
// beside it, or nobody any more.
func TestAPauseThatIsOverBeforeItsWorkerIs(t *testing.T) {
	t.Parallel()

	for name, batch := range map[string]int{"one by one": 1, "batches": 2} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			synctest.Test(t, func(t *testing.T) {
				b, out := inBatches(t, batch, func(e *delivery.Engine) {
					e.Base = stopping{context.Background(), time.Minute}
				})
				b.pages <- keyed(1, "k", "k", "k", "k")
				first := <-out
				require.Len(t, first, batch)
				for _, msg := range first {
					msg.Nack()
				}
				again := <-out
				require.Equal(t, ids(first...), ids(again...))
				time.Sleep(time.Hour)
				select {
				case over := <-out:
					require.Fail(t, "overtaken", "%v", ids(over...))
				default:
				}
				for _, msg := range again {
					msg.Ack()
				}
				for next := int64(batch) + 1; next <= 4; next += int64(batch) {
					batch := <-out
					require.Equal(t, next, ids(batch...)[0])
					for _, msg := range batch {
						msg.Ack()
					}
				}
				time.Sleep(time.Hour)
				state, _, _ := b.tracker.State()
				require.Empty(t, state.Holes)
				require.Equal(t, int64(4), state.Position.Floor)
			})
		})
	}
}
