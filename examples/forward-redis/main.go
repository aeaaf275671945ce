// Command forward-redis forwards the outbox to a stream of Redis, over an outage of the
// server.
//
//	go run ./examples/forward-redis
//
// An order service changes orders and publishes an event of each change in the same
// transaction; some are rolled back. A forwarder publishes them to a stream. Meanwhile
// the server is killed and comes back. The last line compares the stream with what was
// committed; a message whose answer was lost is there twice, as Redis does not
// notice, which is up to twenty of them, one of each order:
//
//	published=540 forwarded=540 lost=0 duplicated=20 out_of_order=0
//
// It needs no set-up but redis-server, or a Redis in OUTBOX_TEST_REDIS_URL, whose
// connections are cut then. Without a PostgreSQL in OUTBOX_DATABASE_URL it starts a
// throw-away one.
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
	"github.com/millrace/watermill-outbox/examples/internal/broker/redis"
	"github.com/millrace/watermill-outbox/examples/internal/forwarding"
	"github.com/millrace/watermill-outbox/examples/internal/program"
	"github.com/millrace/watermill-outbox/forwarder"
)

func main() { forwarding.Main("forward-redis", run) }

func run(ctx context.Context, db *pgxpool.Pool, out io.Writer) (_ forwarding.Result, err error) {
	server, err := redis.Open(ctx)
	if err != nil {
		return forwarding.Result{}, err
	}
	defer program.Closing(&err, "Redis", server.Shutdown)
	publisher, err := newPublisher(server.Address)
	if err != nil {
		return forwarding.Result{}, err
	}
	defer program.Closing(&err, "publisher to Redis", publisher.Close)

	return forwarding.Scenario{
		Broker: server,
		Forwarder: func(consumer *outbox.Consumer, logger watermill.LoggerAdapter) (*forwarder.Forwarder, error) {
			return forwarder.New(forwarder.Config{
				Source: forwarder.FromOutbox(consumer, outbox.SubscriberConfig{}, outbox.ListTopics(forwarding.Topic)),
				Destinations: []forwarder.Destination{{
					Name:      "redis",
					Publisher: publisher,
					// A server has one space of names for all its users.
					Topic:    server.Prefix + forwarder.DefaultTopic,
					Classify: classify,
				}},
			}, logger)
		},
	}.Run(ctx, db, out)
}
