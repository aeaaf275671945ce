package pgtest

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

const identifier = "SELECT system_identifier::text FROM pg_control_system()"

// Copies of one cluster are different clusters: what tells its transactions from
// those of another is an identifier, which each must have to itself, in all places
// where the server looks at it when it recovers.
func TestCopiesAreClustersOfTheirOwn(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for range 3 {
		s := Own(t, Options{})
		id := query[string](t, s.URL(), identifier)
		require.False(t, seen[id], "two clusters are %s", id)
		seen[id] = true
		run(t, s.URL(), "CREATE TABLE kept AS SELECT 1 AS n")
		require.NoError(t, s.Kill(t.Context()))
		require.NoError(t, s.StartAgain(t.Context()))
		require.True(t, recovered(t, s))
		require.Equal(t, id, query[string](t, s.URL(), identifier))
		require.Equal(t, 1, query[int](t, s.URL(), "SELECT n FROM kept"))
	}
}

// A new version may keep the identifier elsewhere. Better no server than two that
// are the same.
func TestIdentifierIsNotFound(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	require.ErrorIs(t, changeIdentifier(folder, 1), os.ErrNotExist)

	s := Own(t, Options{})
	require.NoError(t, s.Kill(t.Context()))
	require.NoError(t, os.MkdirAll(filepath.Join(folder, "data", "global"), 0o700))
	require.NoError(t, os.MkdirAll(filepath.Join(folder, "data", "pg_wal"), 0o700))
	controlFile := filepath.Join(folder, "data", "global", "pg_control")
	control, err := os.ReadFile(filepath.Join(s.DataDir(), "global", "pg_control"))
	require.NoError(t, err)
	damaged := bytes.Clone(control)
	damaged[0]++
	require.NoError(t, os.WriteFile(controlFile, damaged, 0o600))
	require.ErrorContains(t, changeIdentifier(folder, 1), "no checksum")

	require.NoError(t, os.WriteFile(controlFile, control, 0o600))
	require.ErrorContains(t, changeIdentifier(folder, 1), "0 segments of WAL")
	segment := filepath.Join(folder, "data", "pg_wal", "000000010000000000000001")
	require.NoError(t, os.WriteFile(segment, make([]byte, 64), 0o600))
	require.ErrorContains(t, changeIdentifier(folder, 1), "does not begin with its system identifier")
	after, err := os.ReadFile(controlFile)
	require.NoError(t, err)
	require.Equal(t, control, after)
}
