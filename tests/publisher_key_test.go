package tests

import (
	"slices"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

func TestPublishStoresTheOrderingKey(t *testing.T) {
	t.Parallel()

	f := newFixture(t)
	text := func(s string) *string { return &s }
	keyed := func(metadata message.Metadata) *message.Message { return withMetadata("", nil, metadata) }
	for name, test := range map[string]struct {
		function func(topic string, msg *message.Message) string
		messages []*message.Message
		want     []*string
	}{
		"default": {
			messages: []*message.Message{
				keyed(message.Metadata{outbox.DefaultKeyMetadata: "order 1"}), keyed(nil),
				keyed(message.Metadata{outbox.DefaultKeyMetadata: ""}), keyed(message.Metadata{"aggregate": "order 1"}),
			},
			want: []*string{text("order 1"), nil, nil, nil},
		},
		"metadata": {
			function: outbox.KeyFromMetadata("aggregate"),
			messages: []*message.Message{
				keyed(message.Metadata{outbox.DefaultKeyMetadata: "order 1"}), keyed(message.Metadata{"aggregate": `"o'2\`}), keyed(nil),
			},
			want: []*string{nil, text(`"o'2\`), nil},
		},
		"function": {
			function: func(topic string, msg *message.Message) string { return topic + "/" + msg.Metadata.Get("tenant") },
			messages: []*message.Message{keyed(message.Metadata{"tenant": "7"}), keyed(nil)},
			want:     []*string{text("key by function/7"), text("key by function/")},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			publisher := f.publisher(outbox.PublisherConfig{OrderingKey: test.function})
			topic := "key by " + name
			// Each way into the table.
			for _, msg := range test.messages {
				require.NoError(t, publisher.Publish(topic, msg))
			}
			require.NoError(t, publisher.Publish(topic, test.messages...))
			require.NoError(t, publisher.Publish(topic, slices.Repeat(test.messages, 40)...))
			want := slices.Repeat(test.want, 42)

			var got []*string
			for _, row := range f.stored(t, topic) {
				got = append(got, row.Key)
			}
			require.Equal(t, want, got)
		})
	}
}
