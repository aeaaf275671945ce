package jetstream

import (
	"testing"

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
