package tests

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/requeuer"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// retryQuickly is a Retry that does not let a test wait.
func retryQuickly(maxRetries int) message.HandlerMiddleware {
	return middleware.Retry{MaxRetries: maxRetries, InitialInterval: time.Millisecond, MaxInterval: time.Millisecond}.Middleware
}

// calls counts the calls of a handler by message. Safe for concurrent use.
type calls struct {
	mu    sync.Mutex
	count map[string]int
}

func (c *calls) add(msg *message.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.count == nil {
		c.count = map[string]int{}
	}
	c.count[msg.UUID]++
}

func (c *calls) get(uuid string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.count[uuid]
}

// A user cannot tell whether a message goes to the poison queue before or after
// its retries, and reports it as a bug. With PoisonQueue added before Retry, the
// handler is called until the retries are used up, then the message is published
// to the poison topic, once and with the reason, and acked. Field case F65.
func TestRouterRetriesBeforeThePoisonQueue(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	poison, err := middleware.PoisonQueue(publisher, "poison")
	require.NoError(t, err)
	consumer := f.consumer(nil)
	subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
	require.NoError(t, err)
	var called calls
	handled := make(chan string, 10)
	stop := startRouter(t, func(r *message.Router) {
		r.AddMiddleware(outbox.KeepError, poison, retryQuickly(3), middleware.Recoverer)
		r.AddConsumerHandler("handler", "orders", subscriber, func(msg *message.Message) error {
			called.add(msg)
			switch msg.UUID {
			case "fails":
				return errors.New("no such customer")
			case "panics":
				panic("no such product")
			}
			handled <- msg.UUID
			return nil
		})
	})
	bad := withMetadata("fails", []byte("payload"), message.Metadata{outbox.DefaultKeyMetadata: "key", "name": "value"})
	require.NoError(t, publisher.Publish("orders", bad, message.NewMessage("panics", nil), message.NewMessage("good", nil)))
	require.Equal(t, "good", await(t, handled), "the topic goes on")
	stop()
	require.Equal(t, 4, called.get("fails"))
	require.Equal(t, 4, called.get("panics"))
	require.Equal(t, 1, called.get("good"))

	require.Equal(t, []string{"fails", "panics"}, f.storedUUIDs(t, "poison"))
	_, poisoned := f.subscribe(consumer, outbox.SubscriberConfig{}, "poison")
	list := receive(t, poisoned, 2)
	require.Equal(t, message.Payload("payload"), list[0].Payload)
	require.Equal(t, message.Metadata{
		outbox.DefaultKeyMetadata: "key", "name": "value",
		middleware.ReasonForPoisonedKey: "no such customer", middleware.PoisonedTopicKey: "orders",
		middleware.PoisonedHandlerKey: "handler", middleware.PoisonedSubscriberKey: list[0].Metadata.Get(middleware.PoisonedSubscriberKey),
	}, list[0].Metadata)
	require.Contains(t, list[0].Metadata.Get(middleware.PoisonedSubscriberKey), "Subscriber")
	require.Contains(t, list[1].Metadata.Get(middleware.ReasonForPoisonedKey), "no such product")

	// The originals are acked: whoever subscribes next does not get them.
	last := newMessages(1)
	require.NoError(t, publisher.Publish("orders", last...))
	_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, "orders")
	requireNext(t, messages, last...)
}

// The wrong way round, which is what the test above guards against: Retry around
// PoisonQueue sees no error, and nothing is retried.
func TestRouterPoisonQueueInsideRetry(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	poison, err := middleware.PoisonQueue(publisher, "poison")
	require.NoError(t, err)
	subscriber, err := outbox.NewSubscriber(f.consumer(nil), outbox.SubscriberConfig{}, nil)
	require.NoError(t, err)
	var called calls
	handled := make(chan string, 1)
	stop := startRouter(t, func(r *message.Router) {
		r.AddMiddleware(retryQuickly(3), poison)
		r.AddConsumerHandler("handler", "orders", subscriber, func(msg *message.Message) error {
			called.add(msg)
			if msg.UUID == "fails" {
				return errors.New("failed")
			}
			handled <- msg.UUID
			return nil
		})
	})
	require.NoError(t, publisher.Publish("orders", message.NewMessage("fails", nil), message.NewMessage("good", nil)))
	await(t, handled)
	stop()
	require.Equal(t, 1, called.get("fails"))
}

// When the poison topic cannot be written to, the message is not acked: it comes
// again, and is in the poison topic in the end, once.
func TestRouterPoisonTopicThatCannotBeWritten(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.exec("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $do$ BEGIN RAISE EXCEPTION 'refused'; END $do$")
	f.exec("CREATE TRIGGER refuse BEFORE INSERT ON outbox.messages FOR EACH ROW WHEN (new.topic = 'poison') EXECUTE FUNCTION refuse()")
	publisher := f.publisher(outbox.PublisherConfig{})
	poison, err := middleware.PoisonQueue(publisher, "poison")
	require.NoError(t, err)
	subscriber, err := outbox.NewSubscriber(f.consumer(nil), outbox.SubscriberConfig{
		Retry: outbox.RetryConfig{MinBackoff: time.Millisecond, MaxBackoff: time.Millisecond},
	}, nil)
	require.NoError(t, err)
	failing, handled := make(chan struct{}), make(chan string, 1)
	stop := startRouter(t, func(r *message.Router) {
		r.AddMiddleware(poison)
		r.AddConsumerHandler("handler", "orders", subscriber, func(msg *message.Message) error {
			if msg.UUID == "fails" {
				failing <- struct{}{}
				return errors.New("failed")
			}
			handled <- msg.UUID
			return nil
		})
	})
	require.NoError(t, publisher.Publish("orders", message.NewMessage("fails", nil), message.NewMessage("good", nil)))
	for range 3 {
		await(t, failing)
	}
	require.Empty(t, handled)
	// The trigger itself could not be dropped beside inserts.
	f.exec("CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $do$ BEGIN RETURN new; END $do$")
	for good := ""; good == ""; {
		select {
		case <-failing: // the message of the third may have been written already
		case good = <-handled:
			require.Equal(t, "good", good)
		case <-time.After(waitFor):
			require.FailNow(t, "the good one does not come")
		}
	}
	stop()
	require.Equal(t, []string{"fails"}, f.storedUUIDs(t, "poison"))
}

// A bad message circles between its topic and the poison topic for ever: the
// Requeuer counts its rounds and nobody looks. With MaxRequeues it is tried once
// more per round, and then parked, with the counter as it is. Field case F66.
func TestRouterRequeuesEnd(t *testing.T) {
	t.Parallel()

	const maxRequeues = 3
	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	consumer := f.consumer(nil)
	poison, err := middleware.PoisonQueue(publisher, "poison")
	require.NoError(t, err)
	limit, err := outbox.MaxRequeues(maxRequeues, publisher, "parked")
	require.NoError(t, err)
	newSubscriber := func() message.Subscriber {
		subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{}, nil)
		require.NoError(t, err)
		return subscriber
	}

	var called calls
	handled := make(chan string, 10)
	stopHandler := startRouter(t, func(r *message.Router) {
		r.AddMiddleware(poison)
		r.AddConsumerHandler("handler", "orders", newSubscriber(), func(msg *message.Message) error {
			called.add(msg)
			if msg.UUID == "bad" {
				return errors.New("always")
			}
			handled <- msg.UUID
			return nil
		})
	})
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: waitFor}, watermill.NopLogger{})
	require.NoError(t, err)
	router.AddMiddleware(limit)
	requeue, err := requeuer.NewRequeuer(requeuer.Config{
		Subscriber: newSubscriber(), SubscribeTopic: "poison", Publisher: publisher, Router: router, Delay: 10 * time.Millisecond,
		GeneratePublishTopic: func(params requeuer.GeneratePublishTopicParams) (string, error) {
			return params.Message.Metadata.Get(middleware.PoisonedTopicKey), nil
		},
	}, watermill.NopLogger{})
	require.NoError(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		assert.NoError(t, requeue.Run(context.WithoutCancel(t.Context())))
	}()
	await(t, router.Running())

	require.NoError(t, publisher.Publish("orders", message.NewMessage("bad", []byte("payload"))))
	_, parked := f.subscribe(consumer, outbox.SubscriberConfig{}, "parked")
	msg := receive(t, parked, 1)[0]
	require.Equal(t, "bad", msg.UUID)
	require.Equal(t, message.Payload("payload"), msg.Payload)
	require.Equal(t, "3", msg.Metadata.Get(requeuer.RetriesKey))
	require.Equal(t, "always", msg.Metadata.Get(middleware.ReasonForPoisonedKey))

	// Another one goes the whole way, from the poison topic through the handler.
	// Whatever the bad one still did would have come before it.
	last := withMetadata("last", nil, message.Metadata{middleware.PoisonedTopicKey: "orders"})
	require.NoError(t, publisher.Publish("poison", last))
	require.Equal(t, "last", await(t, handled))
	require.NoError(t, router.Close())
	await(t, ended)
	stopHandler()
	require.Equal(t, 1+maxRequeues, called.get("bad"))
	require.Equal(t, []string{"bad", "bad", "bad", "bad", "last"}, f.storedUUIDs(t, "orders"))
	require.Equal(t, []string{"bad", "bad", "bad", "bad", "last"}, f.storedUUIDs(t, "poison"))
	require.Equal(t, []string{"bad"}, f.storedUUIDs(t, "parked"))
}
