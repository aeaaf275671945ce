package jetstream

import (
	"testing"

	wmnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/forwarder"
)

// Metadata that would not arrive as they are, or not at all, are refused for good.
func TestMetadataThatIsNoHeader(t *testing.T) {
	t.Parallel()

	for _, header := range []nats.Header{
		nil, {"traceparent": {"00-ab-cd-01"}}, {"_watermill_message_uuid": {"1"}}, {"key": {"", "a b", "ü: ,\x01"}},
	} {
		require.NoError(t, checkHeader(header), header)
	}
	for _, header := range []nats.Header{
		{"": {"a"}},
		{"two words": {"a"}},
		{"a:b": {"c"}},
		{"schlüssel": {"a"}},
		{"a\n": {"b"}},
		{"key": {"a\nb"}},
		{"key": {"a\r"}},
		{"key": {" a"}},
		{"key": {"a\t"}},
		{"key": {"fine", "not "}},
	} {
		err := checkHeader(header)
		require.ErrorIs(t, err, ErrMetadata, header)
		require.True(t, outbox.IsPermanent(err))
		require.Equal(t, forwarder.FaultPermanent, Classify(err))
	}
}

// What is published is what watermill-nats publishes.
func TestMarshalLikeWatermill(t *testing.T) {
	t.Parallel()

	for _, metadata := range []message.Metadata{
		nil, {}, {"key": "value"}, {"lower": "", "Upper": "b", "x-y": "ü"}, {wmnats.WatermillUUIDHdr: "another"},
	} {
		for _, payload := range []message.Payload{nil, {}, []byte("payload")} {
			msg := message.NewMessage("uuid", payload)
			msg.Metadata = metadata
			want, err := new(wmnats.NATSMarshaler).Marshal("topic", msg)
			require.NoError(t, err)
			got, err := headers{}.Marshal("topic", msg)
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
	}
}
