//go:build !race

package tests

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/brokertest"
	"github.com/millrace/watermill-outbox/internal/brokertest/rabbitmq"
)

// Not with the race detector, which reports watermill-amqp v3.0.2: Publish looks at
// whether it is connected while its connection's goroutine writes that.
func init() {
	brokerKinds = append(brokerKinds, brokerKind{"rabbitmq", asBroker(rabbitmq.Open), asBroker(rabbitmq.Start), rabbitmq.Connect})
}

// A broker with other users can't be ended, and its topics are one's own.
func TestForwardBrokerShared(t *testing.T) {
	t.Parallel()
	one := newBroker(t, asBroker(rabbitmq.Open))
	other := newBroker(t, asBroker(rabbitmq.Open))
	require.False(t, one.Owned())
	require.ErrorIs(t, one.Kill(t.Context()), brokertest.ErrNotOwned)
	require.ErrorIs(t, one.StartAgain(t.Context()), brokertest.ErrNotOwned)
	require.ErrorIs(t, one.Restart(t.Context()), brokertest.ErrNotOwned)

	messages := brokerMessages(2, 1)
	for i, broker := range []brokertest.Broker{one, other} {
		require.NoError(t, broker.Declare(t.Context(), "orders"))
		require.NoError(t, brokerPublisher(t, broker).Publish("orders", messages[i]))
	}
	for i, broker := range []brokertest.Broker{one, other} {
		// Twice: reading takes nothing away.
		for range 2 {
			received, err := broker.Received(t.Context(), "orders")
			require.NoError(t, err)
			require.Equal(t, uuids(messages[i:i+1]), uuids(received))
		}
	}
}
