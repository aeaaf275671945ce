// Package kafka gets the examples a Kafka.
package kafka

import (
	"context"
	"errors"

	"github.com/IBM/sarama"

	"github.com/millrace/watermill-outbox/examples/internal/broker"
	"github.com/millrace/watermill-outbox/internal/brokertest/kafka"
)

// Start starts a cluster of one broker in this process, franz-go's kfake. Its address
// is host:port.
func Start(ctx context.Context) (*broker.Broker, error) {
	b, err := kafka.Start(ctx, kafka.Options{})
	if err != nil {
		return nil, err
	}
	return broker.New(b, func() (address string, err error) {
		err = b.Do(func(client sarama.Client) error {
			brokers := client.Brokers()
			if len(brokers) == 0 {
				return errors.New("the cluster has no brokers")
			}
			address = brokers[0].Addr()
			return nil
		})
		return address, err
	})
}
