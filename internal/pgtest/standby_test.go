package pgtest

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestStandby(t *testing.T) {
	t.Parallel()
	primary := Own(t, Options{})
	run(t, primary.URL(), "CREATE TABLE copied AS SELECT 1 AS n")
	standby, err := primary.Standby(t.Context(), Options{Settings: map[string]string{"work_mem": "9MB"}})
	require.NoError(t, err)
	Cleanup(t, standby)
	require.True(t, query[bool](t, standby.URL(), "SELECT pg_is_in_recovery()"))
	require.Equal(t, "9MB", query[string](t, standby.URL(), "SHOW work_mem"))
	require.NotEqual(t, primary.Port(), standby.Port())

	run(t, primary.URL(), "INSERT INTO copied VALUES (2)")
	eventually(t, func() bool {
		return query[int](t, standby.URL(), "SELECT count(*) FROM copied") == 2
	}, "not streamed")

	require.NoError(t, primary.Stop())
	require.True(t, query[bool](t, standby.URL(), "SELECT pg_promote()"))
	run(t, standby.URL(), "INSERT INTO copied VALUES (3)")
	require.NoError(t, standby.Restart(t.Context(), Immediate))
	require.Equal(t, 3, query[int](t, standby.URL(), "SELECT count(*) FROM copied"))
}
