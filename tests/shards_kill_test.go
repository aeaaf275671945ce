package tests

import (
	"cmp"
	"context"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// stamped is a line of a child with shards: when it was handed what.
type stamped struct {
	at     int64
	change change
}

// Processes that share eight shards are killed, stopped for longer than their
// lease and woken, and started anew, under load. Nothing is lost, the order per
// key stands, and what comes again is what was in flight or not yet stored. The
// clock of the database plays no part: the times that processes tell are set
// back and forth all the while. Field cases F57, F92 and F93.
func TestShardsSurviveKillsAndPauses(t *testing.T) {
	t.Parallel()

	const writers, shards, processes, lease = 3, 8, 3, 2 * time.Second
	rounds := number("OUTBOX_TEST_SHARD_KILLS", 4)
	f := newFixture(t)
	w := newWorkload(t, f, "changes", 40, writers)
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, 0))

	var mu sync.Mutex
	var lines []stamped
	var reading sync.WaitGroup
	start := func() *child {
		c := f.startChild(t, w.topic, lease, childShards+"="+strconv.Itoa(shards))
		reading.Go(func() {
			for line := range c.lines {
				at, payload, _ := strings.Cut(line, " ")
				var s stamped
				var err error
				if s.at, err = strconv.ParseInt(at, 10, 64); err != nil {
					continue // cut off by the kill
				}
				if json.Unmarshal([]byte(payload), &s.change) != nil {
					continue
				}
				mu.Lock()
				lines = append(lines, s)
				mu.Unlock()
			}
		})
		return c
	}
	delivered := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(lines)
	}
	progress := func(n int) {
		t.Helper()
		before := delivered()
		require.Eventually(t, func() bool { return delivered() >= before+n }, waitFor, 5*time.Millisecond, "nothing comes any more")
	}

	writing, stopWriting := context.WithCancel(t.Context())
	var written sync.WaitGroup
	defer written.Wait()
	defer stopWriting()
	written.Go(func() { w.run(t, writing, writers, seed) })
	written.Go(func() {
		for writing.Err() == nil {
			f.exec("UPDATE outbox.processes SET beat_at = now() + random() * '2 years'::interval - '1 year'::interval")
			time.Sleep(50 * time.Millisecond)
		}
	})
	var running []*child
	for range processes {
		running = append(running, start())
	}
	f.awaitEven(w.topic, processes)
	progress(30)
	var took []time.Duration
	for round := range rounds {
		i := random.IntN(len(running))
		c := running[i]
		began := time.Now()
		if round%2 == 0 {
			c.kill()
			f.awaitEven(w.topic, processes-1)
			took = append(took, time.Since(began))
			require.Error(t, c.wait())
			running[i] = start()
		} else {
			c.suspend()
			f.awaitEven(w.topic, processes-1)
			took = append(took, time.Since(began))
			progress(20)
			c.resume()
		}
		f.awaitEven(w.topic, processes)
		progress(20)
	}
	// A rolling restart of all.
	for i, c := range running {
		c.stop()
		require.NoError(t, c.wait())
		running[i] = start()
		f.awaitEven(w.topic, processes)
		progress(10)
	}
	stopWriting()
	written.Wait()

	var l ledger
	collect := func() {
		mu.Lock()
		defer mu.Unlock()
		slices.SortFunc(lines, func(a, b stamped) int { return cmp.Compare(a.at, b.at) })
		l = ledger{}
		for _, line := range lines {
			l.add(line.change)
		}
	}
	committed := f.number("SELECT count(*)::int FROM outbox.messages WHERE topic = $1", w.topic)
	require.Eventually(t, func() bool { collect(); return w.judge(t, &l).Lost == 0 }, waitFor, 50*time.Millisecond, "messages lost of %d; seed %d", committed, seed)
	for _, c := range running {
		c.stop()
		require.NoError(t, c.wait())
	}
	reading.Wait()
	collect()
	v := w.judge(t, &l)
	t.Logf("seed=%d taken over after %v %s", seed, took, v)
	require.Zero(t, v.Lost, "lost")
	require.Zero(t, v.Invented, "invented")
	require.Zero(t, v.OutOfOrder, "out of order")
	require.Zero(t, f.number("SELECT count(*)::int FROM outbox.cursors WHERE holder IS NOT NULL"))
}
