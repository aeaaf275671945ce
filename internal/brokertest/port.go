package brokertest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
)

// Ports of servers that are down for a while must not be given to outgoing
// connections meanwhile, so they are from below the range of those.
const (
	firstPort    = 20000
	lastPort     = 32000
	portAttempts = 100
)

// Listen listens on a free port of 127.0.0.1 that a server can come back to.
func Listen(ctx context.Context) (net.Listener, error) {
	var lc net.ListenConfig
	var last error
	for range portAttempts {
		var l net.Listener
		if l, last = lc.Listen(ctx, "tcp", Local(firstPort+rand.IntN(lastPort-firstPort))); last == nil {
			return l, nil
		}
	}
	return nil, fmt.Errorf("brokertest: no free port on 127.0.0.1 between %d and %d: %w", firstPort, lastPort, last)
}

// FreePorts returns n ports as from Listen on which nobody listens. Another
// process may take them before the caller does.
func FreePorts(ctx context.Context, n int) ([]int, error) {
	ports := make([]int, 0, n)
	var err error
	for range n {
		l, listenErr := Listen(ctx)
		if listenErr != nil {
			return nil, listenErr
		}
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
		// Not before all are chosen: they must differ.
		defer func() { err = errors.Join(err, l.Close()) }()
	}
	return ports, err
}

// Local returns the address of a port of 127.0.0.1.
func Local(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
