package outbox

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/ThreeDotsLabs/watermill/components/requeuer"
	"github.com/ThreeDotsLabs/watermill/message"
)

// MaxRequeues is a Router middleware that ends the rounds of Watermill's
// Requeuer, which counts them and leaves the limit to its user: a message that
// has been requeued limit times already is published to the parking topic
// instead, unchanged, and acked. Others are passed on. With 0 every message is
// parked at once.
//
// Give the Requeuer a Router of its own, with this middleware on it:
//
//	router := message.NewDefaultRouter(logger)
//	router.AddMiddleware(maxRequeues)
//	requeuer.NewRequeuer(requeuer.Config{Router: router, ...}, logger)
//
// On the Router of the handler it would park messages before their last attempt.
// What it publishes is at least once, as with PoisonQueue: it is there before
// the ack.
func MaxRequeues(limit int, publisher message.Publisher, parkingTopic string) (message.HandlerMiddleware, error) {
	if limit < 0 {
		return nil, fmt.Errorf("outbox: limit of requeues must not be negative, is %d", limit)
	}
	if publisher == nil {
		return nil, errors.New("outbox: no publisher for parked messages")
	}
	if err := ValidateTopic(parkingTopic); err != nil {
		return nil, err
	}
	return func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			// What is no number counts as none, as in the Requeuer.
			requeued, err := strconv.Atoi(msg.Metadata.Get(requeuer.RetriesKey))
			if err != nil {
				requeued = 0
			}
			if requeued < limit {
				return h(msg)
			}
			if err := publisher.Publish(parkingTopic, msg); err != nil {
				return nil, fmt.Errorf("outbox: park message %.200q after %d requeues: %w", msg.UUID, requeued, err)
			}
			return nil, nil
		}
	}, nil
}
