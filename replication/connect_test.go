package replication

import (
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

func TestSessionParameters(t *testing.T) {
	t.Parallel()
	config, err := pgconn.ParseConfig("postgres://u@h/db?pool_max_conns=5&default_query_exec_mode=exec&application_name=app&search_path=x&lock_timeout=9s")
	require.NoError(t, err)
	before := config.Copy().RuntimeParams
	require.Equal(t, map[string]string{
		"replication": "database", "application_name": "app", "search_path": "x", "lock_timeout": "2s", "datestyle": "German",
		"client_encoding": "UTF8", "intervalstyle": "postgres", "extra_float_digits": "3",
	}, sessionParameters(config.RuntimeParams, ConnectOptions{Settings: map[string]string{"lock_timeout": "2s", "DateStyle": "German"}}))
	require.Equal(t, before, config.RuntimeParams, "the caller's are left alone")
	require.Equal(t, "mine", sessionParameters(config.RuntimeParams, ConnectOptions{ApplicationName: "mine"})["application_name"])
	require.Equal(t, "replication", sessionParameters(nil, ConnectOptions{})["application_name"])
}

func TestConnectOptions(t *testing.T) {
	t.Parallel()
	config, err := pgconn.ParseConfig("postgres://u@h/db")
	require.NoError(t, err)
	for _, size := range []int{1, -1, MaxReadBuffer + 1} {
		_, err = Connect(t.Context(), config, ConnectOptions{ReadBuffer: size})
		require.ErrorContains(t, err, "ReadBuffer is")
	}
}

func TestQuoteLiteral(t *testing.T) {
	t.Parallel()
	require.Equal(t, `E'a''b\\c"d'`, quoteLiteral(`a'b\c"d`))
}
