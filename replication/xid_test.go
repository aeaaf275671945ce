package replication

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWidenXID(t *testing.T) {
	t.Parallel()
	const epoch = uint64(1) << 32
	tests := []struct {
		name      string
		xid       uint32
		reference uint64
		want      uint64
	}{
		{"the reference itself", 100, 5*epoch + 100, 5*epoch + 100},
		{"before it", 90, 5*epoch + 100, 5*epoch + 90},
		{"after it", 110, 5*epoch + 100, 5*epoch + 110},
		{"the epoch has turned since", 0xfffffff0, 6*epoch + 5, 6*epoch - 16},
		{"the epoch turns next", 5, 6*epoch - 16, 6*epoch + 5},
		{"as far ahead as can be", 1<<31 - 1, 5 * epoch, 5*epoch + 1<<31 - 1},
		{"as far behind as can be", 1 << 31, 5 * epoch, 5*epoch - 1<<31},
		{"a young server has no epoch before its first", 0xfffffff0, 5, 0xfffffff0},
		{"its first transaction", 3, 700, 3},
		{"its very beginning", 0, 700, 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, test.want, WidenXID(test.xid, test.reference))
		})
	}
}

// Whatever the full id and the reference, as long as they are near enough.
func TestWidenXIDRandom(t *testing.T) {
	t.Parallel()
	for range 20_000 {
		full := rand.Uint64() >> (1 + rand.IntN(40))
		distance := rand.Uint64N(1 << 31)
		require.Equal(t, full, WidenXID(uint32(full&0xffffffff), full+distance))
		if distance <= full {
			require.Equal(t, full, WidenXID(uint32(full&0xffffffff), full-distance))
		}
	}
}
