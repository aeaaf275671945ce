package pgtest

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseMemAvailable(t *testing.T) {
	t.Parallel()
	got, err := parseMemAvailable("MemTotal:       24684376 kB\nMemFree:        1 kB\nMemAvailable:   24060464 kB\nBuffers: 2 kB\n")
	require.NoError(t, err)
	require.Equal(t, int64(24060464<<10), got)
	_, err = parseMemAvailable("MemTotal: 1 kB\n")
	require.ErrorContains(t, err, "no MemAvailable")
}

// Where the folder is made: in memory if there is room there, and never if the
// data are to outlive a crash of the machine, or TMPDIR names a place.
func TestParentFolder(t *testing.T) {
	want := "/tmp"
	if folder, free := memoryFolder(); free >= memoryRoom {
		want = folder
	}
	parent := func(s *Server) string { return filepath.Dir(filepath.Dir(s.DataDir())) }

	t.Setenv("TMPDIR", "")
	require.Equal(t, want, parent(Own(t, Options{})))
	require.Equal(t, "/tmp", parent(Own(t, Options{Durable: true})))
	tmp := openFolder(t)
	t.Setenv("TMPDIR", tmp)
	require.Equal(t, tmp, parent(Own(t, Options{})))
}
