package main

import (
	"errors"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/millrace/watermill-outbox/examples/internal/forwarding/forwardingtest"
	"github.com/millrace/watermill-outbox/forwarder"
)

func TestClassify(t *testing.T) {
	t.Parallel()

	forwardingtest.Classify(t, classify, map[error]forwarder.Fault{
		amqp.ErrClosed:                                  forwarder.FaultDestination,
		&amqp.Error{Code: amqp.ResourceLocked}:          forwarder.FaultDestination,
		&amqp.Error{Code: amqp.ContentTooLarge}:         forwarder.FaultPermanent,
		errors.New("not connected to AMQP"):             forwarder.FaultUnknown,
		errors.New("delivery not confirmed for tag 17"): forwarder.FaultUnknown,
	})
}
