package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	wmnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"

	"github.com/millrace/watermill-outbox/forwarder"
)

// ErrClosed is returned by Publish and PublishBatch after Close.
var ErrClosed = errors.New("jetstream: publisher is closed")

// PublisherConfig configures a Publisher. The zero value works.
type PublisherConfig struct {
	// Marshaler makes messages of NATS. By default they are those of watermill-nats,
	// which have metadata in headers; so a DeduplicationKey of
	// forwarder.NATSMessageID becomes the header that JetStream looks at.
	Marshaler wmnats.Marshaler
	// AckTimeout is how long JetStream may take for a message whose context has no
	// deadline; those of a forwarder have one. Defaults to
	// forwarder.DefaultPublishTimeout.
	AckTimeout time.Duration
}

// Publisher publishes to streams, which must exist. It returns when JetStream has
// acknowledged, and waits for that no longer than the context of a message, or than the
// connection lasts: one that is reported as failed then may be in the stream all the
// same. To send a message the client takes the time it takes, whatever the context
// says: while a server does not read, nats.FlusherTimeout, and that of others before
// it; while it connects anew, nats.Timeout. So a message may be sent that late. It is
// safe for concurrent use.
type Publisher struct {
	conn   connection
	config PublisherConfig
	acks   *acks
	inbox  *nats.Subscription
	// ended is closed by Close, watched when nobody watches the connection any more.
	ended, watched chan struct{}

	mu      sync.Mutex
	closed  bool
	running sync.WaitGroup
}

var _ forwarder.BatchPublisher = (*Publisher)(nil)

// connection is what a Publisher needs of a *nats.Conn.
type connection interface {
	NewInbox() string
	Subscribe(subject string, callback nats.MsgHandler) (*nats.Subscription, error)
	PublishMsg(msg *nats.Msg) error
	Status() nats.Status
	Stats() nats.Statistics
	StatusChanged(statuses ...nats.Status) chan nats.Status
	RemoveStatusListener(changed chan nats.Status)
}

// NewPublisher returns a Publisher on a connection of the caller's, whom it belongs
// to. Make it with nats.ReconnectBufSize(-1): with a buffer, what is published
// while the server is away is reported as failed and sent all the same later, out
// of order. Close it, and whatever publishes with it, before the connection is closed
// or drained. An error is the configuration's, or the connection's.
func NewPublisher(conn *nats.Conn, config PublisherConfig) (*Publisher, error) {
	if conn == nil {
		return nil, errors.New("jetstream: NewPublisher needs a connection")
	}
	return newPublisher(conn, config)
}

func newPublisher(conn connection, config PublisherConfig) (*Publisher, error) {
	if config.Marshaler == nil {
		config.Marshaler = headers{}
	}
	if config.AckTimeout < 0 {
		return nil, fmt.Errorf("jetstream: PublisherConfig.AckTimeout must not be negative, is %s", config.AckTimeout)
	}
	config.AckTimeout = cmp.Or(config.AckTimeout, forwarder.DefaultPublishTimeout)
	p := &Publisher{
		conn: conn, config: config, acks: newAcks(conn.NewInbox()),
		ended: make(chan struct{}), watched: make(chan struct{}),
	}
	var err error
	if p.inbox, err = conn.Subscribe(p.acks.inbox+"*", p.acks.receive); err != nil {
		return nil, fmt.Errorf("jetstream: subscribe to acknowledgements: %w", err)
	}
	go p.watch(conn.StatusChanged(nats.RECONNECTING), conn.StatusChanged(nats.CONNECTED), conn.StatusChanged(nats.CLOSED))
	return p, nil
}

// watch fails what is not answered when the connection is lost, until it is closed or
// the publisher is.
//
// The client forgets a listener that has not heard the last when there is something new
// (sendStatusEvent of nats.go). So each status has a channel of its own, and
// RECONNECTING, which is told for each server that refuses, a new one after each outage,
// whose end shows as well that there was one.
func (p *Publisher) watch(lost, found, closed chan nats.Status) {
	defer close(p.watched)
	defer func() {
		for _, listener := range []chan nats.Status{lost, found, closed} {
			p.conn.RemoveStatusListener(listener)
		}
	}()
	for {
		select {
		case <-p.ended:
			return
		case <-lost:
		case <-found:
			former := lost
			lost = p.conn.StatusChanged(nats.RECONNECTING)
			p.conn.RemoveStatusListener(former)
		case <-closed:
			p.acks.fail(math.MaxUint64, nats.ErrConnectionClosed)
			return
		}
		// In this order: if it is connected anew in between, that is told.
		reconnects := p.conn.Stats().Reconnects
		if p.conn.Status() != nats.CONNECTED {
			reconnects++ // the last one is lost, too
		}
		p.acks.fail(reconnects, nats.ErrDisconnected)
	}
}

// unusable returns why nothing can be published now.
func unusable(status nats.Status) error {
	switch status {
	case nats.CONNECTED:
		return nil
	case nats.DRAINING_PUBS, nats.DRAINING_SUBS: // it would be sent, and its answer not be received
		return nats.ErrConnectionDraining
	case nats.CLOSED:
		return nats.ErrConnectionClosed
	case nats.CONNECTING, nats.DISCONNECTED, nats.RECONNECTING:
	}
	return nats.ErrConnectionReconnecting
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
	deadline := time.Now().Add(p.config.AckTimeout)
	call := p.acks.begin(len(batch), p.conn.Stats().Reconnects)
	defer call.end()
	// It is watched from here on, so what is sent on a connection that is lost fails.
	down := unusable(p.conn.Status())
	for i, out := range batch {
		if call.known(i) { // the connection was lost
			continue
		}
		err := down
		if err == nil {
			err = p.send(out, call.reply(i), deadline)
		}
		if err != nil {
			call.settle(i, err)
		}
	}
	// The last first: when it is acknowledged the others are, as a rule, and who has to
	// wait for one takes more of the machine than the message itself.
	for i := len(batch) - 1; i >= 0; i-- {
		answered := call.watch(i)
		if answered == nil {
			continue
		}
		ctx, cancel := bounded(batch[i].Message.Context(), deadline)
		select {
		case <-answered:
		case <-ctx.Done():
			call.settle(i, cmp.Or(context.Cause(ctx), context.DeadlineExceeded))
		}
		cancel()
	}
	return call.errors(batch)
}

// bounded returns a context that has a deadline, its own if it has one.
func bounded(ctx context.Context, deadline time.Time) (context.Context, context.CancelFunc) {
	if _, own := ctx.Deadline(); own {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, deadline)
}

// send sends a message whose answer goes to reply.
func (p *Publisher) send(out forwarder.Outgoing, reply string, deadline time.Time) error {
	ctx := out.Message.Context()
	if err := ctx.Err(); err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	if _, own := ctx.Deadline(); !own && !time.Now().Before(deadline) {
		return context.DeadlineExceeded // since the client took so long for those before
	}
	msg, err := p.config.Marshaler.Marshal(out.Topic, out.Message)
	if err != nil {
		return err
	}
	if err := checkHeader(msg.Header); err != nil {
		return err
	}
	msg.Reply = reply
	return p.conn.PublishMsg(msg)
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
	first := !p.closed
	p.closed = true
	p.mu.Unlock()
	p.running.Wait()
	if first {
		close(p.ended)
	}
	<-p.watched
	_ = p.inbox.Unsubscribe() // fails if it is, or the connection is closed: then no more comes
	return nil
}
