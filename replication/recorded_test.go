package replication

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// recorded returns the messages of a real server, from a file in testdata with
// one per line. TestReplicationRecord in module tests writes these files.
func recorded(t testing.TB, name string) [][]byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	require.NoError(t, err)
	var messages [][]byte
	for line := range strings.Lines(string(text)) {
		message, err := hex.DecodeString(strings.TrimSpace(line))
		require.NoError(t, err)
		messages = append(messages, message)
	}
	require.NotEmpty(t, messages)
	return messages
}

// Every kind of message that a server sends is decoded, and means what
// pglogrepl says.
func TestDecodeRecorded(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"text.hex", "binary.hex"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var d Decoder
			kinds := map[byte]int{}
			for _, message := range recorded(t, name) {
				event, err := d.Decode(9, message)
				require.NoError(t, err, "%x", message)
				require.Equal(t, message, encode(event))
				compareWithPglogrepl(t, event, message)
				kinds[message[0]]++
			}
			for _, kind := range "BCIUDTRYMO" {
				require.NotZero(t, kinds[byte(kind)], "no message %c", kind)
			}
		})
	}
}
