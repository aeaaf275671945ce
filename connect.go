package outbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/schema"
)

// sessionSettings are what a reader's session needs. They are sent with the
// connection's start, so a database's or a role's own defaults do not count;
// behind a transaction pooler each transaction brings them, see pooler.go.
var sessionSettings = map[string]string{
	// A policy is an error and not a silent gap.
	"row_security": "off",
	// A statement sees what committed before it began; with a stricter level
	// as the database's default, positions would conflict (40001).
	"default_transaction_isolation": "read committed",
	"search_path":                   "",
	// The statements are small and their plans known: by index, in order. The
	// statistics of a table that was empty a minute ago are not.
	"jit":                             "off",
	"plan_cache_mode":                 "force_generic_plan",
	"enable_seqscan":                  "off",
	"enable_bitmapscan":               "off",
	"max_parallel_workers_per_gather": "0",
}

// consumerPool is the configuration of a Consumer's own pool.
func consumerPool(db *pgxpool.Config, config ConsumerConfig) *pgxpool.Config {
	pool := db.Copy()
	reserved := 2
	if config.Mode == ModePoll {
		reserved = 1
	}
	pool.MaxConns = int32(config.MaxConns - reserved) //nolint:gosec // a small number
	pool.MinConns = 0
	pool.MinIdleConns = 0
	params := maps.Clone(pool.ConnConfig.RuntimeParams)
	if params == nil {
		params = map[string]string{}
	}
	if !config.TransactionPooler {
		maps.Copy(params, sessionSettings)
	}
	if params["application_name"] == "" {
		params["application_name"] = "watermill-outbox"
	}
	pool.ConnConfig.RuntimeParams = params
	if pool.ConnConfig.ValidateConnect == nil {
		// A host that became a standby, or one of several, is no use. The answer
		// of a transaction pooler is that of one of its connections, which is what
		// a list of several poolers is chosen by.
		pool.ConnConfig.ValidateConnect = requireReadWrite
	}
	if config.TransactionPooler {
		withoutSession(pool)
	} else {
		pool.AfterConnect = commitLocally(pool.AfterConnect)
	}
	return pool
}

// commitLocally follows on the user's hook, if there is one. Beats and positions
// wait for no standby: a stall would cost the lease, and a position that a
// failover forgets costs a repeat. What does not even wait for the disk stays so.
func commitLocally(hook func(context.Context, *pgx.Conn) error) func(context.Context, *pgx.Conn) error {
	return func(ctx context.Context, conn *pgx.Conn) error {
		if hook != nil {
			if err := hook(ctx, conn); err != nil {
				return err
			}
		}
		_, err := conn.Exec(ctx, "SELECT set_config('synchronous_commit', 'local', false) WHERE current_setting('synchronous_commit') <> 'off'")
		return err
	}
}

// requireReadWrite refuses a connection to a server that takes no writes.
func requireReadWrite(ctx context.Context, conn *pgconn.PgConn) error {
	result := conn.ExecParams(ctx, "SHOW transaction_read_only", nil, nil, nil, nil).Read()
	if result.Err != nil {
		return result.Err
	}
	if len(result.Rows) == 1 && string(result.Rows[0][0]) == "on" {
		return ErrReadOnly
	}
	return nil
}

// failed is told of the statements that failed: a pool keeps a connection that
// answers, even when the server at its other end is no longer the right one.
func (c *Consumer) failed(err error) {
	switch sqlState(err) {
	case stateReadOnly, stateFeature: // the latter is how a standby refuses unlogged tables
		c.reconnect()
	case "":
		if errors.Is(err, window.ErrOtherLife) {
			c.reconnect()
		} else if !errors.Is(err, context.Canceled) {
			c.pool.Reset() // no answer, or another life of the server
		}
	}
}

// reconnect has all connections made again before their next use: some lead to a
// server that the others do not.
func (c *Consumer) reconnect() {
	c.pool.Reset()
	c.beat.reset.Store(true)
	if c.barrier != nil {
		c.barrier.reset.Store(true)
	}
}

// consumerText asks for what a consumer needs beyond the right tables.
const consumerText = `
SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool, current_user::text,
       coalesce((SELECT string_agg(w.privilege || ' on ' || w.name, ', ')
           FROM (VALUES ('messages', 'SELECT'), ('messages_id_seq', 'SELECT'), ('boot', 'INSERT'), ('boot', 'SELECT'),
                        ('cursors', 'INSERT'), ('cursors', 'UPDATE'), ('cursors', 'SELECT'),
                        ('processes', 'INSERT'), ('processes', 'UPDATE'), ('processes', 'DELETE'),
                        ('deferred', 'SELECT'), ('deferred', 'UPDATE'), ('deferred', 'DELETE')) AS w (name, privilege)
           LEFT JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.name
           WHERE c.oid IS NULL OR NOT has_table_privilege(c.oid, w.privilege)),
           -- On columns: what moves a deferred message into the log.
           (SELECT 'INSERT on messages (' || string_agg(w.name, ', ') || ')'
           FROM unnest(ARRAY['topic', 'key', 'uuid', 'metadata', 'payload', 'target_group', 'attempt']) AS w (name)
           JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = 'messages'
           WHERE NOT coalesce(has_column_privilege(c.oid, w.name, 'INSERT'), false)), '')
FROM pg_catalog.pg_namespace n WHERE n.nspname = $1::text`

// checkConsumer refuses an installation that would not deliver.
func checkConsumer(ctx context.Context, db schema.Querier, schemaName string, logger watermill.LoggerAdapter) error {
	row := schema.PgxRow(db)
	if err := schema.RequireVersion(ctx, row, schemaName); err != nil {
		return err
	}
	var readOnly bool
	var role, missing string
	if err := row(ctx, consumerText, []any{schemaName}, &readOnly, &role, &missing); err != nil {
		return fmt.Errorf("schema %q: look at privileges: %w", schemaName, err)
	}
	if readOnly {
		return ErrReadOnly
	}
	if missing != "" {
		return fmt.Errorf("schema %q: role %q lacks %s: run the script printed by schema.Grants", schemaName, role, missing)
	}
	var hidden bool
	err := row(ctx, `SELECT coalesce(bool_or(row_security_active(c.oid)), false)
		FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1::text AND c.relkind IN ('r', 'p')`, []any{schemaName}, &hidden)
	if err != nil {
		return fmt.Errorf("schema %q: look at row-level security: %w", schemaName, err)
	}
	if hidden {
		return fmt.Errorf("schema %q, role %q: %w", schemaName, role, ErrRowSecurity)
	}
	differences, err := schema.Check(ctx, db, schema.Config{Name: schemaName})
	if err != nil {
		return err
	}
	for _, d := range differences {
		if d.Severity == schema.SeverityWarning {
			logger.Info("The outbox's tables: "+d.String(), watermill.LogFields{"schema": schemaName})
		}
	}
	return schema.Errors(differences)
}

// reservedConn is one connection outside every pool, made as the pool makes its
// own, opened when it is first needed and again after a failure. It has one
// user, the goroutine that renews the lease or that of the stream; close comes
// when that has ended.
type reservedConn struct {
	config *pgxpool.Config

	// limit bounds the making of the connection; 0 leaves that to the statement's
	// context.
	limit time.Duration
	// transactions says that it leads to a transaction pooler: each statement
	// brings its settings.
	transactions bool
	// reset, from any goroutine, asks for another connection.
	reset atomic.Bool

	conn *pgx.Conn
	// last is the answer of the statement before: what went wrong with it.
	last pgx.Rows
	// used says that the connection has answered before.
	used bool
}

// Query runs one statement, whose rows are read before the next.
func (r *reservedConn) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if r.reset.Swap(false) || r.last != nil && r.last.Err() != nil {
		r.close() // it may lead to a server that is no longer the right one
	}
	if r.conn == nil || r.conn.IsClosed() {
		conn, err := r.connectInTime(ctx)
		if err != nil {
			return nil, err
		}
		r.conn = conn
		if ctx.Err() != nil {
			return nil, ctx.Err() // it is there for the next
		}
	}
	rows, err := r.query(ctx, sql, args)
	if err != nil && ctx.Err() == nil && r.used && pgconn.SafeToRetry(err) {
		// It broke while nobody used it, and the server has seen nothing of this.
		r.close()
		return r.Query(ctx, sql, args...)
	}
	if err != nil {
		r.close()
		return nil, err
	}
	r.last, r.used = rows, true
	return rows, nil
}

// query runs a statement on the connection that there is.
func (r *reservedConn) query(ctx context.Context, sql string, args []any) (pgx.Rows, error) {
	if r.transactions {
		return queryInTransaction(ctx, r.conn, func() {}, sql, args)
	}
	return r.conn.Query(ctx, sql, args...)
}

// connectInTime is connect with a limit of its own, if there is one: a short one
// for a statement would never do for a connection. A caller that gives up ends it
// all the same.
func (r *reservedConn) connectInTime(ctx context.Context) (*pgx.Conn, error) {
	if r.limit == 0 {
		return r.connect(ctx)
	}
	connecting, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.limit)
	defer cancel()
	defer context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.Canceled) {
			cancel()
		}
	})()
	return r.connect(connecting)
}

// connect does what the pool does, hooks included: they may carry a password
// that changes, or set the session's role.
func (r *reservedConn) connect(ctx context.Context) (*pgx.Conn, error) {
	config := r.config.ConnConfig.Copy()
	if r.config.BeforeConnect != nil {
		if err := r.config.BeforeConnect(ctx, config); err != nil {
			return nil, err
		}
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	if r.config.AfterConnect != nil {
		if err := r.config.AfterConnect(ctx, conn); err != nil {
			_ = conn.Close(ctx) // the hook's error is the one to tell
			return nil, err
		}
	}
	return conn, nil
}

func (r *reservedConn) close() {
	r.last, r.used = nil, false
	if r.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = r.conn.Close(ctx) // nothing depends on a polite goodbye
	r.conn = nil
}
