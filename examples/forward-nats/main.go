// Command forward-nats forwards the outbox to NATS JetStream, over an outage of the
// server.
//
//	go run ./examples/forward-nats
//
// An order service changes orders and publishes an event of each change in the same
// transaction; some are rolled back. A forwarder publishes them to a stream. Meanwhile
// the server ends and comes back. The last line compares the stream with what was
// committed:
//
//	published=540 forwarded=540 lost=0 duplicated=0 out_of_order=0
//
// It needs no set-up: without a PostgreSQL in OUTBOX_DATABASE_URL it starts a
// throw-away one, and the NATS server is in this process.
//
// Here is the forwarder, and in publisher.go what it publishes with.
package main

import (
	"context"
	"io"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/examples/internal/broker/jetstream"
	"github.com/millrace/watermill-outbox/examples/internal/forwarding"
	"github.com/millrace/watermill-outbox/examples/internal/program"
	"github.com/millrace/watermill-outbox/forwarder"
	classify "github.com/millrace/watermill-outbox/forwarder/jetstream"
)

func main() { forwarding.Main("forward-nats", run) }

func run(ctx context.Context, db *pgxpool.Pool, out io.Writer) (_ forwarding.Result, err error) {
	server, err := jetstream.Start(ctx)
	if err != nil {
		return forwarding.Result{}, err
	}
	defer program.Closing(&err, "NATS server", server.Shutdown)
	publisher, err := newPublisher(server.Address)
	if err != nil {
		return forwarding.Result{}, err
	}
	defer program.Closing(&err, "publisher to NATS", publisher.Close)

	return forwarding.Scenario{
		Broker: server, Deduplicates: true,
		Forwarder: func(consumer *outbox.Consumer, logger watermill.LoggerAdapter) (*forwarder.Forwarder, error) {
			return forwarder.New(forwarder.Config{
				Source: forwarder.FromOutbox(consumer, outbox.SubscriberConfig{}, outbox.ListTopics(forwarding.Topic)),
				Destinations: []forwarder.Destination{{
					Name:      "nats",
					Publisher: publisher,
					// The stream drops what it had within two minutes: a message whose
					// acknowledgement was lost is published again, and there once.
					DeduplicationKey: forwarder.NATSMessageID,
					Classify:         classify.Classify,
				}},
			}, logger)
		},
	}.Run(ctx, db, out)
}
