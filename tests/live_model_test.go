package tests

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/cursor"
	"github.com/millrace/watermill-outbox/internal/live"
	"github.com/millrace/watermill-outbox/internal/pgtest"
	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/replication"
	"github.com/millrace/watermill-outbox/schema"
)

// TestLiveReader attaches to the stream and leaves it as often as it can, under
// the workload that has lost and reordered messages before: after a random
// while, in the middle of a page, when the stream is killed, when its buffer
// refuses rows; and forgets everything but its stored cursor in between. Nothing
// may be lost, repeated or out of causal order. OUTBOX_TEST_SECONDS makes it
// longer, OUTBOX_TEST_SEED repeats its choices.
func TestLiveReader(t *testing.T) {
	t.Parallel()

	const writers, topic = 12, "changes"
	f, _ := newOwnFixture(t, pgtest.Options{})
	w := newWorkload(t, f, topic, 20, writers)
	seed := uint64(number("OUTBOX_TEST_SEED", int(time.Now().UnixNano())))
	r := newLiveReader(t, f, topic, seed)

	writing, cancel := context.WithTimeout(t.Context(), time.Duration(number("OUTBOX_TEST_SECONDS", 5))*time.Second)
	defer cancel()
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.run(stop)
	}()
	w.run(t, writing, writers, seed)
	w.settled(t, &r.ledger)
	close(stop)
	<-done

	v := w.judge(t, &r.ledger)
	t.Logf("seed=%d streams=%d attached=%d refused=%d restarts=%d from_wal=%d from_table=%d ahead_stored=%d %s",
		seed, r.streams, r.attached, r.refused, r.restarts, r.fromWAL, r.fromTable, r.aheadStored, v)
	require.Greater(t, r.attached, 5)
	require.Positive(t, r.fromWAL)
	require.Positive(t, r.fromTable)
	require.Positive(t, v.Committed)
	require.Zero(t, v.Lost, "lost")
	require.Zero(t, v.Invented, "invented")
	require.Zero(t, v.Duplicated, "duplicated")
	require.Zero(t, v.OutOfOrder, "out of order")
}

// liveReader does what a subscription does, with worse luck.
type liveReader struct {
	t      *testing.T
	f      *fixture
	ledger ledger
	random *rand.Rand
	source *live.Source
	key    cursor.Key
	store  *cursor.Store
	reader window.Reader

	held     cursor.Held
	position window.Position

	streams, attached, refused, restarts, fromWAL, fromTable, aheadStored int
}

func newLiveReader(t *testing.T, f *fixture, topic string, seed uint64) *liveReader {
	t.Helper()
	r := &liveReader{
		t: t, f: f, random: rand.New(rand.NewPCG(seed, 3000)),
		key: cursor.Key{Group: "group", Topic: topic}, store: cursor.NewStore(oddSchema, "reader"),
		reader: window.Reader{Queries: window.NewQueries(oddSchema), Topics: window.One(topic), Group: "group"},
	}
	require.NoError(t, r.store.MarkLife(t.Context(), f.pool))
	f.ensure(t, r.store, r.key)
	r.claim()
	config := f.pool.Config()
	config.MaxConns = 1
	barrier, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(barrier.Close)
	r.source = live.New(live.Config{
		Schema: oddSchema, Publication: schema.PublicationName(oddSchema), Barrier: barrier, DB: f.pool,
		Connect: func(ctx context.Context, options replication.ConnectOptions) (*replication.Conn, error) {
			r.streams++
			return replication.Connect(ctx, &config.ConnConfig.Config, options)
		},
		Problems: func(context.Context) ([]string, error) { return nil, nil },
		Tick:     3 * time.Millisecond, Lag: 500 * time.Millisecond, Bytes: 20_000, MaxPinned: 1 << 30,
		Timeout: 2 * time.Second, Failed: func(error) {}, Logger: testLogger(t),
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.source.Run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return r
}

func (r *liveReader) run(stop <-chan struct{}) {
	interest := r.source.Want(window.One(r.key.Topic))
	defer func() { interest.Close() }()
	for {
		select {
		case <-stop:
			return
		default:
		}
		buffer := interest.Attach("group", live.Shard{})
		if !r.window(buffer) {
			buffer = nil
		}
		if buffer == nil {
			continue
		}
		r.attached++
		r.live(buffer)
		buffer.Close()
		if r.random.IntN(3) == 0 { // with rows that were handed out ahead of P
			r.save()
			r.claim()
		}
		switch r.random.IntN(60) {
		case 0:
			interest.Close()
			interest = r.source.Want(window.One(r.key.Topic))
		case 1:
			_, err := r.f.pool.Exec(context.Background(), `SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active`)
			assert.NoError(r.t, err)
		}
	}
}

// window reads a whole window and reports whether the buffer follows on it.
func (r *liveReader) window(buffer *live.Buffer) bool {
	follows := false
	for first := true; ; first = false {
		r.reader.Limits = window.Limits{Rows: 1 + r.random.IntN(50), Bytes: 1 + r.random.IntN(10_000)}
		idle := r.position.Step == window.Idle
		page, err := r.reader.Next(context.Background(), r.f.pool, r.position)
		if !assert.NoError(r.t, err) || !assert.Equal(r.t, r.held.Life, page.Life) {
			return false
		}
		if first && idle && buffer != nil {
			if follows = buffer.Follow(page.Window(), page.Life); !follows {
				buffer.Close()
			}
		}
		r.fromTable += r.deliver(page)
		r.position = page.End
		if !page.More {
			return follows
		}
	}
}

// live takes from the buffer for a random while.
func (r *liveReader) live(buffer *live.Buffer) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(r.random.IntN(300))*time.Millisecond)
	defer cancel()
	for {
		if r.random.IntN(200) == 0 {
			time.Sleep(100 * time.Millisecond) // slow, so that the buffer fills
		}
		limits := window.Limits{Rows: 1 + r.random.IntN(20), Bytes: 1 + r.random.IntN(10_000)}
		rows, sample, ok := buffer.Next(ctx, limits)
		if !ok {
			if buffer.Err() != nil {
				r.refused++
			}
			return
		}
		page := window.LivePage(r.position, buffer.Life(), rows, sample)
		if len(rows) > 0 && r.random.IntN(50) == 0 { // stopped in mid-page
			i := r.random.IntN(len(rows))
			page.Rows = rows[:i+1]
			r.fromWAL += r.deliver(page)
			page.Rows = rows
			r.position = page.After(i)
			return
		}
		r.fromWAL += r.deliver(page)
		r.position = page.End
	}
}

func (r *liveReader) deliver(page window.Page) int {
	for _, row := range page.Rows {
		var c change
		assert.NoError(r.t, json.Unmarshal(row.Payload, &c))
		r.ledger.add(c)
	}
	return len(page.Rows)
}

// save stores the position as a subscription does that is closed.
func (r *liveReader) save() {
	assert.NoError(r.t, r.position.Validate())
	r.aheadStored += len(r.position.Ahead)
	saved, err := r.store.Save(context.Background(), r.f.pool, []cursor.Write{{
		Key: r.key, Epoch: r.held.Epoch, State: window.State{Position: r.position}, Life: r.held.Life, Release: true,
	}})
	assert.NoError(r.t, err)
	assert.True(r.t, saved[r.key])
}

// claim forgets everything but the stored cursor.
func (r *liveReader) claim() {
	r.restarts++
	held, err := r.store.Claim(context.Background(), r.f.pool, []cursor.Wanted{{Key: r.key}}, nil)
	if !assert.NoError(r.t, err) || !assert.Len(r.t, held, 1) || !assert.NoError(r.t, held[0].Err) {
		return
	}
	r.held, r.position = held[0], held[0].State.Position
}
