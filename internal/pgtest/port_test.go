package pgtest

import (
	"net"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFreePort(t *testing.T) {
	t.Parallel()
	port := FreePort(t)
	require.GreaterOrEqual(t, port, firstPort)
	require.Less(t, port, lastPort)
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:"+strconv.Itoa(port))
	require.NoError(t, err)
	require.NoError(t, l.Close())
}
