package forwarder

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Outgoing is a message with the topic that it is published to.
type Outgoing struct {
	Topic   string
	Message *message.Message
}

// BatchPublisher is a Publisher that really sends many messages at once, faster
// than one by one. A Destination's Publisher that has this method is used by it
// alone. Messages that become ready while a call runs leave together in the next. Two
// calls run at a time: beside one the other begins with as many messages as that has, or
// with those that are there after a millisecond.
type BatchPublisher interface {
	message.Publisher

	// PublishBatch publishes the messages, in any order or at the same time, for no
	// two of them are of one line; it returns when each of them is safe or has
	// failed. It returns nil if all are safe, and otherwise as many errors as there
	// are messages, nil for those that are. Each message carries its own context. It
	// may be called while another call runs.
	//
	// Unlike Publish it must not change the messages, which are published again if
	// they fail, nor keep batch. Their Ack and Nack reach nobody.
	PublishBatch(batch []Outgoing) []error
}

const (
	// maxBatch and maxBatchBytes bound what is in one call of PublishBatch. A
	// single message may have more bytes.
	maxBatch      = 1000
	maxBatchBytes = 1 << 20
	// maxCalls is how many calls run at the same time, beside those that hang: one is
	// prepared while the other waits for the broker.
	maxCalls = 2
	// linger is how long messages may wait for others while one call runs. What is
	// answered comes back one by one, and without a wait every other call would have a
	// single message: the idea is that of Nagle, RFC 896.
	linger = time.Millisecond
)

// errBatchResult is of a publisher that does not do what BatchPublisher says.
var errBatchResult = errors.New("forwarder: PublishBatch must return no errors or one for each message")

// combiner makes batches of what several lines publish at the same time, each one
// message.
type combiner struct {
	publisher BatchPublisher
	// patience is how long a call may take. One that takes longer keeps what it has,
	// and its place goes to another.
	patience time.Duration
	// mayBegin is asked for each message when its call begins: it may have waited for
	// long, and be another process's by now. Deadline is that of the call.
	mayBegin func(*consumed) error
	deadline func() time.Time

	mu    sync.Mutex
	queue []*parcel
	// calls counts the callers, inCalls the messages that they have with the publisher,
	// those that hang aside.
	calls, inCalls int
	// waiting says that what is queued waits for others, waited that it has waited long
	// enough. takes counts what was taken, after which a wait is over.
	waiting, waited bool
	takes           uint64

	// parcels are those that nothing is in, for the next messages.
	parcels sync.Pool
}

// parcel is a message on its way; done gets what became of it.
type parcel struct {
	*consumed
	outgoing

	done chan error
}

// call is a message in a call of the publisher.
type call struct {
	msg message.Message
	ctx attemptContext
}

// publish publishes a message together with others.
func (c *combiner) publish(of *consumed, out outgoing) error {
	p, ok := c.parcels.Get().(*parcel)
	if !ok {
		p = &parcel{done: make(chan error, 1)}
	}
	p.consumed, p.outgoing = of, out
	c.mu.Lock()
	c.queue = append(c.queue, p)
	c.employ()
	c.mu.Unlock()
	err := <-p.done
	p.consumed, p.outgoing = nil, outgoing{}
	c.parcels.Put(p)
	return err
}

// employ begins a caller for what is queued, if there may be another. Called with mu
// held.
func (c *combiner) employ() {
	if c.calls < maxCalls && c.due() {
		c.calls++
		go c.call()
	}
}

// due reports whether what is queued is to go, now that another caller could take it.
// If not, it is seen to that it goes soon. Called with mu held.
func (c *combiner) due() bool {
	switch n := len(c.queue); {
	case n == 0:
		return false
	case c.waited, n >= c.inCalls, n >= maxBatch:
		return true
	}
	if !c.waiting {
		c.waiting = true
		takes := c.takes
		time.AfterFunc(linger, func() { c.endWait(takes) })
	}
	return false
}

// endWait ends the wait that began after so many were taken.
func (c *combiner) endWait(takes uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if takes == c.takes {
		c.waited = true
		c.employ()
	}
}

// leave makes the place of a caller free that has so many messages with the publisher.
func (c *combiner) leave(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls--
	c.inCalls -= n
	c.employ()
}

// call calls the publisher until nothing is to go, or a call has hung.
func (c *combiner) call() {
	back := 0
	for {
		batch := c.take(back)
		n := len(batch)
		if n == 0 {
			c.leave(0)
			return
		}
		hangs := time.AfterFunc(c.patience, func() { c.leave(n) })
		c.send(batch)
		if !hangs.Stop() {
			return // another has the place
		}
		back = n
	}
}

// take takes what may go together, in the order of arrival, if it is to go. It is told
// how many messages the caller has back from the publisher.
func (c *combiner) take(back int) []*parcel {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inCalls -= back
	if !c.due() {
		return nil
	}
	c.waiting, c.waited = false, false
	c.takes++
	n, bytes := 0, 0
	for ; n < len(c.queue) && n < maxBatch; n++ {
		bytes += len(c.queue[n].msg.Payload)
		if n > 0 && bytes > maxBatchBytes {
			break
		}
	}
	batch := c.queue[:n:n]
	c.queue = c.queue[n:]
	c.inCalls += n
	c.employ() // for what is left over
	return batch
}

// send calls the publisher and tells each line what became of its message.
func (c *combiner) send(batch []*parcel) {
	sent := batch[:0]
	for _, p := range batch {
		if err := c.mayBegin(p.consumed); err != nil {
			p.done <- err
			continue
		}
		sent = append(sent, p)
	}
	if len(sent) == 0 {
		return
	}
	calls, all, deadline := make([]call, len(sent)), make([]Outgoing, len(sent)), c.deadline()
	for i, p := range sent {
		call := &calls[i]
		call.ctx.Context, call.ctx.deadline = p.outgoing.context(p.consumed), deadline //nolint:fatcontext // one for each
		// Everything of it but its context: see PublishBatch.
		call.msg.UUID, call.msg.Metadata, call.msg.Payload = p.msg.UUID, p.msg.Metadata, p.msg.Payload
		call.msg.SetContext(&call.ctx)
		all[i] = Outgoing{Topic: p.outgoing.topic, Message: &call.msg}
	}
	var results []error
	err := recovered(func() error {
		results = c.publisher.PublishBatch(all)
		return nil
	})
	if err == nil && results != nil && len(results) != len(sent) {
		err = fmt.Errorf("%w: %d for %d", errBatchResult, len(results), len(sent))
	}
	for i, p := range sent {
		result := err
		if err == nil && results != nil {
			result = results[i]
		}
		p.done <- calls[i].ctx.result(result)
	}
}
