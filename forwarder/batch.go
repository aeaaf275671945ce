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
// alone: messages that become ready while a call runs leave together in the next.
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
	// calls counts the callers, those that hang aside.
	calls int

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
	if len(c.queue) > 0 && c.calls < maxCalls {
		c.calls++
		go c.call()
	}
}

// leave makes a caller's place free.
func (c *combiner) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls--
	c.employ()
}

// call calls the publisher until nothing is queued, or a call has hung.
func (c *combiner) call() {
	for {
		batch := c.take()
		if len(batch) == 0 {
			c.leave()
			return
		}
		hangs := time.AfterFunc(c.patience, c.leave)
		c.send(batch)
		if !hangs.Stop() {
			return // another has the place
		}
	}
}

// take takes what may go together, in the order of arrival.
func (c *combiner) take() []*parcel {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, bytes := 0, 0
	for ; n < len(c.queue) && n < maxBatch; n++ {
		bytes += len(c.queue[n].msg.Payload)
		if n > 0 && bytes > maxBatchBytes {
			break
		}
	}
	batch := c.queue[:n:n]
	c.queue = c.queue[n:]
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
