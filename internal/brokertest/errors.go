package brokertest

import "errors"

var (
	// ErrNotOwned is returned by Kill, StartAgain and Restart of a broker that has
	// other users: a named server, or one that the tests of a process share. Use
	// the package's Start for one that may be treated like that.
	ErrNotOwned = errors.New("brokertest: the broker has other users; use Start for one of your own")

	// ErrDown is returned by Kill and Restart when the broker is not running, and by
	// whatever needs it. Call StartAgain.
	ErrDown = errors.New("brokertest: the broker is not running")

	// ErrRunning is returned by StartAgain when the broker is up. Call Kill first, or
	// Restart instead.
	ErrRunning = errors.New("brokertest: the broker is running")

	// ErrShutDown is returned by all methods that need what Shutdown has removed.
	// Start another broker.
	ErrShutDown = errors.New("brokertest: the broker was shut down and its data removed")
)
