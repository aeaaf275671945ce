package record

import (
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/envelope"
	"github.com/millrace/watermill-outbox/internal/metadata"
)

func wrap(t testing.TB, topic string, msg *message.Message) *message.Message {
	t.Helper()
	outer, err := envelope.Wrap(topic, msg)
	require.NoError(t, err)
	return outer
}

func TestRecordsOfEnvelopes(t *testing.T) {
	t.Parallel()

	inner := message.NewMessage("inner", []byte{0, 1})
	inner.Metadata = message.Metadata{keyMetadata: "order 1", delay.DelayedUntilKey: "2030-01-02T03:04:05Z"}
	m := testMaker(t)
	m.Envelopes = "forwarded"
	m.OrderingKey = func(topic string, msg *message.Message) string { return topic + "/" + msg.Metadata.Get(keyMetadata) }
	records, problem := m.Records("forwarded", []*message.Message{wrap(t, "a", inner), wrap(t, "b", message.NewMessage("", nil))})
	require.Nil(t, problem)
	stored, err := metadata.Decode([]byte(records[0].Metadata))
	require.NoError(t, err)
	require.Equal(t, map[string]string(inner.Metadata), stored)
	key, due, otherKey := "a/order 1", "2030-01-02 03:04:05.000000+00", "b/"
	require.Equal(t, Record{Topic: "a", Key: &key, UUID: "inner", Metadata: records[0].Metadata, Payload: []byte{0, 1}, Due: &due}, records[0])
	require.Equal(t, Record{Topic: "b", Key: &otherKey, Metadata: "{}"}, records[1])

	// One envelope comes off, not two.
	nested := wrap(t, "forwarded", wrap(t, "a", inner))
	records, problem = m.Records("forwarded", []*message.Message{nested})
	require.Nil(t, problem)
	require.Equal(t, "forwarded", records[0].Topic)
	require.Contains(t, string(records[0].Payload), "destination_topic")

	// Elsewhere, and by default everywhere, an envelope is a message.
	outer := wrap(t, "a", inner)
	for _, topic := range []string{"other", "forwarded"} {
		if topic == "forwarded" {
			m.Envelopes = ""
		}
		records, problem = m.Records(topic, []*message.Message{outer})
		require.Nil(t, problem)
		require.Equal(t, topic, records[0].Topic)
		require.Equal(t, outer.UUID, records[0].UUID)
		require.Equal(t, []byte(outer.Payload), records[0].Payload)
	}
}

// Decorators between forwarder and publisher see the envelope only. Watermill's
// Forwarder drops what they write into its metadata.
func TestRecordsKeepWhatDecoratorsWroteOnTheEnvelope(t *testing.T) {
	t.Parallel()

	inner := message.NewMessage("inner", nil)
	inner.Metadata = message.Metadata{"own": "1", "both": "inner"}
	outer := wrap(t, "a", inner)
	outer.Metadata = message.Metadata{"both": "outer", "added": "2", delay.DelayedUntilKey: "2030-01-02T03:04:05Z", keyMetadata: "k"}
	m := testMaker(t)
	m.Envelopes = "forwarded"
	records, problem := m.Records("forwarded", []*message.Message{outer})
	require.Nil(t, problem)
	stored, err := metadata.Decode([]byte(records[0].Metadata))
	require.NoError(t, err)
	require.Equal(t, map[string]string{
		"own": "1", "both": "inner", "added": "2", delay.DelayedUntilKey: "2030-01-02T03:04:05Z", keyMetadata: "k",
	}, stored)
	require.NotNil(t, records[0].Due)
	require.Equal(t, "k", *records[0].Key)
	require.Len(t, outer.Metadata, 4, "the messages of a call are not changed")
}

func TestRecordsRefuseWhatIsNoEnvelope(t *testing.T) {
	t.Parallel()

	m := testMaker(t)
	m.Envelopes = "forwarded"
	good := wrap(t, "a", message.NewMessage("inner", nil))
	for _, test := range []struct {
		payload, topic, uuid, field, problem string
		is                                   error
	}{
		{"", "forwarded", "outer", "payload", "is empty", envelope.ErrNotEnvelope},
		{"hello", "forwarded", "outer", "payload", "is not valid JSON", envelope.ErrNotEnvelope},
		{`{"destination_topic":""}`, "forwarded", "outer", "payload", "has no destination_topic", envelope.ErrNotEnvelope},
		{`{"destination_topic":"a\u0000"}`, "forwarded", "outer", "payload", "is an envelope for a topic that cannot be", ErrInvalidTopic},
		{`{"destination_topic":"` + strings.Repeat("x", 1025) + `"}`, "forwarded", "outer", "payload", "has 1025 bytes", ErrInvalidTopic},
		{`{"destination_topic":"a","uuid":"in\u0000ner"}`, "a", "in\x00ner", "uuid", "NUL", nil},
		{`{"destination_topic":"a","uuid":"inner","metadata":{"b":"\u0000"}}`, "a", "inner", "metadata", "NUL", nil},
		{`{"destination_topic":"a","uuid":"inner","metadata":{"_watermill_delayed_for":"soon"}}`, "a", "inner", "metadata", "not a duration", nil},
	} {
		_, problem := m.Records("forwarded", []*message.Message{good, message.NewMessage("outer", []byte(test.payload)), good})
		require.NotNil(t, problem, test.payload)
		require.Equal(t, 1, problem.Index)
		require.Equal(t, test.topic, problem.Topic)
		require.Equal(t, test.uuid, problem.UUID)
		require.Equal(t, test.field, problem.Field)
		require.Contains(t, problem.Problem, test.problem)
		require.Less(t, len(problem.Problem), 1000)
		if test.is != nil {
			require.ErrorIs(t, problem.Err, test.is)
		}
	}
	_, problem := m.Records("forwarded", []*message.Message{good, nil})
	require.Equal(t, &Problem{Topic: "forwarded", Index: 1, Field: "message", Problem: "is nil"}, problem)
}
