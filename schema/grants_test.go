package schema

import (
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
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

// What is for somebody else to decide stays a comment, also for a role that has
// line breaks in its name.
func TestGrantsLeavesReplicationToOthers(t *testing.T) {
	t.Parallel()

	for _, role := range []string{"r", `"odd"; '`, "two\nlines", "\r; DROP TABLE t; --\r\n\n"} {
		script, err := Grants(Config{Name: "x"}, Roles{Consumer: role})
		require.NoError(t, err)
		quoted := pgx.Identifier{role}.Sanitize()
		var comments strings.Builder
		for _, line := range regexp.MustCompile(`[^\n\r]*[\n\r]`).FindAllString(script, -1) {
			if comment, found := strings.CutPrefix(line, "-- "); found {
				comments.WriteString(comment)
			}
		}
		for _, statement := range []string{
			"ALTER ROLE " + quoted + " REPLICATION;", "GRANT rds_replication TO " + quoted + ";", "GRANT pg_read_all_stats TO " + quoted + ";",
		} {
			require.Contains(t, comments.String(), statement)
		}
	}
}
