package window

import (
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func parse(t testing.TB, text string) Snapshot {
	t.Helper()
	s, err := ParseSnapshot(text)
	require.NoError(t, err)
	return s
}

// liveRows are rows of era 1, given as ids and transactions.
func liveRows(pairs ...[2]int64) []Row {
	rows := make([]Row, len(pairs))
	for i, pair := range pairs {
		rows[i] = Row{Era: 1, ID: pair[0], XID: uint64(pair[1])}
	}
	return rows
}

var testLife = Life{Era: 1, Boot: "boot"}

// Rows from the write-ahead log are handed out while P stays behind, and are
// remembered until a sample moves it.
func TestLivePage(t *testing.T) {
	t.Parallel()

	pos := Latest(1, parse(t, "100:110:100,105"), 50)
	pos.Ahead = []Ahead{{ID: 51, XID: 105}}
	first := LivePage(pos, testLife, liveRows([2]int64{60, 111}, [2]int64{55, 100}, [2]int64{56, 100}), Snapshot{})
	require.Equal(t, testLife, first.Life)
	require.Equal(t, pos.P, first.End.P)
	require.Equal(t, Idle, first.End.Step)
	require.Equal(t, int64(60), first.End.Floor, "the highest id, not the last")
	require.Equal(t, []Ahead{{51, 105}, {60, 111}, {55, 100}, {56, 100}}, first.End.Ahead)
	require.NoError(t, first.End.Validate())
	require.False(t, first.More)
	require.True(t, first.Window().Empty(), "it is no window")

	// A sample sees some, and says that all of those are out.
	second := LivePage(first.End, testLife, liveRows([2]int64{57, 112}), parse(t, "105:113:105,112"))
	require.Equal(t, parse(t, "105:113:105,112"), second.End.P)
	require.Equal(t, int64(60), second.End.Floor)
	require.Equal(t, []Ahead{{51, 105}, {57, 112}}, second.End.Ahead)
	require.NoError(t, second.End.Validate())

	// A sample alone moves P over nothing.
	third := LivePage(second.End, testLife, nil, parse(t, "120:120:"))
	require.Equal(t, parse(t, "120:120:"), third.End.P)
	require.Empty(t, third.End.Ahead)
	require.Equal(t, int64(60), third.End.Floor)

	// One that was taken before the window in front says less than that did.
	fourth := LivePage(third.End, testLife, liveRows([2]int64{70, 121}), parse(t, "119:119:"))
	require.Equal(t, parse(t, "120:120:"), fourth.End.P)
	require.Equal(t, []Ahead{{70, 121}}, fourth.End.Ahead)
	require.Equal(t, int64(70), fourth.End.Floor)

	require.Equal(t, []Ahead{{51, 105}}, pos.Ahead, "a stored position is never changed")
	require.Len(t, first.End.Ahead, 4)
}

// A subscription that ends in mid-page has handed out the rows so far: they, and
// no others, are ahead. P moves with the last row only.
func TestLivePageAfter(t *testing.T) {
	t.Parallel()

	pos := Latest(1, parse(t, "100:100:"), 50)
	pos.Ahead = []Ahead{{ID: 51, XID: 101}}
	rows := liveRows([2]int64{52, 102}, [2]int64{53, 102}, [2]int64{54, 103})
	page := LivePage(pos, testLife, rows, parse(t, "104:104:"))
	require.Equal(t, []Ahead{{51, 101}, {52, 102}}, page.After(0).Ahead)
	require.Equal(t, []Ahead{{51, 101}, {52, 102}, {53, 102}}, page.After(1).Ahead)
	require.Equal(t, pos.P, page.After(1).P)
	require.Equal(t, Idle, page.After(1).Step)
	require.NoError(t, page.After(1).Validate())
	require.Equal(t, page.End, page.After(2))
	require.Equal(t, parse(t, "104:104:"), page.After(2).P)
	require.Empty(t, page.After(2).Ahead)

	// Positions of a page share an array, and what follows on one of them must
	// not run into the next.
	early := page.After(0)
	other := LivePage(early, testLife, liveRows([2]int64{99, 99}), Snapshot{})
	_ = append(early.Ahead, Ahead{ID: 98, XID: 98})
	require.Equal(t, []Ahead{{51, 101}, {52, 102}, {99, 99}}, other.End.Ahead)
	require.Equal(t, []Ahead{{51, 101}, {52, 102}, {53, 102}}, page.After(1).Ahead)

	// Without a sample the last row is like the others.
	page = LivePage(pos, testLife, rows, Snapshot{})
	require.Equal(t, []Ahead{{51, 101}, {52, 102}, {53, 102}, {54, 103}}, page.After(2).Ahead)
	require.Equal(t, int64(54), page.After(2).Floor)
}

func TestUnseen(t *testing.T) {
	t.Parallel()

	ahead := []Ahead{{1, 10}, {2, 15}, {3, 20}, {4, 15}, {5, 25}}
	require.Equal(t, []Ahead{{2, 15}, {3, 20}, {4, 15}, {5, 25}}, unseen(ahead, parse(t, "15:20:15")))
	require.Equal(t, ahead, unseen(ahead, Snapshot{}), "it sees nothing")
	require.Empty(t, unseen(ahead, parse(t, "26:26:")))
	require.Empty(t, unseen(nil, Snapshot{}))
	require.Equal(t, Ahead{1, 10}, ahead[0], "the slice is never changed")
}

// A window leaves out what was handed out in front of it: by era and id, since
// another cluster's rows have ids of their own.
func TestWithoutAhead(t *testing.T) {
	t.Parallel()

	rows := func() []Row { return []Row{{Era: 1, ID: 5}, {Era: 1, ID: 6}, {Era: 2, ID: 5}, {Era: 2, ID: 7}} }
	left := func(pos Position) (ids [][2]int64) {
		for _, row := range pos.withoutAhead(rows()) {
			ids = append(ids, [2]int64{row.Era, row.ID})
		}
		return ids
	}
	pos := Position{
		Era: 2, Step: Idle, Ahead: []Ahead{{ID: 5, XID: 100}, {ID: 8, XID: 100}},
		Past: map[int64]PastEra{1: {Ahead: []Ahead{{ID: 6, XID: 900}, {ID: 7, XID: 900}}}, 3: {Ahead: []Ahead{{ID: 5, XID: 1}}}},
	}
	for _, step := range []Step{Idle, Late, Main} {
		pos.Step = step
		require.Equal(t, [][2]int64{{1, 5}, {1, 6}, {2, 7}}, left(pos), step)
	}
	pos.Step = Past
	require.Equal(t, [][2]int64{{1, 5}, {2, 5}, {2, 7}}, left(pos))
	require.Equal(t, [][2]int64{{1, 5}, {1, 6}, {2, 5}, {2, 7}}, left(Position{Era: 2, Step: Main}))
}

// When a window is through, and when the cluster is left, what is ahead goes
// along.
func TestAheadOutlivesWindowsAndEras(t *testing.T) {
	t.Parallel()

	pos := Latest(1, parse(t, "100:100:"), 50)
	pos.Ahead = []Ahead{{51, 101}, {52, 105}}
	pos.Step, pos.C, pos.Top = Main, parse(t, "101:110:105"), 60
	done := pos.done()
	require.Equal(t, []Ahead{{52, 105}}, done.Ahead)
	require.Equal(t, pos.C, done.P)
	require.Equal(t, int64(60), done.Floor)

	away := done.enterEra(2)
	require.Empty(t, away.Ahead)
	require.Equal(t, []Ahead{{52, 105}}, away.Past[1].Ahead)
	back := away.enterEra(1)
	require.Equal(t, []Ahead{{52, 105}}, back.Ahead)
	require.Equal(t, done.P, back.P)
}

// Whatever is handed out in front of P, and whatever samples say: the rows that P
// does not see are ahead, each once, and no others; and P never moves back.
func TestLivePagesAgainstModel(t *testing.T) {
	t.Parallel()

	random := rand.New(rand.NewPCG(1, 2))
	moved, cut := 0, 0
	for range 100 {
		pos := Latest(1, parse(t, "100:100:"), 0)
		out := map[int64]uint64{} // all that was handed out
		next := uint64(100)       // the transaction after the last
		for id := int64(1); id < 100; {
			var rows []Row
			for range random.IntN(5) {
				xid := next - random.Uint64N(next-99)
				if pos.P.Sees(xid) {
					xid = next
				}
				rows = append(rows, Row{Era: 1, ID: id, XID: xid})
				id++
				next += random.Uint64N(2)
			}
			samples := []Snapshot{{}, {xmin: 100, xmax: 100}, {xmin: next, xmax: next}}
			if pos.P.Xmax() < next { // with one that is running
				running := pos.P.Xmax() + random.Uint64N(next-pos.P.Xmax())
				samples = append(samples, Snapshot{xmin: running, xmax: next, xip: []uint64{running}})
			}
			page := LivePage(pos, testLife, rows, samples[random.IntN(len(samples))])
			before := pos.P
			pos = page.End
			if len(rows) > 0 && random.IntN(3) == 0 { // stopped in mid-page
				i := random.IntN(len(rows))
				pos, rows = page.After(i), rows[:i+1]
				cut++
			}
			require.True(t, pos.P.Covers(before))
			if !pos.P.Equal(before) {
				moved++
			}
			for _, row := range rows {
				out[row.ID] = row.XID
			}
			maps.DeleteFunc(out, func(_ int64, xid uint64) bool { return pos.P.Sees(xid) })
			got := map[int64]uint64{}
			for _, a := range pos.Ahead {
				got[a.ID] = a.XID
			}
			require.Equal(t, out, got)
			require.Len(t, pos.Ahead, len(out))
			require.NoError(t, pos.Validate())
		}
		page := LivePage(pos, testLife, nil, Snapshot{xmin: next + 1, xmax: next + 1})
		require.Empty(t, page.End.Ahead, "a sample that sees all leaves nothing ahead")
	}
	require.Greater(t, moved, 100)
	require.Greater(t, cut, 100)
}
