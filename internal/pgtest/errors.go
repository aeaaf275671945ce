package pgtest

import "errors"

var (
	// ErrNotOwned is returned by every method that would stop, restart or
	// reconfigure a server named by OUTBOX_DATABASE_URL. Use Start to get a
	// server that may be treated like that.
	ErrNotOwned = errors.New("pgtest: the server belongs to somebody else (" + EnvDatabaseURL + "); use Start for one of your own")

	// ErrStopped is returned by every method that needs the server's folder
	// after Stop has removed it. Start another server.
	ErrStopped = errors.New("pgtest: the server was stopped and its folder removed")

	// ErrRunning is returned by StartAgain when the server is up. Call Shutdown
	// or Kill first, or Restart instead.
	ErrRunning = errors.New("pgtest: the server is running")

	// ErrDown is returned by Shutdown, Kill and Restart when the server is not
	// running: shut down before, or ended by itself. Call StartAgain.
	ErrDown = errors.New("pgtest: the server is not running")

	// errPortTaken marks a start that failed because another process listens on
	// the port.
	errPortTaken = errors.New("port is taken by another process")
)
