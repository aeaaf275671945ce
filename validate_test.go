package outbox

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/metadata"
)

func TestValidateTopic(t *testing.T) {
	t.Parallel()

	for _, topic := range []string{"a", " ", "A.b-c_d:e", `"'\;--`, "\n", "é", strings.Repeat("x", 1024), strings.Repeat("é", 512), "\ufffd"} {
		require.NoError(t, ValidateTopic(topic))
	}
	for topic, problem := range map[string]string{
		"":                        "it is empty",
		strings.Repeat("x", 1025): "has 1025 bytes, the limit is 1024",
		strings.Repeat("é", 513):  "has 1026 bytes, the limit is 1024",
		"a\x00":                   "NUL",
		"\xff":                    "UTF-8",
		"\xc0\x80":                "UTF-8", // an overlong NUL
		"\xed\xa0\x80":            "UTF-8", // half of a surrogate pair
	} {
		err := ValidateTopic(topic)
		require.ErrorIs(t, err, ErrInvalidTopic)
		require.ErrorContains(t, err, problem)
		require.Less(t, len(err.Error()), 1000)
	}
}

// testPublisher returns a Publisher that has no database and a clock that
// stands still.
func testPublisher(config PublisherConfig, now time.Time) *Publisher {
	return &Publisher{config: config.withDefaults(), now: func() time.Time { return now }}
}

func TestRecordAcceptsUpToTheBounds(t *testing.T) {
	t.Parallel()

	p := testPublisher(PublisherConfig{MaxPayloadBytes: 10}, time.Now())
	key := strings.Repeat("k", MaxOrderingKeyBytes)
	msg := message.NewMessage(strings.Repeat("u", MaxUUIDBytes), make([]byte, 10))
	msg.Metadata = message.Metadata{DefaultKeyMetadata: key}
	// The braces are counted, the quotes are not.
	rest := MaxMetadataBytes - 2 - len(DefaultKeyMetadata) - len(key) - 1
	msg.Metadata["x"] = strings.Repeat("v", rest)
	r, err := p.record("topic", 0, msg)
	require.NoError(t, err)
	require.Equal(t, msg.UUID, r.uuid)
	require.Equal(t, key, *r.key)
	require.Equal(t, []byte(msg.Payload), r.payload)
	decoded, err := metadata.Decode([]byte(r.metadata))
	require.NoError(t, err)
	require.Equal(t, map[string]string(msg.Metadata), decoded)

	for field, change := range map[string]func(*message.Message){
		"uuid":         func(msg *message.Message) { msg.UUID += "u" },
		"payload":      func(msg *message.Message) { msg.Payload = make([]byte, 11) },
		"metadata":     func(msg *message.Message) { msg.Metadata["x"] += "v" },
		"ordering key": func(msg *message.Message) { msg.Metadata[DefaultKeyMetadata] += "k"; msg.Metadata["x"] = "" },
	} {
		changed := msg.Copy()
		change(changed)
		_, err := p.record("topic", 7, changed)
		var invalid *MessageError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, field, invalid.Field)
		require.Equal(t, 7, invalid.Index)
		require.Contains(t, invalid.Problem, "the limit is")
	}
}

func TestRecordOfEmptyMessage(t *testing.T) {
	t.Parallel()

	p := testPublisher(PublisherConfig{}, time.Now())
	for _, metadata := range []message.Metadata{nil, {}} {
		r, err := p.record("topic", 0, &message.Message{Metadata: metadata})
		require.NoError(t, err)
		require.Equal(t, record{metadata: "{}"}, r)
	}
	r, err := p.record("topic", 0, message.NewMessage("", []byte{}))
	require.NoError(t, err)
	require.NotNil(t, r.payload, "no bytes are something else than NULL")
	require.Empty(t, r.payload)
}

// The times are whole seconds, so what is due within this second is due.
func TestRecordOfDelayedMessage(t *testing.T) {
	t.Parallel()

	now := time.Date(2030, 1, 2, 3, 4, 5, 600_000_000, time.UTC)
	p := testPublisher(PublisherConfig{}, now)
	for until, want := range map[string]error{
		"2030-01-02T03:04:05Z":      nil,
		"2030-01-02T03:04:05.6Z":    nil,
		"2030-01-02T05:04:05+02:00": nil,
		"1970-01-01T00:00:00Z":      nil,
		"":                          nil,
		"2030-01-02T03:04:05.601Z":  ErrScheduled,
		"2030-01-02T03:04:06Z":      ErrScheduled,
		"2030-01-02T03:04:05-00:01": ErrScheduled,
		"9999-12-31T23:59:59Z":      ErrScheduled,
		"2030-01-02":                ErrInvalidMessage,
		"1893553446":                ErrInvalidMessage,
		"2030-02-30T00:00:00Z":      ErrInvalidMessage,
		" ":                         ErrInvalidMessage,
	} {
		msg := message.NewMessage("1", nil)
		msg.Metadata = message.Metadata{delay.DelayedUntilKey: until}
		_, err := p.record("topic", 0, msg)
		if want == nil {
			require.NoError(t, err, until)
			continue
		}
		require.ErrorIs(t, err, want, until)
		require.ErrorIs(t, err, ErrInvalidMessage, until)
		require.Equal(t, errors.Is(want, ErrScheduled), errors.Is(err, ErrScheduled), until)
		require.ErrorContains(t, err, until)
	}
}

func TestRecordAsksForTheOrderingKey(t *testing.T) {
	t.Parallel()

	msg := message.NewMessage("1", nil)
	msg.Metadata = message.Metadata{DefaultKeyMetadata: "a", "other": "b"}
	for want, function := range map[string]func(topic string, msg *message.Message) string{
		"a":       nil,
		"b":       KeyFromMetadata("other"),
		"topic/1": func(topic string, msg *message.Message) string { return topic + "/" + msg.UUID },
	} {
		r, err := testPublisher(PublisherConfig{OrderingKey: function}, time.Now()).record("topic", 0, msg)
		require.NoError(t, err)
		require.Equal(t, want, *r.key)
	}
	r, err := testPublisher(PublisherConfig{OrderingKey: KeyFromMetadata("none")}, time.Now()).record("topic", 0, msg)
	require.NoError(t, err)
	require.Nil(t, r.key)
	for _, key := range []string{"\xff", "a\x00"} {
		p := testPublisher(PublisherConfig{OrderingKey: func(string, *message.Message) string { return key }}, time.Now())
		_, err := p.record("topic", 0, msg)
		var invalid *MessageError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, "ordering key", invalid.Field)
	}
}
