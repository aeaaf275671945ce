package pgtest

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
)

// Main's verdict is the exit code, so it is seen from outside only.
func TestMainChecksLeaks(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	require.NoError(t, err)
	for _, test := range []struct {
		name, leak string
		code       int
	}{{"clean", "", 0}, {"leak", "1", 1}} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			tmp := openFolder(t)
			cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestPool$")
			cmd.Env = append(os.Environ(), envLeak+"="+test.leak, "TMPDIR="+tmp)
			output, err := cmd.CombinedOutput()
			require.Equal(t, test.code, cmd.ProcessState.ExitCode(), "%v: %s", err, output)
			require.Contains(t, string(output), "PASS")
			if test.code != 0 {
				require.Contains(t, string(output), "pgtest: goroutines left after the tests")
			}
			// Main stops the shared server before it exits.
			require.Empty(t, entries(t, tmp))
		})
	}
}

func TestPool(t *testing.T) {
	t.Parallel()
	url := Database(t)
	var closed func() bool
	t.Run("open", func(t *testing.T) {
		pool := Pool(t, url)
		require.NoError(t, pool.Ping(t.Context()))
		closed = func() bool { return pool.Stat().TotalConns() == 0 }
	})
	require.True(t, closed())
}
