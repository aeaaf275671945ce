// Package jetstream gets the examples a NATS server with JetStream.
package jetstream

import (
	"context"

	"github.com/millrace/watermill-outbox/examples/internal/broker"
	"github.com/millrace/watermill-outbox/internal/brokertest/jetstream"
)

// Start starts a server in this process. Its address is a nats:// URL.
func Start(ctx context.Context) (*broker.Broker, error) {
	b, err := jetstream.Start(ctx)
	if err != nil {
		return nil, err
	}
	return broker.New(b, func() (string, error) { return "nats://" + b.Proxy().Addr(), nil })
}
