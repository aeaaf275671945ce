// Package pgtest is a PostgreSQL for anyone: tests, benchmarks and examples ask
// it for a database and get one, on a laptop, in a container and in CI alike.
//
// # Where the server comes from
//
// Open takes the first of these that there is:
//
//  1. the server named by OUTBOX_DATABASE_URL. It belongs to somebody else: it
//     is never stopped, restarted or reconfigured;
//  2. a throw-away server made with programs found on the machine: in the
//     folder named by OUTBOX_POSTGRES_BIN, on PATH, or where the usual
//     distributions put them, newest version first;
//  3. a throw-away server made with downloaded programs, kept in the user's
//     cache folder. OUTBOX_POSTGRES_REPOSITORY names another Maven repository
//     to download them from.
//
// Start never uses 1: a test that restarts or crashes its server needs one of
// its own.
//
// # What a throw-away server is
//
// A fresh cluster in a temporary folder, listening on 127.0.0.1 only, on a free
// port, superuser "postgres" without a password, ready for logical replication
// and prepared transactions, and with fsync off unless [Options] asks for it.
// Started by root, it runs as the user "postgres" or "nobody", since PostgreSQL
// refuses to run as root.
//
// The folder is made in TMPDIR. If that is not set it is in memory (/dev/shm) if
// there is room, unless the server is durable, and in /tmp otherwise.
//
// In a test binary whose TestMain calls [Main], initdb runs once, and each
// server is a copy of what it made, with a system identifier of its own.
//
// # What is left behind
//
// Nothing. The server is the child of a small shell script, the supervisor,
// that lives in a session of its own and listens on a pipe whose other end this
// process holds. Stop closes the pipe; so does the kernel when this process
// ends in any other way, SIGKILL included. The supervisor then takes the server
// down at once, waits until the last of its processes is gone, and removes the
// folder. See supervisor.sh.
package pgtest
