package metadata_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/metadata"
)

func TestRoundTrip(t *testing.T) {
	t.Parallel()

	for name, m := range map[string]map[string]string{
		"nil":        nil,
		"empty":      {},
		"plain":      {"correlation_id": "42", "name": "orders.placed"},
		"empty text": {"": ""},
		"escapes":    {`qu"ote`: `back\slash`, "control": "\t\r\n\x01\x1f", "html": "<a&b>"},
		"unicode":    {"ключ": "值", "emoji": "🙂", "line": "\u2028"},
		"look-alike": {`a":"b`: `","`, "}": "{"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			text := metadata.Append(nil, m)
			require.True(t, json.Valid(text), "%s", text)
			got, err := metadata.Decode(text)
			require.NoError(t, err)
			require.NotNil(t, got)
			want := map[string]string{}
			for k, v := range m {
				want[k] = v
			}
			require.Equal(t, want, got)
		})
	}
}

func TestDecodeRefusesWhatIsNotAnObjectOfStrings(t *testing.T) {
	t.Parallel()

	for _, text := range []string{"", "{", "null", "[]", `"a"`, "1", `{"a":1}`, `{"a":null}`, `{"a":{}}`, `{"a":"b"}x`, `{"a":"b"}{}`, `{"a":"b",}`} {
		_, err := metadata.Decode([]byte(text))
		require.Error(t, err, "%s", text)
	}
}

// FuzzDecode compares the decoder, fast path included, with encoding/json.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{`{}`, `{"a":"b"}`, `{"a":"b","c":"d"}`, `{"a":"\u0041"}`, ` { "a" : "b" } `, `{"a":"b","a":"c"}`, `{"a":1}`, "{\"a\":\"\xff\"}"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var want map[string]*string
		wantErr := json.Unmarshal(text, &want)
		valid := wantErr == nil && want != nil
		for _, value := range want {
			valid = valid && value != nil
		}
		got, err := metadata.Decode(text)
		if !valid {
			require.Error(t, err)
			return
		}
		require.NoError(t, err)
		require.Len(t, got, len(want))
		for key, value := range want {
			require.Equal(t, *value, got[key])
		}
	})
}
