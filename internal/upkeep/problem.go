package upkeep

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
)

// Problem is something that is not as it should be. The rest of the upkeep goes
// on.
type Problem struct {
	// Object is what it is about, such as the name of a partition.
	Object string
	Err    error
}

// Error implements error.
func (p *Problem) Error() string { return fmt.Sprintf("%s: %v", p.Object, p.Err) }

// Unwrap returns the cause.
func (p *Problem) Unwrap() error { return p.Err }

// SQLSTATEs that are told apart.
const (
	stateLock  = "55P03" // lock_not_available
	stateCheck = "23514" // check_violation
	stateLate  = "55000" // object_not_in_prerequisite_state: a range is too near by now
)

// stateOf returns the SQLSTATE of a server's error, or "".
func stateOf(err error) string {
	var server *pgconn.PgError
	if errors.As(err, &server) {
		return server.Code
	}
	return ""
}

// ends reports whether an error is of the connection, or of the server, so that no
// other step would fare better.
func ends(err error) bool {
	code := stateOf(err)
	if len(code) != 5 {
		return true
	}
	switch code[:2] {
	case "08", // connection
		"25", // transaction state, such as read-only
		"28", // authorization
		"3D", // no such database
		"57": // the operator: shutting down, starting
		return code != "57014" // query_canceled: that one took too long
	}
	return false
}
