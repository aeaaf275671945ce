package delivery_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/delivery"
	"github.com/millrace/watermill-outbox/internal/window"
)

func TestTrackerKeepsHolesSortedAndStatesApart(t *testing.T) {
	t.Parallel()

	hole := func(era, id int64) window.Hole { return window.Hole{Era: era, ID: id} }
	tracker := delivery.NewTracker(window.State{Position: window.Earliest(1)})
	before, version, urgent := tracker.State()
	require.Empty(t, before.Holes)

	for _, h := range []window.Hole{hole(2, 5), hole(1, 9), hole(2, 1), hole(2, 5)} {
		tracker.AddHole(h, window.Position{Era: 2, Step: window.Idle, Floor: h.ID})
	}
	state, _, _ := tracker.State()
	require.Equal(t, []window.Hole{hole(1, 9), hole(2, 1), hole(2, 5)}, state.Holes)
	require.Equal(t, int64(5), state.Position.Floor)

	tracker.FillHole(hole(2, 1))
	tracker.FillHole(hole(7, 7)) // was none
	after, newVersion, newUrgent := tracker.State()
	require.Equal(t, []window.Hole{hole(1, 9), hole(2, 5)}, after.Holes)
	// A state that is being stored must not change under the writer.
	require.Equal(t, []window.Hole{hole(1, 9), hole(2, 1), hole(2, 5)}, state.Holes)
	require.Greater(t, newVersion, version)
	require.Greater(t, newUrgent, urgent)

	tracker.Move(window.Position{Era: 2, Step: window.Idle, Floor: 6}, false)
	_, idleVersion, idleUrgent := tracker.State()
	require.Greater(t, idleVersion, newVersion)
	require.Equal(t, newUrgent, idleUrgent, "a move without a message is not urgent")
}
