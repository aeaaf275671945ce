package live

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/window"
)

// put puts rows with these ids into a buffer, as one transaction of number xid.
func put(b *Buffer, xid uint64, ids ...int64) {
	rows := make([]bufferedRow, len(ids))
	for i, id := range ids {
		rows[i] = bufferedRow{topic: b.topic, row: window.Row{ID: id, XID: xid}}
	}
	b.add(rows)
}

// numbered is a sample that can be told from others.
func numbered(t testing.TB, n int, at time.Time) sample {
	return sample{snapshot: snapshot(t, fmt.Sprintf("%d:%d:", 100+n, 100+n)), at: at}
}

// A page ends at its limits, and at the last sample among its rows: what a sample
// says, it says of the rows in front of it.
func TestTake(t *testing.T) {
	t.Parallel()

	one := rowSize(&window.Row{}) // all test rows are of this size
	all := window.Limits{Rows: 100, Bytes: 100 * one}
	type taken struct {
		ids    []int64
		sample int // 0 for none
	}
	for name, test := range map[string]struct {
		// fill is the order of rows, as their ids, and samples, below 0.
		fill   []int64
		limits window.Limits
		want   []taken
	}{
		"nothing":                 {nil, all, nil},
		"rows alone":              {[]int64{1, 2, 3}, all, []taken{{[]int64{1, 2, 3}, 0}}},
		"limited by rows":         {[]int64{1, 2, 3}, window.Limits{Rows: 2, Bytes: all.Bytes}, []taken{{[]int64{1, 2}, 0}, {[]int64{3}, 0}}},
		"limited by bytes":        {[]int64{1, 2, 3}, window.Limits{Rows: all.Rows, Bytes: 2 * one}, []taken{{[]int64{1, 2}, 0}, {[]int64{3}, 0}}},
		"one row above the limit": {[]int64{1, 2, 3}, window.Limits{Rows: all.Rows, Bytes: 2*one - 1}, []taken{{[]int64{1, 2}, 0}, {[]int64{3}, 0}}},
		"one byte is a row":       {[]int64{1, 2}, window.Limits{Rows: all.Rows, Bytes: 1}, []taken{{[]int64{1}, 0}, {[]int64{2}, 0}}},
		"a sample alone":          {[]int64{-1}, all, []taken{{nil, 1}}},
		"a sample in front":       {[]int64{-1, 1, 2}, all, []taken{{nil, 1}, {[]int64{1, 2}, 0}}},
		"a sample behind":         {[]int64{1, 2, -1}, all, []taken{{[]int64{1, 2}, 1}}},
		"a sample among them":     {[]int64{1, 2, -1, 3, 4}, all, []taken{{[]int64{1, 2}, 1}, {[]int64{3, 4}, 0}}},
		"a sample at the cut":     {[]int64{1, 2, -1, 3, 4}, window.Limits{Rows: 2, Bytes: all.Bytes}, []taken{{[]int64{1, 2}, 1}, {[]int64{3, 4}, 0}}},
		"a sample behind the cut": {[]int64{1, 2, -1, 3, 4}, window.Limits{Rows: 1, Bytes: all.Bytes}, []taken{{[]int64{1}, 0}, {[]int64{2}, 1}, {[]int64{3}, 0}, {[]int64{4}, 0}}},
		"samples among them":      {[]int64{1, -1, 2, -2, 3}, all, []taken{{[]int64{1, 2}, 2}, {[]int64{3}, 0}}},
		"samples around the cut":  {[]int64{1, -1, 2, 3, -2, 4}, window.Limits{Rows: 2, Bytes: all.Bytes}, []taken{{[]int64{1}, 1}, {[]int64{2, 3}, 2}, {[]int64{4}, 0}}},
		"two samples in a row":    {[]int64{1, -1, -2, 2}, all, []taken{{[]int64{1}, 2}, {[]int64{2}, 0}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			r := newRig(t, testBytes, "topic")
			b := r.attach("topic", "group")
			at := time.Now()
			rows := 0
			for _, step := range test.fill {
				if step < 0 {
					b.mark(numbered(t, int(-step), at))
				} else {
					put(b, 1, step)
					rows++
				}
			}
			require.Equal(t, rows*one, r.session.bytes)
			var got []taken
			for {
				page, sample, found, closed := b.take(test.limits)
				require.False(t, closed)
				require.Equal(t, len(page) > 0, found)
				if !found && sample.Empty() {
					break
				}
				var turn taken
				for _, row := range page {
					turn.ids = append(turn.ids, row.ID)
				}
				if !sample.Empty() {
					turn.sample = int(sample.Xmax() - 100)
				}
				got = append(got, turn)
			}
			require.Equal(t, test.want, got)
			require.Zero(t, b.bytes)
			require.Zero(t, r.session.bytes)
			require.Empty(t, b.marks)
		})
	}
}

// Whatever comes in and however it is taken: the rows come once and in order,
// each sample behind all rows that were there when it came, and in the end the
// last row has one behind it.
func TestBufferAgainstModel(t *testing.T) {
	t.Parallel()

	random := rand.New(rand.NewPCG(1, 2))
	merged := 0
	for range 50 {
		r := newRig(t, testBytes, "topic")
		b := r.attach("topic", "group")
		now := time.Now()
		var in, out int64 // the last row that came in, and that was taken
		covers := []int64{0}
		last := 0 // the last sample that was taken
		take := func() bool {
			limits := window.Limits{Rows: 1 + random.IntN(100), Bytes: 1 + random.IntN(20_000)}
			rows, sample, found, _ := b.take(limits)
			require.LessOrEqual(t, len(rows), limits.Rows)
			for i, row := range rows {
				require.True(t, row.ID == out+int64(i)+1, "row %d behind row %d", row.ID, out+int64(i))
			}
			out += int64(len(rows))
			if !sample.Empty() {
				n := int(sample.Xmax() - 100)
				require.Greater(t, n, last, "an older sample follows on a newer one")
				require.GreaterOrEqual(t, out, covers[n], "a sample came in front of rows that it sees")
				merged += n - last - 1
				last = n
			}
			return found || !sample.Empty()
		}
		for range 300 {
			switch random.IntN(7) {
			case 0, 1:
				n := 1 + random.IntN(1+random.IntN(50))
				for range n {
					in++
					put(b, uint64(in), in)
				}
			case 2, 3, 4:
				now = now.Add(time.Duration(random.IntN(int(sampleInterval / 3))))
				covers = append(covers, in)
				b.mark(numbered(t, len(covers)-1, now))
			default:
				take()
			}
			require.Equal(t, b.bytes, r.session.bytes)
			require.Equal(t, int(in-out)*rowSize(&window.Row{}), b.bytes)
		}
		covers = append(covers, in)
		b.mark(numbered(t, len(covers)-1, now))
		for take() {
		}
		require.Equal(t, in, out)
		require.Equal(t, in, covers[last], "the last rows have no sample behind them")
	}
	require.Positive(t, merged)
}

// Each row had a sample of its own behind it, which was not counted: where many
// transactions run, a buffer within its bound held many times that in samples.
func TestMarksStayFew(t *testing.T) {
	t.Parallel()

	const rows = 10_000
	r := newRig(t, 16<<20, "topic")
	b := r.attach("topic", "group")
	now := time.Now()
	for i := range rows {
		put(b, 1, int64(i+1))
		b.mark(numbered(t, i+1, now))
		require.LessOrEqual(t, len(b.marks), 3+i/(rowsPerMark-1))
	}
	last := b.marks[len(b.marks)-1]
	require.Equal(t, mark{after: rows, snapshot: numbered(t, rows, now).snapshot}, last, "the newest sample stands behind the last row")
	ids, samples := takeAll(b)
	require.Len(t, ids, rows)
	require.Equal(t, last.snapshot, samples[len(samples)-1])
}

// A reader without news gets a sample from time to time, so that its position
// moves; one with news gets one behind them at once.
func TestIdleReaderGetsASampleNowAndThen(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "topic")
	b := r.attach("topic", "group")
	now := time.Now()
	n := 0
	mark := func(after time.Duration) []window.Snapshot {
		now = now.Add(after)
		n++
		b.mark(numbered(t, n, now))
		_, samples := takeAll(b)
		return samples
	}
	require.Len(t, mark(0), 1, "the first")
	for range 9 {
		require.Empty(t, mark(sampleInterval/10))
	}
	require.Equal(t, []window.Snapshot{snapshot(t, "111:111:")}, mark(sampleInterval/10))
	put(b, 1, 1)
	require.Len(t, mark(0), 1)
	require.Empty(t, mark(sampleInterval-1))

	// Of those that come before it is taken, the newest counts.
	put(b, 1, 2)
	now = now.Add(time.Millisecond)
	b.mark(numbered(t, 20, now))
	b.mark(numbered(t, 21, now))
	_, samples := takeAll(b)
	require.Equal(t, []window.Snapshot{snapshot(t, "121:121:")}, samples)
}

// What the window in front saw is left out, and only that: the rows of a
// transaction that was running then come, although younger ones were seen.
func TestRowsThatTheTableHadAreLeftOut(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "topic")
	b := r.attach("topic", "group")
	require.True(t, b.Follow(snapshot(t, "20:30:20,25"), r.session.base.life))
	for _, xid := range []uint64{19, 20, 21, 25, 29, 30, 31} {
		put(b, xid, int64(xid), int64(100+xid))
	}
	ids, _ := takeAll(b)
	require.Equal(t, []int64{20, 120, 25, 125, 30, 130, 31, 131}, ids)
	require.Zero(t, r.session.bytes, "what is left out is given back, too")

	put(b, 19, 1)
	rows, sample, found, _ := b.take(window.Limits{Rows: 10, Bytes: 1 << 20})
	require.Empty(t, rows)
	require.True(t, sample.Empty())
	require.True(t, found)
}

// A row for one group goes to that one alone.
func TestRowsOfGroups(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "topic", "other")
	a, b, c := r.attach("topic", "a"), r.attach("topic", "b"), r.attach("other", "a")
	r.transaction(
		1001, stored{id: 1, topic: "topic"}, stored{id: 2, topic: "topic", group: "b", payload: 1000}, stored{id: 3, topic: "other", group: "b"},
		stored{id: 4, topic: "other"}, stored{id: 5, topic: "topic", group: "c"},
	)
	r.step()
	require.Less(t, a.bytes, 1000)
	require.Greater(t, b.bytes, 1000)
	for _, test := range []struct {
		buffer *Buffer
		ids    []int64
	}{{a, []int64{1}}, {b, []int64{1, 2}}, {c, []int64{4}}} {
		rows, _, _, _ := test.buffer.take(window.Limits{Rows: 10, Bytes: 1 << 20})
		require.Len(t, rows, len(test.ids))
		for i, row := range rows {
			require.Equal(t, test.ids[i], row.ID)
		}
	}
	require.Zero(t, r.session.bytes)
}

// Next waits for what is worth returning, and no longer than its context or the
// buffer lasts.
func TestNextWaits(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, testBytes, "topic")
		r.server.set(func(s *fakeServer) { s.insert = "1/0" }) // no sample is passed
		b := r.attach("topic", "group")
		require.True(t, b.Follow(snapshot(t, "1002:1002:"), r.session.base.life))
		limits := window.Limits{Rows: 10, Bytes: 1 << 20}

		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		began := time.Now()
		time.AfterFunc(time.Minute, func() {
			r.transaction(1001, stored{id: 1, topic: "topic"}) // the table had it
			r.step()
		})
		_, _, ok := b.Next(ctx, limits)
		require.False(t, ok)
		require.Equal(t, time.Hour, time.Since(began))
		require.NoError(t, b.Err(), "only its context has ended")
		cancel()

		time.AfterFunc(time.Minute, func() {
			r.transaction(1002, stored{id: 2, topic: "topic"})
			r.step()
		})
		rows, sample, ok := b.Next(t.Context(), limits)
		require.True(t, ok)
		require.Len(t, rows, 1)
		require.True(t, sample.Empty())

		time.AfterFunc(time.Minute, func() {
			r.session.mu.Lock()
			defer r.session.mu.Unlock()
			b.mark(numbered(t, 1, time.Now()))
		})
		rows, sample, ok = b.Next(t.Context(), limits)
		require.True(t, ok)
		require.Empty(t, rows)
		require.False(t, sample.Empty())

		require.False(t, isGone(b))
		time.AfterFunc(time.Minute, b.Close)
		_, _, ok = b.Next(t.Context(), limits)
		require.False(t, ok)
		require.ErrorIs(t, b.Err(), errEnded)
		require.True(t, isGone(b))
		require.Zero(t, r.source.Status().Attached)
	})
}

// A reader that hung in its handler was given a sample each second, and kept them
// all until it came back.
func TestStuckReaderKeepsFewIdleSamples(t *testing.T) {
	t.Parallel()

	r := newRig(t, testBytes, "topic")
	b := r.attach("topic", "group")
	put(b, 1, 1)
	now := time.Now()
	for n := range 36_000 {
		b.mark(numbered(t, n, now.Add(time.Duration(n)*100*time.Millisecond)))
	}
	require.Len(t, b.marks, 1)
	_, samples := takeAll(b)
	require.Equal(t, numbered(t, 35_999, now).snapshot, samples[0])
}
