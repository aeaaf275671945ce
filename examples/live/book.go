package main

import (
	"fmt"
	"slices"
	"sync"
	"time"

	outbox "github.com/millrace/watermill-outbox"
)

// book knows when each message was committed and when it came.
type book struct {
	mu         sync.Mutex
	committed  map[string]time.Time // just before the COMMIT, by UUID
	delivered  map[string]bool
	duplicated int
	latencies  map[outbox.Source]latencies
	phase      latencies
}

func newBook() *book {
	return &book{
		committed: map[string]time.Time{}, delivered: map[string]bool{}, latencies: map[outbox.Source]latencies{},
	}
}

// committing notes that a message's transaction is about to commit.
func (b *book) committing(uuid string, at time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.committed[uuid] = at
}

// arrived notes that a message came, and where from.
func (b *book) arrived(uuid string, source outbox.Source, at time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.delivered[uuid] {
		b.duplicated++
		return
	}
	b.delivered[uuid] = true
	latency := at.Sub(b.committed[uuid])
	b.latencies[source] = append(b.latencies[source], latency)
	b.phase = append(b.phase, latency)
}

// endPhase returns the latencies since it was called the last time.
func (b *book) endPhase() latencies {
	b.mu.Lock()
	defer b.mu.Unlock()
	ended := b.phase
	b.phase = nil
	return ended
}

// missing returns how many messages have not come.
func (b *book) missing() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.lost()
}

// lost is missing, called with mu held.
func (b *book) lost() int {
	lost := 0
	for uuid := range b.committed {
		if !b.delivered[uuid] {
			lost++
		}
	}
	return lost
}

// result compares what came with what was committed.
func (b *book) result() result {
	b.mu.Lock()
	defer b.mu.Unlock()
	return result{
		published: len(b.committed), delivered: len(b.delivered) + b.duplicated,
		lost: b.lost(), duplicated: b.duplicated,
		wal: b.latencies[outbox.SourceWAL], table: b.latencies[outbox.SourceTable],
	}
}

// result is the outcome of the program.
type result struct {
	published, delivered, lost, duplicated int
	// wal and table are the latencies of the messages that came from there.
	wal, table latencies
	// cannotBeLive says that the server does not let its WAL be read.
	cannotBeLive bool
}

// ok reports whether each message came once, and some from the WAL if it can be
// read.
func (r result) ok() bool {
	return r.delivered == r.published && r.lost == 0 && r.duplicated == 0 && (len(r.wal) > 0 || r.cannotBeLive)
}

// String is the last line that the program prints.
func (r result) String() string {
	return fmt.Sprintf("published=%d delivered=%d lost=%d duplicated=%d live=%d%% median_wal=%s median_table=%s",
		r.published, r.delivered, r.lost, r.duplicated,
		100*len(r.wal)/max(len(r.wal)+len(r.table), 1), r.wal.median(), r.table.median())
}

// latencies are the times from COMMIT to handler, of some messages.
type latencies []time.Duration

// String is how the program prints a phase.
func (l latencies) String() string {
	if len(l) == 0 {
		return "no messages"
	}
	return fmt.Sprintf("%d messages, median %s, maximum %s", len(l), l.median(), milliseconds(slices.Max(l)))
}

// median returns the median as text, "-" if there is none.
func (l latencies) median() string {
	if len(l) == 0 {
		return "-"
	}
	return milliseconds(slices.Sorted(slices.Values(l))[len(l)/2])
}

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.1fms", float64(d)/float64(time.Millisecond))
}
