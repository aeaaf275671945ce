package replication

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/jackc/pglogrepl"
	"github.com/stretchr/testify/require"
)

func TestParseLSN(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]LSN{
		"0/0":               0,
		"16/B374D848":       0x16_B374D848,
		"16/b374d848":       0x16_B374D848,
		"0/1":               1,
		"1/0":               1 << 32,
		"00000001/00000000": 1 << 32,
		"FFFFFFFF/FFFFFFFF": math.MaxUint64,
	} {
		got, err := ParseLSN(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{
		"", "/", "0", "0/", "/0", "0/0/0", " 0/0", "0/0 ", "0/0x1", "+1/0", "1/-1", "g/0", "100000000/0", "000000001/0", "0/000000001", "0/100000000", "1_0/0", "0/٣",
	} {
		_, err := ParseLSN(text)
		require.ErrorContains(t, err, "is not an LSN", text)
	}
}

func TestLSNText(t *testing.T) {
	t.Parallel()
	for _, lsn := range []LSN{0, 1, 0x16_B374D848, math.MaxUint64} {
		require.Equal(t, pglogrepl.LSN(lsn).String(), lsn.String())
		parsed, err := ParseLSN(lsn.String())
		require.NoError(t, err)
		require.Equal(t, lsn, parsed)

		text, err := json.Marshal(map[string]LSN{"at": lsn})
		require.NoError(t, err)
		var back map[string]LSN
		require.NoError(t, json.Unmarshal(text, &back))
		require.Equal(t, lsn, back["at"])

		value, err := lsn.Value()
		require.NoError(t, err)
		scanned := LSN(7)
		require.NoError(t, scanned.Scan(value))
		require.Equal(t, lsn, scanned)
	}
	var lsn LSN
	require.NoError(t, lsn.Scan([]byte("1/2")))
	require.Equal(t, LSN(1<<32|2), lsn)
	require.Error(t, lsn.Scan(5))
	require.Error(t, lsn.Scan("5"))
	require.Equal(t, LSN(1<<32|2), lsn, "a failed scan changes nothing")
}

func FuzzParseLSN(f *testing.F) {
	for _, text := range []string{"0/0", "16/B374D848", "x", "0/000000000"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		lsn, err := ParseLSN(text)
		if err != nil {
			require.Zero(t, lsn)
			return
		}
		again, err := ParseLSN(lsn.String())
		require.NoError(t, err)
		require.Equal(t, lsn, again)
	})
}
