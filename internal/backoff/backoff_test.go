package backoff_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/backoff"
)

// A delay that overflowed to zero or below after some sixty failures has turned
// retry loops into hot loops elsewhere.
func TestDelayStaysInBounds(t *testing.T) {
	t.Parallel()

	for _, base := range []time.Duration{1, time.Second, time.Hour} {
		p := backoff.Policy{Min: base, Max: 24 * time.Hour}
		last := time.Duration(0)
		for n := range 100_000 {
			ceiling := p.Ceiling(n)
			require.Positive(t, ceiling)
			require.LessOrEqual(t, ceiling, p.Max)
			require.GreaterOrEqual(t, ceiling, last)
			last = ceiling
			delay := p.Delay(n)
			require.Positive(t, delay)
			require.LessOrEqual(t, delay, ceiling)
			require.GreaterOrEqual(t, delay, ceiling-ceiling/5-1)
		}
		require.Equal(t, p.Max, last)
	}
}

func TestTableInTheDocumentation(t *testing.T) {
	t.Parallel()

	p := backoff.Policy{Min: 100 * time.Millisecond, Max: 10 * time.Second}
	for i, ms := range []int{100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000} {
		require.Equal(t, time.Duration(ms)*time.Millisecond, p.Ceiling(i+1))
	}
}

func TestWait(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		require.True(t, backoff.Wait(t.Context(), time.Hour))
		require.Equal(t, time.Hour, time.Since(start))

		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.False(t, backoff.Wait(ctx, time.Hour))
		require.Equal(t, time.Hour+time.Minute, time.Since(start))
	})
}
