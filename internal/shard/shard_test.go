package shard

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// Positions depend on these: another answer would lose messages of whoever has
// shards already.
func TestOfStaysWhatItWas(t *testing.T) {
	t.Parallel()

	require.Equal(t, int64(0xd41d8cd9), Hash("", 0xd41d8cd9), "an empty key is none")
	require.Equal(t, int64(0x0cc175b9), Hash("a", 7), "the first four bytes of the MD5")
	require.Equal(t, 0x0cc175b9%8, Of("a", 7, 8))
	require.Equal(t, 7, Of("", 1_000_000_007, 8))
	require.Zero(t, Of("a", 7, 1))
}

func TestOfSpreadsKeys(t *testing.T) {
	t.Parallel()

	const shards, keys = 8, 8000
	count := make([]int, shards)
	for i := range keys {
		count[Of(fmt.Sprint("key ", i), 1, shards)]++
	}
	for i, n := range count {
		require.InDelta(t, keys/shards, n, keys/shards/5, "shard %d", i)
	}
}

func BenchmarkOf(b *testing.B) {
	for _, key := range []string{"", "order-4711"} {
		b.Run("key="+key, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				Of(key, 4711, 8)
			}
		})
	}
}
