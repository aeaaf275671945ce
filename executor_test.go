package outbox

import (
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
