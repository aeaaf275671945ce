package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"reflect"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/millrace/watermill-outbox/internal/record"
	"github.com/millrace/watermill-outbox/schema"
)

var errSQLTxDone = sql.ErrTxDone

// pgxExecutor is what pgx's pool, connection and transaction have in common.
type pgxExecutor interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, source pgx.CopyFromSource) (int64, error)
}

// stdExecutor is what *sql.DB, *sql.Conn and *sql.Tx have in common.
type stdExecutor interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// executor is a database handle of one of the supported kinds: exactly one of
// pgx and std is set.
type executor struct {
	handle any // as the caller gave it, to compare
	pgx    pgxExecutor
	std    stdExecutor
	// isTx: the handle is a transaction, somebody else commits.
	isTx bool
}

// newExecutor recognises the kind of handle by its methods, so that types which
// embed a transaction work, too.
func newExecutor(handle any) (executor, error) {
	if isNil(handle) {
		return executor{}, fmt.Errorf("%w: %T is nil", ErrUnsupportedExecutor, handle)
	}
	e := executor{handle: handle}
	switch db := handle.(type) {
	case pgxExecutor:
		e.pgx = db
		_, e.isTx = handle.(pgx.Tx)
	case stdExecutor:
		e.std = db
		_, e.isTx = handle.(interface {
			Commit() error
			Rollback() error
		})
	default:
		return executor{}, fmt.Errorf("%w: %T; give a *pgxpool.Pool, *pgxpool.Conn, *pgx.Conn, pgx.Tx, *sql.DB, *sql.Conn or *sql.Tx", ErrUnsupportedExecutor, handle)
	}
	return e, nil
}

// inTx reports whether what is written now waits for somebody's commit. A
// connection may be after BEGIN or not, which changes while it is in use, so
// the answer is not to be kept.
func (e executor) inTx() bool {
	switch db := e.handle.(type) {
	case interface{ PgConn() *pgconn.PgConn }: // *pgx.Conn
		return db.PgConn().TxStatus() != 'I'
	case pgx.Tx: // has a Conn method, too
		return true
	case interface{ Conn() *pgx.Conn }: // *pgxpool.Conn
		return db.Conn().PgConn().TxStatus() != 'I'
	}
	return e.isTx
}

// isNil sees a nil pointer inside the interface, too.
func isNil(handle any) bool {
	if handle == nil {
		return true
	}
	v := reflect.ValueOf(handle)
	return v.Kind() == reflect.Pointer && v.IsNil()
}

// row returns a reader of single rows, for checks at construction, if the
// handle can query.
func (e executor) row() (schema.RowFunc, bool) {
	switch db := e.handle.(type) {
	case schema.Querier:
		return schema.PgxRow(db), true
	case schema.SQLQuerier:
		return schema.SQLRow(db), true
	}
	return nil, false
}

// same reports whether two handles are the same. Handles are pointers or
// structs around one.
func (e executor) same(other executor) bool { return record.Equal(e.handle, other.handle) }
