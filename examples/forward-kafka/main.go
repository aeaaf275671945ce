// Command forward-kafka forwards the outbox to a topic of Kafka, over an outage of the
// cluster.
//
//	go run ./examples/forward-kafka
//
// An order service changes orders and publishes an event of each change in the same
// transaction; some are rolled back. A forwarder publishes them to a topic, the changes
// of an order to one partition. Meanwhile the cluster ends and comes back. The last line
// compares the topic with what was committed; a message whose acknowledgement was lost
// is there twice:
//
//	published=540 forwarded=540 lost=0 duplicated=0 out_of_order=0
//
// It needs no set-up: without a PostgreSQL in OUTBOX_DATABASE_URL it starts a
// throw-away one, and what speaks Kafka's protocol is in this process.
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
	"github.com/millrace/watermill-outbox/examples/internal/broker/kafka"
	"github.com/millrace/watermill-outbox/examples/internal/forwarding"
	"github.com/millrace/watermill-outbox/examples/internal/program"
	"github.com/millrace/watermill-outbox/forwarder"
)

func main() { forwarding.Main("forward-kafka", run) }

func run(ctx context.Context, db *pgxpool.Pool, out io.Writer) (_ forwarding.Result, err error) {
	cluster, err := kafka.Start(ctx)
	if err != nil {
		return forwarding.Result{}, err
	}
	defer program.Closing(&err, "Kafka", cluster.Shutdown)
	publisher, err := newPublisher(cluster.Address)
	if err != nil {
		return forwarding.Result{}, err
	}
	defer program.Closing(&err, "publisher to Kafka", publisher.Close)

	return forwarding.Scenario{
		Broker: cluster,
		Forwarder: func(consumer *outbox.Consumer, logger watermill.LoggerAdapter) (*forwarder.Forwarder, error) {
			return forwarder.New(forwarder.Config{
				Source: forwarder.FromOutbox(consumer, outbox.SubscriberConfig{}, outbox.ListTopics(forwarding.Topic)),
				Destinations: []forwarder.Destination{{
					Name:      "kafka",
					Publisher: publisher,
					Topic:     cluster.Prefix + forwarder.DefaultTopic,
					Classify:  classify,
				}},
			}, logger)
		},
	}.Run(ctx, db, out)
}
