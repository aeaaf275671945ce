package delivery_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/delivery"
	"github.com/millrace/watermill-outbox/internal/window"
)

// bench is an engine with its surroundings, in virtual time.
type bench struct {
	engine  *delivery.Strict
	out     chan *message.Message
	pages   chan window.Page
	tracker *delivery.Tracker
	stop    context.CancelFunc
	lose    context.CancelCauseFunc
	done    chan struct{}
}

func start(t *testing.T) *bench {
	b := &bench{
		out: make(chan *message.Message), pages: make(chan window.Page), done: make(chan struct{}),
		tracker: delivery.NewTracker(window.State{}),
	}
	stop, cancel := context.WithCancel(t.Context())
	lease, lose := context.WithCancelCause(t.Context())
	b.stop, b.lose = cancel, lose
	b.engine = &delivery.Strict{
		Out: b.out, Base: context.Background(), Stop: stop, Grace: time.Minute,
		Backoff:  backoff.Policy{Min: time.Second, Max: 4 * time.Second},
		MaxHoles: 2,
		Wrap:     func(ctx context.Context, _ window.Row, _ int) context.Context { return ctx },
		Valid:    func() bool { return lease.Err() == nil },
		Logger:   watermill.NopLogger{},
	}
	go func() {
		defer close(b.done)
		b.engine.Run(lease, b.tracker, b.pages)
	}()
	t.Cleanup(func() {
		cancel()
		lose(nil)
		<-b.done
	})
	return b
}

func rows(ids ...int64) window.Page {
	var page window.Page
	for _, id := range ids {
		page.Rows = append(page.Rows, window.Row{ID: id, UUID: string(rune('a' + id)), Metadata: []byte("{}")})
	}
	page.End = window.Position{Step: window.Idle, Floor: ids[len(ids)-1]}
	return page
}

func TestStrictWaitsForTheAck(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		b.pages <- rows(1, 2)
		first := <-b.out
		synctest.Wait()
		select {
		case <-b.out:
			require.Fail(t, "the second message came before the first was acked")
		default:
		}
		require.NoError(t, first.Context().Err())
		first.Ack()
		second := <-b.out
		require.ErrorIs(t, first.Context().Err(), context.Canceled)
		require.Equal(t, "c", second.UUID)
		second.Ack()
		synctest.Wait()
		state, _, _ := b.tracker.State()
		require.Equal(t, int64(2), state.Position.Floor)
	})
}

func TestStrictRedeliversAfterGrowingPauses(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		b.pages <- rows(1)
		msg := <-b.out
		for _, ceiling := range []time.Duration{1, 2, 4, 4} {
			ceiling *= time.Second
			began := time.Now()
			msg.Nack()
			again := <-b.out
			require.NotSame(t, msg, again)
			require.Equal(t, msg.UUID, again.UUID)
			require.ErrorIs(t, msg.Context().Err(), context.Canceled)
			require.LessOrEqual(t, time.Since(began), ceiling)
			require.GreaterOrEqual(t, time.Since(began), ceiling*4/5)
			msg = again
		}
		state, _, _ := b.tracker.State()
		require.Zero(t, state.Position.Floor)
		msg.Ack()
	})
}

func TestStrictStopDuringBackoffReturnsAtOnce(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		b.pages <- rows(1)
		(<-b.out).Nack()
		synctest.Wait()
		began := time.Now()
		b.stop()
		<-b.done
		require.Zero(t, time.Since(began))
	})
}

func TestStrictGivesTheMessageInFlightItsGrace(t *testing.T) {
	t.Parallel()

	t.Run("acked in time", func(t *testing.T) {
		t.Parallel()

		synctest.Test(t, func(t *testing.T) {
			b := start(t)
			b.pages <- rows(1, 2)
			msg := <-b.out
			b.stop()
			time.Sleep(59 * time.Second)
			require.NoError(t, msg.Context().Err())
			msg.Ack()
			<-b.done
			_, version, urgent := b.tracker.State()
			require.Equal(t, uint64(1), version, "the ack was not recorded")
			require.Equal(t, uint64(1), urgent)
		})
	})
	t.Run("never acked", func(t *testing.T) {
		t.Parallel()

		synctest.Test(t, func(t *testing.T) {
			b := start(t)
			b.pages <- rows(1)
			msg := <-b.out
			began := time.Now()
			b.stop()
			<-b.done
			require.Equal(t, time.Minute, time.Since(began))
			require.Error(t, msg.Context().Err())
			_, version, _ := b.tracker.State()
			require.Zero(t, version)
		})
	})
	t.Run("nobody has taken it", func(t *testing.T) {
		t.Parallel()

		synctest.Test(t, func(t *testing.T) {
			b := start(t)
			b.pages <- rows(1)
			synctest.Wait()
			began := time.Now()
			b.stop()
			<-b.done
			require.Zero(t, time.Since(began))
		})
	})
}

func TestStrictIgnoresAcksOfALostLease(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		b.pages <- rows(1, 2)
		msg := <-b.out
		cause := errors.New("taken by another process")
		b.lose(cause)
		synctest.Wait()
		require.ErrorIs(t, context.Cause(msg.Context()), cause)
		msg.Ack()
		<-b.done
		_, version, _ := b.tracker.State()
		require.Zero(t, version)
	})
}

func TestStrictPassesOverWhatCannotBecomeAMessage(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		page := rows(1, 2, 3)
		page.Rows[0].Metadata = []byte("[]")
		page.Rows[2].Metadata = []byte("[]")
		b.pages <- page
		msg := <-b.out
		require.Equal(t, int64(2), int64(msg.UUID[0]-'a'))
		msg.Ack()
		synctest.Wait()
		state, _, _ := b.tracker.State()
		require.Equal(t, []window.Hole{{ID: 1}, {ID: 3}}, state.Holes)
		require.Equal(t, int64(3), state.Position.Floor, "the position stopped at the last row")

		// At the bound nothing more is passed over.
		page = rows(4, 5)
		page.Rows[0].Metadata = []byte("[]")
		b.pages <- page
		time.Sleep(time.Hour)
		state, _, _ = b.tracker.State()
		require.Len(t, state.Holes, 2)
		require.Equal(t, int64(3), state.Position.Floor)
	})
}

func TestStrictFillsHoles(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := start(t)
		b.tracker.AddHole(window.Hole{ID: 1}, window.Position{Floor: 9})
		b.tracker.AddHole(window.Hole{ID: 2}, window.Position{Floor: 9})
		page := rows(1)
		page.Holes, page.Gone = true, []window.Hole{{ID: 2}}
		b.pages <- page
		(<-b.out).Ack()
		synctest.Wait()
		state, _, _ := b.tracker.State()
		require.Empty(t, state.Holes)
		require.Equal(t, int64(9), state.Position.Floor, "a hole moved the position")
	})
}
