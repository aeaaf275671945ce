package forwarder

import (
	"context"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
)

// BatchPublisher is a Publisher that really sends many messages at once, faster
// than one by one. A Destination's Publisher that has this method is used by it:
// messages that become ready while a call runs leave together in the next one.
// Publish is used too, to find the one that fails among many.
type BatchPublisher interface {
	message.Publisher

	// PublishBatch publishes the messages in order, and returns when they are safe.
	// With an error, accepted says how many of the first ones are, and none of the
	// others may become so any more: they are published again. It is not called
	// concurrently by one Destination. Each message carries its own context.
	PublishBatch(topic string, messages ...*message.Message) (accepted int, err error)
}

const (
	// maxBatch and maxBatchBytes bound what is in one call of PublishBatch. A
	// single message may have more bytes.
	maxBatch      = 1000
	maxBatchBytes = 1 << 20
)

// combiner makes batches of what several lines publish at the same time.
type combiner struct {
	publisher BatchPublisher

	mu     sync.Mutex
	queue  []*parcel
	queued chan struct{}
}

// parcel is what one line publishes to one topic.
type parcel struct {
	topic    string
	messages []*message.Message
	bytes    int
	// done gets how many were accepted. If not all were, each of the others is to
	// be published by itself.
	done chan int
}

func newCombiner(publisher BatchPublisher) *combiner {
	return &combiner{publisher: publisher, queued: make(chan struct{}, 1)}
}

// publish returns how many of the messages were accepted, when none of the others
// may be any more.
func (c *combiner) publish(topic string, messages []*message.Message) int {
	p := &parcel{topic: topic, messages: messages, done: make(chan int, 1)}
	for _, msg := range messages {
		p.bytes += len(msg.Payload)
	}
	c.mu.Lock()
	c.queue = append(c.queue, p)
	c.mu.Unlock()
	select {
	case c.queued <- struct{}{}:
	default:
	}
	return <-p.done
}

// run calls the publisher until the context ends and nothing is queued.
func (c *combiner) run(ctx context.Context) {
	for {
		batch := c.take()
		if len(batch) > 0 {
			c.send(batch)
			continue
		}
		select {
		case <-c.queued:
		case <-ctx.Done():
			return
		}
	}
}

// take takes what may go together: of one topic, in the order of arrival.
func (c *combiner) take() []*parcel {
	c.mu.Lock()
	defer c.mu.Unlock()
	var batch []*parcel
	kept := c.queue[:0]
	n, bytes := 0, 0
	for _, p := range c.queue {
		fits := n+len(p.messages) <= maxBatch && bytes+p.bytes <= maxBatchBytes
		if len(batch) > 0 && (p.topic != batch[0].topic || !fits) {
			kept = append(kept, p)
			continue
		}
		batch = append(batch, p)
		n, bytes = n+len(p.messages), bytes+p.bytes
	}
	clear(c.queue[len(kept):])
	c.queue = kept
	return batch
}

// send calls the publisher and tells each line how much of its own is safe.
func (c *combiner) send(batch []*parcel) {
	var all []*message.Message
	for _, p := range batch {
		all = append(all, p.messages...)
	}
	accepted, err := 0, error(nil)
	err = recovered(func() error {
		accepted, err = c.publisher.PublishBatch(batch[0].topic, all...)
		return err
	})
	if err == nil {
		accepted = len(all)
	}
	accepted = min(max(accepted, 0), len(all))
	for _, p := range batch {
		n := min(accepted, len(p.messages))
		accepted -= n
		p.done <- n
	}
}
