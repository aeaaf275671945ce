package main

import (
	"errors"
	"io"
	"testing"

	"github.com/IBM/sarama"
	"github.com/eapache/go-resiliency/breaker"

	"github.com/millrace/watermill-outbox/examples/internal/forwarding/forwardingtest"
	"github.com/millrace/watermill-outbox/forwarder"
)

func TestClassify(t *testing.T) {
	t.Parallel()

	forwardingtest.Classify(t, classify, map[error]forwarder.Fault{
		sarama.ErrOutOfBrokers:                  forwarder.FaultDestination,
		sarama.ErrNotEnoughReplicas:             forwarder.FaultDestination,
		sarama.ErrUnknownTopicOrPartition:       forwarder.FaultDestination,
		breaker.ErrBreakerOpen:                  forwarder.FaultDestination,
		io.EOF:                                  forwarder.FaultDestination,
		sarama.ErrMessageSizeTooLarge:           forwarder.FaultPermanent,
		sarama.ConfigurationError("too large"):  forwarder.FaultPermanent,
		errors.New("something that is unknown"): forwarder.FaultUnknown,
	})
}
