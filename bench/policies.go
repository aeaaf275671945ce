package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"golang.org/x/sync/errgroup"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	policyMessages = 40_000
	policyKeys     = 1000
	policyInFlight = 64
	policyHandler  = 5 * time.Millisecond
	policyMin      = 0.8 // of the ideal
	poisonMin      = 0.9 // of the undisturbed rate
	// policyIdeal is what so many handlers at a time can do.
	policyIdeal = float64(policyInFlight) / (float64(policyHandler) / float64(time.Second))
)

// byKeyScenario: handlers that take 5 ms, 64 at a time, over 1000 keys, against
// what 64 handlers can do if they never wait for a message.
func byKeyScenario(ctx context.Context, b *bench) error {
	return policyScenario(ctx, b, outbox.OrderingByKey)
}

// unorderedScenario is the same without an order.
func unorderedScenario(ctx context.Context, b *bench) error {
	return policyScenario(ctx, b, outbox.OrderingUnordered)
}

func policyScenario(ctx context.Context, b *bench, ordering outbox.Ordering) (err error) {
	backlog, err := b.keyed(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, backlog.close()) }()
	metric := fmt.Sprintf("%d in flight, %s each, %d keys", policyInFlight, policyHandler, policyKeys)
	results, err := b.rounds(ctx, metric,
		contender{"ideal", func(context.Context) (float64, error) { return policyIdeal, nil }},
		contender{"sleepers", func(ctx context.Context) (float64, error) { return sleepers(ctx, backlog.n) }},
		contender{"outbox", func(ctx context.Context) (float64, error) { return backlog.handle(ctx, ordering, "") }})
	if err != nil {
		return err
	}
	b.add(newFigure(b.scenario, metric, "messages/s", results[2], results[0], minRatio(policyMin)))
	b.add(newFigure(b.scenario, metric+", against as many sleepers", "messages/s", results[2], results[1], nil))
	return nil
}

// poisonScenario: the other keys of a topic while one message is always nacked,
// against the same without it.
func poisonScenario(ctx context.Context, b *bench) (err error) {
	backlog, err := b.keyed(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, backlog.close()) }()
	metric := fmt.Sprintf("other keys, %d in flight, %s each", policyInFlight, policyHandler)
	results, err := b.rounds(ctx, metric,
		contender{"undisturbed", func(ctx context.Context) (float64, error) { return backlog.handle(ctx, outbox.OrderingByKey, "") }},
		contender{"one nacked", func(ctx context.Context) (float64, error) { return backlog.handle(ctx, outbox.OrderingByKey, "0") }})
	if err != nil {
		return err
	}
	b.add(newFigure(b.scenario, metric, "messages/s", results[1], results[0], minRatio(poisonMin)))
	return nil
}

// keyedBacklog is a topic whose messages take turns among keys "0" to "999".
type keyedBacklog struct {
	consumer *outbox.Consumer
	n        int
}

func (b *bench) keyed(ctx context.Context) (*keyedBacklog, error) {
	d, err := b.database(ctx)
	if err != nil {
		return nil, err
	}
	n := b.count(policyMessages)
	_, err = d.pool.Exec(ctx, `INSERT INTO outbox.messages (topic, key, uuid, metadata, payload)
		SELECT 'orders', (i % $1::bigint)::text, gen_random_uuid()::text, $2::text::json, `+payload200+`
		FROM generate_series(0, $3::bigint - 1) AS i`, policyKeys, metadata, n)
	if err := errors.Join(err, d.settle(ctx)); err != nil {
		return nil, err
	}
	consumer, err := d.consumer(outbox.ModeAuto)
	if err != nil {
		return nil, err
	}
	return &keyedBacklog{consumer: consumer, n: n}, nil
}

func (k *keyedBacklog) close() error { return k.consumer.Close() }

// handle subscribes a new group and returns how many messages per second were
// handled, each in a goroutine as a Router does. The first message of the poisoned
// key, if any, is nacked whenever it comes, and the key is not counted.
func (k *keyedBacklog) handle(ctx context.Context, ordering outbox.Ordering, poisoned string) (float64, error) {
	subscriber, err := outbox.NewSubscriber(k.consumer, outbox.SubscriberConfig{
		ConsumerGroup: newGroup(), Ordering: ordering, MaxInFlight: policyInFlight,
	}, nil)
	if err != nil {
		return 0, err
	}
	messages, err := subscriber.Subscribe(ctx, "orders")
	if err != nil {
		return 0, err
	}
	n := k.n
	if poisoned != "" {
		n -= (k.n + policyKeys - 1) / policyKeys
	}
	m := newMeter()
	m.time(1, int64(n))
	var handlers sync.WaitGroup
	defer handlers.Wait()
	received := make(chan struct{})
	defer func() { <-received }()
	defer subscriber.Close() //nolint:errcheck // always nil
	go func() {
		defer close(received)
		for msg := range messages {
			handlers.Go(func() { k.handleOne(msg, poisoned, m) })
		}
	}()
	took, err := m.await(ctx)
	return float64(n-1) / took.Seconds(), err
}

func (k *keyedBacklog) handleOne(msg *message.Message, poisoned string, m *meter) {
	time.Sleep(policyHandler)
	delivery, ok := outbox.DeliveryFromCtx(msg.Context())
	switch {
	case !ok:
		m.fail(errors.New("a message without a Delivery"))
	case delivery.OrderingKey == poisoned:
		msg.Nack()
	default:
		msg.Ack()
		m.row()
	}
}

// sleepers returns how many times a second as many goroutines can sleep for as
// long as a handler takes.
func sleepers(ctx context.Context, n int) (float64, error) {
	var group errgroup.Group
	start := time.Now()
	for range policyInFlight {
		group.Go(func() error {
			for range n / policyInFlight {
				time.Sleep(policyHandler)
			}
			return ctx.Err()
		})
	}
	err := group.Wait()
	return float64(n/policyInFlight*policyInFlight) / time.Since(start).Seconds(), err
}
