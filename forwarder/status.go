package forwarder

import "time"

// Status says how a Forwarder stands.
type Status struct {
	// Destinations are in the order of Config.Destinations.
	Destinations []DestinationStatus
}

// DestinationStatus says how one destination stands.
type DestinationStatus struct {
	Name string
	// Breaker says whether it is used, Since when, and Err why it failed last, nil
	// since it took a message.
	Breaker BreakerState
	Since   time.Time
	Err     error
	// Published counts the messages that it took since the start.
	Published int64
	// InFlight is how many lines have messages on the way to it, Waiting how many of
	// them wait for the breaker.
	InFlight, Waiting int
	// Failing is how many messages fail for a reason that is not known to be the
	// destination's.
	Failing int
}

// Status returns how the destinations stand. It asks nobody, and may be called at
// any time.
func (f *Forwarder) Status() Status {
	var status Status
	for _, p := range f.pumps {
		d := DestinationStatus{Name: p.destination.Name, Published: p.published.Load(), InFlight: int(p.inFlight.Load())}
		d.Breaker, d.Since, d.Err, d.Waiting = p.breaker.status()
		p.mu.Lock()
		d.Failing = len(p.failed)
		p.mu.Unlock()
		status.Destinations = append(status.Destinations, d)
	}
	return status
}
