package main

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	outbox "github.com/millrace/watermill-outbox"
)

const (
	soakRate    = 2000 // messages a second
	soakConns   = 8
	soakMaxSize = 9 // messages in a transaction, from 1
	// soakRollback is how many transactions are rolled back, one in so many, and
	// soakLongRollback the same of the long ones.
	soakRollback     = 50
	soakLongRollback = 4

	// soakLongs is how many long transactions are open at most. Each takes between
	// soakLongMin and soakLongMax, and follows on the last after soakLongPause at
	// most: there are times without any.
	soakLongs     = 2
	soakLongMin   = time.Second
	soakLongMax   = 90 * time.Second
	soakLongPause = time.Minute
)

// soakWriters publish at a steady rate for a while, and beside it in long
// transactions.
type soakWriters struct {
	options
	pool      *pgxpool.Pool
	publisher *outbox.Publisher
	keys      []*soakKey
	length    time.Duration

	start time.Time
	// slots counts the messages whose time has been given out.
	slots atomic.Int64
	// committed counts messages; those of long transactions are in long.
	committed, long atomic.Int64
	// longEnded counts the long transactions that committed, and that did not.
	longEnded [2]atomic.Int64
	// slowest is the longest commit or insert that a writer has waited for.
	slowest atomic.Int64
}

// run publishes for the length, and returns when all transactions have ended.
func (w *soakWriters) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	ending, end := context.WithTimeout(ctx, w.length)
	defer end()
	w.start = time.Now()
	for i := range uint64(soakConns) {
		group.Go(func() error { return w.write(ctx, ending, rand.New(rand.NewPCG(1, i))) })
	}
	for i := range uint64(soakLongs) {
		group.Go(func() error { return w.writeLong(ctx, ending, rand.New(rand.NewPCG(2, i))) })
	}
	return group.Wait()
}

// write publishes when it is time until ending ends.
func (w *soakWriters) write(ctx, ending context.Context, random *rand.Rand) error {
	conn, err := w.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	for {
		size := 1 + random.IntN(soakMaxSize)
		slot := w.slots.Add(int64(size)) - int64(size)
		wait(ending, time.Until(w.start.Add(time.Duration(slot)*time.Second/soakRate)))
		if ending.Err() != nil {
			return ctx.Err()
		}
		if random.IntN(soakRollback) == 0 {
			t := w.begin(random, true)
			if err := t.run(ctx, conn.Conn(), func(tx pgx.Tx) error { return t.publish(ctx, tx, size) }); err != nil {
				return err
			}
		}
		t := w.begin(random, false)
		began := time.Now()
		if err := t.run(ctx, conn.Conn(), func(tx pgx.Tx) error { return t.publish(ctx, tx, size) }); err != nil {
			return err
		}
		w.committed.Add(int64(size))
		raise(&w.slowest, int64(time.Since(began)))
	}
}

// writeLong makes long transactions until ending ends: those that publish and then
// stay open, those that have an id early and publish late, and those that do both.
func (w *soakWriters) writeLong(ctx, ending context.Context, random *rand.Rand) error {
	conn, err := w.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	for {
		wait(ending, time.Duration(random.Float64()*float64(w.duration(soakLongPause))))
		if ending.Err() != nil {
			return ctx.Err()
		}
		length := w.duration(soakLongMin + time.Duration(random.Int64N(int64(soakLongMax-soakLongMin))))
		early, late := random.IntN(3), 0
		if early != 1 {
			late = 1 + random.IntN(soakMaxSize)
		}
		if early != 0 {
			early = 1 + random.IntN(soakMaxSize)
		}
		rollback := random.IntN(soakLongRollback) == 0
		t := w.begin(random, rollback)
		err := t.run(ctx, conn.Conn(), func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "SELECT pg_current_xact_id()"); err != nil {
				return err
			}
			if err := t.publish(ctx, tx, early); err != nil {
				return err
			}
			wait(ending, length)
			return t.publish(ctx, tx, late)
		})
		if err != nil {
			return err
		}
		if rollback {
			w.longEnded[1].Add(1)
			continue
		}
		w.longEnded[0].Add(1)
		w.committed.Add(int64(early + late))
		w.long.Add(int64(early + late))
	}
}

// begin begins a transaction.
func (w *soakWriters) begin(random *rand.Rand, rollback bool) *soakTransaction {
	return &soakTransaction{writers: w, random: random, rollback: rollback, numbers: map[*soakKey]uint32{}}
}

// soakTransaction is what one transaction publishes.
type soakTransaction struct {
	writers  *soakWriters
	random   *rand.Rand
	rollback bool
	// numbers are the keys that it holds, and how many messages it published with
	// each.
	numbers map[*soakKey]uint32
}

// run runs it to its end.
func (t *soakTransaction) run(ctx context.Context, conn *pgx.Conn, publish func(pgx.Tx) error) error {
	defer func() {
		for k := range t.numbers {
			k.mu.Unlock()
		}
	}()
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) //nolint:errcheck // nothing after Commit
	if err := publish(tx); err != nil {
		return err
	}
	if t.rollback {
		return tx.Rollback(ctx)
	}
	if err := tx.Commit(ctx); err != nil {
		return err
	}
	for k, n := range t.numbers {
		k.committed.Add(n)
	}
	return nil
}

// publish publishes so many messages to one topic, with keys at random.
func (t *soakTransaction) publish(ctx context.Context, tx pgx.Tx, size int) error {
	if size == 0 {
		return nil
	}
	ctx = outbox.ContextWithTx(ctx, tx)
	topic := t.random.IntN(soakTopics)
	messages := make([]*message.Message, size)
	for i := range messages {
		k := t.key(topic)
		messages[i] = k.message(k.committed.Load()+t.numbers[k], t.rollback)
		messages[i].SetContext(ctx)
		t.numbers[k]++
	}
	return t.writers.publisher.Publish(soakTopic(topic), messages...)
}

// key returns a key of a topic that nobody else publishes with now. There are many
// more of them than transactions hold.
func (t *soakTransaction) key(topic int) *soakKey {
	for {
		k := t.writers.keys[t.random.IntN(soakKeys/soakTopics)*soakTopics+topic]
		if _, held := t.numbers[k]; held {
			return k
		}
		if k.mu.TryLock() {
			t.numbers[k] = 0
			return k
		}
	}
}

// wait returns after d, or when the context ends.
func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// raise makes a number what it is to be at the least.
func raise(number *atomic.Int64, least int64) {
	for {
		old := number.Load()
		if least <= old || number.CompareAndSwap(old, least) {
			return
		}
	}
}
