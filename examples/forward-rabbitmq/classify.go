package main

import (
	"errors"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/millrace/watermill-outbox/forwarder"
)

// classify knows the errors of AMQP: a message that is too large is at fault for good,
// and all else that the server or the client says by a code is of the connection or of
// the server. That the publisher is not connected, and that a message was not confirmed,
// come as errors without a type: those are left to the forwarder, which sees whether
// other messages get through.
func classify(err error) forwarder.Fault {
	var problem *amqp.Error
	if !errors.As(err, &problem) {
		return forwarder.Classify(err)
	}
	if problem.Code == amqp.ContentTooLarge {
		return forwarder.FaultPermanent
	}
	return forwarder.FaultDestination
}
