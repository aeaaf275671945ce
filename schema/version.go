package schema

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
)

// Querier runs one query. *pgx.Conn, *pgxpool.Pool and pgx.Tx do.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// SQLQuerier is what *sql.DB, *sql.Conn and *sql.Tx have in common for reading
// one row.
type SQLQuerier interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// RowFunc reads the one row of a query into dest. See PgxRow and SQLRow.
type RowFunc func(ctx context.Context, query string, args []any, dest ...any) error

// errNoRow is what a RowFunc returns for a query without a row.
var errNoRow = errors.New("no row")

// PgxRow reads rows through pgx.
func PgxRow(db Querier) RowFunc {
	return func(ctx context.Context, query string, args []any, dest ...any) error {
		rows, err := db.Query(ctx, query, args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		if !rows.Next() {
			if err := rows.Err(); err != nil {
				return err
			}
			return errNoRow
		}
		if err := rows.Scan(dest...); err != nil {
			return err
		}
		rows.Close()
		return rows.Err()
	}
}

// SQLRow reads rows through database/sql.
func SQLRow(db SQLQuerier) RowFunc {
	return func(ctx context.Context, query string, args []any, dest ...any) error {
		err := db.QueryRowContext(ctx, query, args...).Scan(dest...)
		if errors.Is(err, sql.ErrNoRows) {
			return errNoRow
		}
		return err
	}
}

// versionText asks what there is, without failing where the schema, the table
// or the privilege to read it is missing: a failed statement would abort a
// caller's transaction. Names and operators are qualified: the session, and its
// search_path, are the caller's.
const versionText = `
SELECT n.oid IS NOT NULL, coalesce(pg_catalog.has_schema_privilege(n.oid, 'USAGE'), false),
       c.oid IS NOT NULL, coalesce(pg_catalog.has_table_privilege(c.oid, 'SELECT'), false), current_user::text
FROM (SELECT) AS one
LEFT JOIN pg_catalog.pg_namespace n ON n.nspname OPERATOR(pg_catalog.=) $1::text
LEFT JOIN pg_catalog.pg_class c ON c.relnamespace OPERATOR(pg_catalog.=) n.oid AND c.relname OPERATOR(pg_catalog.=) 'meta'`

// ReadVersion returns the installed version, ErrNotInstalled if there is none,
// or an error that names the missing privilege.
func ReadVersion(ctx context.Context, row RowFunc, name string) (int, error) {
	var hasSchema, usage, hasMeta, mayRead bool
	var role string
	err := row(ctx, versionText, []any{name}, &hasSchema, &usage, &hasMeta, &mayRead, &role)
	switch {
	case err != nil:
		return 0, fmt.Errorf("schema %q: look for the tables: %w", name, err)
	case !hasSchema:
		return 0, fmt.Errorf("schema %q does not exist: %w", name, ErrNotInstalled)
	case !usage:
		return 0, fmt.Errorf("schema %q: role %q lacks USAGE on it: run the script printed by schema.Grants", name, role)
	case !hasMeta:
		return 0, fmt.Errorf("table meta in schema %q does not exist: %w", name, ErrNotInstalled)
	case !mayRead:
		return 0, fmt.Errorf("schema %q: role %q lacks SELECT on table meta: run the script printed by schema.Grants", name, role)
	}
	// By way of JSON, since somebody else's table may have any columns, and a
	// failed statement would abort the caller's transaction.
	var text *string
	err = row(ctx, Text(name, `SELECT pg_catalog.to_jsonb(m) OPERATOR(pg_catalog.->>) 'value' FROM outbox.meta m
		WHERE (pg_catalog.to_jsonb(m) OPERATOR(pg_catalog.->>) 'key') OPERATOR(pg_catalog.=) 'version'`), nil, &text)
	if err != nil && !errors.Is(err, errNoRow) {
		return 0, fmt.Errorf("schema %q: read version: %w", name, err)
	}
	if text != nil {
		if version, err := strconv.Atoi(*text); err == nil {
			return version, nil
		}
	}
	return 0, fmt.Errorf("schema %q has a table meta without a version, so it is not an outbox of this library: choose another schema", name)
}

// RequireVersion returns nil when the installed version is this library's,
// a *VersionError when it is another, and otherwise what ReadVersion returns.
func RequireVersion(ctx context.Context, row RowFunc, name string) error {
	version, err := ReadVersion(ctx, row, name)
	if err != nil {
		return err
	}
	if version != Version {
		return &VersionError{Schema: name, Have: version, Want: Version}
	}
	return nil
}
