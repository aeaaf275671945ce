// Package tests holds the tests that need a database. They go through the
// public packages, and through internal ones where a guarantee is theirs. See
// the package documentation of internal/pgtest for where the database comes
// from.
package tests

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// children are what the test binary does instead of testing when it was started
// by a test as a process of its own, by the environment variable that says so.
var children = map[string]func() error{
	childURL: consumeAsChild, poisonURL: handleAsPoisoned, neighbourURL: handleBesidePoison, orderURL: handleAsReplica,
	scheduledURL: scheduleAsChild, forwardURL: forwardAsChild,
}

func TestMain(m *testing.M) {
	for name, run := range children {
		if os.Getenv(name) == "" {
			continue
		}
		if err := run(); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	pgtest.Main(m,
		// Watermill's reconnect test leaves this one behind.
		goleak.IgnoreTopFunction("github.com/ThreeDotsLabs/watermill/pubsub/tests.TestReconnect.func2"),
		// watermill-amqp's publisher, closed while its connection ends, waits for
		// another connection for ever.
		goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp.(*ConnectionWrapper).handleConnectionClose"),
		// The clock of sarama's metrics has no end.
		goleak.IgnoreTopFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick"),
	)
}
