package envelope

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
)

func TestUnwrap(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		payload  string
		topic    string
		uuid     string
		inner    message.Payload
		metadata message.Metadata
	}{
		"all":            {`{"destination_topic":"t","uuid":"u","payload":"AP8=","metadata":{"a":"b"}}`, "t", "u", message.Payload{0, 0xff}, message.Metadata{"a": "b"}},
		"null":           {`{"destination_topic":"t","uuid":"u","payload":null,"metadata":null}`, "t", "u", nil, message.Metadata{}},
		"no bytes":       {`{"destination_topic":"t","uuid":"u","payload":"","metadata":{}}`, "t", "u", message.Payload{}, message.Metadata{}},
		"topic only":     {`{"destination_topic":"t"}`, "t", "", nil, message.Metadata{}},
		"more than that": {`{"destination_topic":"t","uuid":"","version":2,"headers":[]}`, "t", "", nil, message.Metadata{}},
		"blanks around":  {" {\n\"destination_topic\" : \"t\" } \n", "t", "", nil, message.Metadata{}},
		"escapes":        {`{"destination_topic":"\u00e9 \"","uuid":"\ud83d\ude42","metadata":{"\u003c":"\u0000"}}`, `é "`, "🙂", nil, message.Metadata{"<": "\x00"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			type key struct{}
			outer := message.NewMessageWithContext(context.WithValue(t.Context(), key{}, 1), "outer", []byte(test.payload))
			outer.Metadata.Set("of", "the outer")
			topic, inner, err := Unwrap(outer)
			require.NoError(t, err)
			require.Equal(t, test.topic, topic)
			require.Equal(t, test.uuid, inner.UUID)
			require.Equal(t, test.inner, inner.Payload)
			require.Equal(t, test.metadata, inner.Metadata)
			require.Equal(t, 1, inner.Context().Value(key{}))
			require.True(t, inner.Ack(), "it is a message like any other")

			require.Equal(t, "outer", outer.UUID)
			require.Equal(t, test.payload, string(outer.Payload))
			require.Equal(t, message.Metadata{"of": "the outer"}, outer.Metadata)
		})
	}
}

func TestUnwrapRefuses(t *testing.T) {
	t.Parallel()

	for payload, reason := range map[string]string{
		"":                                      "is empty",
		"hello":                                 "is not valid JSON",
		"{":                                     "is not valid JSON",
		`{"destination_topic":"t"`:              "is not valid JSON",
		`{"destination_topic":"t"}x`:            "is not valid JSON",
		`{"destination_topic":"t"}{}`:           "is not valid JSON",
		"{\"destination_topic\":\"t\"}\x00":     "is not valid JSON",
		"{\"destination_topic\":\"\xff\"}":      "is not valid UTF-8",
		"null":                                  "has no destination_topic",
		"{}":                                    "has no destination_topic",
		`{"destination_topic":""}`:              "has no destination_topic",
		`{"destination_topic":null}`:            "has no destination_topic",
		`{"uuid":"u","payload":"AA=="}`:         "has no destination_topic",
		"1":                                     "no object: it is of type number",
		`"t"`:                                   "no object: it is of type string",
		"[]":                                    "no object: it is of type array",
		`{"destination_topic":1}`:               "has a destination_topic of the wrong type: number",
		`{"destination_topic":"t","uuid":{}}`:   "has a uuid of the wrong type: object",
		`{"destination_topic":"t","payload":1}`: "has a payload of the wrong type: number",
		`{"destination_topic":"t","payload":"x"}`:        "has a payload that is not base64",
		`{"destination_topic":"t","metadata":[]}`:        "has a metadata of the wrong type: array",
		`{"destination_topic":"t","metadata":{"a":1}}`:   "of the wrong type: number",
		`{"destination_topic":"t","metadata":{"a":{}}}`:  "of the wrong type: object",
		`{"destination_topic":"t","metadata":{"a":"b"},`: "is not valid JSON",
	} {
		topic, inner, err := Unwrap(message.NewMessage("outer\n1", []byte(payload)))
		require.ErrorIs(t, err, ErrNotEnvelope, payload)
		var refused *Error
		require.ErrorAs(t, err, &refused)
		require.Contains(t, refused.Reason, reason, payload)
		require.Equal(t, "outer\n1", refused.UUID)
		require.ErrorContains(t, err, `"outer\n1"`, payload)
		require.Empty(t, topic)
		require.Nil(t, inner)
	}
	_, _, err := Unwrap(message.NewMessage("", []byte("{")))
	var syntax *json.SyntaxError
	require.ErrorAs(t, err, &syntax, "the cause is kept")
	_, _, err = Unwrap(message.NewMessage(strings.Repeat("u", 5000), nil))
	require.Less(t, len(err.Error()), 500)
}

func TestWrap(t *testing.T) {
	t.Parallel()

	type key struct{}
	msg := message.NewMessageWithContext(context.WithValue(t.Context(), key{}, 1), "<1>", []byte{0})
	msg.Metadata.Set("a", "b")
	outer, err := Wrap("t&", msg)
	require.NoError(t, err)
	require.JSONEq(t, `{"destination_topic":"t&","uuid":"<1>","payload":"AA==","metadata":{"a":"b"}}`, string(outer.Payload))
	require.NotEmpty(t, outer.UUID)
	require.NotEqual(t, msg.UUID, outer.UUID)
	require.Equal(t, message.Metadata{}, outer.Metadata)
	require.Equal(t, 1, outer.Context().Value(key{}))
	another, err := Wrap("t&", msg)
	require.NoError(t, err)
	require.NotEqual(t, outer.UUID, another.UUID)
}

// encoding/json writes U+FFFD for what is not UTF-8, and the message that arrives
// is another one.
func TestWrapRefuses(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		topic, uuid string
		metadata    message.Metadata
	}{
		"the topic is empty":             {"", "u", nil},
		"the topic is not valid UTF-8":   {"\xff", "u", nil},
		"the uuid is not valid UTF-8":    {"t", "\xff", nil},
		`the metadata under "a" are not`: {"t", "u", message.Metadata{"a": "\xff"}},
		`the metadata under "\xff" are`:  {"t", "u", message.Metadata{"\xff": "a"}},
	} {
		outer, err := Wrap(test.topic, &message.Message{UUID: test.uuid, Metadata: test.metadata})
		require.ErrorIs(t, err, ErrCannotWrap, name)
		require.ErrorContains(t, err, name)
		require.Nil(t, outer)
	}
}

// FuzzUnwrap reads anything, and writes what it could read once more: it must
// come out the same.
func FuzzUnwrap(f *testing.F) {
	for _, text := range []string{
		"", "null", "{", `{"destination_topic":"t","uuid":"u","payload":"AP8=","metadata":{"a":"b"}}`,
		`{"destination_topic":"t","payload":null,"metadata":null}`, `{"Destination_Topic":"t","payload":[1,2]}`,
		`{"destination_topic":"t","metadata":{"a":null}}`, `{"destination_topic":"\ud800"}`, `{"destination_topic":"t"}}`,
		`{"destination_topic":"t","payload":"` + base64.StdEncoding.EncodeToString([]byte("hello")) + `"}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		topic, inner, err := Unwrap(message.NewMessage("outer", payload))
		if err != nil {
			require.ErrorIs(t, err, ErrNotEnvelope)
			require.Nil(t, inner)
			return
		}
		require.NotEmpty(t, topic)
		require.NotNil(t, inner.Metadata)
		outer, err := Wrap(topic, inner)
		require.NoError(t, err)
		againTopic, again, err := Unwrap(outer)
		require.NoError(t, err)
		require.Equal(t, topic, againTopic)
		require.Equal(t, inner.UUID, again.UUID)
		require.Equal(t, inner.Payload, again.Payload)
		require.Equal(t, inner.Metadata, again.Metadata)
	})
}
