package record

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// Comparing two values of a type that cannot be compared is a panic, and such a
// type may also hide behind an interface.
func TestEqualDoesNotPanic(t *testing.T) {
	t.Parallel()

	type holder struct{ any }
	a, b := &holder{}, &holder{}
	for _, test := range []struct {
		a, b any
		want bool
	}{
		{a, a, true},
		{a, b, false},
		{nil, a, false},
		{a, nil, false},
		{1, int64(1), false},
		{holder{a}, holder{a}, true},
		{holder{a}, holder{b}, false},
		{holder{nil}, holder{nil}, true},
		{context.Background(), context.Background(), true},
		{context.Background(), context.TODO(), false},
		{[]int{}, []int{}, false},
		{holder{[]int{}}, holder{[]int{}}, false},
		{holder{a}, holder{[]int{}}, false},
		{holder{[]int{}}, holder{a}, false},
	} {
		require.Equal(t, test.want, Equal(test.a, test.b), "%T(%v) and %T(%v)", test.a, test.a, test.b, test.b)
	}
}
