package window

import (
	"math"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What was handed out of another cluster's rows is put aside with the rest when
// this one is left in the middle of them, or after them.
func TestPastIsKeptOnTheNextCluster(t *testing.T) {
	t.Parallel()

	open := Snapshot{xmin: 20, xmax: 20}
	left := Snapshot{xmin: 10, xmax: 10}
	past := map[int64]PastEra{
		1: {P: left, C: open, At: 90}, 2: {P: left, Ahead: []Ahead{{ID: 5, XID: 30}}}, 3: {P: left, C: open, At: 90}, 4: {P: left},
	}
	pos := Position{Era: 9, Step: Past, AtEra: 3, At: 50, Past: past}
	require.Equal(t, map[int64]PastEra{
		1: {P: left, C: everything, At: math.MaxInt64},
		2: {P: left, C: everything, At: math.MaxInt64, Ahead: []Ahead{{ID: 5, XID: 30}}},
		3: {P: left, C: open, At: 90}, // says more than that 50 has been passed
		4: {P: left},
	}, pos.enterEra(10).Past)
	pos.At = 95
	require.Equal(t, PastEra{P: left, C: everything, At: 95}, pos.enterEra(10).Past[3])
	require.Equal(t, map[int64]PastEra{
		1: {P: left, C: open, At: 90}, 2: {P: left, Ahead: []Ahead{{ID: 5, XID: 30}}}, 3: {P: left, C: open, At: 90}, 4: {P: left},
	}, past, "positions share it")

	// A return goes on where the cluster was left, if that is known.
	pos = Position{Era: 9, Step: Idle, P: left, Past: finished(past)}
	back := pos.enterEra(2)
	require.Equal(t, Position{Era: 2, Step: Past, P: left, Ahead: past[2].Ahead, Past: back.Past}, back)
	pos.Past = map[int64]PastEra{2: {P: everything}}
	back = pos.enterEra(2)
	require.Equal(t, Position{Era: 2, Step: Past, Past: map[int64]PastEra{9: {P: left}}}, back)
}

// The server takes no transaction id whose lower half is 0.
func TestEverythingIsASnapshotToTheServer(t *testing.T) {
	t.Parallel()

	x, _, _ := strings.Cut(everything.String(), ":")
	n, err := strconv.ParseUint(x, 10, 64)
	require.NoError(t, err)
	require.NotZero(t, uint32(n))
	content, err := queries.ReadFile("queries/past.sql")
	require.NoError(t, err)
	require.Contains(t, string(content), "k.c::pg_snapshot")
}
