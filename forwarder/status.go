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
	// Failing are the messages that failed and are tried again, those that have
	// failed for longest first, at most MaxFailing of them; FailingCount is how many
	// there are. Each holds back what is behind it in its line. One that the source
	// has back stays here until this process gets it again: if it went to another
	// process, that knows more.
	Failing      []FailingMessage
	FailingCount int
	// Ended says that the source has closed its channel: nothing more comes.
	Ended bool
}

// Status returns how the destinations stand. It asks nobody, and may be called at
// any time.
func (f *Forwarder) Status() Status {
	var status Status
	for _, p := range f.pumps {
		d := DestinationStatus{Name: p.destination.Name, Published: p.published.Load(), InFlight: int(p.inFlight.Load()), Ended: p.over.Load()}
		d.Breaker, d.Since, d.Waiting, d.Err = p.breaker.status()
		d.Failing, d.FailingCount = p.failures(MaxFailing)
		status.Destinations = append(status.Destinations, d)
	}
	return status
}
