package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/millrace/watermill-outbox/schema"
)

// on runs statements on a handle. Behind a transaction pooler it leads them past
// what the handle would keep in a session.
func (p *Publisher) on(ctx context.Context, db executor, run func(executor) error) error {
	if !p.config.TransactionPooler {
		return run(db)
	}
	if db.pgx != nil {
		return run(unprepared(db.pgx))
	}
	switch std := db.handle.(type) {
	case *sql.DB:
		conn, err := std.Conn(ctx)
		if err != nil {
			return err
		}
		return errors.Join(runOnSQL(ctx, conn, true, run), conn.Close())
	case *sql.Conn:
		// It may be inside a transaction that was begun by hand.
		return runOnSQL(ctx, std, false, run)
	}
	return run(db)
}

// runOnSQL runs statements on pgx's connection, if there is one in conn, or else on
// conn, which alone says that the driver sends a statement at once: lib/pq does not
// unless it is told to, and needs a transaction then.
func runOnSQL(ctx context.Context, conn *sql.Conn, inTx bool, run func(executor) error) error {
	isPgx := false
	err := conn.Raw(func(driver any) error {
		of, ok := driver.(interface{ Conn() *pgx.Conn })
		if !ok {
			return nil
		}
		isPgx = true
		return run(unprepared(of.Conn()))
	})
	switch {
	case isPgx || err != nil:
		return err
	case !inTx:
		return run(executor{handle: conn, std: conn})
	}
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	if err := run(executor{handle: tx, std: tx, isTx: true}); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}

// unprepared returns an executor of a handle of pgx's that prepares nothing.
func unprepared(db pgxExecutor) executor {
	p := preparesNothing{db}
	return executor{handle: p, pgx: p}
}

// preparesNothing has pgx send each statement with its parameters, whose types are
// written out in ours, whatever its query mode.
type preparesNothing struct{ pgxExecutor }

// Exec implements pgxExecutor.
func (p preparesNothing) Exec(ctx context.Context, text string, args ...any) (pgconn.CommandTag, error) {
	return p.pgxExecutor.Exec(ctx, text, withoutPreparing(args)...)
}

// Query implements schema.Querier.
func (p preparesNothing) Query(ctx context.Context, text string, args ...any) (pgx.Rows, error) {
	db, ok := p.pgxExecutor.(schema.Querier)
	if !ok {
		return nil, fmt.Errorf("%w: %T cannot query", ErrUnsupportedExecutor, p.pgxExecutor)
	}
	return db.Query(ctx, text, withoutPreparing(args)...)
}

func withoutPreparing(args []any) []any {
	return slices.Insert(slices.Clone(args), 0, any(pgx.QueryExecModeExec))
}
