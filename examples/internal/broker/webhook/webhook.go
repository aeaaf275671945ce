// Package webhook gets the examples a service that takes messages as HTTP requests.
package webhook

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/examples/internal/broker"
	"github.com/millrace/watermill-outbox/forwarder"
	"github.com/millrace/watermill-outbox/internal/brokertest/webhook"
)

// Start starts the service in this process. Its address is an http:// URL, and a topic
// is a path.
func Start(ctx context.Context) (*broker.Broker, error) {
	b, err := webhook.Start(ctx)
	if err != nil {
		return nil, err
	}
	return broker.New(service{b}, func() (string, error) { return "http://" + b.Proxy().Addr(), nil })
}

// service heeds forwarder.IdempotencyKey, as who offers a webhook should.
type service struct{ *webhook.Broker }

// Received returns what the service has done: what came with a key that it had
// before it has answered, and not done again.
func (s service) Received(ctx context.Context, topic string) (done []*message.Message, err error) {
	messages, err := s.Broker.Received(ctx, topic)
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, msg := range messages {
		key := msg.Metadata.Get(forwarder.IdempotencyKey)
		if key == "" || !seen[key] {
			done = append(done, msg)
		}
		seen[key] = true
	}
	return done, nil
}
