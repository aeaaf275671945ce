package replication

import (
	"testing"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/stretchr/testify/require"
)

func TestParseFrame(t *testing.T) {
	t.Parallel()
	f, err := parseFrame(data(0x16_B374D848, []byte("message")))
	require.NoError(t, err)
	require.Equal(t, frame{kind: frameData, lsn: 0x16_B374D848, data: []byte("message")}, f)

	body := keepalive(0x16_B374D848, true)
	f, err = parseFrame(body)
	require.NoError(t, err)
	other, err := pglogrepl.ParsePrimaryKeepaliveMessage(body[1:])
	require.NoError(t, err)
	require.Equal(t, LSN(other.ServerWALEnd), f.lsn)
	require.True(t, other.ServerTime.Equal(f.serverTime))
	require.True(t, f.replyRequested)
}

// The bytes of a status, by hand.
func TestAppendStatus(t *testing.T) {
	t.Parallel()
	at := time.Date(2000, 1, 1, 0, 0, 1, 2000, time.UTC)
	require.Equal(t, []byte{
		'd', 0, 0, 0, 38, 'r',
		0, 0, 0, 1, 0, 0, 0, 2,
		0, 0, 0, 0, 0, 0, 0, 0,
		0, 0, 0, 0, 0, 0, 0, 3,
		0, 0, 0, 0, 0, 0x0f, 0x42, 0x42, 1,
	}, appendStatus(nil, Positions{Write: 1<<32 | 2, Apply: 3}, at, true))
	require.Equal(t, at, fromServerTime(toServerTime(at)))
}

func FuzzParseFrame(f *testing.F) {
	f.Add(data(1, []byte("x")))
	f.Add(keepalive(1, true))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, body []byte) {
		parsed, err := parseFrame(body)
		if err != nil {
			require.ErrorIs(t, err, ErrProtocol)
			return
		}
		require.Equal(t, body[0], parsed.kind)
		require.LessOrEqual(t, len(parsed.data), len(body))
	})
}
