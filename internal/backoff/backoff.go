// Package backoff computes and waits delays that grow.
package backoff

import (
	"context"
	"math/rand/v2"
	"time"
)

// Policy is exponential: the delay before retry n is Min * 2^(n-1), at most
// Max, and from that up to a fifth is taken off at random, so that many who
// failed together do not return together. With Min 100 ms and Max 10 s:
//
//	retry      1      2      3      4      5      6      7      8 and later
//	at most  0.1 s  0.2 s  0.4 s  0.8 s  1.6 s  3.2 s  6.4 s  10 s
//	at least 0.08   0.16   0.32   0.64   1.28   2.56   5.12   8
type Policy struct {
	Min, Max time.Duration
}

// Ceiling returns the longest delay before retry n, counted from 1. It is
// capped before it is computed, so no n overflows it.
func (p Policy) Ceiling(n int) time.Duration {
	d := max(p.Min, 1)
	for ; n > 1; n-- {
		if d >= p.Max/2 {
			return max(p.Max, d)
		}
		d *= 2
	}
	return d
}

// Delay returns a random delay before retry n: 80 to 100 percent of Ceiling,
// never zero.
func (p Policy) Delay(n int) time.Duration {
	d := p.Ceiling(n)
	return max(d-time.Duration(rand.Int64N(int64(d)/5+1)), 1) //nolint:gosec // spreads load, keeps no secret
}

// Wait waits for d. It returns false when the context ended first.
func Wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
