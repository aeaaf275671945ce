package replication

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRate(t *testing.T) {
	t.Parallel()

	now := time.Unix(1, 0)
	feed := func(r *rate, n int, every time.Duration) {
		for range n {
			now = now.Add(every)
			r.count(now)
		}
	}
	var always rate
	require.True(t, always.reached())
	r := rate{least: 5000}
	require.False(t, r.reached(), "nothing has come")
	feed(&r, 10*rateWindow, 500*time.Microsecond)
	require.False(t, r.reached(), "2,000 a second")
	feed(&r, 2*rateWindow, 100*time.Microsecond)
	require.True(t, r.reached(), "10,000 a second")
	feed(&r, 2*rateWindow, 500*time.Microsecond)
	require.False(t, r.reached(), "2,000 again")
	feed(&r, 2*rateWindow, 10*time.Microsecond)
	require.True(t, r.reached())
	feed(&r, 1, time.Second)
	require.False(t, r.reached(), "a quiet time")
}
