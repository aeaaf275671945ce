package tests

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/cursor"
	"github.com/millrace/watermill-outbox/internal/window"
)

// model is what is promised, in its shortest form: each committed row once, and
// a row that was published after another had been committed comes after it.
type model struct {
	clock               int         // counts inserts and commits
	inserted, committed map[int]int // by row: when
}

func (m *model) check(t *testing.T, delivered []int) {
	place := map[int]int{}
	for i, row := range delivered {
		require.NotContains(t, place, row, "row %d came twice", row)
		require.Contains(t, m.committed, row, "row %d was never committed", row)
		place[row] = i
	}
	require.Len(t, place, len(m.committed), "rows lost")
	for a := range m.committed {
		for b := range m.committed {
			if m.committed[a] < m.inserted[b] {
				require.Less(t, place[a], place[b], "row %d committed before row %d was published, and came after it", a, b)
			}
		}
	}
}

// openTx is a transaction of the model test, and what it has inserted so far.
type openTx struct {
	tx   pgx.Tx
	rows []int
}

// TestWindowsAgainstModel interleaves transactions and a reader step by step, in
// one goroutine, so that a failing seed fails again: transactions begin, take
// their id, insert, set savepoints and roll back to them, commit and roll back;
// the reader reads one page of a random size, or forgets everything but its
// stored cursor, in the middle of a window too.
func TestWindowsAgainstModel(t *testing.T) {
	t.Parallel()

	seeds := number("OUTBOX_TEST_SEEDS", 30)
	f := newFixture(t)
	store := cursor.NewStore(oddSchema, "model")
	require.NoError(t, store.MarkLife(t.Context(), f.pool))
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := &modelRun{
				t: t, f: f, store: store, random: rand.New(rand.NewPCG(uint64(seed), 7)),
				key: cursor.Key{Group: "group", Topic: fmt.Sprint("topic ", seed)}, topics: []string{fmt.Sprint("topic ", seed)},
				model: model{inserted: map[int]int{}, committed: map[int]int{}},
			}
			topics := window.One(r.topics[0])
			if seed%2 == 1 {
				// Many topics, by one cursor, and rows of others between them.
				topics = window.Matching(window.Pattern{r.topics[0] + ".", ""}, window.Pattern{"", "%_" + r.topics[0]})
				r.key, r.patterns = cursor.Key{Group: fmt.Sprint("group ", seed)}, topics.Like()
				r.topics = []string{r.topics[0] + ".", r.topics[0] + ".a", "x%_" + r.topics[0]}
				r.others = []string{"other", fmt.Sprint("topic ", seed), fmt.Sprint("xx_topic ", seed)}
			}
			r.reader = window.Reader{Queries: window.NewQueries(oddSchema), Topics: topics, Group: r.key.Group, Scan: 1 + r.random.Int64N(20)}
			config := f.pool.Config()
			config.MaxConns = 8
			var err error
			r.pool, err = pgxpool.NewWithConfig(t.Context(), config)
			require.NoError(t, err)
			defer r.pool.Close()
			r.run()
		})
	}
}

type modelRun struct {
	t      *testing.T
	f      *fixture
	pool   *pgxpool.Pool
	store  *cursor.Store
	random *rand.Rand
	reader window.Reader
	model  model
	key    cursor.Key
	// topics are what the reader reads, patterns if they are many; others are not.
	topics, patterns, others []string

	open      []*openTx
	nextRow   int
	held      cursor.Held
	position  window.Position
	delivered []int
	restarts  int
}

func (r *modelRun) run() {
	key := r.key
	_, err := r.store.Ensure(r.t.Context(), r.f.pool, key.Of(), r.patterns, 1, false)
	require.NoError(r.t, err)
	r.restart(key)
	for range 400 {
		switch n := r.random.IntN(20); {
		case n < 3 && len(r.open) < 5:
			r.begin()
		case n < 10 && len(r.open) > 0:
			r.insert(r.open[r.random.IntN(len(r.open))])
		case n < 13 && len(r.open) > 0:
			r.end(r.random.IntN(len(r.open)), r.random.IntN(4) > 0)
		case n < 14:
			r.save(key)
			r.restart(key)
		default:
			r.read()
		}
	}
	for len(r.open) > 0 {
		r.end(0, true)
	}
	for quiet := 0; quiet < 2; {
		if r.read() {
			quiet = 0
		} else {
			quiet++
		}
	}
	require.NotEmpty(r.t, r.delivered)
	require.Positive(r.t, r.restarts)
	r.model.check(r.t, r.delivered)
}

func (r *modelRun) begin() {
	tx, err := r.pool.Begin(r.t.Context())
	require.NoError(r.t, err)
	if r.random.IntN(3) == 0 {
		_, err := tx.Exec(r.t.Context(), "SELECT pg_current_xact_id()")
		require.NoError(r.t, err)
	}
	r.open = append(r.open, &openTx{tx: tx})
}

func (r *modelRun) insert(o *openTx) {
	tx := o.tx
	var err error
	nested := r.random.IntN(4) == 0
	if nested {
		tx, err = o.tx.Begin(r.t.Context())
		require.NoError(r.t, err)
	}
	insert := r.f.sql("INSERT INTO outbox.messages (topic, uuid) VALUES ($1, $2)")
	for range r.random.IntN(10) * min(len(r.others), 1) {
		_, err := tx.Exec(r.t.Context(), insert, r.others[r.random.IntN(len(r.others))], "not to be read")
		require.NoError(r.t, err)
	}
	row := r.nextRow
	r.nextRow++
	// The clock before the insert: what committed by now came first.
	r.model.clock++
	r.model.inserted[row] = r.model.clock
	_, err = tx.Exec(r.t.Context(), insert, r.topics[row%len(r.topics)], fmt.Sprint(row))
	require.NoError(r.t, err)
	if nested && r.random.IntN(2) == 0 {
		require.NoError(r.t, tx.Rollback(r.t.Context()))
		return
	}
	if nested {
		require.NoError(r.t, tx.Commit(r.t.Context()))
	}
	o.rows = append(o.rows, row)
}

func (r *modelRun) end(i int, commit bool) {
	o := r.open[i]
	r.open = append(r.open[:i], r.open[i+1:]...)
	if !commit {
		require.NoError(r.t, o.tx.Rollback(r.t.Context()))
		return
	}
	require.NoError(r.t, o.tx.Commit(r.t.Context()))
	r.model.clock++
	for _, row := range o.rows {
		r.model.committed[row] = r.model.clock
	}
}

// read reads a page and reports whether there was anything in it.
func (r *modelRun) read() bool {
	r.reader.Limits = window.Limits{Rows: 1 + r.random.IntN(6), Bytes: 1 + r.random.IntN(1000)}
	page, err := r.reader.Next(r.t.Context(), r.f.pool, r.position)
	require.NoError(r.t, err)
	require.Equal(r.t, r.held.Life, page.Life)
	for i, row := range page.Rows {
		var n int
		_, err := fmt.Sscan(row.UUID, &n)
		require.NoError(r.t, err)
		require.Equal(r.t, r.topics[n%len(r.topics)], row.Topic)
		r.delivered = append(r.delivered, n)
		if r.random.IntN(30) == 0 { // stopped in mid-page
			r.position = page.After(i)
			return true
		}
	}
	r.position = page.End
	return len(page.Rows) > 0 || page.More
}

// save stores the position as the subscriber does.
func (r *modelRun) save(key cursor.Key) {
	require.NoError(r.t, r.position.Validate())
	saved, err := r.store.Save(r.t.Context(), r.f.pool, []cursor.Write{{
		Key: key, Epoch: r.held.Epoch, State: window.State{Position: r.position}, Life: r.held.Life, Release: true,
	}})
	require.NoError(r.t, err)
	require.True(r.t, saved[key])
}

// restart forgets everything but the stored cursor.
func (r *modelRun) restart(key cursor.Key) {
	r.restarts++
	held, err := r.store.Claim(r.t.Context(), r.f.pool, []cursor.Wanted{{Key: key, Patterns: r.patterns}}, nil)
	require.NoError(r.t, err)
	require.Len(r.t, held, 1)
	require.NoError(r.t, held[0].Err)
	r.held, r.position = held[0], held[0].State.Position
}
