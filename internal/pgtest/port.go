package pgtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
)

// Ports are taken from below the range that Linux and macOS hand out to
// outgoing connections. Otherwise a client that keeps dialling a server which
// is down may be given the server's own port as its source, connect to itself,
// and keep the server from coming back.
const (
	firstPort = 20000
	lastPort  = 32000
)

// freePort returns a port of 127.0.0.1 on which nobody listens. Another process
// may take it before the caller does.
func freePort(ctx context.Context) (int, error) {
	var lc net.ListenConfig
	var last error
	for range 100 {
		port := firstPort + rand.IntN(lastPort-firstPort)
		l, err := lc.Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			last = err
			continue
		}
		if err := l.Close(); err != nil {
			return 0, fmt.Errorf("pgtest: release port %d: %w", port, err)
		}
		return port, nil
	}
	return 0, fmt.Errorf("pgtest: no free port on 127.0.0.1 between %d and %d: %w",
		firstPort, lastPort, errors.Join(last, ctx.Err()))
}
