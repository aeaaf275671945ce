//go:build !race

package main

import (
	"testing"

	"github.com/millrace/watermill-outbox/examples/internal/forwarding/forwardingtest"
)

// Not with the race detector, which reports watermill-amqp v3.0.2: Publish looks at whether
// it is connected while its connection's goroutine writes that.
func TestForwardRabbitMQ(t *testing.T) {
	t.Parallel()

	forwardingtest.Run(t, run, "of destination \"rabbitmq\": ")
}
