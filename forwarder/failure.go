package forwarder

import (
	"slices"
	"strconv"
	"time"
)

// MaxFailing is how many messages DestinationStatus.Failing names.
const MaxFailing = 100

// FailingMessage is one that failed and is tried again, here or by the source.
type FailingMessage struct {
	// UUID, Topic and OrderingKey are those it has in the source.
	UUID, Topic, OrderingKey string
	// Failures is how often it failed in this process, Attempts how many of them
	// were held against it; the rest were the destination's fault, or may be.
	Failures, Attempts int
	// Since is when it failed first in this process, Err why it did the last time.
	Since time.Time
	Err   error
}

// failure is what is remembered of a message that fails.
type failure struct {
	FailingMessage

	// accepted is how many messages the destination had taken when it failed last.
	accepted uint64
	// unproven counts the failures of which only the error is known.
	unproven int
}

// note remembers that a message failed, and reports whether that is proven to be
// its own fault: the destination took another one since it failed before.
func (p *pump) note(c *consumed, err error) (proven bool) {
	accepted := p.breaker.acceptances()
	p.mu.Lock()
	defer p.mu.Unlock()
	name := p.nameOf(c)
	f := p.failing[name]
	switch {
	case f != nil:
		proven = accepted > f.accepted
	case len(p.failing) > maxInFlight:
		clear(p.failing) // some that went elsewhere; the others fail once more
		fallthrough
	default:
		f = &failure{FailingMessage: FailingMessage{UUID: c.UUID, Topic: c.topic, OrderingKey: c.key, Since: time.Now()}}
		p.failing[name] = f
	}
	f.accepted = accepted
	f.Failures++
	c.failures = f.Failures
	f.Err = err
	return proven
}

// doubt notes that of the failure that was noted last only the error is known, and
// reports whether there were so many that it may well be the message's own fault.
func (p *pump) doubt(c *consumed) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.failing[p.nameOf(c)]
	if f == nil {
		return false
	}
	f.unproven++
	return p.MaxAttempts > 0 && f.unproven >= p.MaxAttempts
}

// spend notes that the failure that was noted last is an attempt.
func (p *pump) spend(c *consumed, attempts int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f := p.failing[p.nameOf(c)]; f != nil {
		f.Attempts = attempts
	}
}

// forget ends the memory of a message: it is settled, or not ours any more.
func (p *pump) forget(c *consumed) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.failing) > 0 {
		delete(p.failing, p.nameOf(c))
	}
}

// nameOf returns what a message is remembered by. Called with mu held.
func (p *pump) nameOf(c *consumed) string {
	if c.name == "" {
		c.name = c.id()
	}
	if c.name == "" {
		p.unnamed++
		c.name = "#" + strconv.FormatInt(p.unnamed, 10)
	}
	return c.name
}

// failures returns the messages that fail, those that have failed for longest
// first, at most limit; n is how many there are.
func (p *pump) failures(limit int) (list []FailingMessage, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.failing {
		list = append(list, f.FailingMessage)
	}
	slices.SortFunc(list, func(a, b FailingMessage) int { return a.Since.Compare(b.Since) })
	return list[:min(len(list), limit)], len(list)
}
