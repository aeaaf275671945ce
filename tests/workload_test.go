package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	outbox "github.com/millrace/watermill-outbox"
)

// change is what a workload's message says: a version of an aggregate.
type change struct {
	Aggregate int `json:"aggregate"`
	Version   int `json:"version"`
}

// workload changes aggregates and publishes each change in the transaction that
// makes it, in all the ways that have lost or reordered messages: transactions
// that take their id early and publish late, savepoints, some rolled back,
// transactions that stay open while others come and go, rollbacks.
type workload struct {
	f     *fixture
	topic string
	// also are topics that each change is published to as well.
	also       []string
	aggregates int
	publisher  *outbox.Publisher
	pool       *pgxpool.Pool
}

func newWorkload(t testing.TB, f *fixture, topic string, aggregates, writers int) *workload {
	t.Helper()
	config := f.pool.Config()
	config.MaxConns = int32(writers)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	_, err = pool.Exec(t.Context(), `CREATE TABLE IF NOT EXISTS aggregates (id int PRIMARY KEY, version int NOT NULL DEFAULT 0)`)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `INSERT INTO aggregates SELECT g FROM generate_series(1, $1::int) g ON CONFLICT DO NOTHING`, aggregates)
	require.NoError(t, err)
	return &workload{f: f, topic: topic, aggregates: aggregates, publisher: f.publisher(outbox.PublisherConfig{RequireTx: true}), pool: pool}
}

// run lets the writers work until the context ends.
func (w *workload) run(t testing.TB, ctx context.Context, writers int, seed uint64) {
	t.Helper()
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			for ctx.Err() == nil {
				// A started transaction is finished, whatever ctx says.
				if err := w.transaction(context.WithoutCancel(ctx), random, i == 0); err != nil {
					assert.NoError(t, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// transaction is one transaction of a writer.
func (w *workload) transaction(ctx context.Context, random *rand.Rand, long bool) error {
	tx, err := w.pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	if random.IntN(3) == 0 { // takes its id early
		if _, err := tx.Exec(ctx, "SELECT pg_current_xact_id()"); err != nil {
			return err
		}
	}
	// Row locks in one order, or the writers would deadlock.
	ids := random.Perm(w.aggregates)[:1+random.IntN(3)]
	slices.Sort(ids)
	for _, id := range ids {
		if random.IntN(4) == 0 {
			if _, err := tx.Exec(ctx, "SELECT pg_sleep($1)", random.Float64()*0.008); err != nil {
				return err
			}
		}
		savepoint := random.IntN(5) == 0
		inner := tx
		if savepoint {
			if inner, err = tx.Begin(ctx); err != nil {
				return err
			}
		}
		if err := w.change(ctx, inner, id+1); err != nil {
			return err
		}
		if savepoint {
			if random.IntN(2) == 0 {
				err = inner.Rollback(ctx)
			} else {
				err = inner.Commit(ctx)
			}
			if err != nil {
				return err
			}
		}
	}
	if long && random.IntN(10) == 0 { // stays open while others come and go
		if _, err := tx.Exec(ctx, "SELECT pg_sleep(0.5)"); err != nil {
			return err
		}
	}
	if random.IntN(6) == 0 {
		return tx.Rollback(ctx)
	}
	return tx.Commit(ctx)
}

// change locks an aggregate's row, changes it and publishes the change.
func (w *workload) change(ctx context.Context, tx pgx.Tx, id int) error {
	c := change{Aggregate: id}
	if err := tx.QueryRow(ctx, "UPDATE aggregates SET version = version + 1 WHERE id = $1 RETURNING version", id).Scan(&c.Version); err != nil {
		return err
	}
	payload, err := json.Marshal(c)
	if err != nil {
		return err
	}
	for _, topic := range append([]string{w.topic}, w.also...) {
		msg := message.NewMessage(watermill.NewUUID(), payload)
		msg.Metadata.Set(outbox.DefaultKeyMetadata, strconv.Itoa(id))
		msg.SetContext(outbox.ContextWithTx(ctx, tx))
		if err := w.publisher.Publish(topic, msg); err != nil {
			return err
		}
	}
	return nil
}

// on returns the workload as it is to those who read another of its topics.
func (w *workload) on(topic string) *workload {
	other := *w
	other.topic = topic
	return &other
}

// ledger records what was delivered. Safe for concurrent use.
type ledger struct {
	mu        sync.Mutex
	delivered []change
}

func (l *ledger) record(t testing.TB, msg *message.Message) {
	var c change
	if !assert.NoError(t, json.Unmarshal(msg.Payload, &c)) {
		return
	}
	l.add(c)
}

func (l *ledger) add(c change) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delivered = append(l.delivered, c)
}

func (l *ledger) len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.delivered)
}

// verdict compares what was delivered with what was committed.
type verdict struct {
	Committed, Delivered, Lost, Invented, Duplicated, OutOfOrder int
}

func (v verdict) String() string {
	return fmt.Sprintf("committed=%d delivered=%d lost=%d invented=%d duplicated=%d out_of_order=%d",
		v.Committed, v.Delivered, v.Lost, v.Invented, v.Duplicated, v.OutOfOrder)
}

// judge reads the committed messages of the workload's topic. A repeated message
// counts as duplicated, not as out of order.
func (w *workload) judge(t testing.TB, l *ledger) verdict {
	t.Helper()
	rows, err := w.f.pool.Query(t.Context(), w.f.sql("SELECT payload FROM outbox.messages WHERE topic = $1"), w.topic)
	require.NoError(t, err)
	committed := map[change]bool{}
	var payload []byte
	_, err = pgx.ForEachRow(rows, []any{&payload}, func() error {
		var c change
		if err := json.Unmarshal(payload, &c); err != nil {
			return err
		}
		committed[c] = true
		return nil
	})
	require.NoError(t, err)

	l.mu.Lock()
	defer l.mu.Unlock()
	v := verdict{Committed: len(committed), Delivered: len(l.delivered)}
	seen := map[change]bool{}
	latest := map[int]int{}
	for _, c := range l.delivered {
		switch {
		case !committed[c]:
			v.Invented++
		case seen[c]:
			v.Duplicated++
		case c.Version < latest[c.Aggregate]:
			v.OutOfOrder++
		}
		seen[c] = true
		latest[c.Aggregate] = max(latest[c.Aggregate], c.Version)
	}
	for c := range committed {
		if !seen[c] {
			v.Lost++
		}
	}
	return v
}

// settled waits until as many different messages were delivered as committed, or
// until nothing has come for a while: then the verdict tells what is missing.
func (w *workload) settled(t testing.TB, l *ledger) {
	t.Helper()
	committed := w.f.number("SELECT count(*)::int FROM outbox.messages WHERE topic = $1", w.topic)
	last, since := -1, time.Now()
	for {
		n := l.len()
		if n >= committed {
			return
		}
		if n != last {
			last, since = n, time.Now()
		}
		if time.Since(since) > 10*time.Second {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// ledgers are those of several topics, by name. Safe for concurrent use.
type ledgers map[string]*ledger

// newLedgers returns one for each of the workload's topics.
func newLedgers(w *workload) ledgers {
	l := ledgers{w.topic: {}}
	for _, topic := range w.also {
		l[topic] = &ledger{}
	}
	return l
}

// record records a message with its topic.
func (l ledgers) record(t testing.TB, msg *message.Message) {
	delivery, _ := outbox.DeliveryFromCtx(msg.Context())
	if assert.Contains(t, l, delivery.Topic) {
		l[delivery.Topic].record(t, msg)
	}
}

func (l ledgers) len() (n int) {
	for _, ledger := range l {
		n += ledger.len()
	}
	return n
}

// settled waits as workload.settled does, for all topics.
func (l ledgers) settled(t testing.TB, w *workload) {
	t.Helper()
	for topic, ledger := range l {
		w.on(topic).settled(t, ledger)
	}
}

// requireOnceInOrder fails unless each topic's committed messages were recorded,
// once, and those of a key in order.
func (l ledgers) requireOnceInOrder(t testing.TB, w *workload, what string) {
	t.Helper()
	for topic, ledger := range l {
		v := w.on(topic).judge(t, ledger)
		t.Logf("%s topic=%s %s", what, topic, v)
		require.Positive(t, v.Committed)
		require.Zero(t, v.Lost, "lost")
		require.Zero(t, v.Invented, "invented")
		require.Zero(t, v.Duplicated, "repeated")
		require.Zero(t, v.OutOfOrder, "out of order")
	}
}
