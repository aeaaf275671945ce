package schema

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestGrantsWritesTheNamedPartsOnly(t *testing.T) {
	t.Parallel()

	parts := map[string]Roles{
		"owner": {Owner: "r"}, "publisher": {Publisher: "r"}, "consumer": {Consumer: "r"}, "upkeep": {Upkeep: "r"},
	}
	for part, roles := range parts {
		script, err := Grants(Config{Name: "x"}, roles)
		require.NoError(t, err)
		for other := range parts {
			require.Equal(t, other == part, strings.Contains(script, "\n-- "+other+"\n"), "%s of %s", other, part)
		}
		require.Contains(t, script, "\n-- all\n")
		require.Contains(t, script, `TO "r"`)
		require.NotContains(t, script, ":role")
	}
	script, err := Grants(Config{}, Roles{})
	require.NoError(t, err)
	require.NotContains(t, script, "GRANT", "what is left is to take away")
	require.Contains(t, script, "REVOKE")
}

func TestGrantsRefusesNames(t *testing.T) {
	t.Parallel()

	for _, name := range []string{strings.Repeat("r", 64), "a\x00b"} {
		for part, roles := range map[string]Roles{
			"owner": {Owner: name}, "publisher": {Publisher: name}, "consumer": {Consumer: name}, "upkeep": {Upkeep: name},
		} {
			_, err := Grants(Config{}, roles)
			require.ErrorContains(t, err, part+" role")
		}
	}
}
