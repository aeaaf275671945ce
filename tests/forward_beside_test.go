package tests

import (
	"context"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// Two Forwarders with default names to all brokers, and a Router whose handler has the
// same messages, run beside each other on one Consumer. Each broker and the handler get
// everything, once; when one Forwarder ends the other goes on, and so does the Router when
// both have. Field case F107.
func TestForwardBesideARouterAndAnother(t *testing.T) {
	t.Parallel()

	r := newRelay(t, forwardTopic)
	for _, e := range r.ends {
		e.destination.MaxInFlight = 4
	}
	consumer := r.consumer(nil)
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: waitFor}, watermill.NopLogger{})
	require.NoError(t, err)
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	require.NoError(t, err)
	handled := make(chan string, 1000)
	router.AddConsumerHandler("forwarder", forwardTopic, subscriber, func(msg *message.Message) error {
		handled <- msg.UUID
		return nil
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		assert.NoError(t, router.Run(context.WithoutCancel(t.Context())))
	}()
	await(t, router.Running())
	_, stopFirst := r.run(t, consumer, nil)
	_, stopSecond := r.run(t, consumer, nil)

	sent := brokerMessages(90, 6)
	for i, stop := range []func(){stopFirst, stopSecond, func() {
		require.NoError(t, router.Close())
		await(t, ended)
	}} {
		some := sent[30*i : 30*(i+1)]
		r.publish(t, forwardTopic, some...)
		var got []string
		for range some {
			got = append(got, receiveOne(t, handled))
		}
		require.Equal(t, uuids(some), got)
		if i < 2 { // one Forwarder is there at least
			r.awaitTaken(t, some)
		}
		stop()
	}
	require.Empty(t, handled)
	r.requireNoLetters(t)
	for _, e := range r.ends {
		e.requireOnce(t, forwardTopic, sent[:60])
	}
}
