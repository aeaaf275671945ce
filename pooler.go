package outbox

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// rollbackTimeout bounds the end of a transaction that failed.
const rollbackTimeout = time.Second

// database is what the statements of a Consumer run on, each in a transaction of
// its own, with the sessionSettings in force: those of a session, or, behind a
// transaction pooler, those of the transaction. Safe for concurrent use.
type database interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

var (
	_ database = (*pgxpool.Pool)(nil)
	_ database = transactionDB{}
)

// databaseOn returns what the statements run on, given the Consumer's own pool.
func databaseOn(pool *pgxpool.Pool, config ConsumerConfig) database {
	if config.TransactionPooler {
		return transactionDB{pool: pool}
	}
	return pool
}

// withoutSession has a pool keep nothing in its sessions: behind a transaction
// pooler the next statement may run in another one, and what was set stays in
// this one for somebody else.
func withoutSession(pool *pgxpool.Config) {
	pool.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	pool.ConnConfig.StatementCacheCapacity = 0
	pool.ConnConfig.DescriptionCacheCapacity = 0
}

const (
	beginText  = "BEGIN ISOLATION LEVEL READ COMMITTED"
	commitText = "COMMIT"
)

// transactionSettings does for a transaction what consumerPool does for a
// session. The isolation level is in beginText.
var transactionSettings = func() string {
	var text strings.Builder
	text.WriteString("SELECT ")
	for _, name := range slices.Sorted(maps.Keys(sessionSettings)) {
		if name != "default_transaction_isolation" {
			text.WriteString("pg_catalog.set_config('" + name + "', '" + sessionSettings[name] + "', true), ")
		}
	}
	// See commitLocally.
	text.WriteString("CASE WHEN pg_catalog.current_setting('synchronous_commit') <> 'off'" +
		" THEN pg_catalog.set_config('synchronous_commit', 'local', true) END")
	return text.String()
}()

// transactionDB runs each statement in a transaction that brings its own
// settings.
type transactionDB struct{ pool *pgxpool.Pool }

// Query implements database. What the statement did counts when the rows have
// been read, or closed, and their Err is nil: that includes the commit.
func (db transactionDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	conn, err := db.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	return queryInTransaction(ctx, conn.Conn(), conn.Release, sql, args)
}

// Exec implements database.
func (db transactionDB) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	rows.Close()
	return rows.CommandTag(), rows.Err()
}

// BeginTx implements database. The transaction is READ COMMITTED, whatever the
// options say.
func (db transactionDB) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	options.BeginQuery = beginText + "; " + transactionSettings
	return db.pool.BeginTx(ctx, options)
}

// queryInTransaction runs a statement in a transaction that brings its own
// settings, in one round trip: all is sent before the first answer is read, so no
// transaction waits for its client. release is called once, when the connection
// is free again.
func queryInTransaction(ctx context.Context, conn *pgx.Conn, release func(), sql string, args []any) (pgx.Rows, error) {
	batch := &pgx.Batch{}
	batch.Queue(beginText)
	batch.Queue(transactionSettings)
	batch.Queue(sql, args...)
	batch.Queue(commitText)
	answers := conn.SendBatch(ctx, batch)
	rows := &transactionRows{ctx: ctx, conn: conn, answers: answers, release: release}
	for range 2 {
		if _, err := answers.Exec(); err != nil {
			rows.end(err)
			return nil, err
		}
	}
	var err error
	if rows.Rows, err = answers.Query(); err != nil {
		rows.end(err)
		return nil, err
	}
	return rows, nil
}

// transactionRows are the rows of a statement whose transaction ends with them.
type transactionRows struct {
	pgx.Rows

	ctx     context.Context //nolint:containedctx // that of the query, which the rows belong to
	conn    *pgx.Conn
	answers pgx.BatchResults
	release func()

	ended bool
	err   error
}

// Next implements pgx.Rows.
func (r *transactionRows) Next() bool {
	if !r.ended && r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

// Close implements pgx.Rows.
func (r *transactionRows) Close() {
	if r.ended {
		return
	}
	r.Rows.Close()
	err := r.Rows.Err()
	if err == nil {
		_, err = r.answers.Exec() // the answer to COMMIT
	}
	r.end(err)
}

// Err implements pgx.Rows. After Close, or a Next that returned false, it
// includes the error of the commit.
func (r *transactionRows) Err() error {
	if r.ended {
		return r.err
	}
	return r.Rows.Err()
}

// end leaves the connection outside of any transaction, and gives it back.
func (r *transactionRows) end(err error) {
	r.ended = true
	closeErr := r.answers.Close()
	if err == nil {
		err = closeErr
	}
	r.err = err
	if !r.conn.IsClosed() && r.conn.PgConn().TxStatus() != 'I' {
		// The COMMIT behind what failed was skipped, and the pooler keeps a server's
		// connection for this client until there is another end.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.ctx), rollbackTimeout)
		defer cancel()
		// If that fails the connection is not used again: the pool sees its state,
		// as does a reservedConn the error.
		_ = r.conn.PgConn().Exec(ctx, "ROLLBACK").Close()
	}
	r.release()
}
