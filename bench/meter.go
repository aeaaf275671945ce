package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// meterPatience is how long the next message may take.
const meterPatience = 20 * time.Second

var errReaderEnded = errors.New("the reader has ended")

// meter counts what one goroutine receives, and takes the time from one message
// to another. It looks at the clock for these two only.
type meter struct {
	start       time.Time
	n           atomic.Int64
	first, last atomic.Int64 // numbers of messages
	began       atomic.Int64 // when the first one came, since start
	took        chan time.Duration
	failed      chan error
}

func newMeter() *meter {
	return &meter{start: time.Now(), took: make(chan time.Duration, 1), failed: make(chan error, 1)}
}

// row counts a message.
func (m *meter) row() {
	n := m.n.Add(1)
	if n == m.first.Load() {
		m.began.Store(int64(time.Since(m.start)))
	}
	if n == m.last.Load() {
		m.took <- time.Since(m.start) - time.Duration(m.began.Load())
	}
}

// fail says that what is received is not what it should be, or ends.
func (m *meter) fail(err error) {
	select {
	case m.failed <- err:
	default: // the first says it
	}
}

func (m *meter) received() int64 { return m.n.Load() }

// time says between which messages the time is taken. Neither may have come.
func (m *meter) time(first, last int64) {
	m.first.Store(first)
	m.last.Store(last)
}

// await returns that time when the last message is there.
func (m *meter) await(ctx context.Context) (time.Duration, error) {
	for before := int64(-1); before < m.received(); {
		before = m.received()
		select {
		case took := <-m.took:
			return took, nil
		case err := <-m.failed:
			return 0, fmt.Errorf("after %d messages: %w", m.received(), cmp.Or(err, errReaderEnded))
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		case <-time.After(meterPatience):
		}
	}
	return 0, fmt.Errorf("%d of %d messages came, and none for %s", m.received(), m.last.Load(), meterPatience)
}
