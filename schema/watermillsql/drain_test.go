package watermillsql

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

func TestDrainChecksItsConfiguration(t *testing.T) {
	t.Parallel()

	for field, config := range map[string]DrainConfig{
		"DrainConfig.Schema":  {Schema: "pg_outbox", Topic: "orders"},
		"DrainConfig.Topic":   {},
		"DrainConfig.MaxRows": {Topic: "orders", MaxRows: -1},
	} {
		_, err := Drain(t.Context(), nil, config)
		require.ErrorContains(t, err, "watermillsql: "+field)
	}
	_, err := Drain(t.Context(), nil, DrainConfig{Topic: "a\x00"})
	require.ErrorIs(t, err, outbox.ErrInvalidTopic)
}

// Names are put in as they are, and not looked at again: a table may be in a
// schema called outbox that is another one's, and a schema may be called as a
// place is.
func TestDrainTextReadsNoNameAgain(t *testing.T) {
	t.Parallel()

	config := DrainConfig{
		Schema: "a:offsets", Topic: "orders", MessagesTable: `outbox.":offsets"`, OffsetsTable: `outbox.":messages"`,
	}.withDefaults()
	text := config.text("m.payload", "INSERT INTO outbox.messages SELECT :payload::text FROM :messages, :offsets, :source")
	require.Equal(t, `INSERT INTO "a:offsets".messages SELECT m.payload::text FROM outbox.":offsets", outbox.":messages", plain`, text)

	config = DrainConfig{Topic: `a"b`, Envelopes: true}.withDefaults()
	require.Equal(t, `"watermill_a""b" "watermill_offsets_a""b" unwrapped`, config.text("", ":messages :offsets :source"))

	// The comments of the files have no place, where a name would not be quoted.
	for line := range strings.Lines(drainRows + drainProblem + drainMove) {
		if strings.HasPrefix(strings.TrimSpace(line), "--") {
			require.Equal(t, line, config.text("", line))
		}
	}
}
