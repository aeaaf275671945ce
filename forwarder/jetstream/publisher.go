package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	wmnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"

	"github.com/millrace/watermill-outbox/forwarder"
)

// ErrClosed is returned by Publish and PublishBatch after Close.
var ErrClosed = errors.New("jetstream: publisher is closed")

// PublisherConfig configures a Publisher. The zero value works.
type PublisherConfig struct {
	// Marshaler makes messages of NATS. Defaults to that of watermill-nats, which
	// puts metadata into headers; so a DeduplicationKey of
	// forwarder.NATSMessageID becomes the header that JetStream looks at.
	Marshaler wmnats.Marshaler
}

// Publisher publishes to streams, which must exist. It returns when JetStream has
// acknowledged, and waits no longer than the context of a message: one that is
// reported as failed then may be in the stream all the same. It is safe for
// concurrent use.
type Publisher struct {
	js     nats.JetStreamContext
	config PublisherConfig

	mu      sync.Mutex
	closed  bool
	running sync.WaitGroup
}

var _ forwarder.BatchPublisher = (*Publisher)(nil)

// NewPublisher returns a Publisher on a connection of the caller's, whom it belongs
// to. Make it with nats.ReconnectBufSize(-1): with a buffer, what is published
// while the server is away is reported as failed and sent all the same later, out
// of order. Make js with nats.PublishAsyncTimeout, for instance of the time limit of
// the messages: without one the client keeps each acknowledgement that never comes
// in mind until it is connected anew, and with 4000 of them publishes no more.
func NewPublisher(js nats.JetStreamContext, config PublisherConfig) (*Publisher, error) {
	if js == nil {
		return nil, errors.New("jetstream: NewPublisher needs a JetStreamContext")
	}
	if config.Marshaler == nil {
		config.Marshaler = &wmnats.NATSMarshaler{}
	}
	return &Publisher{js: js, config: config}, nil
}

// Publish publishes one message after the other, up to the first that fails.
func (p *Publisher) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		if errs := p.PublishBatch([]forwarder.Outgoing{{Topic: topic, Message: msg}}); errs != nil {
			return errs[0]
		}
	}
	return nil
}

// PublishBatch sends all messages and then waits for the acknowledgements.
func (p *Publisher) PublishBatch(batch []forwarder.Outgoing) []error {
	if !p.begin() {
		errs := make([]error, len(batch))
		for i := range errs {
			errs[i] = ErrClosed
		}
		return errs
	}
	defer p.running.Done()
	futures := make([]nats.PubAckFuture, len(batch))
	var errs []error
	fail := func(i int, err error) {
		if err == nil {
			return
		}
		if errs == nil {
			errs = make([]error, len(batch))
		}
		errs[i] = fmt.Errorf("jetstream: publish to %q: %w", batch[i].Topic, err)
	}
	for i, out := range batch {
		var err error
		futures[i], err = p.send(out)
		fail(i, err)
	}
	// The last first: when it is acknowledged the others are, as a rule, and who has to
	// wait for one takes more of the machine than the message itself.
	for i, future := range slices.Backward(futures) {
		if future != nil {
			fail(i, await(batch[i].Message.Context(), future))
		}
	}
	return errs
}

func (p *Publisher) send(out forwarder.Outgoing) (nats.PubAckFuture, error) {
	if err := out.Message.Context().Err(); err != nil {
		return nil, cmp.Or(context.Cause(out.Message.Context()), err)
	}
	msg, err := p.config.Marshaler.Marshal(out.Topic, out.Message)
	if err != nil {
		return nil, err
	}
	if err := checkHeader(msg.Header); err != nil {
		return nil, err
	}
	return p.js.PublishMsgAsync(msg)
}

func await(ctx context.Context, future nats.PubAckFuture) error {
	ok := future.Ok()
	select {
	case <-ok: // without asking the context for more than it has
		return nil
	default:
	}
	failed := future.Err()
	select {
	case <-ok:
		return nil
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	select { // while others were waited for
	case <-ok:
		return nil
	case err := <-failed:
		return err
	default:
		return context.Cause(ctx)
	}
}

// begin reports whether the publisher is open, and counts the call.
func (p *Publisher) begin() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.running.Add(1)
	return true
}

// Close waits for running calls, and lets no other begin. The connection stays
// open. It may be called more than once, and always returns nil.
func (p *Publisher) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.running.Wait()
	return nil
}
