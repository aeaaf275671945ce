package upkeep

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A process is dead when its beat was seen not to change for long enough, whatever
// the times in the table say; one that comes back begins anew.
func TestSightings(t *testing.T) {
	t.Parallel()

	s := sightings{}
	at := time.Now()
	look := func(after time.Duration, beats map[string]int64) map[string]int64 {
		at = at.Add(after)
		return s.dead(at, beats, time.Hour)
	}
	require.Empty(t, look(0, map[string]int64{"a": 1, "b": 7}))
	require.Empty(t, look(59*time.Minute, map[string]int64{"a": 1, "b": 8}))
	require.Equal(t, map[string]int64{"a": 1}, look(time.Minute, map[string]int64{"a": 1, "b": 8}))
	require.Equal(t, map[string]int64{"b": 8}, look(time.Hour, map[string]int64{"a": 2, "b": 8}), "a was only asleep")
	require.Empty(t, look(time.Minute, map[string]int64{"a": 2}))
	require.Empty(t, look(time.Minute, map[string]int64{"a": 2, "b": 8}), "b is here again")
	require.Equal(t, map[string]int64{"a": 2}, look(58*time.Minute, map[string]int64{"a": 2, "b": 8}))
}
