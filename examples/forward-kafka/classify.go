package main

import (
	"errors"

	"github.com/IBM/sarama"
	"github.com/eapache/go-resiliency/breaker"

	"github.com/millrace/watermill-outbox/forwarder"
)

// classify knows the errors of sarama: a message that is too large, for the client or
// for the broker, is at fault for good, and so is one that the broker calls invalid. All
// else that a broker answers, and that there is none, is the cluster's fault, and so is
// that the client refuses a partition for a while after that. What is of the connection,
// forwarder.Classify knows.
func classify(err error) forwarder.Fault {
	var (
		client sarama.ConfigurationError // "Attempt to produce message larger than configured …"
		broker sarama.KError
	)
	switch {
	case errors.Is(err, sarama.ErrOutOfBrokers), errors.Is(err, sarama.ErrNotConnected), errors.Is(err, sarama.ErrClosedClient), errors.Is(err, breaker.ErrBreakerOpen):
		return forwarder.FaultDestination
	case errors.As(err, &client):
		return forwarder.FaultPermanent
	case errors.As(err, &broker):
		switch broker {
		case sarama.ErrMessageSizeTooLarge, sarama.ErrInvalidMessage, sarama.ErrInvalidMessageSize, sarama.ErrInvalidRecord:
			return forwarder.FaultPermanent
		}
		return forwarder.FaultDestination
	}
	return forwarder.Classify(err)
}
