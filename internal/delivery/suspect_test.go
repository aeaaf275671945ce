package delivery_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/delivery"
	"github.com/millrace/watermill-outbox/internal/window"
)

// stored returns the holes of the state that was stored last.
func (b *bench) stored() []window.Hole {
	b.store.mu.Lock()
	defer b.store.mu.Unlock()
	if len(b.store.saved) == 0 {
		return nil
	}
	return b.store.saved[len(b.store.saved)-1].Holes
}

// holes returns the page of their rows.
func holes(list ...window.Hole) window.Page {
	ids := make([]int64, len(list))
	for i, hole := range list {
		ids[i] = hole.ID
	}
	page := rows(ids...)
	page.Holes = true
	return page
}

// After an unclean end what may have been in flight goes out in waves, beside
// nothing else. If a process ends of one, its messages go out one at a time, and
// only the one that is out counts if the process ends again: its neighbours do not.
// The message that does it dies when it has ended as many processes as it has
// attempts, as if it had been alone from the first.
func TestSuspects(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		first := window.State{Position: at(2), Holes: []window.Hole{{ID: 1}, {ID: 2, Attempts: 1}}, Reach: 4}
		b := startAt(t, first, true, ordered(delivery.Unordered, 3), attempts(3))
		b.pages <- holes(first.Holes...)
		one := b.inFlight()
		require.Equal(t, []int64{1}, ids(one...))
		require.Equal(t, []window.Hole{{ID: 1, Starts: 2}, {ID: 2, Attempts: 1}}, b.stored(), "it is by itself, and known to be")
		b.pages <- rows(3, 4, 5, 6, 7, 8, 9)
		require.Empty(t, b.inFlight())
		one[0].Ack()
		two := b.inFlight()
		require.Equal(t, []int64{2}, ids(two...), "it has failed before, so it is by itself")
		two[0].Ack()
		wave := b.inFlight()
		require.Equal(t, []int64{3, 4, 5}, ids(wave...))
		require.Equal(t, []window.Hole{{ID: 3, Among: true}, {ID: 4, Among: true}, {ID: 5, Among: true}}, b.stored())
		dying := b.stored()
		for _, msg := range wave {
			if msg.UUID == "e" { // 4
				msg.Nack()
			} else {
				msg.Ack()
			}
		}
		last := b.inFlight()
		require.Equal(t, []int64{6}, ids(last...), "the wave took what there may be in flight, this is the next")
		require.Equal(t, []window.Hole{{ID: 4, Attempts: 1}, {ID: 6, Starts: 2}}, b.stored())
		last[0].Ack()
		require.Equal(t, []int64{7, 8, 9}, ids(b.inFlight()...), "these were not in flight")

		// The process ended of the wave.
		b = startAt(t, window.State{Position: at(5), Holes: dying, Reach: 1}, true, ordered(delivery.Unordered, 10), attempts(3))
		b.pages <- holes(dying...)
		for i, hole := range dying {
			alone := b.inFlight()
			require.Equal(t, []int64{hole.ID}, ids(alone...))
			want := append([]window.Hole{{ID: hole.ID, Starts: 3, Among: true}}, dying[i+1:]...)
			require.Equal(t, want, b.stored(), "the others still must be by themselves")
			alone[0].Ack()
		}

		// And now of one.
		killer := window.Hole{ID: 4, Starts: 3, Among: true}
		b = startAt(t, window.State{Position: at(5), Holes: []window.Hole{killer}, Reach: 1}, true, attempts(3))
		b.pages <- holes(killer)
		require.Empty(t, b.inFlight())
		verdicts := b.store.settled()
		require.Len(t, verdicts, 1)
		require.Equal(t, 3, verdicts[0].Attempts)
	})
}

// With few attempts there is none to spare for finding out which of a wave it was.
func TestSuspectsWithFewAttempts(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := startAt(t, window.State{Position: at(0), Reach: 3}, true, ordered(delivery.Unordered, 10), attempts(2))
		b.pages <- rows(1, 2, 3)
		for _, id := range []int64{1, 2, 3} {
			alone := b.inFlight()
			require.Equal(t, []int64{id}, ids(alone...))
			require.Equal(t, []window.Hole{{ID: id, Starts: 2}}, b.stored())
			alone[0].Ack()
		}
	})
}

// A wave that was cut short by the end of the subscription has ended no process.
func TestSuspectsAreAcquitted(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := startAt(t, window.State{Position: at(0), Reach: 3}, true, ordered(delivery.Unordered, 10), attempts(3))
		b.pages <- rows(1)
		first := b.inFlight()
		require.Len(t, first, 1)
		b.pages <- rows(2, 3)
		require.Empty(t, b.inFlight())
		first[0].Ack()
		wave := b.inFlight()
		require.Equal(t, []int64{2, 3}, ids(wave...))
		b.stop()
		for _, msg := range wave {
			msg.Nack()
		}
		<-b.done
		state, _, _ := b.tracker.State()
		require.Empty(t, state.Holes)
	})
}

// Of all engines of a process one has a suspect out, or one that ends the process
// would take those of the others with it. One that takes its time, or that nobody
// takes, does not keep them waiting for long.
func TestSuspectsOfOneProcessGoOutAlone(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		alone := make(chan struct{}, 1)
		var benches []*bench
		for range 3 {
			b := startAt(t, window.State{Position: at(0), Reach: 1}, true, attempts(3), func(e *delivery.Engine) { e.Alone = alone })
			b.pages <- rows(1)
			synctest.Wait()
			benches = append(benches, b)
		}
		accused := func(b *bench) bool {
			b.store.mu.Lock()
			defer b.store.mu.Unlock()
			n := len(b.store.saved)
			return n > 0 && len(b.store.saved[n-1].Holes) > 0
		}
		first := benches[0].inFlight()
		require.Len(t, first, 1)
		require.True(t, accused(benches[0]))
		require.Empty(t, benches[1].inFlight())
		require.False(t, accused(benches[1]))
		first[0].Ack()
		second := benches[1].inFlight()
		require.Len(t, second, 1)
		require.False(t, accused(benches[0]), "it is out no more, and that is not stored")

		time.Sleep(2 * time.Second)
		require.Empty(t, benches[2].inFlight())
		time.Sleep(2 * time.Second)
		third := benches[2].inFlight()
		require.Len(t, third, 1)
		second[0].Ack()
		third[0].Ack()
		synctest.Wait()
		require.Empty(t, alone)

		b := startAt(t, window.State{Position: at(0), Reach: 1}, true, attempts(3), func(e *delivery.Engine) { e.Alone = alone })
		alone <- struct{}{}
		b.pages <- rows(1)
		synctest.Wait()
		b.stop()
		<-b.done
	})
}

// A suspect that only failed has not ended its process.
func TestSuspectThatFailsCountsOnce(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := startAt(t, window.State{Position: at(0), Reach: 1}, true, attempts(3))
		b.store.failures = 3 // nothing goes out before it is known who does
		b.pages <- rows(1)
		msg := <-b.out
		msg.Nack()
		synctest.Wait()
		state, _, _ := b.tracker.State()
		require.Equal(t, []window.Hole{{ID: 1, Attempts: 1}}, state.Holes)
	})
}

// A suspect that hangs, as it may have done before its process was killed for it, kept
// everything else of its engine waiting, for ever: what was in its wave and had been
// acked long ago kept its line, nothing else went out, and nothing more was read.
func TestSuspectsThatTakeLong(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		b := startAt(t, window.State{Position: at(0), Reach: 6}, true, ordered(delivery.ByKey, 3), attempts(3), func(e *delivery.Engine) {
			e.Pending = 7
		})
		b.pages <- keyed(1, "a", "b", "c", "d", "e", "f", "b")
		wave := b.inFlight()
		require.Equal(t, []int64{1, 2, 3}, ids(wave...))
		go func() { b.pages <- keyed(8, "b", "c") }()
		var hangs *message.Message
		for _, msg := range wave {
			if ids(msg)[0] == 1 {
				hangs = msg
				continue
			}
			msg.Ack()
		}
		require.Empty(t, b.inFlight())
		time.Sleep(4 * time.Second)
		second := b.inFlight()
		require.Equal(t, []int64{4, 5, 6}, ids(second...))
		require.Contains(t, b.stored(), window.Hole{ID: 1, Among: true}, "it is out, and may be what ends the process")

		// The first wave is through, and that says nothing of the second.
		hangs.Ack()
		require.Empty(t, b.inFlight())
		for _, msg := range second {
			msg.Ack()
		}
		require.Equal(t, []int64{7, 9}, ids(b.inFlight()...))
		state, _, _ := b.tracker.State()
		require.Empty(t, state.Holes, "all have shown what they are")
	})
}

// The same with one that goes out by itself, which others then go out beside.
func TestASuspectThatHangsByItself(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		hole := window.Hole{ID: 1, Attempts: 1}
		b := startAt(t, window.State{Position: at(1), Holes: []window.Hole{hole}}, true, ordered(delivery.Unordered, 3), attempts(9))
		b.pages <- holes(hole)
		require.Len(t, b.inFlight(), 1)
		b.pages <- rows(2, 3, 4)
		require.Empty(t, b.inFlight())
		time.Sleep(4 * time.Second)
		beside := b.inFlight()
		require.Equal(t, []int64{2, 3}, ids(beside...), "no more than may be in flight at once")
		require.Equal(t, []window.Hole{{ID: 1, Attempts: 1, Starts: 2}}, b.stored())
		for _, msg := range beside {
			msg.Ack()
		}
		require.Equal(t, []int64{4}, ids(b.inFlight()...))
	})
}
