package tests

import (
	"context"
	"maps"
	"strconv"
	"testing"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/envelope"
	"github.com/millrace/watermill-outbox/schema"
)

// forwarderTopic is where envelopes go.
const forwarderTopic = "forwarded"

// forwarding decorates a publisher as existing code does.
func forwarding(publisher message.Publisher) message.Publisher {
	return forwarder.NewPublisher(publisher, forwarder.PublisherConfig{ForwarderTopic: forwarderTopic})
}

// wrapped returns the messages in envelopes to the topics, in turn.
func wrapped(t testing.TB, messages []*message.Message, topics ...string) []*message.Message {
	t.Helper()
	all := make([]*message.Message, len(messages))
	for i, msg := range messages {
		var err error
		all[i], err = envelope.Wrap(topics[i%len(topics)], msg)
		require.NoError(t, err)
	}
	return all
}

// Existing code publishes through Watermill's forwarder.NewPublisher. With
// envelopes in the table, order by key and delays were hidden in JSON. Unwrapped,
// the rows are those of the messages: through every handle, at every size, in a
// transaction and with no privilege beyond the publisher's.
func TestForwardEnvelopeIsStoredAsItsMessage(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	role := f.role("publisher")
	f.grant(schema.Roles{Publisher: role})
	for kind, open := range poolKinds {
		publisher := forwarding(publisherOn(t, open(t, f.urlAs(role)), outbox.PublisherConfig{UnwrapEnvelopes: forwarderTopic}))
		for _, n := range []int{1, 2, 3, 200} {
			topic := kind + strconv.Itoa(n)
			sent := variety(n)
			require.NoError(t, publisher.Publish(topic, sent...))
			f.requireStored(t, topic, sent)

			topic += " delayed"
			all, now, later := mixed(n)
			for _, msg := range all {
				if msg.Metadata != nil {
					msg.Metadata.Set(outbox.DefaultKeyMetadata, "order 1")
				}
			}
			require.NoError(t, publisher.Publish(topic, all...))
			f.requireStored(t, topic, now)
			f.requireDeferred(t, topic, later)
			for _, row := range f.deferred(t, topic) {
				require.NotNil(t, row.Key)
				require.Equal(t, "order 1", *row.Key)
			}
		}
	}
	require.Empty(t, f.stored(t, forwarderTopic))
}

// The transaction comes with the context, which the envelope takes over.
func TestForwardEnvelopeInTheTransaction(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	publisher := forwarding(f.publisher(outbox.PublisherConfig{UnwrapEnvelopes: forwarderTopic, RequireTx: true}))
	require.ErrorIs(t, publisher.Publish("orders", newMessages(1)...), outbox.ErrNoTransaction)
	for _, n := range callSizes {
		for _, commit := range []bool{false, true} {
			tx, err := f.pool.Begin(t.Context())
			require.NoError(t, err)
			topic := strconv.Itoa(n)
			sent := newMessages(n)
			ctx := delay.WithContext(outbox.ContextWithTx(t.Context(), tx), delay.For(0))
			for _, msg := range sent {
				msg.Metadata.Set(outbox.DefaultKeyMetadata, msg.UUID)
				msg.SetContext(ctx)
			}
			require.NoError(t, publisher.Publish(topic, sent...))
			require.Empty(t, f.stored(t, topic))
			if !commit {
				require.NoError(t, tx.Rollback(t.Context()))
				require.Empty(t, f.stored(t, topic))
				continue
			}
			require.NoError(t, tx.Commit(t.Context()))
			require.Equal(t, uuids(sent), f.storedUUIDs(t, topic))
			for _, row := range f.stored(t, topic) {
				require.Equal(t, row.UUID, *row.Key)
				require.Contains(t, string(row.Metadata), delay.DelayedUntilKey, "the delay of the context was asked for")
			}
		}
	}
}

// Envelopes of one call may be for different topics. They are one statement all
// the same, and all or nothing.
func TestForwardEnvelopesOfOneCallForSeveralTopics(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	f.exec("ALTER TABLE outbox.messages ADD CONSTRAINT refused CHECK (uuid <> 'refused')")
	for kind, open := range poolKinds {
		publisher := publisherOn(t, open(t, f.url), outbox.PublisherConfig{UnwrapEnvelopes: forwarderTopic})
		for _, n := range []int{2, 5, 200} {
			a, b := kind+" a"+strconv.Itoa(n), kind+" b"+strconv.Itoa(n)
			sent := newMessages(n)
			last := sent[n-1].UUID
			sent[n-1].UUID = "refused"
			require.ErrorContains(t, publisher.Publish(forwarderTopic, wrapped(t, sent, a, b)...), "refused")
			require.Empty(t, f.stored(t, a))
			require.Empty(t, f.stored(t, b))

			sent[n-1].UUID = last
			require.NoError(t, publisher.Publish(forwarderTopic, wrapped(t, sent, a, b)...))
			var inA, inB []*message.Message
			for i, msg := range sent {
				if i%2 == 0 {
					inA = append(inA, msg)
				} else {
					inB = append(inB, msg)
				}
			}
			f.requireStored(t, a, inA)
			f.requireStored(t, b, inB)
			ids := make(map[string]int64)
			for _, row := range append(f.stored(t, a), f.stored(t, b)...) {
				ids[row.UUID] = row.ID
			}
			for i, msg := range sent[1:] {
				require.Less(t, ids[sent[i].UUID], ids[msg.UUID], "across topics, too, ids follow the order of the call")
			}

			// With some that wait.
			all, now, later := mixed(n)
			topic := kind + " mixed" + strconv.Itoa(n)
			require.NoError(t, publisher.Publish(forwarderTopic, wrapped(t, all, topic)...))
			f.requireStored(t, topic, now)
			f.requireDeferred(t, topic, later)
		}
	}

	pool, counter := f.countedPool(t)
	publisher := publisherOn(t, pool, outbox.PublisherConfig{UnwrapEnvelopes: forwarderTopic})
	for _, n := range []int{2, 5, 200} {
		outer := wrapped(t, newMessages(n), "a", "b", "c")
		require.NoError(t, publisher.Publish(forwarderTopic, outer...)) // prepares the statement
		before := counter.n.Load()
		require.NoError(t, publisher.Publish(forwarderTopic, outer...))
		few := counter.n.Load() - before
		sent := newMessages(n)
		require.NoError(t, publisher.Publish("one topic", sent...))
		require.Equal(t, few, counter.n.Load()-before-few, "as many round trips as for one topic")
	}
}

// What is no envelope would be a row that nobody can read. It is refused before
// any SQL, and so the caller's transaction stays usable.
func TestForwardEnvelopeRefusesBeforeAnySQL(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	pool, counter := f.countedPool(t)
	publisher := publisherOn(t, pool, outbox.PublisherConfig{UnwrapEnvelopes: forwarderTopic, MaxPayloadBytes: 1000})
	inner := func(msg *message.Message) []byte { return wrapped(t, []*message.Message{msg}, "orders")[0].Payload }
	for name, test := range map[string]struct {
		payload            []byte
		topic, uuid, field string
		is                 error
	}{
		"no envelope":           {[]byte("hello"), forwarderTopic, "outer", "payload", envelope.ErrNotEnvelope},
		"empty":                 {nil, forwarderTopic, "outer", "payload", envelope.ErrNotEnvelope},
		"no destination":        {[]byte(`{"uuid":"1"}`), forwarderTopic, "outer", "payload", envelope.ErrNotEnvelope},
		"trailing garbage":      {append(inner(message.NewMessage("1", nil)), '}'), forwarderTopic, "outer", "payload", envelope.ErrNotEnvelope},
		"destination with NUL":  {[]byte(`{"destination_topic":"a\u0000"}`), forwarderTopic, "outer", "payload", outbox.ErrInvalidTopic},
		"inner uuid with NUL":   {inner(message.NewMessage("a\x00", nil)), "orders", "a\x00", "uuid", outbox.ErrInvalidMessage},
		"inner payload too big": {inner(message.NewMessage("1", make([]byte, 1001))), "orders", "1", "payload", outbox.ErrInvalidMessage},
		"inner metadata":        {inner(withMetadata("1", nil, message.Metadata{"a": "\x00"})), "orders", "1", "metadata", outbox.ErrInvalidMessage},
		"inner delay":           {inner(withMetadata("1", nil, message.Metadata{delay.DelayedUntilKey: "soon"})), "orders", "1", "metadata", outbox.ErrInvalidMessage},
	} {
		t.Run(name, func(t *testing.T) {
			tx, err := pool.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(t.Context()) }()
			for _, n := range callSizes {
				messages := wrapped(t, newMessages(n), "orders")
				index := n / 2
				messages[index] = message.NewMessage("outer", test.payload)
				before := counter.n.Load()
				err := publishIn(t.Context(), publisher, tx, forwarderTopic, messages...)
				require.Equal(t, before, counter.n.Load())
				require.ErrorIs(t, err, outbox.ErrInvalidMessage)
				require.ErrorIs(t, err, test.is)
				var invalid *outbox.MessageError
				require.ErrorAs(t, err, &invalid)
				require.Equal(t, index, invalid.Index)
				require.Equal(t, test.topic, invalid.Topic)
				require.Equal(t, test.uuid, invalid.UUID)
				require.Equal(t, test.field, invalid.Field)
				require.ErrorContains(t, err, "message "+strconv.Itoa(index)+" ")
			}
			require.NoError(t, publishIn(t.Context(), publisher, tx, forwarderTopic, wrapped(t, newMessages(3), name)...))
			require.NoError(t, tx.Commit(t.Context()))
			require.Len(t, f.stored(t, name), 3)
		})
	}
	require.Empty(t, f.stored(t, "orders"))
	require.Empty(t, f.stored(t, forwarderTopic))

	_, err := outbox.NewPublisher(pool, outbox.PublisherConfig{Schema: oddSchema, UnwrapEnvelopes: "a\x00"}, nil)
	require.ErrorIs(t, err, outbox.ErrInvalidTopic)
	require.ErrorContains(t, err, "PublisherConfig.UnwrapEnvelopes")
}

// correlation is the key under which the tests' contexts have a correlation id.
type correlation struct{}

// correlating writes the correlation id of a message's context into its metadata.
func correlating(t testing.TB, publisher message.Publisher) message.Publisher {
	t.Helper()
	decorated, err := message.MessageTransformPublisherDecorator(func(msg *message.Message) {
		if id, ok := msg.Context().Value(correlation{}).(string); ok {
			middleware.SetCorrelationID(id, msg)
		}
	})(publisher)
	require.NoError(t, err)
	return decorated
}

// Field case F106. With a correlation decorator on the inside of the forwarder,
// it is the envelope that gets the id, and Watermill's Forwarder drops it there.
// Here the message arrives the same in both orders, with the values of its
// context seen by the decorators in between.
func TestForwardEnvelopeWithDecoratorsInBothOrders(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	unwrapping := f.publisher(outbox.PublisherConfig{UnwrapEnvelopes: forwarderTopic})
	consumer := f.consumer(nil)
	for name, publisher := range map[string]message.Publisher{
		"correlation outside": correlating(t, forwarding(unwrapping)),
		"correlation inside":  forwarding(correlating(t, unwrapping)),
	} {
		t.Run(name, func(t *testing.T) {
			var sent, want []*message.Message
			for i, metadata := range []message.Metadata{
				{}, {"a": "b", outbox.DefaultKeyMetadata: "order 1"}, {middleware.CorrelationIDMetadataKey: "its own"},
			} {
				msg := withMetadata("uuid "+strconv.Itoa(i), [][]byte{nil, {}, {0, 0xff}}[i], metadata)
				msg.SetContext(context.WithValue(t.Context(), correlation{}, "request 7"))
				expected := withMetadata(msg.UUID, msg.Payload, maps.Clone(metadata))
				middleware.SetCorrelationID("request 7", expected)
				sent, want = append(sent, msg), append(want, expected)
			}
			require.NoError(t, publisher.Publish(name, sent...))
			f.requireStored(t, name, want)

			_, messages := f.subscribe(consumer, outbox.SubscriberConfig{}, name)
			receiveWith(t, messages, len(want), func(i int, msg *message.Message) {
				require.NoError(t, msg.Context().Err(), "live until the ack")
				require.Equal(t, want[i].UUID, msg.UUID)
				require.Equal(t, want[i].Payload, msg.Payload)
				require.Equal(t, want[i].Metadata, msg.Metadata)
			})
		})
	}
}
