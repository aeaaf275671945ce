package delivery

import (
	"slices"
	"sync"

	"github.com/millrace/watermill-outbox/internal/window"
)

// Tracker holds the state to be stored: how far the acks are, and the holes.
// Safe for concurrent use.
type Tracker struct {
	mu sync.Mutex
	// state is replaced, never changed, so that a copy stays what it was.
	state           window.State
	version, urgent uint64
}

// NewTracker begins at a stored state.
func NewTracker(state window.State) *Tracker { return &Tracker{state: state} }

// State returns the state to store; version counts its changes, urgent those
// that a message has caused.
func (t *Tracker) State() (state window.State, version, urgent uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state, t.version, t.urgent
}

// Move sets the position after a message was acked, or, with acked false, when
// it moved over nothing of interest.
func (t *Tracker) Move(pos window.Position, acked bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.state.Position = pos
	t.changed(acked)
}

// AddHole notes that a row is passed over, with the position behind it.
func (t *Tracker) AddHole(hole window.Hole, pos window.Position) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.state.Position = pos
	i, found := slices.BinarySearchFunc(t.state.Holes, hole, compareHoles)
	if !found {
		t.state.Holes = slices.Insert(slices.Clone(t.state.Holes), i, hole)
	}
	t.changed(true)
}

// FillHole notes that the row of a hole was acked, or is gone.
func (t *Tracker) FillHole(hole window.Hole) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if i, found := slices.BinarySearchFunc(t.state.Holes, hole, compareHoles); found {
		t.state.Holes = slices.Delete(slices.Clone(t.state.Holes), i, i+1)
		t.changed(true)
	}
}

func (t *Tracker) changed(urgent bool) {
	t.version++
	if urgent {
		t.urgent++
	}
}

func compareHoles(a, b window.Hole) int {
	switch {
	case a.Era != b.Era && a.Era < b.Era, a.Era == b.Era && a.ID < b.ID:
		return -1
	case a.Era == b.Era && a.ID == b.ID:
		return 0
	}
	return 1
}
