package forwarder_test

import (
	"context"
	"fmt"
	"sync"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/millrace/watermill-outbox/forwarder"
)

// A Forwarder with a route: orders go to the broker, and refunds to the audit as
// well. From an outbox the source would be forwarder.FromOutbox.
func Example() {
	source := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, watermill.NopLogger{})
	for _, topic := range []string{"orders", "refunds"} {
		if err := source.Publish(topic, message.NewMessage(topic+"-1", nil)); err != nil {
			panic(err)
		}
	}

	arrived := make(chan string, 3)
	f, err := forwarder.New(forwarder.Config{
		// Each destination has a subscription, and so progress, of its own.
		Source: forwarder.FromSubscribers(func(string) (message.Subscriber, error) { return shared{source}, nil }, "orders", "refunds"),
		Destinations: []forwarder.Destination{
			{Name: "broker", Publisher: printer{"broker", arrived}, Topic: "shop.{topic}"},
			{Name: "audit", Publisher: printer{"audit", arrived}},
		},
		Route: func(_ *message.Message, topic string) ([]forwarder.Target, error) {
			targets := []forwarder.Target{{Destination: "broker"}}
			if topic == "refunds" {
				targets = append(targets, forwarder.Target{Destination: "audit"})
			}
			return targets, nil
		},
	}, nil)
	if err != nil {
		panic(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := f.Run(ctx); err != nil {
			panic(err)
		}
	})
	for range cap(arrived) {
		fmt.Println(<-arrived)
	}
	stop()
	running.Wait()
	if err := source.Close(); err != nil {
		panic(err)
	}
	// Unordered output:
	// broker has orders-1 in shop.orders
	// broker has refunds-1 in shop.refunds
	// audit has refunds-1 in refunds
}

// shared is a Subscriber that somebody else closes.
type shared struct{ message.Subscriber }

func (shared) Close() error { return nil }

// printer is a broker.
type printer struct {
	name string
	out  chan<- string
}

func (p printer) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		p.out <- fmt.Sprintf("%s has %s in %s", p.name, msg.UUID, topic)
	}
	return nil
}

func (printer) Close() error { return nil }
