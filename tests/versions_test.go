package tests

import (
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/millrace/watermill-outbox/internal/pgtest"
)

// oldestVersion is the oldest PostgreSQL that is supported.
const oldestVersion = 14

// A run on a version that was asked for and silently ran on another one would
// prove nothing.
func TestServerIsTheOneAskedFor(t *testing.T) {
	t.Parallel()

	for name, server := range map[string]*pgtest.Server{"shared": pgtest.Shared(t), "own": pgtest.Own(t, pgtest.Options{})} {
		f := fixtureAt(t, pgtest.DatabaseOn(t, server))
		major := f.number("SELECT current_setting('server_version_num')::int") / 10000
		t.Logf("%s: PostgreSQL %s", name, server.Version())
		require.GreaterOrEqual(t, major, oldestVersion)
		if asked := os.Getenv(pgtest.EnvPostgresVersion); asked != "" {
			require.Equal(t, asked, strconv.Itoa(major), name)
		}
		require.Regexp(t, "^"+strconv.Itoa(major)+`(\D|$)`, server.Version())
	}
}
