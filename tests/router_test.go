package tests

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// startRouter runs a Router until the test stops it.
func startRouter(t *testing.T, add func(*message.Router)) (stop func()) {
	t.Helper()
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: waitFor}, watermill.NopLogger{})
	require.NoError(t, err)
	add(router)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		assert.NoError(t, router.Run(context.WithoutCancel(t.Context())))
	}()
	await(t, router.Running())
	return func() {
		require.NoError(t, router.Close())
		await(t, ended)
	}
}

// The Router is closed while a handler works on its last message, whose result it
// publishes at the end. Elsewhere the publisher is closed under it, or its ack is
// lost because the context has ended: the result is missing, or there twice.
// Field case F52.
func TestRouterClosedWhileAHandlerRuns(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(3)
	require.NoError(t, publisher.Publish("orders", sent...))
	results := f.publisher(outbox.PublisherConfig{})
	started, finish := make(chan string), make(chan struct{})
	handler := func(msg *message.Message) error {
		started <- msg.UUID
		<-finish
		if err := msg.Context().Err(); err != nil {
			return err
		}
		result := message.NewMessage("result of "+msg.UUID, nil)
		result.SetContext(msg.Context())
		return results.Publish("results", result)
	}
	run := func() (stop func()) {
		subscriber, err := outbox.NewSubscriber(f.consumer(nil), outbox.SubscriberConfig{CloseTimeout: waitFor}, nil)
		require.NoError(t, err)
		return startRouter(t, func(r *message.Router) { r.AddConsumerHandler("handler", "orders", subscriber, handler) })
	}

	stop := run()
	require.Equal(t, sent[0].UUID, await(t, started))
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		stop()
	}()
	select {
	case <-stopped:
		require.FailNow(t, "the Router did not wait for the handler")
	case <-time.After(500 * time.Millisecond): // as long as Close needs to do its worst
	}
	close(finish)
	await(t, stopped)
	require.Equal(t, []string{"result of " + sent[0].UUID}, f.storedUUIDs(t, "results"))

	stop = run()
	require.Equal(t, sent[1].UUID, await(t, started), "a message that was handled came again")
	require.Equal(t, sent[2].UUID, await(t, started))
	f.awaitStored(t, "orders")
	stop()
	require.Equal(t, []string{"result of " + sent[0].UUID, "result of " + sent[1].UUID, "result of " + sent[2].UUID}, f.storedUUIDs(t, "results"))
}

// One Subscriber serves several handlers of a Router, whose channels all end with
// it, and two Subscribers of ours serve one Router; a message goes from topic to
// topic through the Router's own publishing.
func TestRouterPassesMessagesOn(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	consumer := f.consumer(nil)
	publisher := f.publisher(outbox.PublisherConfig{})
	sent := newMessages(50)
	arrived := make(chan string, len(sent))
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	require.NoError(t, err)
	stop := startRouter(t, func(r *message.Router) {
		pass := func(msg *message.Message) ([]*message.Message, error) {
			return message.Messages{message.NewMessage(msg.UUID, msg.Payload)}, nil
		}
		for _, step := range [][2]string{{"a", "b"}, {"b", "c"}} {
			r.AddHandler(step[0], step[0], subscriber, step[1], f.publisher(outbox.PublisherConfig{}), pass)
		}
		r.AddConsumerHandler("c", "c", subscriber, func(msg *message.Message) error {
			arrived <- msg.UUID
			return nil
		})
	})
	for _, msg := range sent {
		require.NoError(t, publisher.Publish("a", msg))
	}
	for _, msg := range sent {
		require.Equal(t, msg.UUID, await(t, arrived))
	}
	stop()
	require.Empty(t, arrived)
}
