package upkeep

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/millrace/watermill-outbox/schema"
)

//go:embed queries/partitions.sql
var partitionsText string

//go:embed queries/archive.sql
var archiveText string

// Querier runs one query, each in a transaction of its own that is READ COMMITTED.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Session is a connection for one pass, beside those that messages go through.
type Session interface {
	Querier
	// CopyTo runs COPY … TO STDOUT.
	CopyTo(ctx context.Context, w io.Writer, sql string) error
	// Close ends it. It may be called twice.
	Close()
}

// table runs the functions of one schema on one Querier.
type table struct {
	db      Querier
	schema  string
	timeout time.Duration
}

// call runs a query of one row.
func (t table) call(ctx context.Context, timeout time.Duration, text string, args []any, dest ...any) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	rows, err := t.db.Query(ctx, schema.Text(t.schema, text), args...)
	if err != nil {
		return err
	}
	_, err = pgx.CollectExactlyOneRow(rows, func(r pgx.CollectableRow) (struct{}, error) { return struct{}{}, r.Scan(dest...) })
	return err
}

// word runs a function that says in a word how it went.
func (t table) word(ctx context.Context, text string, args ...any) (word string, err error) {
	err = t.call(ctx, t.timeout, text, args, &word)
	return word, err
}

// done runs a function that says nothing.
func (t table) done(ctx context.Context, text string, args ...any) error {
	var ignored any
	return t.call(ctx, t.timeout, text, args, &ignored)
}

func (t table) begin(ctx context.Context, holder string, lease, rest time.Duration) (string, error) {
	return t.word(ctx, "SELECT outbox.upkeep_begin($1::text, $2::float8, $3::float8)", holder, lease.Seconds(), rest.Seconds())
}

func (t table) end(ctx context.Context, holder string, through bool) error {
	return t.done(ctx, "SELECT outbox.upkeep_end($1::text, $2::boolean)::text", holder, through)
}

// list runs a query of two columns of text.
func (t table) problems(ctx context.Context, text string) ([]*Problem, error) {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	rows, err := t.db.Query(ctx, schema.Text(t.schema, text))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (*Problem, error) {
		var object, what string
		err := row.Scan(&object, &what)
		return &Problem{Object: object, Err: errors.New(what)}, err
	})
}

// span is a range for which a partition can be made.
type span struct {
	lower, upper time.Time
	problem      *string
}

func (s span) String() string {
	return "partition from " + s.lower.UTC().Format(time.RFC3339) + " to " + s.upper.UTC().Format(time.RFC3339)
}

func (t table) ranges(ctx context.Context) ([]span, error) {
	ctx, cancel := context.WithTimeout(ctx, longTimeout)
	defer cancel()
	rows, err := t.db.Query(ctx, schema.Text(t.schema, "SELECT r.lower, r.upper, r.problem FROM outbox.upkeep_ranges() r"))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (s span, err error) {
		return s, row.Scan(&s.lower, &s.upper, &s.problem)
	})
}

func (t table) partitions(ctx context.Context, delay time.Duration) ([]Partition, error) {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	rows, err := t.db.Query(ctx, schema.Text(t.schema, partitionsText), delay.Seconds())
	if err != nil {
		return nil, fmt.Errorf("read the table of partitions: %w", err)
	}
	list, err := pgx.CollectRows(rows, scanPartition)
	if err != nil {
		return nil, fmt.Errorf("read the table of partitions: %w", err)
	}
	return list, nil
}

// place is a place in the DEFAULT partition.
type place struct {
	topic   string
	era, id int64
}

// remove deletes from the DEFAULT partition, of so many rows behind a place, what
// may go, and returns where it came to and how many it looked at and deleted.
func (t table) remove(ctx context.Context, after place, retention, unread time.Duration, archived bool, rows int) (to place, seen, deleted int, err error) {
	err = t.call(ctx, t.timeout, `SELECT d.topic, d.era, d.id, d.seen, d.deleted
		FROM outbox.upkeep_delete($1::text, $2::bigint, $3::bigint, $4::float8, $5::float8, $6::boolean, $7::integer) d`,
		[]any{after.topic, after.era, after.id, retention.Seconds(), unread.Seconds(), archived, rows}, &to.topic, &to.era, &to.id, &seen, &deleted)
	return to, seen, deleted, err
}

func (t table) count(ctx context.Context, text string, args ...any) (n int, err error) {
	err = t.call(ctx, t.timeout, text, args, &n)
	return n, err
}
