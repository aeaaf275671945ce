package main

import (
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	// maxRetries is how often the handler is called again: four calls in all.
	maxRetries = 3
	// callsPerSecond bounds the calls of the payment provider.
	callsPerSecond = 100
)

// addHandlers adds the handler of the orders with its middlewares, and the one
// that watches the poison topic, which has none of them: a poison queue around it
// would publish what it fails at to the topic that it reads.
//
// Read the middlewares from the outside to the inside. An error starts at the
// handler and goes up the list until one of them keeps it:
//
//  1. KeepError notes the error that the Router gets, so that a dead letter can
//     say it. It is on the Router, and so around those of the handler.
//  2. PoisonQueue publishes the message to another topic and returns no error:
//     the message is acked. It must be outside Retry; inside, it would take the
//     first error, and nothing would be retried.
//  3. Retry calls what is below it again.
//  4. Throttle is inside Retry, so that each call of the provider counts. Outside,
//     retries would come on top of the bound.
//  5. Recoverer makes an error of a panic, for those above.
//
// Three more things to know:
//
//   - The poison topic is at least once: the message is published there before it
//     is acked. A process that is killed in between does it again.
//   - While Retry waits, the message is in flight and its topic stands still. For
//     long pauses return the error instead: the Subscriber delivers again, with a
//     pause of its own (outbox.RetryConfig).
//   - Watermill's Timeout leaves a context on the message that has ended, with
//     which nothing can be published. Inside Retry set ResetContextOnRetry, and
//     outside of Timeout, as PoisonQueue is, put the message's own context back.
func addHandlers(router *message.Router, payer, watcher message.Subscriber, poisonPublisher message.Publisher, p *payments) error {
	poison, err := middleware.PoisonQueue(poisonPublisher, poisonTopic)
	if err != nil {
		return err
	}
	retry := middleware.Retry{
		MaxRetries: maxRetries, InitialInterval: 20 * time.Millisecond, MaxInterval: time.Second, Multiplier: 2,
	}
	throttle := middleware.NewThrottle(callsPerSecond, time.Second)

	router.AddMiddleware(outbox.KeepError)
	router.AddConsumerHandler("payments", ordersTopic, payer, p.pay).AddMiddleware(
		poison,
		retry.Middleware,
		throttle.Middleware,
		middleware.Recoverer,
	)
	router.AddConsumerHandler("support", poisonTopic, watcher, p.poisoned)
	return nil
}
