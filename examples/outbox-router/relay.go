package main

import (
	"errors"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/nats-io/nats.go"

	outbox "github.com/millrace/watermill-outbox"
)

// maxRetries is how often the handler is called again at once.
const maxRetries = 3

// addHandlers adds the handler that relays, and the one that watches the poison topic.
//
// The handler publishes by itself. It could return the message instead and leave that
// to the Router, but the Router publishes what a handler returned after all
// middlewares have had their say: neither Retry nor PoisonQueue would see it fail.
//
// From the outside to the inside:
//
//  1. KeepError notes the error that the Router gets.
//  2. PoisonQueue takes what the broker will never take (see refused), and nothing
//     else. Without the filter an outage would empty the outbox into the poison topic.
//  3. Retry bridges a moment. A longer outage goes up as an error, the Router sends a
//     Nack, and the Subscriber delivers the message again, after a pause that grows.
//     The messages after it wait, so the order is kept.
func addHandlers(
	router *message.Router, consumer *outbox.Consumer, destination, poisonPublisher message.Publisher, book *book, logger watermill.LoggerAdapter,
) error {
	relayed, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{
		ConsumerGroup: "relay",
		// Short, for a demonstration.
		Retry: outbox.RetryConfig{MinBackoff: 10 * time.Millisecond, MaxBackoff: 100 * time.Millisecond},
	}, logger)
	if err != nil {
		return err
	}
	watcher, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: "support"}, logger)
	if err != nil {
		return err
	}
	poison, err := middleware.PoisonQueueWithFilter(poisonPublisher, poisonTopic, refused)
	if err != nil {
		return err
	}
	retry := middleware.Retry{
		MaxRetries: maxRetries, InitialInterval: 10 * time.Millisecond, MaxInterval: time.Second, Multiplier: 2,
		ShouldRetry: func(params middleware.RetryParams) bool { return !refused(params.Err) },
	}

	router.AddMiddleware(outbox.KeepError)
	router.AddConsumerHandler("relay", topic, relayed, func(msg *message.Message) error {
		// Before it is published: whoever is told that it was may end the program.
		book.before()
		err := destination.Publish(topic, msg)
		book.after(msg, err)
		return err
	}).AddMiddleware(poison, retry.Middleware)
	router.AddConsumerHandler("support", poisonTopic, watcher, book.poison)
	return nil
}

// refused reports whether the broker has looked at a message and will not take it the
// next time either: it is bigger than the stream or the server allows.
func refused(err error) bool {
	const messageTooBig nats.ErrorCode = 10054
	var api *nats.APIError
	return errors.Is(err, nats.ErrMaxPayload) || errors.As(err, &api) && api.ErrorCode == messageTooBig
}
