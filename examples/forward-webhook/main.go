// Command forward-webhook forwards the outbox to an HTTP server, over an outage of the
// server.
//
//	go run ./examples/forward-webhook
//
// An order service changes orders and publishes an event of each change in the same
// transaction; some are rolled back. A forwarder sends each to a webhook, with a header
// by which the server knows one that it had before. Meanwhile the server ends and comes
// back. The last line compares what the server has done with what was committed:
//
//	published=540 forwarded=540 lost=0 duplicated=0 out_of_order=0
//
// It needs no set-up: without a PostgreSQL in OUTBOX_DATABASE_URL it starts a
// throw-away one, and the server is in this process.
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
	"github.com/millrace/watermill-outbox/examples/internal/broker/webhook"
	"github.com/millrace/watermill-outbox/examples/internal/forwarding"
	"github.com/millrace/watermill-outbox/examples/internal/program"
	"github.com/millrace/watermill-outbox/forwarder"
)

func main() { forwarding.Main("forward-webhook", run) }

func run(ctx context.Context, db *pgxpool.Pool, out io.Writer) (_ forwarding.Result, err error) {
	server, err := webhook.Start(ctx)
	if err != nil {
		return forwarding.Result{}, err
	}
	defer program.Closing(&err, "webhook", server.Shutdown)
	publisher, err := newPublisher(server.Address)
	if err != nil {
		return forwarding.Result{}, err
	}
	defer program.Closing(&err, "publisher to the webhook", publisher.Close)

	return forwarding.Scenario{
		Broker: server, Deduplicates: true,
		Forwarder: func(consumer *outbox.Consumer, logger watermill.LoggerAdapter) (*forwarder.Forwarder, error) {
			return forwarder.New(forwarder.Config{
				Source: forwarder.FromOutbox(consumer, outbox.SubscriberConfig{}, outbox.ListTopics(forwarding.Topic)),
				Destinations: []forwarder.Destination{{
					Name:             "webhook",
					Publisher:        publisher,
					DeduplicationKey: forwarder.IdempotencyKey,
					Classify:         classify,
					// No more requests at a time than the server likes.
					MaxInFlight: maxRequests,
				}},
			}, logger)
		},
	}.Run(ctx, db, out)
}
