package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The soak says that nothing was lost, or came out of order: here it says so when
// something was, and did.
func TestTallySeesWhatIsWrong(t *testing.T) {
	t.Parallel()

	keys := []*soakKey{{number: 0}, {number: 1}}
	keys[0].committed.Store(4)
	keys[1].committed.Store(2)
	payload := func(key int, n uint32) []byte { return keys[key].message(n, false).Payload }

	good := newTally(len(keys))
	for n := range uint32(4) {
		good.take(payload(0, n))
	}
	require.EqualValues(t, 2, good.lost(keys), "nothing of key 1 has come")
	good.take(payload(1, 0))
	good.take(payload(1, 1))
	require.Zero(t, good.lost(keys))
	require.EqualValues(t, 6, good.received())
	require.Zero(t, good.repeated+good.disordered+good.rolledBack)

	good.take(payload(0, 2))
	require.EqualValues(t, 1, good.repeated)
	require.Zero(t, good.disordered, "what comes again is no disorder")
	require.EqualValues(t, 6, good.received())
	good.take(keys[1].message(2, true).Payload)
	require.EqualValues(t, 1, good.rolledBack)
	require.NoError(t, good.strange)
	good.take([]byte("odd"))
	require.ErrorContains(t, good.strange, "nobody published")

	bad := newTally(len(keys))
	for _, n := range []uint32{0, 3, 1} {
		bad.take(payload(0, n))
	}
	require.EqualValues(t, 1, bad.disordered, "1 after 3")
	require.EqualValues(t, 1+2, bad.lost(keys), "2, and all of key 1")
	bad.take(payload(0, 1))
	require.EqualValues(t, 1, bad.repeated)
}

func TestTallyIsBounded(t *testing.T) {
	t.Parallel()

	key := &soakKey{}
	key.committed.Store(3*soakMaxMissing + 1)
	bad := newTally(1)
	bad.take(key.message(3*soakMaxMissing, false).Payload)
	require.Len(t, bad.missing, soakMaxMissing)
	require.EqualValues(t, 3*soakMaxMissing, bad.lost([]*soakKey{key}))
}
