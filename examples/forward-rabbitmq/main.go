// Command forward-rabbitmq forwards the outbox to a queue of RabbitMQ, over an outage
// of the connection.
//
//	go run ./examples/forward-rabbitmq
//
// An order service changes orders and publishes an event of each change in the same
// transaction; some are rolled back. A forwarder publishes them to a queue. Meanwhile
// the connections to the server are cut, and new ones refused for a while. The last
// line compares the queue with what was committed; a message whose confirmation was
// lost is there twice, as RabbitMQ notices that only with a plugin:
//
//	published=540 forwarded=540 lost=0 duplicated=0 out_of_order=0
//
// It needs no set-up but rabbitmq-server, or a RabbitMQ in OUTBOX_TEST_RABBITMQ_URL.
// Without a PostgreSQL in OUTBOX_DATABASE_URL it starts a throw-away one.
//
// Here is the forwarder, in publisher.go what it publishes with, and in classify.go
// whose fault an error is.
package main

import (
	"context"
	"io"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/examples/internal/broker/rabbitmq"
	"github.com/millrace/watermill-outbox/examples/internal/forwarding"
	"github.com/millrace/watermill-outbox/examples/internal/program"
	"github.com/millrace/watermill-outbox/forwarder"
)

func main() { forwarding.Main("forward-rabbitmq", run) }

func run(ctx context.Context, db *pgxpool.Pool, out io.Writer) (_ forwarding.Result, err error) {
	server, err := rabbitmq.Open(ctx)
	if err != nil {
		return forwarding.Result{}, err
	}
	defer program.Closing(&err, "RabbitMQ", server.Shutdown)
	publisher, err := newPublisher(server.Address)
	if err != nil {
		return forwarding.Result{}, err
	}
	defer program.Closing(&err, "publisher to RabbitMQ", publisher.Close)

	return forwarding.Scenario{
		Broker: server,
		Forwarder: func(consumer *outbox.Consumer, logger watermill.LoggerAdapter) (*forwarder.Forwarder, error) {
			return forwarder.New(forwarder.Config{
				Source: forwarder.FromOutbox(consumer, outbox.SubscriberConfig{}, outbox.ListTopics(forwarding.Topic)),
				Destinations: []forwarder.Destination{{
					Name:      "rabbitmq",
					Publisher: publisher,
					// The name of the queue. It must exist: what is published to a queue that
					// does not is confirmed, and lost.
					Topic: server.Prefix + forwarder.DefaultTopic,
					// The plugin rabbitmq-message-deduplication looks at this header; without
					// it nobody does.
					DeduplicationKey: forwarder.RabbitMQDeduplication,
					Classify:         classify,
				}},
			}, logger)
		},
	}.Run(ctx, db, out)
}
