package tests

import (
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// One event bus for the life of the service, injected once, and still each
// event belongs to the transaction of its caller.
func TestEventBusIsTransactional(t *testing.T) {
	t.Parallel()

	type orderPlaced struct{ ID int }
	f := newFixture(t)
	bus, err := cqrs.NewEventBusWithConfig(f.publisher(outbox.PublisherConfig{RequireTx: true}), cqrs.EventBusConfig{
		GeneratePublishTopic: func(params cqrs.GenerateEventPublishTopicParams) (string, error) { return params.EventName, nil },
		Marshaler:            cqrs.JSONMarshaler{GenerateName: cqrs.StructName},
		OnPublish: func(params cqrs.OnEventSendParams) error {
			params.Message.Metadata.Set(outbox.DefaultKeyMetadata, "order")
			return nil
		},
	})
	require.NoError(t, err)
	require.ErrorIs(t, bus.Publish(t.Context(), orderPlaced{0}), outbox.ErrNoTransaction)

	place := func(tx any, ids ...int) {
		ctx := outbox.ContextWithTx(t.Context(), tx)
		for _, id := range ids {
			require.NoError(t, bus.Publish(ctx, orderPlaced{id}))
		}
	}
	rolledBack, err := f.connect(t).Begin(t.Context())
	require.NoError(t, err)
	place(rolledBack, 1, 2)
	committed, err := openSQL(t, "postgres", f.url).BeginTx(t.Context(), nil)
	require.NoError(t, err)
	place(committed, 3, 4)
	require.NoError(t, rolledBack.Rollback(t.Context()))
	require.Empty(t, f.stored(t, "orderPlaced"))
	require.NoError(t, committed.Commit())

	_, messages := f.subscribe(f.consumer(nil), outbox.SubscriberConfig{}, "orderPlaced")
	var got []string
	for _, msg := range receive(t, messages, 2) {
		require.Equal(t, "orderPlaced", msg.Metadata.Get("name"))
		got = append(got, string(msg.Payload))
	}
	require.Equal(t, `{"ID":3},{"ID":4}`, strings.Join(got, ","))
	require.Equal(t, "order", *f.stored(t, "orderPlaced")[0].Key)
}

// Watermill components publish what they consumed again, the object itself and
// whatever context it has: a context of a subscription, which no longer has
// anything to do with a transaction here.
func TestPublishConsumedMessageAgain(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := f.publisher(outbox.PublisherConfig{})
	consumer := f.consumer(nil)
	require.NoError(t, publisher.Publish("in", withMetadata("1", []byte("x"), message.Metadata{"a": "b"})))
	_, in := f.subscribe(consumer, outbox.SubscriberConfig{}, "in")
	msg := await(t, in)
	require.NoError(t, publisher.Publish("out", msg))
	require.True(t, msg.Ack())
	f.requireStored(t, "out", []*message.Message{msg})
}
