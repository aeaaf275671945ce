package window

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTopicsMatch(t *testing.T) {
	t.Parallel()

	for pattern, topics := range map[string]map[string]bool{
		"*":         {"": true, "a": true, "a.b": true},
		"orders.*":  {"orders.": true, "orders.x": true, "orders": false, "my.orders.x": false},
		"*.created": {"orders.created": true, ".created": true, "created": false, "orders.created.x": false},
		"a*a":       {"aa": true, "aba": true, "a": false, "ab": false},
		"a*b*c":     {"abc": true, "axbxc": true, "acb": false, "ac": false, "abbc": true},
		"ab*bc":     {"abc": false, "abbc": true},
		"*a*a*":     {"aa": true, "xaxax": true, "a": false},
		"plain":     {"plain": true, "plain2": false, "": false},
		"**":        {"": true, "x": true},
	} {
		for topic, want := range topics {
			require.Equal(t, want, Matching(strings.Split(pattern, "*")).Match(topic), "%q %q", pattern, topic)
		}
	}
	require.True(t, One("a*").Match("a*"))
	require.False(t, One("a*").Match("ab"))
}

func TestTopicsLike(t *testing.T) {
	t.Parallel()

	topics := Matching(Pattern{"b"}, Pattern{`100%_\`}, Pattern{"b"}, Pattern{"a_", ""})
	require.Equal(t, []string{`100\%\_\\`, `a\_%`, "b"}, topics.Like())
	require.Equal(t, topics.Key(), Matching(Pattern{"a_", ""}, Pattern{"b"}, Pattern{`100%_\`}).Key(), "the order is of no importance")
	require.Nil(t, One("a").Like())
	// What selects the same is the same, or a group would be refused its own cursor.
	for _, same := range [][]Topics{
		{Matching(Pattern{"", ""}), Matching(Pattern{"", "", ""}), Matching(Pattern{"", "", "", "", ""}), Matching(Pattern{"a"}, Pattern{"", ""}, Pattern{"b", ""})},
		{Matching(Pattern{"a", "b"}), Matching(Pattern{"a", "", "b"}), Matching(Pattern{"a", "", "", "b"}, Pattern{"a", "b"})},
		{Matching(Pattern{"a", ""}), Matching(Pattern{"a", "", ""})},
		{Matching(Pattern{"", "a", ""}), Matching(Pattern{"", "", "a", "", ""})},
	} {
		for _, other := range same[1:] {
			require.Equal(t, same[0], other)
		}
	}
	require.Equal(t, []string{"%"}, Matching(Pattern{"", "", ""}).Like())
	require.NotEqual(t, Matching(Pattern{"", ""}), Matching(Pattern{"", "a", ""}))
	require.NotEqual(t, Matching(Pattern{""}), Matching(Pattern{"", ""}))
	require.Equal(t, "a", One("a").Key())
	require.NotEqual(t, One("%").Key(), Matching(Pattern{"", ""}).Key())
}
