package delivery_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/delivery"
	"github.com/millrace/watermill-outbox/internal/window"
)

func at(id int64) window.Position { return window.Position{Era: 1, Step: window.Idle, Floor: id} }

func hole(id int64) window.Hole { return window.Hole{Era: 1, ID: id} }

// The stored state against a model that knows of every row what became of it,
// with rows settled in any order: what is not settled is a hole or beyond the
// position, and nothing else is.
func TestTrackerAgainstModel(t *testing.T) {
	t.Parallel()

	for seed := range uint64(15) {
		r := rand.New(rand.NewPCG(seed, 1))
		tracker := delivery.NewTracker(window.State{Position: at(0), Holes: []window.Hole{hole(-2), hole(-1)}}, false, false)
		open := map[int64]*delivery.Entry{}
		tried := map[int64]int{}
		for _, id := range []int64{-2, -1} {
			open[id], _ = tracker.Hole(hole(id))
		}
		last := int64(0)
		for range 300 {
			switch choice := r.IntN(10); {
			case choice < 5:
				last++
				open[last] = tracker.Add(hole(last), at(last))
			case choice == 5:
				last++ // nobody's row
				tracker.Move(at(last))
			case len(open) > 0:
				ids := make([]int64, 0, len(open))
				for id := range open {
					ids = append(ids, id)
				}
				slices.Sort(ids)
				id := ids[r.IntN(len(ids))]
				if choice == 6 {
					tried[id]++
					open[id].Count(tried[id], 0)
					break
				}
				without, _, _ := tracker.StateWithout(open[id])
				open[id].Settled()
				state, _, _ := tracker.State()
				require.Equal(t, without.Holes, state.Holes)
				require.Equal(t, without.Position, state.Position)
				delete(open, id)
			}
			state, _, _ := tracker.State()
			holes := map[int64]bool{}
			for i, h := range state.Holes {
				require.Contains(t, open, h.ID, "what is settled is no hole")
				require.Equal(t, tried[h.ID], h.Attempts)
				require.LessOrEqual(t, h.ID, state.Position.Floor)
				require.True(t, i == 0 || state.Holes[i-1].ID < h.ID, "holes are sorted")
				holes[h.ID] = true
			}
			for id := range open {
				require.True(t, holes[id] || id > state.Position.Floor, "row %d is neither a hole nor to come", id)
				require.True(t, holes[id] || tried[id] == 0, "an attempt is forgotten")
			}
			require.GreaterOrEqual(t, state.Reach, len(open)-len(holes))
		}
		for _, e := range open {
			e.Settled()
		}
		state, _, _ := tracker.State()
		require.Empty(t, state.Holes)
		require.Equal(t, last, state.Position.Floor)
	}
}

// A state that is being stored must not change under the writer, and versions
// tell what to store, and how soon.
func TestTrackerStatesStayApart(t *testing.T) {
	t.Parallel()

	tracker := delivery.NewTracker(window.State{Position: at(0), Holes: []window.Hole{hole(2), hole(1)}}, false, false)
	before, version, urgent := tracker.State()
	e, attempts := tracker.Hole(hole(1))
	require.Zero(t, attempts)
	e.Count(3, 0)
	e.Settled()
	tracker.Gone(hole(7)) // was none
	require.Equal(t, []window.Hole{hole(1), hole(2)}, before.Holes)
	after, newVersion, newUrgent := tracker.State()
	require.Equal(t, []window.Hole{hole(2)}, after.Holes)
	require.Greater(t, newVersion, version)
	require.Greater(t, newUrgent, urgent)

	tracker.Move(at(6))
	_, idleVersion, idleUrgent := tracker.State()
	require.Greater(t, idleVersion, newVersion)
	require.Equal(t, newUrgent, idleUrgent, "a move without a message is not urgent")
}

// However much passes a row that is not settled, the state does not grow with it.
func TestTrackerStaysSmallBehindABlockedRow(t *testing.T) {
	t.Parallel()

	tracker := delivery.NewTracker(window.State{Position: at(0)}, false, false)
	blocked := tracker.Add(hole(1), at(1))
	blocked.Count(1, 0)
	for id := int64(2); id < 100_000; id++ {
		tracker.Add(hole(id), at(id)).Settled()
		tracker.Move(at(id))
	}
	state, _, _ := tracker.State()
	require.Equal(t, []window.Hole{{Era: 1, ID: 1, Attempts: 1}}, state.Holes)
	require.Equal(t, int64(99_999), state.Position.Floor)
	require.Equal(t, 2, tracker.Len())
}

// What may be in flight beyond the stored state is bounded by what that says,
// and after an unclean end so many rows are suspect, with all holes.
func TestTrackerBoundsWhatIsBeyond(t *testing.T) {
	t.Parallel()

	tracker := delivery.NewTracker(window.State{Position: at(0)}, true, false)
	stored := window.State{Reach: 64} // as the claim left it
	last := int64(0)
	for range 50 {
		beyond := 0
		_, _, before := tracker.State()
		for tracker.Room() {
			last++
			beyond++
			tracker.Add(hole(last), at(last))
		}
		require.LessOrEqual(t, beyond, stored.Reach)
		state, version, urgent := tracker.State()
		require.Greater(t, urgent, before, "nothing asks for the state to be stored")
		stored = state
		tracker.Stored(version)
		require.True(t, tracker.Room())
	}
	require.Zero(t, stored.Position.Floor, "nothing is settled")
	require.GreaterOrEqual(t, int64(stored.Reach), last)

	stored.Holes = []window.Hole{{Era: 1, ID: -2, Attempts: 1, Starts: 2}, {Era: 1, ID: -1, Attempts: 4}}
	stored.Reach = 3
	for _, unclean := range []bool{false, true} {
		tracker = delivery.NewTracker(stored, true, unclean)
		e, attempts := tracker.Hole(hole(-2))
		require.Equal(t, unclean, e.Suspect)
		require.Equal(t, map[bool]int{false: 1, true: 2}[unclean], attempts, "it was running alone when the process ended")
		e, attempts = tracker.Hole(hole(-1))
		require.Equal(t, unclean, e.Suspect)
		require.Equal(t, 4, attempts)
		for id := int64(1); id < 6; id++ {
			require.Equal(t, unclean && id <= 3, tracker.Add(hole(id), at(id)).Suspect)
		}
	}
}

// With much in flight and nothing settled, somebody who waits for room has the
// state stored that makes some, whenever the last one was asked for.
func TestTrackerAsksForRoom(t *testing.T) {
	t.Parallel()

	tracker := delivery.NewTracker(window.State{Position: at(0)}, true, false)
	last := int64(0)
	add := func(n int) {
		for ; n > 0 && tracker.Room(); n-- {
			last++
			tracker.Add(hole(last), at(last))
		}
	}
	const most = 4096
	for range 10 { // until so many may go out
		add(most)
		_, version, _ := tracker.State()
		tracker.Stored(version)
	}
	add(most / 2)
	_, version, saved := tracker.State()
	add(most)
	tracker.Stored(version)
	add(2 * most)
	require.False(t, tracker.Room())
	_, _, urgent := tracker.State()
	require.NotEqual(t, saved, urgent, "no room after %d rows, and the state need not be stored", last)
}
