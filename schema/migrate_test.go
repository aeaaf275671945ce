package schema

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The key is part of what versions of the library agree on: with another one,
// an old and a new replica would migrate at the same time.
func TestLockKeyIsFixed(t *testing.T) {
	t.Parallel()

	require.Equal(t, int64(3113520410702895434), LockKey("outbox"))
	require.NotEqual(t, LockKey("outbox"), LockKey("Outbox"))
}

func TestScriptHasNothingLeftToFillIn(t *testing.T) {
	t.Parallel()

	script, err := SQL(Config{Name: "x"}, 0)
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(script, "BEGIN;\n"))
	require.True(t, strings.HasSuffix(script, "COMMIT;\n"))
	for _, place := range places.FindAllString(script, -1) {
		require.Contains(t, []string{"::", "$body$"}, place)
	}
	require.Contains(t, script, `CREATE SCHEMA IF NOT EXISTS "x";`)

	script, err = SQL(Config{Name: "x"}, Version)
	require.NoError(t, err)
	require.NotContains(t, script, "CREATE", "from the newest version on there is nothing to do")
}

func TestErrorsSayWhatToDo(t *testing.T) {
	t.Parallel()

	require.ErrorContains(t, &VersionError{Schema: "x", Have: 1, Want: 2}, "run schema.Migrate")
	require.ErrorContains(t, &VersionError{Schema: "x", Have: 3, Want: 2}, "update the library")
	err := error(&MigrationError{Schema: "x", Version: 1, Name: "outbox", Err: ErrNotInstalled})
	require.ErrorIs(t, err, ErrNotInstalled)
	require.ErrorContains(t, err, "migration 1 (outbox) failed and was rolled back")
}
