package replication

import "time"

const (
	// rateWindow is how many messages a rate is measured over.
	rateWindow = 128
	// rateQuiet is the gap between two messages after which it is measured anew.
	rateQuiet = 10 * time.Millisecond
)

// rate tells whether messages come at a certain rate at least. The zero value
// says that they do.
type rate struct {
	least int // a second

	n           int
	since, last time.Time
	high        bool
}

// count notes a message.
func (r *rate) count(now time.Time) {
	if now.Sub(r.last) > rateQuiet {
		r.n, r.since, r.high = 0, now, false
	}
	r.last = now
	if r.n++; r.n < rateWindow {
		return
	}
	r.high = now.Sub(r.since)*time.Duration(r.least) <= rateWindow*time.Second
	r.n, r.since = 0, now
}

// reached reports whether the last messages came at the rate.
func (r *rate) reached() bool { return r.least == 0 || r.high }
