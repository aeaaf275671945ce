package pgtest

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const nextTransaction = "SELECT pg_current_xact_id()::text::bigint"

// A server that has used the ids of 32 bits up goes on, with what there was.
func TestSkipTransactions(t *testing.T) {
	t.Parallel()
	s := Own(t, Options{})
	run(t, s.URL(), "CREATE TABLE kept AS SELECT 1 AS n")
	for _, next := range []uint64{1<<32 - 20, 5<<32 + 1000} {
		require.NoError(t, s.SkipTransactions(t.Context(), next))
		first := query[uint64](t, s.URL(), nextTransaction)
		require.GreaterOrEqual(t, first, next)
		require.Less(t, first, next+20)
		for range 40 {
			run(t, s.URL(), "INSERT INTO kept SELECT 1")
		}
		require.GreaterOrEqual(t, query[uint64](t, s.URL(), nextTransaction), first+40)
		require.NoError(t, s.Restart(t.Context(), Immediate))
		require.Greater(t, query[uint64](t, s.URL(), nextTransaction), first+40)
	}
	require.Equal(t, 81, query[int](t, s.URL(), "SELECT count(*) FROM kept"))
}
