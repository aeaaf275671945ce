package promote

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgconn"
)

// blame is where the fault of a statement that failed may lie.
type blame int

const (
	// elsewhere: the connection, the server's state, other sessions.
	elsewhere blame = iota
	// slow: no answer in time. That may be a large batch, a row that takes for
	// ever, or a lock that somebody holds.
	slow
	// unclear: the server refused it. That may be a row, or all there are.
	unclear
	// aRow: the server refused it for what a row contains.
	aRow
)

// blameFor looks at an error of a statement that moves rows.
func blameFor(err error) blame {
	var server *pgconn.PgError
	if !errors.As(err, &server) {
		if errors.Is(err, context.DeadlineExceeded) || pgconn.Timeout(err) {
			return slow
		}
		return elsewhere
	}
	if server.Code == "57014" { // query_canceled: by the role's statement_timeout, or by hand
		return slow
	}
	if len(server.Code) != 5 {
		return unclear
	}
	switch server.Code[:2] {
	case "08", // connection
		"0A", // feature not supported: a standby, for unlogged tables and locks
		"25", // transaction state, such as read-only
		"28", // authorization
		"3D", // no such database
		"40", // rolled back for another transaction's sake
		"57": // the operator: shutting down, starting
		return elsewhere
	case "21", "22", "23", "38", "39", "44", // data, constraints, functions
		"54", // limits of a row
		"P0": // raised by a trigger
		return aRow
	}
	return unclear
}
