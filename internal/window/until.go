package window

// Until is where a position ends: at a common snapshot, from which on others go
// on with the same rows in another division into shards.
type Until struct {
	// Era is the cluster that C belongs to.
	Era int64
	C   Snapshot
	// Top is the last id drawn when C was taken.
	Top int64
}

// Reached reports whether everything up to the end has been handed out, when
// the server is of the position's era. Of another era than the end's nothing is
// the position's, beside what came before.
func (u Until) Reached(pos Position) bool {
	return pos.Step == Idle && (pos.Era != u.Era || pos.P.Covers(u.C))
}

// towards opens the last window: the rows that the end sees and P does not.
func (u Until) towards(pos Position) Position {
	pos.Step, pos.C, pos.Top, pos.At, pos.lateXids = Late, u.C, u.Top, 0, nil
	return pos
}
