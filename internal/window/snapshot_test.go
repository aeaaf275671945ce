package window_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/window"
)

func TestSnapshotText(t *testing.T) {
	t.Parallel()

	for _, text := range []string{"1:1:", "10:10:", "10:20:", "10:20:10", "10:20:10,12,19", "18446744073709551614:18446744073709551615:"} {
		s, err := window.ParseSnapshot(text)
		require.NoError(t, err, text)
		require.Equal(t, text, s.String())
	}
	for _, text := range []string{"", "1", "1:1", "a:b:", "0:1:", "2:1:", "10:20:9", "10:20:20", "10:20:12,11", "10:20:12,12", "10:20:x", "10:20:12,", "-1:2:", "99999999999999999999:1:"} {
		_, err := window.ParseSnapshot(text)
		require.Error(t, err, text)
	}
}

func TestZeroSnapshotSeesNothing(t *testing.T) {
	t.Parallel()

	var zero window.Snapshot
	parsed, err := window.ParseSnapshot(zero.String())
	require.NoError(t, err)
	require.Equal(t, zero, parsed)
	require.True(t, zero.Empty())
	for _, xid := range []uint64{1, 3, 1 << 40} {
		require.False(t, zero.Sees(xid))
	}
}

// TestSnapshotAgainstModel compares with the definition: a snapshot is the set
// of transactions that had ended.
func TestSnapshotAgainstModel(t *testing.T) {
	t.Parallel()

	random := rand.New(rand.NewPCG(1, 2))
	generate := func() (window.Snapshot, map[uint64]bool) {
		xmin := 1 + random.Uint64N(20)
		xmax := xmin + random.Uint64N(15)
		text := []byte{}
		sees := map[uint64]bool{}
		for x := range uint64(50) {
			sees[x] = x < xmax
		}
		for x := xmin; x < xmax; x++ {
			if random.IntN(3) == 0 {
				if len(text) > 0 {
					text = append(text, ',')
				}
				text = appendNumber(text, x)
				sees[x] = false
			}
		}
		full := append(appendNumber(append(appendNumber(nil, xmin), ':'), xmax), ':')
		s, err := window.ParseSnapshot(string(append(full, text...)))
		require.NoError(t, err)
		return s, sees
	}
	covers := 0
	for range 5000 {
		a, aSees := generate()
		b, bSees := generate()
		want := true
		for x := range uint64(50) {
			require.Equal(t, aSees[x] && !a.Empty(), a.Sees(x), "%s %d", a, x)
			if x > 0 && bSees[x] && !b.Empty() && !(aSees[x] && !a.Empty()) {
				want = false
			}
		}
		require.Equal(t, want, a.Covers(b), "%s covers %s", a, b)
		if want {
			covers++
		}
	}
	require.Greater(t, covers, 100)
}

func appendNumber(b []byte, n uint64) []byte {
	if n >= 10 {
		b = appendNumber(b, n/10)
	}
	return append(b, byte('0'+n%10))
}

func FuzzParseSnapshot(f *testing.F) {
	for _, seed := range []string{"1:1:", "10:20:12,13", "10:20:", "::", "1:2:1"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := window.ParseSnapshot(text)
		if err != nil {
			return
		}
		again, err := window.ParseSnapshot(s.String())
		require.NoError(t, err)
		require.True(t, s.Equal(again))
	})
}
