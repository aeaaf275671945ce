package delivery

import (
	"cmp"
	"slices"
	"sync"

	"github.com/millrace/watermill-outbox/internal/window"
)

const (
	// minReach is how many rows may go beyond the stored position to begin with,
	// which is what taking a cursor adds to its reach (claim.sql of package
	// cursor), maxReach how many at most.
	minReach = 64
	maxReach = 4096
)

// Tracker holds the state to be stored: how far the acks are, and the holes.
//
// It keeps the rows that were taken in, in the order of the log, as a list in
// which of neighbours that are settled only the last remains. So it is no longer
// than twice the rows that are not settled, however much passes one of them.
//
// After an unclean end it must be known what may have been in flight: so only so
// many rows are taken in beyond the stored position as the stored reach says.
//
// Safe for concurrent use.
type Tracker struct {
	// Changed is signalled when there is more room, if it is not nil.
	Changed chan<- struct{}

	// bounded says that Room counts.
	bounded bool

	mu sync.Mutex
	// base is the position in front of the list, which is that of row number
	// baseNumber.
	base        window.Position
	baseNumber  int
	first, last *Entry
	// holes are those of earlier leases. The slice is replaced, never changed.
	holes           []window.Hole
	version, urgent uint64

	// taken counts the rows of the log that were taken in, allowed is how many
	// may be; reach is how many more the next stored state allows.
	taken, allowed, reach int
	// suspects is how many of the next rows may have ended a process.
	suspects int
	// unclean says that the holes may have, too.
	unclean bool
	// offered is what State was last asked for, and said about taken and reach.
	offered struct {
		version      uint64
		taken, reach int
	}
	storedTaken int
}

// Entry is a row that was taken in.
type Entry struct {
	// Suspect says that the row may have ended a process; Among that it was among
	// some of which one did; Alone that it must be in flight by itself.
	Suspect, Among, Alone bool

	tracker    *Tracker
	prev, next *Entry
	hole       window.Hole
	// old says that it is one of Tracker.holes, and not in the list.
	old  bool
	done bool
	// after is the position behind it, number its place among those taken in.
	after  window.Position
	number int
}

// NewTracker begins at a stored state. With bounded, what may be in flight
// beyond the stored position is bounded as told above. With unclean, the process
// that held it has died: what it may have had in flight is suspect, and an
// attempt that was running alone is over.
func NewTracker(state window.State, bounded, unclean bool) *Tracker {
	t := &Tracker{
		bounded: bounded, base: state.Position, holes: slices.Clone(state.Holes),
		allowed: minReach, reach: minReach, unclean: unclean,
	}
	slices.SortFunc(t.holes, compareHoles)
	for i := range t.holes {
		if unclean && t.holes[i].Starts > 0 {
			t.holes[i].Attempts = t.holes[i].Starts
		}
		t.holes[i].Starts = 0
		t.holes[i].Among = t.holes[i].Among && unclean
	}
	if unclean {
		t.suspects = state.Reach
	}
	return t
}

// Room reports whether another row of the log may be taken in.
func (t *Tracker) Room() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.bounded || t.taken < t.allowed {
		return true
	}
	t.changed(true) // what makes room is to be stored, although nothing was settled
	return false
}

// Add takes in a row, with the position behind it.
func (t *Tracker) Add(hole window.Hole, after window.Position) *Entry {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.taken++
	if t.bounded && t.allowed-t.taken == t.reach/2 {
		// Faster than positions are stored: they are to be stored now, and to
		// last longer.
		t.reach = min(2*t.reach, maxReach)
		t.changed(true)
	}
	e := &Entry{tracker: t, hole: hole, after: after, number: t.taken, Suspect: t.suspects > 0}
	t.suspects = max(t.suspects-1, 0)
	t.push(e)
	return e
}

// Hole takes in the row of a hole, and returns how many attempts it had, of
// those in the row itself apart.
func (t *Tracker) Hole(hole window.Hole) (e *Entry, attempts int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if i, found := slices.BinarySearchFunc(t.holes, hole, compareHoles); found {
		hole = t.holes[i]
	}
	return &Entry{
		tracker: t, hole: hole, old: true, Suspect: t.unclean,
		Among: hole.Among, Alone: hole.Among || hole.Attempts > 0,
	}, hole.Attempts
}

// Gone forgets a hole whose row no longer exists.
func (t *Tracker) Gone(hole window.Hole) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.holes = without(t.holes, hole)
	t.changed(true)
}

// Move sets the position behind all that was taken in: it moved over nothing of
// interest.
func (t *Tracker) Move(pos window.Position) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := &Entry{tracker: t, after: pos, number: t.taken, done: true}
	t.push(e)
	t.compact(e)
	t.changed(false)
}

// Settled notes that a row is acked, or that its fate is stored elsewhere.
func (e *Entry) Settled() {
	t := e.tracker
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.old {
		t.holes = without(t.holes, e.hole)
	} else {
		e.done = true
		t.compact(e)
	}
	t.changed(true)
}

// Count sets how many attempts are over, and how many are if the process ends
// now; 0 if that says nothing about the row.
func (e *Entry) Count(attempts, starts int) {
	e.change(func(hole *window.Hole) { hole.Attempts, hole.Starts = attempts, starts })
}

// AccuseAmong notes that the row is in flight among suspects, one of which has done
// it if the process ends now.
func (e *Entry) AccuseAmong(attempts int) {
	e.change(func(hole *window.Hole) { hole.Attempts, hole.Starts, hole.Among = attempts, 0, true })
}

// Acquit notes that the row was in flight and the process lives.
func (e *Entry) Acquit(attempts int) {
	e.change(func(hole *window.Hole) { hole.Attempts, hole.Starts, hole.Among = attempts, 0, false })
}

// change changes what is stored of the row while it is open.
func (e *Entry) change(change func(*window.Hole)) {
	t := e.tracker
	t.mu.Lock()
	defer t.mu.Unlock()
	change(&e.hole)
	if i, found := slices.BinarySearchFunc(t.holes, e.hole, compareHoles); e.old && found {
		t.holes = slices.Clone(t.holes)
		t.holes[i] = e.hole
	}
	t.changed(true)
}

// State returns the state to store; version counts its changes, urgent those
// that a message has caused.
func (t *Tracker) State() (state window.State, version, urgent uint64) { return t.StateWithout(nil) }

// StateWithout returns the state as it is once the row is settled.
func (t *Tracker) StateWithout(settled *Entry) (state window.State, version, urgent uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.offered.version, t.offered.taken, t.offered.reach = t.version, t.taken, t.reach
	return t.state(settled), t.version, t.urgent
}

// state is the position behind the last row that is settled or was tried, with
// what is open up to there as holes. What is in flight beyond comes again from
// the position. Called with mu held.
func (t *Tracker) state(settled *Entry) window.State {
	state := window.State{Position: t.base, Holes: t.holes}
	if settled != nil && settled.old {
		state.Holes = without(t.holes, settled.hole)
	}
	passed, number := t.last, t.baseNumber
	for passed != nil && !passed.done && passed != settled && !passed.tried() {
		passed = passed.prev
	}
	if passed != nil {
		state.Position, number = passed.after, passed.number
		open := slices.Clone(state.Holes)
		for e := passed; e != nil; e = e.prev {
			if !e.done && e != settled {
				open = append(open, e.hole)
			}
		}
		slices.SortFunc(open, compareHoles)
		state.Holes = open
	}
	state.Reach = t.taken - number + max(t.reach, t.suspects)
	return state
}

// tried reports whether more must be stored of the row than that it comes again.
func (e *Entry) tried() bool { return e.hole.Attempts > 0 || e.hole.Starts > 0 || e.hole.Among }

// Len returns how many rows and runs of settled rows are kept.
func (t *Tracker) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for e := t.first; e != nil; e = e.next {
		n++
	}
	return n
}

// Stored notes that the state of this version, the last that was asked for, is
// stored.
func (t *Tracker) Stored(version uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.offered.version != version {
		return
	}
	if t.offered.taken-t.storedTaken < t.reach/4 {
		t.reach = max(t.reach/2, minReach) // so few need not have so much
	}
	t.storedTaken = t.offered.taken
	t.allowed = max(t.allowed, t.offered.taken+t.offered.reach)
	select {
	case t.Changed <- struct{}{}:
	default:
	}
}

func (t *Tracker) push(e *Entry) {
	e.prev = t.last
	if t.last == nil {
		t.first = e
	} else {
		t.last.next = e
	}
	t.last = e
}

// compact merges an entry that is settled with its neighbours.
func (t *Tracker) compact(e *Entry) {
	if e.prev != nil && e.prev.done {
		t.remove(e.prev)
	}
	if e.next != nil && e.next.done {
		t.remove(e) // the position behind the next is further
		e = e.next
	}
	if e == t.first {
		t.base, t.baseNumber = e.after, e.number
		t.remove(e)
	}
}

func (t *Tracker) remove(e *Entry) {
	if e.prev == nil {
		t.first = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		t.last = e.prev
	} else {
		e.next.prev = e.prev
	}
}

func (t *Tracker) changed(urgent bool) {
	t.version++
	if urgent {
		t.urgent++
	}
}

// without returns the holes but one; the slice stays as it is.
func without(holes []window.Hole, hole window.Hole) []window.Hole {
	i, found := slices.BinarySearchFunc(holes, hole, compareHoles)
	if !found {
		return holes
	}
	return slices.Delete(slices.Clone(holes), i, i+1)
}

func compareHoles(a, b window.Hole) int {
	return cmp.Or(cmp.Compare(a.Era, b.Era), cmp.Compare(a.ID, b.ID))
}
