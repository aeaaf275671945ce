package tests

import (
	"bytes"
	"maps"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/forwarder"
)

// identities are messages of all kinds, as they must arrive.
func identities() []*message.Message {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	key := message.Metadata{outbox.DefaultKeyMetadata: "key"}
	with := func(metadata message.Metadata) message.Metadata {
		metadata = maps.Clone(metadata)
		maps.Copy(metadata, key)
		return metadata
	}
	return []*message.Message{
		withMetadata("nil", nil, nil),
		withMetadata("empty", []byte{}, message.Metadata{}),
		withMetadata("bytes", all, key),
		withMetadata("trace", []byte(`{"a": 1}`), with(message.Metadata{
			"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1,b=2",
			"correlation_id": "request 7", "Content-Type": "application/json",
		})),
		withMetadata("text", []byte("ä\x00\xff"), with(message.Metadata{"text": `ä 'ß' "\ ☃`, "empty": "", "CASE": "1", "case": "2"})),
		withMetadata("uuid with ä, spaces & "+strings.Repeat("x", 200), []byte(" "), key),
		withMetadata("large", bytes.Repeat([]byte{0, 0xff}, 100_000), with(message.Metadata{"large": strings.Repeat("ä", 1000)})),
	}
}

// requireIdentities checks that all arrived as they were, once. Metadata that are nil are
// empty, and so are payloads.
func (e *end) requireIdentities(t *testing.T) {
	t.Helper()
	received := map[string]*message.Message{}
	for _, msg := range e.received(t, forwardTopic) {
		require.NotContains(t, received, msg.UUID, e.name)
		received[msg.UUID] = msg
	}
	want := identities()
	require.Len(t, received, len(want), e.name)
	for _, msg := range want {
		got := received[msg.UUID]
		require.NotNil(t, got, "%s: %s is missing", e.name, msg.UUID)
		require.True(t, bytes.Equal(msg.Payload, got.Payload), "%s: payload of %s", e.name, msg.UUID)
		metadata := message.Metadata{}
		maps.Copy(metadata, msg.Metadata)
		assert.Equal(t, metadata, got.Metadata, "%s: metadata of %s", e.name, msg.UUID)
	}
}

// UUID, metadata and payload are the same in each broker as they were published to the
// outbox, whatever they are, and as they came from another Pub/Sub. Field case F106.
func TestForwardIdentity(t *testing.T) {
	t.Parallel()

	for name, source := range map[string]func(*testing.T, *relay) forwarder.Source{
		"from the outbox": func(t *testing.T, r *relay) forwarder.Source {
			r.publish(t, forwardTopic, identities()...)
			return forwarder.FromOutbox(r.consumer(nil), outbox.SubscriberConfig{}, outbox.ListTopics(forwardTopic))
		},
		"from subscribers": func(t *testing.T, _ *relay) forwarder.Source {
			return forwarder.FromSubscribers(func(string) (message.Subscriber, error) {
				channel := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, nil)
				t.Cleanup(func() { require.NoError(t, channel.Close()) })
				return channel, channel.Publish(forwardTopic, identities()...)
			}, forwardTopic)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			r := newRelay(t, forwardTopic)
			for _, e := range r.ends {
				e.destination.DeduplicateBy = forwarder.ByUUID
			}
			from := source(t, r)
			_, stop := runForwarder(t, forwarder.Config{Source: from, Destinations: r.destinations()}, r.logger)
			r.awaitTaken(t, identities())
			stop()
			for _, e := range r.ends {
				e.requireIdentities(t)
			}
		})
	}
}

// FromSubscriber serves one destination: what one broker has in the outbox goes to it as
// it is.
func TestForwardFromOneSubscriber(t *testing.T) {
	t.Parallel()

	r := newRelay(t, forwardTopic)
	r.publish(t, forwardTopic, identities()...)
	consumer := r.consumer(nil)
	for _, e := range r.ends {
		subscriber, err := outbox.NewSubscriber(consumer, outbox.SubscriberConfig{ConsumerGroup: e.name}, nil)
		require.NoError(t, err)
		e.destination.DeduplicateBy = forwarder.ByUUID
		_, stop := runForwarder(t, forwarder.Config{
			Source: forwarder.FromSubscriber(subscriber, forwardTopic), Destinations: []forwarder.Destination{e.destination},
		}, r.logger)
		e.awaitTaken(t, identities())
		stop()
		e.requireIdentities(t)
	}
}
