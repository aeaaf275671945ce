package window

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"
)

// Step is where in a window a position is; see the package documentation.
type Step string

// The steps.
const (
	Past Step = "past"
	Idle Step = "idle"
	Late Step = "late"
	Main Step = "main"
)

// Position says what a consumer group has been handed out of a topic. The zero
// value is not valid: see Earliest and Latest.
type Position struct {
	// Era is the cluster that P, Floor and the window belong to.
	Era int64
	// P is the snapshot of which everything has been handed out.
	P Snapshot
	// Floor is the highest id handed out in the windows up to P.
	Floor int64

	Step Step
	// C and Top are those of the open window, in the steps late and main.
	C   Snapshot
	Top int64
	// At is the last id handed out in this step, 0 if none; in the step past
	// it belongs to the era AtEra.
	At    int64
	AtEra int64

	// Ahead are the rows of this era that were handed out although P does not
	// see them: those that came from the write-ahead log since P was last moved.
	// The slice is appended to, never changed.
	Ahead []Ahead

	// Past holds what is known of other eras, by era.
	Past map[int64]PastEra

	// lateXids are the transactions with late rows in the open window, if
	// known; they need not be stored, since P and C determine them.
	lateXids []string
}

// PastEra is where a position was when its cluster was left.
type PastEra struct {
	P     Snapshot
	Floor int64
	// C, if not empty, is the window that was open; of it, the rows up to At
	// were handed out. When all of an era has been handed out on another
	// cluster it is a window without an end: see finished.
	C  Snapshot
	At int64
	// Ahead are rows that were handed out although P does not see them.
	Ahead []Ahead
}

// Ahead is a row that was handed out before the window that sees it.
type Ahead struct {
	ID int64
	// XID is the transaction that wrote it: when P sees that, the row need not
	// be remembered.
	XID uint64
}

// unseen returns those of the rows that the snapshot does not see.
func unseen(ahead []Ahead, by Snapshot) []Ahead {
	var kept []Ahead
	for _, a := range ahead {
		if !by.Sees(a.XID) {
			kept = append(kept, a)
		}
	}
	return kept
}

// Hole is a row that was handed out and not acknowledged.
type Hole struct {
	Era       int64     `json:"era"`
	ID        int64     `json:"id"`
	CreatedAt time.Time `json:"created_at"`
	// Attempts is how many deliveries to the group have failed.
	Attempts int `json:"attempts,omitempty"`
	// Starts is what Attempts becomes if the holder dies: the row alone is in
	// flight, so it counts as its doing. 0 if it would say nothing.
	Starts int `json:"starts,omitempty"`
	// Among says that it is in flight among others of which one has done it if the
	// holder dies.
	Among bool `json:"among,omitempty"`
}

// State is what a cursor stores of its group.
type State struct {
	Position Position
	// Holes are rows that were handed out and not acknowledged, by era and id.
	Holes []Hole
	// Reach is how many rows beyond the position may have been handed out.
	Reach int
}

// Earliest is the position before everything.
func Earliest(era int64) Position {
	return Position{Era: era, Step: Past}
}

// Latest is the position after everything that the snapshot sees, top being the
// last id drawn when it was taken.
func Latest(era int64, snapshot Snapshot, top int64) Position {
	return Position{Era: era, Step: Idle, P: snapshot, Floor: top}
}

// Validate reports what in a stored position cannot be: a cursor row was edited.
func (p Position) Validate() error {
	switch {
	case !slices.Contains([]Step{Past, Idle, Late, Main}, p.Step):
		return fmt.Errorf("step %q is none of past, idle, late, main", p.Step)
	case p.Floor < 0 || p.Top < 0 || p.At < 0:
		return fmt.Errorf("floor %d, top %d or at %d is negative", p.Floor, p.Top, p.At)
	case (p.Step == Late || p.Step == Main) == p.C.Empty():
		return fmt.Errorf("step %q does not go with the open window %q", p.Step, p.C)
	case !p.C.Empty() && !p.C.Covers(p.P):
		return fmt.Errorf("the open window %q does not follow on p %q", p.C, p.P)
	case p.Step == Late && p.At > p.Floor:
		return fmt.Errorf("at %d is above floor %d among the late rows", p.At, p.Floor)
	case p.Step == Main && p.At > 0 && (p.At <= p.Floor || p.At > p.Top):
		return fmt.Errorf("at %d is outside floor %d and top %d of the window", p.At, p.Floor, p.Top)
	}
	for _, a := range p.Ahead {
		if a.ID <= 0 || a.XID == 0 {
			return fmt.Errorf("row %d of transaction %d cannot have been handed out ahead", a.ID, a.XID)
		}
	}
	return nil
}

// enterEra puts the position of another cluster aside.
func (p Position) enterEra(era int64) Position {
	past := make(map[int64]PastEra, len(p.Past)+1)
	maps.Copy(past, p.Past)
	if p.Step == Past && p.At > 0 {
		past = passed(past, p.AtEra, p.At)
	}
	if p.Step != Past || !p.P.Empty() {
		known := PastEra{P: p.P, Floor: p.Floor, Ahead: p.Ahead}
		switch p.Step {
		case Late:
			known.C, known.At = p.C, p.At
		case Main: // all late rows are out
			known.C, known.At = p.C, max(p.At, p.Floor)
		}
		past[p.Era] = known
	}
	delete(past, era)
	next := Earliest(era)
	if known, ok := p.Past[era]; ok && known.P.xmax < everything.xmax {
		// Back on a cluster that was left before: its transaction ids go on. What
		// of it was handed out elsewhere comes again, and all of it if the position
		// there was lost when the shards were divided anew (cursor.Store.Switch):
		// a P that is ahead of the server would hold the position for ever.
		next.P, next.Floor, next.Ahead = known.P, known.Floor, known.Ahead
	}
	next.Past = past
	return next
}

// everything is a snapshot that sees all that a cluster can have written, as in
// switch.sql. It is not a round number: the server takes no transaction id whose
// lower 32 bits are 0.
var everything = Snapshot{xmin: 1<<62 + 3, xmax: 1<<62 + 3}

// named returns past with an entry for the era of each row, in which nothing was
// handed out if it is new.
func named(past map[int64]PastEra, rows []Row) map[int64]PastEra {
	copied := false
	for _, row := range rows {
		if _, ok := past[row.Era]; ok {
			continue
		}
		if !copied {
			past, copied = maps.Clone(past), true
			if past == nil {
				past = map[int64]PastEra{}
			}
		}
		past[row.Era] = PastEra{}
	}
	return past
}

// finished returns past when all rows of other eras have been handed out: on a
// third cluster they would come again otherwise, since what P was when each was
// left says nothing of that. P and Ahead stay, for a return.
func finished(past map[int64]PastEra) map[int64]PastEra {
	past = maps.Clone(past)
	for era, known := range past {
		known.C, known.At = everything, math.MaxInt64
		past[era] = known
	}
	return past
}

// passed returns past when the rows of other eras have been handed out up to and
// including this one.
func passed(past map[int64]PastEra, atEra, at int64) map[int64]PastEra {
	past = maps.Clone(past)
	for era, known := range past {
		switch {
		case era < atEra:
			known.C, known.At = everything, math.MaxInt64
		case era == atEra && at >= known.At:
			known.C, known.At = everything, at
		}
		past[era] = known
	}
	return past
}
