package outbox

import (
	"context"
	"database/sql"

	"github.com/millrace/watermill-outbox/schema"
)

// stdQuerier is what *sql.DB, *sql.Conn and *sql.Tx have in common for reading
// rows.
type stdQuerier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// canQuery reports whether query works.
func (e executor) canQuery() bool {
	switch e.handle.(type) {
	case schema.Querier, stdQuerier:
		return true
	}
	return false
}

// query runs a statement and calls each for every row of its answer, with the
// function that scans it.
func (e executor) query(ctx context.Context, text string, args []any, each func(scan func(dest ...any) error) error) error {
	switch db := e.handle.(type) {
	case schema.Querier:
		rows, err := db.Query(ctx, text, args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			if err := each(rows.Scan); err != nil {
				return err
			}
		}
		return rows.Err()
	case stdQuerier:
		rows, err := db.QueryContext(ctx, text, args...)
		if err != nil {
			return err
		}
		defer rows.Close() //nolint:errcheck // rows.Err has what there is to know
		for rows.Next() {
			if err := each(rows.Scan); err != nil {
				return err
			}
		}
		return rows.Err()
	}
	return ErrUnsupportedExecutor
}
