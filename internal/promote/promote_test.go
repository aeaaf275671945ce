package promote

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"
)

// fakeRow waits in a fakeStore.
type fakeRow struct {
	row

	due time.Time
	// refusal is why it cannot be moved, if it cannot.
	refusal error
}

// fakeStore is the tables, by a clock that is the test's.
type fakeStore struct {
	rows  []*fakeRow // in the order of their due times
	moved []int64
	movedAt,
	looks []time.Time
	sizes []int
	full  int
	cost  time.Duration
	// busy: somebody else has the lock.
	busy bool
	// before is called at the start of each look, and may fail it.
	before func(look int) error
	notes  map[int64][]string
	again  []time.Duration
	next   func(d time.Duration) time.Duration
}

func (s *fakeStore) add(id int64, in time.Duration, refusal error) {
	s.rows = append(s.rows, &fakeRow{row: row{id: id}, due: time.Now().Add(in), refusal: refusal})
}

func (s *fakeStore) take(i int) {
	s.moved = append(s.moved, s.rows[i].id)
	s.movedAt = append(s.movedAt, time.Now())
	s.rows = append(s.rows[:i:i], s.rows[i+1:]...)
}

func (s *fakeStore) batch(_ context.Context, after place, rows int) (batch, error) {
	s.looks = append(s.looks, time.Now())
	s.sizes = append(s.sizes, rows)
	if s.before != nil {
		if err := s.before(len(s.looks)); err != nil {
			return batch{}, err
		}
	}
	if s.busy {
		return batch{}, nil
	}
	if after == front {
		s.full++
	}
	now := time.Now()
	b := batch{locked: true, at: pgtype.Timestamptz{Time: now, Valid: true}, cost: s.cost}
	var next *time.Duration
	var due []int
	for i, r := range s.rows {
		if !r.due.After(now) {
			if len(due) < rows && (after == front || !r.due.Before(after.due.Time)) {
				due = append(due, i)
			}
		} else if d := r.due.Sub(now); next == nil || d < *next {
			if s.next != nil {
				d = s.next(d)
			}
			next = &d
		}
	}
	for _, i := range due {
		if s.rows[i].refusal != nil {
			return batch{}, s.rows[i].refusal
		}
	}
	for n, i := range due {
		b.last = place{due: pgtype.Timestamptz{Time: s.rows[i-n].due, Valid: true}, id: s.rows[i-n].id}
		s.take(i - n)
	}
	b.due, b.moved, b.next = len(due), len(due), next
	return b, nil
}

func (s *fakeStore) first(context.Context, place) (row, bool, error) {
	for _, r := range s.rows {
		if !r.due.After(time.Now()) {
			found := r.row
			found.failures = len(s.notes[r.id])
			found.place = place{due: pgtype.Timestamptz{Time: r.due, Valid: true}, id: r.id}
			return found, true, nil
		}
	}
	return row{}, false, nil
}

func (s *fakeStore) one(_ context.Context, wanted row) (bool, error) {
	for i, r := range s.rows {
		if r.id == wanted.id {
			if r.refusal != nil {
				return false, r.refusal
			}
			s.take(i)
			break
		}
	}
	return true, nil
}

func (s *fakeStore) refused(_ context.Context, wanted row, again time.Duration, why string) (bool, error) {
	for _, r := range s.rows {
		if r.id == wanted.id {
			r.due = time.Now().Add(again)
		}
	}
	if s.notes == nil {
		s.notes = map[int64][]string{}
	}
	s.notes[wanted.id] = append(s.notes[wanted.id], why)
	s.again = append(s.again, again)
	return true, nil
}

const interval = 100 * time.Millisecond

// run runs a promoter over a store for a time.
func run(t *testing.T, s *fakeStore, d time.Duration) (failed []error) {
	t.Helper()
	p := &Promoter{
		config: Config{Interval: interval, Failed: func(err error) { failed = append(failed, err) }, Logger: watermill.NopLogger{}},
		store:  s, rows: maxBatchRows, from: front,
	}
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	p.Run(ctx)
	return failed
}

// Field case F89. The time left was computed twice and fell below zero, or the
// database was away for a moment, and the loop over the scheduled messages had
// ended for good. Nobody noticed until they were missed.
func TestNothingEndsTheLoop(t *testing.T) {
	t.Parallel()

	for name, fault := range map[string]struct {
		before func(look int) error
		next   func(d time.Duration) time.Duration
		failed int
	}{
		"a wait below zero":      {next: func(time.Duration) time.Duration { return -1 }},
		"a wait far below zero":  {next: func(time.Duration) time.Duration { return -1 << 62 }},
		"a wait of zero":         {next: func(time.Duration) time.Duration { return 0 }},
		"an error of the server": {before: failAt(2, &pgconn.PgError{Code: "57P01"}), failed: 1},
		"no server":              {before: failAt(2, errors.New("connection refused")), failed: 1},
		"no answer":              {before: failAt(2, context.DeadlineExceeded), failed: 1},
		"a panic": {before: func(look int) error {
			if look == 2 {
				panic("in the middle of a look")
			}
			return nil
		}, failed: 1},
		"one after the other": {before: func(look int) error {
			switch look % 3 {
			case 0:
				return errors.New("connection reset")
			case 1:
				panic(fmt.Sprint(look))
			}
			return nil
		}, failed: 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			synctest.Test(t, func(t *testing.T) {
				s := &fakeStore{before: fault.before, next: fault.next}
				begin := time.Now()
				for i := range 10 {
					s.add(int64(i+1), time.Duration(i+1)*time.Minute, nil)
				}
				failed := run(t, s, time.Hour)
				require.GreaterOrEqual(t, len(failed), fault.failed)
				require.Equal(t, []int64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, s.moved)
				for i, at := range s.movedAt {
					late := at.Sub(begin) - time.Duration(i+1)*time.Minute
					require.GreaterOrEqual(t, late, time.Duration(0))
					require.LessOrEqual(t, late, 6*time.Second, "the pause after a failure has an end")
				}
				require.Less(t, len(s.looks), int(time.Hour/(interval/10))+100, "it does not spin")
			})
		})
	}
}

func failAt(look int, err error) func(int) error {
	return func(n int) error {
		if n == look {
			return err
		}
		return nil
	}
}

// What is due is moved at that moment, and what comes meanwhile within an
// interval.
func TestLooksWhenTheNextIsDue(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		begin := time.Now()
		s.add(1, 50*time.Millisecond, nil)
		s.add(2, 1030*time.Millisecond, nil)
		s.before = func(int) error {
			if time.Since(begin) > 2*time.Second && len(s.rows) == 0 {
				s.add(3, time.Hour, nil)
			}
			return nil
		}
		require.Empty(t, run(t, s, 3*time.Second))
		require.Equal(t, []int64{1, 2}, s.moved)
		require.Equal(t, 50*time.Millisecond, s.movedAt[0].Sub(begin))
		require.Equal(t, 1030*time.Millisecond, s.movedAt[1].Sub(begin))
		for i := range s.looks[1:] {
			require.LessOrEqual(t, s.looks[i+1].Sub(s.looks[i]), interval)
		}
		require.LessOrEqual(t, len(s.looks), 34)
	})
}

// A backlog is moved without a pause, and to whoever else moves rows it is left.
func TestLooksAgainAtOnceWhileThereIsMore(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		begin := time.Now()
		for i := range 3500 {
			s.add(int64(i+1), 0, nil)
		}
		require.Empty(t, run(t, s, time.Millisecond))
		require.Len(t, s.moved, 3500)
		require.Equal(t, begin, s.movedAt[3499])

		s = &fakeStore{busy: true}
		require.Empty(t, run(t, s, time.Second))
		require.LessOrEqual(t, len(s.looks), 11)
	})
}

// Full looks take a fiftieth of the time, and are all looks while they are cheap.
func TestFullLooksAreRareWhenTheyAreDear(t *testing.T) {
	t.Parallel()

	for cost, want := range map[time.Duration]int{
		0: 601, time.Millisecond: 601, interval / fullShare: 601, 50 * time.Millisecond: 25, time.Second: 2, time.Minute: 1,
	} {
		synctest.Test(t, func(t *testing.T) {
			s := &fakeStore{cost: cost}
			run(t, s, time.Minute+interval/2)
			require.InDelta(t, want, s.full, 1, cost)
			require.Len(t, s.looks, 601)
		})
	}
}

// A full look that takes longer than it may must not keep the others from coming.
func TestFullLookThatFails(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		looks := 0
		s.before = func(look int) error {
			if look == 20 { // this one, of the full ones
				looks = len(s.looks)
				time.Sleep(10 * time.Second)
				return context.DeadlineExceeded
			}
			return nil
		}
		require.Len(t, run(t, s, 3*time.Minute), 1)
		require.Equal(t, 19, s.full, "the next one comes after 500 s")
		require.Greater(t, len(s.looks), looks+1000)
	})
}

// A row that the server refuses is found by halves, put off with its reason, and
// put off for longer each time; all others are moved at once.
func TestRefusedRowsBlockNothing(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		begin := time.Now()
		refusal := &pgconn.PgError{Code: "P0001", Message: "not this one"}
		bad := map[int64]bool{1: true, 500: true, 501: true, 2500: true}
		for i := int64(1); i <= 2500; i++ {
			if bad[i] {
				s.add(i, 0, refusal)
			} else {
				s.add(i, 0, nil)
			}
		}
		run(t, s, time.Millisecond)
		require.Len(t, s.moved, 2496)
		require.IsIncreasing(t, s.moved)
		require.Equal(t, begin, s.movedAt[2495])
		require.Less(t, len(s.looks), 100)
		require.Len(t, s.notes, 4)
		require.Contains(t, s.notes[500][0], "not this one")

		// With the others out of the way.
		run(t, s, time.Hour)
		for id := range bad {
			require.Greater(t, len(s.notes[id]), 15, "it is tried again")
			require.Less(t, len(s.notes[id]), 30, "but not for ever as often")
		}
		s.rows[0].refusal, s.rows[1].refusal, s.rows[2].refusal, s.rows[3].refusal = nil, nil, nil, nil
		run(t, s, rowBackoff.Max)
		require.Empty(t, s.rows)
	})
}

// When it is not clear that a row is at fault, few of them pay for it.
func TestRefusalsOfAllRows(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		refusal := &pgconn.PgError{Code: "42501", Message: "permission denied"}
		for i := range 5000 {
			s.add(int64(i+1), 0, refusal)
		}
		run(t, s, time.Minute)
		require.Empty(t, s.moved)
		require.Less(t, len(s.notes), 30)
		for _, r := range s.rows {
			r.refusal = nil
		}
		run(t, s, time.Second)
		require.Greater(t, len(s.moved), 4970)
	})
}

func TestBlame(t *testing.T) {
	t.Parallel()

	for code, want := range map[string]blame{
		"08006": elsewhere, "25006": elsewhere, "0A000": elsewhere, "57P01": elsewhere, "40001": elsewhere, "3D000": elsewhere, "28000": elsewhere,
		"57014": slow,
		"P0001": aRow, "22P02": aRow, "23514": aRow, "54000": aRow, "38000": aRow,
		"42501": unclear, "42P01": unclear, "53100": unclear, "53200": unclear, "55P03": unclear, "XX000": unclear, "": unclear, "?": unclear,
	} {
		require.Equal(t, want, blameFor(fmt.Errorf("wrapped: %w", &pgconn.PgError{Code: code})), code)
	}
	require.Equal(t, slow, blameFor(fmt.Errorf("wrapped: %w", context.DeadlineExceeded)))
	require.Equal(t, elsewhere, blameFor(context.Canceled))
	require.Equal(t, elsewhere, blameFor(errors.New("connection refused")))
}

func TestSeconds(t *testing.T) {
	t.Parallel()

	inf := math.Inf(1)
	require.Equal(t, 1500*time.Millisecond, seconds(1.5))
	require.Equal(t, -time.Nanosecond, seconds(-1e-9))
	require.Greater(t, seconds(inf), 24*time.Hour)
	require.Less(t, seconds(-inf), -24*time.Hour)
}

// The reason goes into a column, whatever is in it.
func TestStorable(t *testing.T) {
	t.Parallel()

	require.Equal(t, "abc\ufffd", storable("a\x00bc\xff"))
	require.Equal(t, strings.Repeat("é", 1000), storable(strings.Repeat("é", 3000)))
	require.Equal(t, "x"+strings.Repeat("é", 999), storable("x"+strings.Repeat("é", 3000)))
}

func TestLockKeys(t *testing.T) {
	t.Parallel()

	require.NotEqual(t, LockKey("a"), LockKey("b"))
}
