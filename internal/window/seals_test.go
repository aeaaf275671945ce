package window

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The bound is the end of the last in an unbroken row of partitions, from the first
// on, that are sealed on the reader's cluster by what it has seen.
func TestSealsOf(t *testing.T) {
	t.Parallel()

	at := func(hour int) time.Time { return time.Date(2026, 1, 1, hour, 0, 0, 0, time.UTC) }
	snapshot := func(text string) Snapshot {
		s, err := ParseSnapshot(text)
		require.NoError(t, err)
		return s
	}
	seal := func(hour int, era int64, text string) Seal {
		return Seal{Upper: at(hour + 1), Era: era, Snapshot: snapshot(text)}
	}
	for name, test := range map[string]struct {
		list []Seal
		want time.Time
	}{
		"nothing":                  {nil, time.Time{}},
		"all":                      {[]Seal{seal(1, 7, "10:10:"), seal(2, 7, "20:20:")}, at(3)},
		"up to what it has not":    {[]Seal{seal(1, 7, "10:10:"), seal(2, 7, "40:40:"), seal(3, 7, "20:20:")}, at(2)},
		"a transaction that runs":  {[]Seal{seal(1, 7, "10:10:"), seal(2, 7, "28:30:"), seal(3, 7, "20:20:")}, at(2)},
		"over a gap":               {[]Seal{seal(1, 7, "10:10:"), seal(3, 7, "10:10:")}, at(4)},
		"up to another cluster's":  {[]Seal{seal(1, 7, "10:10:"), seal(2, 8, "10:10:")}, at(2)},
		"the first one is not his": {[]Seal{seal(1, 8, "10:10:"), seal(2, 7, "10:10:")}, time.Time{}},
	} {
		seals := &Seals{life: Life{Era: 7, Boot: "a"}, list: test.list}
		bound := seals.Of(7, snapshot("28:30:28"))
		require.Equal(t, test.want, bound.Since, name)
		require.Equal(t, test.want.IsZero(), bound.Holds(Life{Era: 7, Boot: "b"}, 0), name)
		require.Equal(t, test.want.IsZero(), bound.Holds(Life{Era: 7, Boot: "a"}, 1), name, "void since")
		require.Equal(t, test.want.IsZero(), bound.Holds(Life{Era: 7, Boot: "a"}, -1), name, "DEFAULT is not empty")
		require.True(t, bound.Holds(Life{Era: 7, Boot: "a"}, 0), name)
		seals.Forget()
		require.Zero(t, seals.Of(7, snapshot("28:30:28")), name)
	}
	require.Zero(t, (*Seals)(nil).Of(7, snapshot("28:30:28")))
}
