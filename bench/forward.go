package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	stock "github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/forwarder"
	"github.com/millrace/watermill-outbox/forwarder/jetstream"
	broker "github.com/millrace/watermill-outbox/internal/brokertest/jetstream"
)

const (
	forwardMessages = 80_000
	// forwardStock is how many Watermill's own Forwarder gets, which takes longer.
	forwardStock    = 16_000
	forwardKeys     = 1000
	forwardInFlight = 64
	forwardTurns    = 3 // in a round: Watermill's waits for the machine, ours uses it, and both vary
	forwardTopic    = "orders"

	forwardOverStock = 5.0
	forwardOfDirect  = 0.5
	forwardBesides   = 0.9
)

// forwardScenario: from the outbox to JetStream in this process, against Watermill's
// own Forwarder over the same outbox, and against publishing the same messages to
// it directly, as many at a time.
func forwardScenario(ctx context.Context, b *bench) (err error) {
	b.options.rounds *= forwardTurns
	s, err := b.forwarding(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	metric := fmt.Sprintf("to JetStream, %d in flight, %d keys", forwardInFlight, forwardKeys)
	results, err := b.rounds(ctx, metric,
		contender{"direct", s.direct}, contender{"Watermill's Forwarder", s.stock},
		contender{"outbox", func(ctx context.Context) (float64, error) { return s.forward(ctx, s.publisher) }},
		contender{"outbox in batches", func(ctx context.Context) (float64, error) { return s.forward(ctx, s.batches) }})
	if err != nil {
		return err
	}
	b.add(newFigure(b.scenario, metric+", of direct", "messages/s", results[2], results[0], minRatio(forwardOfDirect)))
	b.add(newFigure(b.scenario, metric+", over Watermill's", "messages/s", results[2], results[1], nil))
	b.add(newFigure(b.scenario, metric+", in batches, of direct", "messages/s", results[3], results[0], minRatio(forwardOfDirect)))
	b.add(newFigure(b.scenario, metric+", in batches, over Watermill's", "messages/s", results[3], results[1], minRatio(forwardOverStock)))

	metric = "to one destination, while another is dead"
	results, err = b.rounds(ctx, metric,
		contender{"alone", func(ctx context.Context) (float64, error) { return s.forward(ctx, s.publisher) }},
		contender{"beside a dead one", func(ctx context.Context) (float64, error) {
			return s.forward(ctx, s.publisher, forwarder.Destination{Name: "dead", Publisher: deadPublisher{}})
		}})
	if err != nil {
		return err
	}
	b.add(newFigure(b.scenario, metric, "messages/s", results[1], results[0], minRatio(forwardBesides)))
	return nil
}

// forwarding is an outbox with messages to forward, and a broker to forward to.
type forwarding struct {
	consumer *outbox.Consumer
	broker   *broker.Broker
	// publisher is that of watermill-nats, batches ours, on conn.
	publisher message.Publisher
	batches   message.Publisher
	conn      *nats.Conn
	messages  []*message.Message
	// envelopes is how many messages are in envelopes, for Watermill's Forwarder.
	envelopes int
}

func (b *bench) forwarding(ctx context.Context) (s *forwarding, err error) {
	s = &forwarding{envelopes: b.count(forwardStock)}
	d, err := b.database(ctx)
	if err != nil {
		return nil, err
	}
	publisher, err := outbox.NewPublisher(d.pool, outbox.PublisherConfig{}, nil)
	if err != nil {
		return nil, err
	}
	for i := range b.count(forwardMessages) {
		msg := message.NewMessage(watermill.NewUUID(), make([]byte, 200))
		msg.Metadata = message.Metadata{
			"correlation_id": watermill.NewUUID(), "event_name": "order.placed", outbox.DefaultKeyMetadata: fmt.Sprint(i % forwardKeys),
		}
		s.messages = append(s.messages, msg)
	}
	wrapped := stock.NewPublisher(publisher, stock.PublisherConfig{ForwarderTopic: "envelopes"})
	err = errors.Join(publisher.Publish(forwardTopic, s.messages...), wrapped.Publish(forwardTopic, s.messages[:s.envelopes]...), d.settle(ctx))
	if err != nil {
		return nil, err
	}
	if s.consumer, err = d.consumer(outbox.ModeAuto); err != nil {
		return nil, err
	}
	if s.broker, err = broker.Start(ctx); err != nil {
		return nil, errors.Join(err, s.consumer.Close())
	}
	if err = s.broker.Declare(ctx, forwardTopic); err == nil {
		s.publisher, err = broker.NewPublisher(s.broker.URL(), nil)
	}
	if err == nil {
		s.conn, err = nats.Connect(s.broker.URL(), nats.ReconnectBufSize(-1))
	}
	if err == nil {
		s.batches, err = jetstream.NewPublisher(s.conn, jetstream.PublisherConfig{})
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *forwarding) close() error {
	var err error
	if s.publisher != nil {
		err = s.publisher.Close()
	}
	if s.conn != nil {
		s.conn.Close()
	}
	return errors.Join(err, s.consumer.Close(), s.broker.Shutdown())
}

// direct publishes the messages, each goroutine its share.
func (s *forwarding) direct(ctx context.Context) (float64, error) {
	var group errgroup.Group
	start := time.Now()
	for i := range forwardInFlight {
		group.Go(func() error {
			for j := i; j < len(s.messages); j += forwardInFlight {
				if err := errors.Join(s.publisher.Publish(forwardTopic, s.messages[j]), ctx.Err()); err != nil {
					return err
				}
			}
			return nil
		})
	}
	err := group.Wait()
	return float64(len(s.messages)) / time.Since(start).Seconds(), err
}

// stock runs Watermill's Forwarder until it has forwarded all of its messages.
func (s *forwarding) stock(ctx context.Context) (float64, error) {
	subscriber, err := outbox.NewSubscriber(s.consumer, outbox.SubscriberConfig{ConsumerGroup: newGroup()}, nil)
	if err != nil {
		return 0, err
	}
	counted := newCounted(s.publisher, s.envelopes)
	f, err := stock.NewForwarder(subscriber, counted, watermill.NopLogger{}, stock.Config{ForwarderTopic: "envelopes"})
	if err != nil {
		return 0, err
	}
	return counted.rate(ctx, f.Run, f.Close)
}

// forward runs a Forwarder until the broker has all messages, beside other
// destinations.
func (s *forwarding) forward(ctx context.Context, publisher message.Publisher, others ...forwarder.Destination) (float64, error) {
	counted := newCounted(publisher, len(s.messages))
	target, inFlight := message.Publisher(counted), forwardInFlight
	if batches, ok := publisher.(forwarder.BatchPublisher); ok {
		target, inFlight = countedBatches{counted, batches}, 4*forwardInFlight
	}
	f, err := forwarder.New(forwarder.Config{
		Source:       forwarder.FromOutbox(s.consumer, outbox.SubscriberConfig{ConsumerGroup: newGroup()}, outbox.ListTopics(forwardTopic)),
		Destinations: append([]forwarder.Destination{{Publisher: target, MaxInFlight: inFlight}}, others...),
	}, nil)
	if err != nil {
		return 0, err
	}
	return counted.rate(ctx, f.Run, f.Close)
}

// counted counts what a publisher has published, of n messages.
type counted struct {
	message.Publisher

	n     int
	meter *meter
}

// newCounted takes the time between the first message and the last of so many.
func newCounted(publisher message.Publisher, n int) *counted {
	c := &counted{Publisher: publisher, n: n, meter: newMeter()}
	c.meter.time(1, int64(n))
	return c
}

func (c *counted) Publish(topic string, messages ...*message.Message) error {
	if err := c.Publisher.Publish(topic, messages...); err != nil {
		return err
	}
	for range messages {
		c.meter.row()
	}
	return nil
}

// Close leaves the publisher open for the next turn.
func (c *counted) Close() error { return nil }

// countedBatches counts those of a publisher of batches.
type countedBatches struct {
	*counted

	batches forwarder.BatchPublisher
}

func (c countedBatches) PublishBatch(batch []forwarder.Outgoing) []error {
	errs := c.batches.PublishBatch(batch)
	for range batch {
		if errs == nil { // or the meter says that some are missing
			c.meter.row()
		}
	}
	return errs
}

// rate runs a forwarder and returns how many messages a second it publishes.
func (c *counted) rate(ctx context.Context, run func(context.Context) error, end func() error) (float64, error) {
	ended := make(chan error, 1)
	go func() {
		err := run(ctx)
		c.meter.fail(err)
		ended <- err
	}()
	took, err := c.meter.await(ctx)
	err = errors.Join(err, end(), <-ended)
	return float64(c.n-1) / took.Seconds(), err
}

// deadPublisher is of a broker that refuses connections.
type deadPublisher struct{}

func (deadPublisher) Publish(string, ...*message.Message) error {
	return &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
}

func (deadPublisher) Close() error { return nil }
