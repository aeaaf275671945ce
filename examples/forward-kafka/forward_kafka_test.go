package main

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/millrace/watermill-outbox/examples/internal/forwarding/forwardingtest"
	"github.com/millrace/watermill-outbox/internal/pgtest"
)

func TestMain(m *testing.M) {
	// The clock of sarama's metrics has no end.
	pgtest.Main(m, goleak.IgnoreTopFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick"))
}

func TestForwardKafka(t *testing.T) {
	t.Parallel()

	forwardingtest.Run(t, run, "cannot produce message")
}
