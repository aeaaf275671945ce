package envelope

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"
)

// messagesOfAllKinds are what an envelope must carry unchanged.
func messagesOfAllKinds() []*message.Message {
	all := []*message.Message{
		message.NewMessage("", nil),
		message.NewMessage("1", []byte{}),
		message.NewMessage("an odd <uuid> & \"more\" \u2028", []byte{0, 1, 0xfe, 0xff}),
		message.NewMessage("🙂", []byte(`{"b":1,"a":1.0}`)),
		message.NewMessage("4", []byte("x")),
	}
	all[1].Metadata = nil
	all[2].Metadata = message.Metadata{"": "", "<a>": "\x00\n\"\\é", "partition_key": "order 1"}
	return all
}

// requireSame compares all but nil metadata, which come out as none.
func requireSame(t *testing.T, want, got *message.Message) {
	t.Helper()
	require.Equal(t, want.UUID, got.UUID)
	require.Equal(t, want.Payload, got.Payload, "nil stays nil, no bytes stay no bytes")
	if len(want.Metadata) == 0 {
		require.Empty(t, got.Metadata)
	} else {
		require.Equal(t, want.Metadata, got.Metadata)
	}
}

// collector is a publisher that keeps what it is given.
type collector struct {
	topics   []string
	messages []*message.Message
}

func (c *collector) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		c.topics = append(c.topics, topic)
		c.messages = append(c.messages, msg)
	}
	return nil
}

func (c *collector) Close() error { return nil }

// What Watermill wraps, Unwrap unwraps.
func TestUnwrapWhatWatermillWraps(t *testing.T) {
	t.Parallel()

	type key struct{}
	var outer collector
	publisher := forwarder.NewPublisher(&outer, forwarder.PublisherConfig{ForwarderTopic: "forwarded"})
	for i, msg := range messagesOfAllKinds() {
		msg.SetContext(context.WithValue(t.Context(), key{}, i))
		require.NoError(t, publisher.Publish("a topic's <name>", msg))
		require.Equal(t, "forwarded", outer.topics[i])
		topic, inner, err := Unwrap(outer.messages[i])
		require.NoError(t, err)
		require.Equal(t, "a topic's <name>", topic)
		require.NotNil(t, inner.Metadata)
		requireSame(t, msg, inner)
		require.Equal(t, i, inner.Context().Value(key{}))
	}

	// Byte for byte, ours is what Watermill's is.
	for i, msg := range messagesOfAllKinds() {
		ours, err := Wrap("a topic's <name>", msg)
		require.NoError(t, err)
		require.Equal(t, string(outer.messages[i].Payload), string(ours.Payload))
		require.Equal(t, outer.messages[i].Metadata, ours.Metadata)
	}
}

// What Wrap wraps, Watermill unwraps. What Unwrap refuses, Watermill refuses,
// too: both are asked about the same payloads.
func TestWatermillUnwrapsWhatWrapWraps(t *testing.T) {
	t.Parallel()

	logger := watermill.NopLogger{}
	in := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, logger)
	out := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: 100}, logger)
	// Publish waits for the ack of what came in, of what is refused as well.
	stock, err := forwarder.NewForwarder(in, out, logger, forwarder.Config{ForwarderTopic: "forwarded", AckWhenCannotUnwrap: true})
	require.NoError(t, err)
	forwarded, err := out.Subscribe(t.Context(), "t")
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- stock.Run(context.Background()) }()
	<-stock.Running()
	defer func() {
		require.NoError(t, stock.Close())
		require.NoError(t, <-done)
		require.NoError(t, in.Close())
		require.NoError(t, out.Close())
	}()
	receive := func() *message.Message {
		select {
		case msg := <-forwarded:
			msg.Ack()
			return msg
		case <-time.After(30 * time.Second):
			require.FailNow(t, "nothing was forwarded")
			return nil
		}
	}

	for _, msg := range messagesOfAllKinds() {
		outer, err := Wrap("t", msg)
		require.NoError(t, err)
		require.NoError(t, in.Publish("forwarded", outer))
		requireSame(t, msg, receive())
	}
	for _, payload := range []string{
		"", "hello", "null", "{}", "[]", `{"destination_topic":"t"}x`, `{"destination_topic":1}`, `{"destination_topic":""}`,
		`{"destination_topic":"t","payload":"x"}`, `{"destination_topic":"t","metadata":{"a":1}}`,
		`{"Destination_Topic":"t","uuid":"1"}`, `{"destination_topic":"t","uuid":"2","metadata":{"a":null}}`,
		`{"destination_topic":"t","uuid":"3","payload":[1,2]}`,
	} {
		require.NoError(t, in.Publish("forwarded", message.NewMessage("outer", []byte(payload))))
		topic, inner, err := Unwrap(message.NewMessage("outer", []byte(payload)))
		if err != nil {
			continue // had Watermill unwrapped it, it would be the next one received
		}
		require.Equal(t, "t", topic)
		requireSame(t, inner, receive())
	}
}
