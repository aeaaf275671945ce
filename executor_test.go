package outbox

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

func TestNewExecutorRefusesOtherTypes(t *testing.T) {
	t.Parallel()

	for want, handle := range map[string]any{
		"<nil>": nil, "*pgxpool.Pool is nil": (*pgxpool.Pool)(nil), "*pgx.Conn is nil": (*pgx.Conn)(nil), "*sql.Tx is nil": (*sql.Tx)(nil),
		"string": "", "func()": func() {}, "struct {}": struct{}{}, "*outbox.Publisher": &Publisher{},
	} {
		_, err := newExecutor(handle)
		require.ErrorIs(t, err, ErrUnsupportedExecutor, want)
		require.ErrorContains(t, err, want)
	}
}

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
		require.Equal(t, test.want, equal(test.a, test.b), "%T(%v) and %T(%v)", test.a, test.a, test.b, test.b)
	}
}
