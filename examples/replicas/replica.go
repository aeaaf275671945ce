package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/examples/internal/program"
)

const (
	// replicaName and replicaDatabase are the environment that makes a process a
	// replica.
	replicaName     = "REPLICAS_NAME"
	replicaDatabase = "REPLICAS_DATABASE"

	// maxInFlight is how many messages a replica handles at once, each of another
	// order.
	maxInFlight = 16
)

// replicaMain is main of a replica: it does not return in one.
func replicaMain() {
	name, url := os.Getenv(replicaName), os.Getenv(replicaDatabase)
	if url == "" {
		return
	}
	if err := serve(name, url); err != nil {
		fmt.Fprintf(os.Stderr, "replica %s: %s\n", name, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// serve handles messages until it is asked to stop, by a signal as in a
// deployment, or because the program that started it is gone.
func serve(name, url string) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // ends with the one who holds the other end
		stop()
	}()

	logger := newLogger(name)
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return err
	}
	config.MaxConns = maxInFlight / 2
	db, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer db.Close()

	consumer, err := outbox.NewConsumer(config, outbox.ConsumerConfig{Lease: lease}, logger)
	if err != nil {
		return err
	}
	defer program.Closing(&err, "consumer", consumer.Close) // after the Router
	// Shards counts when the group is new; later Reshard changes it.
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{
		ConsumerGroup: group, Shards: shards, Ordering: outbox.OrderingByKey, MaxInFlight: maxInFlight,
	}, logger)
	if err != nil {
		return err
	}
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		return err
	}
	h := &handler{db: db, name: name}
	router.AddConsumerHandler(group, topic, subscriber, h.handle)
	return router.Run(ctx) // until ctx ends, and what is in flight is handled
}

// handler is what a replica does with the messages.
type handler struct {
	db   *pgxpool.Pool
	name string
}

// handle takes a few milliseconds and writes down that it was here. It is called
// concurrently, for one message of an order at a time.
//
// What is written, is written with the message's context: it ends when the shard
// is lost, before another replica can have it. A killed replica may have written
// what comes again; a handler that must not do a thing twice would look at the
// version that it wrote last, in the same transaction.
func (h *handler) handle(msg *message.Message) error {
	var event OrderChanged
	if err := json.Unmarshal(msg.Payload, &event); err != nil {
		return fmt.Errorf("event %s: %w", msg.UUID, err)
	}
	time.Sleep(time.Duration(2+event.Version%4) * time.Millisecond)
	delivery, _ := outbox.DeliveryFromCtx(msg.Context())
	_, err := h.db.Exec(msg.Context(),
		"INSERT INTO handled (order_id, version, replica, pid, waited) VALUES ($1, $2, $3, $4, clock_timestamp() - $5::timestamptz)",
		event.OrderID, event.Version, h.name, os.Getpid(), delivery.PublishedAt)
	return err
}
