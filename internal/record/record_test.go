package record

import (
	"context"
	"maps"
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

// keyMetadata is where the ordering key is in these tests.
const keyMetadata = "partition_key"

// testMaker returns a Maker with the publisher's defaults.
func testMaker(t testing.TB) Maker {
	t.Helper()
	delays, err := NewDelayReader()
	require.NoError(t, err)
	return Maker{OrderingKey: keyFrom(keyMetadata), MaxPayloadBytes: 1 << 20, TooLong: "configured", Delays: delays}
}

func keyFrom(name string) func(string, *message.Message) string {
	return func(_ string, msg *message.Message) string { return msg.Metadata.Get(name) }
}

func TestRecordAcceptsUpToTheBounds(t *testing.T) {
	t.Parallel()

	p := testMaker(t)
	p.MaxPayloadBytes = 10
	key := strings.Repeat("k", MaxOrderingKeyBytes)
	msg := message.NewMessage(strings.Repeat("u", MaxUUIDBytes), make([]byte, 10))
	msg.Metadata = message.Metadata{keyMetadata: key}
	// The braces are counted, the quotes are not.
	rest := MaxMetadataBytes - 2 - len(keyMetadata) - len(key) - 1
	msg.Metadata["x"] = strings.Repeat("v", rest)
	r, problem := p.record("topic", 0, msg, nil)
	require.Nil(t, problem)
	require.Equal(t, msg.UUID, r.UUID)
	require.Equal(t, key, *r.Key)
	require.Equal(t, []byte(msg.Payload), r.Payload)
	decoded, err := metadata.Decode([]byte(r.Metadata))
	require.NoError(t, err)
	require.Equal(t, map[string]string(msg.Metadata), decoded)

	for field, change := range map[string]func(*message.Message){
		"uuid":         func(msg *message.Message) { msg.UUID += "u" },
		"payload":      func(msg *message.Message) { msg.Payload = make([]byte, 11) },
		"metadata":     func(msg *message.Message) { msg.Metadata["x"] += "v" },
		"ordering key": func(msg *message.Message) { msg.Metadata[keyMetadata] += "k"; msg.Metadata["x"] = "" },
	} {
		changed := msg.Copy()
		change(changed)
		_, invalid := p.record("topic", 7, changed, nil)
		require.NotNil(t, invalid)
		require.Equal(t, field, invalid.Field)
		require.Equal(t, 7, invalid.Index)
		require.Contains(t, invalid.Problem, "the limit is")
	}
}

func TestRecordOfEmptyMessage(t *testing.T) {
	t.Parallel()

	p := testMaker(t)
	for _, metadata := range []message.Metadata{nil, {}} {
		r, problem := p.record("topic", 0, &message.Message{Metadata: metadata}, nil)
		require.Nil(t, problem)
		require.Equal(t, Record{Topic: "topic", Metadata: "{}"}, r)
	}
	r, problem := p.record("topic", 0, message.NewMessage("", []byte{}), nil)
	require.Nil(t, problem)
	require.NotNil(t, r.Payload, "no bytes are something else than NULL")
	require.Empty(t, r.Payload)
}

// A time is stored as the database reads it in any zone, and a fraction of a
// microsecond makes it a microsecond later. Whether it is past is not asked here,
// unless it is so by any clock.
func TestRecordOfDelayedMessage(t *testing.T) {
	t.Parallel()

	p := testMaker(t)
	for until, want := range map[string]string{
		"2030-01-02T03:04:05Z":                "2030-01-02 03:04:05.000000+00",
		"2030-01-02T03:04:05.6Z":              "2030-01-02 03:04:05.600000+00",
		"2030-01-02T03:04:05.000001Z":         "2030-01-02 03:04:05.000001+00",
		"2030-01-02T03:04:05.000001001Z":      "2030-01-02 03:04:05.000002+00",
		"2030-01-02T03:04:05.999999999Z":      "2030-01-02 03:04:06.000000+00",
		"2030-01-02T05:34:05+05:30":           "2030-01-02 00:04:05.000000+00",
		"2030-01-02T03:04:05-00:01":           "2030-01-02 03:05:05.000000+00",
		"2030-01-02T03:04:05-23:59":           "2030-01-03 03:03:05.000000+00",
		"1970-01-01T00:00:00Z":                "1970-01-01 00:00:00.000000+00",
		"1970-01-01T00:00:00+00:01":           "",
		"0000-01-01T00:00:00Z":                "",
		"9999-12-31T23:59:59.999999999-23:59": "10000-01-01 23:59:00.000000+00",
		"":                                    "",
	} {
		r, problem := p.record("topic", 0, withMetadata(message.Metadata{delay.DelayedUntilKey: until}), nil)
		require.Nil(t, problem, until)
		if want == "" {
			require.Nil(t, r.Due, until)
			continue
		}
		require.NotNil(t, r.Due, until)
		require.Equal(t, want, *r.Due, until)
	}
	for _, test := range []struct{ key, value string }{
		{delay.DelayedUntilKey, "2030-01-02"},
		{delay.DelayedUntilKey, "1893553446"},
		{delay.DelayedUntilKey, "2030-02-30T00:00:00Z"},
		{delay.DelayedUntilKey, "2030-01-02 03:04:05Z"},
		{delay.DelayedUntilKey, "2030-01-02T03:04:05"},
		{delay.DelayedUntilKey, "infinity"},
		{delay.DelayedUntilKey, " "},
		{delay.DelayedForKey, "1"},
		{delay.DelayedForKey, "soon"},
	} {
		_, invalid := p.record("topic", 3, withMetadata(message.Metadata{test.key: test.value}), nil)
		require.NotNil(t, invalid, test.value)
		require.Equal(t, 3, invalid.Index)
		require.Equal(t, "metadata", invalid.Field)
		require.Contains(t, invalid.Problem, test.key)
		require.Contains(t, invalid.Problem, test.value)
		require.Error(t, invalid.Err)
	}
}

// The duration says when the delay was asked for, not when it ends.
func TestRecordOfDurationAlone(t *testing.T) {
	t.Parallel()

	for _, text := range []string{"24h0m0s", "-1s", "0s"} {
		r, problem := testMaker(t).record("topic", 0, withMetadata(message.Metadata{delay.DelayedForKey: text}), nil)
		require.Nil(t, problem)
		require.Nil(t, r.Due)
		require.Equal(t, `{"_watermill_delayed_for":"`+text+`"}`, r.Metadata)
	}
}

// What is stored is what Watermill's own decorator would have written into the
// message, which stays as it was here.
func TestRecordReadsTheContextAsWatermillDoes(t *testing.T) {
	t.Parallel()

	reader, err := NewDelayReader()
	require.NoError(t, err)
	until := time.Date(2031, 1, 2, 3, 4, 5, 6, time.FixedZone("", 3600))
	for name, own := range map[string]message.Metadata{
		"none":     nil,
		"empty":    {},
		"other":    {"a": "b"},
		"until":    {delay.DelayedUntilKey: "2030-01-02T03:04:05Z"},
		"for":      {delay.DelayedForKey: "1s"},
		"both":     {delay.DelayedUntilKey: "2030-01-02T03:04:05Z", delay.DelayedForKey: "1s"},
		"no delay": {delay.DelayedUntilKey: "", delay.DelayedForKey: ""},
	} {
		for _, ctx := range []context.Context{
			t.Context(), delay.WithContext(t.Context(), delay.Until(until)), delay.WithContext(t.Context(), delay.Delay{}),
		} {
			msg := withMetadata(maps.Clone(own))
			msg.SetContext(ctx)
			decorated := withMetadata(maps.Clone(own))
			if decorated.Metadata == nil {
				decorated.Metadata = message.Metadata{} // the decorator cannot do without
			}
			decorated.SetContext(ctx)
			require.NoError(t, reader.Publish("topic", decorated))

			fromContext, err := contextDelay(ctx, reader)
			require.NoError(t, err)
			r, problem := testMaker(t).record("topic", 0, msg, fromContext)
			require.Nil(t, problem)
			stored, err := metadata.Decode([]byte(r.Metadata))
			require.NoError(t, err)
			require.Equal(t, map[string]string(decorated.Metadata), stored, name)
			require.Equal(t, own, msg.Metadata, name)
		}
	}
}

// A delay from the context counts towards the bound, too.
func TestRecordBoundsMetadataWithTheDelay(t *testing.T) {
	t.Parallel()

	fromContext := message.Metadata{delay.DelayedUntilKey: "2030-01-02T03:04:05Z", delay.DelayedForKey: "1s"}
	_, invalid := testMaker(t).record("topic", 0, withMetadata(message.Metadata{"x": strings.Repeat("v", MaxMetadataBytes-10)}), fromContext)
	require.NotNil(t, invalid)
	require.Contains(t, invalid.Problem, "the limit is")
}

func withMetadata(metadata message.Metadata) *message.Message {
	msg := message.NewMessage("1", nil)
	msg.Metadata = metadata
	return msg
}

func TestRecordAsksForTheOrderingKey(t *testing.T) {
	t.Parallel()

	msg := message.NewMessage("1", nil)
	msg.Metadata = message.Metadata{keyMetadata: "a", "other": "b"}
	m := testMaker(t)
	for want, function := range map[string]func(topic string, msg *message.Message) string{
		"a":       m.OrderingKey,
		"b":       keyFrom("other"),
		"topic/1": func(topic string, msg *message.Message) string { return topic + "/" + msg.UUID },
	} {
		m.OrderingKey = function
		r, problem := m.record("topic", 0, msg, nil)
		require.Nil(t, problem)
		require.Equal(t, want, *r.Key)
	}
	m.OrderingKey = keyFrom("none")
	r, problem := m.record("topic", 0, msg, nil)
	require.Nil(t, problem)
	require.Nil(t, r.Key)
	for _, key := range []string{"\xff", "a\x00"} {
		m.OrderingKey = func(string, *message.Message) string { return key }
		_, invalid := m.record("topic", 0, msg, nil)
		require.NotNil(t, invalid)
		require.Equal(t, "ordering key", invalid.Field)
	}
}

// The context is asked once for each that comes, and each message gets what its
// own asks for.
func TestRecordsOfOneCall(t *testing.T) {
	t.Parallel()

	later := delay.WithContext(t.Context(), delay.Until(time.Date(2031, 1, 2, 3, 4, 5, 0, time.UTC)))
	messages := []*message.Message{withMetadata(nil), withMetadata(nil), withMetadata(nil), withMetadata(nil)}
	messages[1].SetContext(later)
	messages[2].SetContext(later)
	records, problem := testMaker(t).Records("topic", messages)
	require.Nil(t, problem)
	for i, r := range records {
		require.Equal(t, "topic", r.Topic)
		require.Equal(t, i == 1 || i == 2, r.Due != nil, i)
	}
	messages[2] = nil
	_, problem = testMaker(t).Records("topic", messages)
	require.Equal(t, &Problem{Topic: "topic", Index: 2, Field: "message", Problem: "is nil"}, problem)
}
