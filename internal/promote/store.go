package promote

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"hash/fnv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/millrace/watermill-outbox/schema"
)

//go:embed queries/batch.sql
var batchText string

//go:embed queries/first.sql
var firstText string

//go:embed queries/one.sql
var oneText string

//go:embed queries/refused.sql
var refusedText string

// Querier runs one query, each in a transaction of its own.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// place is a place in the order of the due times.
type place struct {
	due pgtype.Timestamptz
	id  int64
}

// front is the place before all rows. Ids count from 1.
var front = place{due: pgtype.Timestamptz{Valid: true, InfinityModifier: pgtype.NegativeInfinity}}

// batch is what came of one.
type batch struct {
	// locked: nobody else was at it. Without the lock all else is empty.
	locked bool
	// due and moved are the numbers of rows that were found and that were moved.
	due, moved int
	// last is the last row that was moved.
	last place
	// at is when the statement began: what was due then was found.
	at pgtype.Timestamptz
	// next is the time until a row is due that was not then, nil if there is
	// none. Both clocks are the database's. It may be negative: the answer takes
	// its time.
	next *time.Duration
	// cost is how long the server took.
	cost time.Duration
}

// row is one that is moved on its own.
type row struct {
	id       int64
	place    place
	topic    string
	uuid     string
	failures int
}

// store is the tables: one statement for each method.
type store interface {
	// batch moves what is due after a place, no more than these rows.
	batch(ctx context.Context, after place, rows int) (batch, error)
	// first returns the first row that is due after a place.
	first(ctx context.Context, after place) (r row, found bool, err error)
	// one moves a row. locked is false when somebody else moves rows now.
	one(ctx context.Context, r row) (locked bool, err error)
	// refused notes a failure of a row, unless it was noted by somebody else.
	refused(ctx context.Context, r row, again time.Duration, why string) (noted bool, err error)
}

// sqlStore is the store of one schema.
type sqlStore struct {
	db      Querier
	lock    int64
	timeout time.Duration

	batchText, firstText, oneText, refusedText string
}

func newSQLStore(db Querier, schemaName string, timeout time.Duration) *sqlStore {
	return &sqlStore{
		db: db, lock: LockKey(schemaName), timeout: timeout,
		batchText: schema.Text(schemaName, batchText), firstText: schema.Text(schemaName, firstText),
		oneText: schema.Text(schemaName, oneText), refusedText: schema.Text(schemaName, refusedText),
	}
}

// LockKey is the key of the transaction-level advisory lock under which rows are
// moved, one per schema name.
func LockKey(schemaName string) int64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte("watermill-outbox/promote/" + schemaName))
	return int64(h.Sum64()) //nolint:gosec // all 64 bits are wanted, the sign means nothing
}

// scanOne runs a query of one row at most.
func (s *sqlStore) scanOne(ctx context.Context, text string, args []any, dest ...any) (found bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	rows, err := s.db.Query(ctx, text, args...)
	if err != nil {
		return false, err
	}
	_, err = pgx.CollectExactlyOneRow(rows, func(r pgx.CollectableRow) (struct{}, error) { return struct{}{}, r.Scan(dest...) })
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}

func (s *sqlStore) batch(ctx context.Context, after place, rows int) (batch, error) {
	var (
		b    batch
		id   *int64
		next *float64
		cost float64
	)
	_, err := s.scanOne(ctx, s.batchText, []any{s.lock, rows, maxBatchBytes, after.due, after.id},
		&b.locked, &b.due, &b.moved, &b.last.due, &id, &b.at, &next, &cost)
	if err != nil {
		return batch{}, fmt.Errorf("move messages that are due into the log: %w", err)
	}
	if id != nil {
		b.last.id = *id
	}
	if next != nil {
		d := seconds(*next)
		b.next = &d
	}
	b.cost = seconds(cost)
	return b, nil
}

// seconds is a number of them as a duration. What is too long for one, such as
// infinity, is a long time.
func seconds(s float64) time.Duration {
	const long = 1e9
	return time.Duration(max(-long, min(s, long)) * float64(time.Second))
}

func (s *sqlStore) first(ctx context.Context, after place) (r row, found bool, err error) {
	found, err = s.scanOne(ctx, s.firstText, []any{after.due, after.id}, &r.id, &r.place.due, &r.topic, &r.uuid, &r.failures)
	if err != nil {
		return row{}, false, fmt.Errorf("look for a message that is due: %w", err)
	}
	r.place.id = r.id
	return r, found, nil
}

func (s *sqlStore) one(ctx context.Context, r row) (locked bool, err error) {
	if _, err = s.scanOne(ctx, s.oneText, []any{s.lock, r.id}, &locked); err != nil {
		return false, fmt.Errorf("move a message that is due into the log: %w", err)
	}
	return locked, nil
}

func (s *sqlStore) refused(ctx context.Context, r row, again time.Duration, why string) (noted bool, err error) {
	var failures int
	noted, err = s.scanOne(ctx, s.refusedText, []any{r.id, r.failures, again.Seconds(), storable(why)}, &failures)
	if err != nil {
		return false, fmt.Errorf("note that a message cannot be moved into the log: %w", err)
	}
	return noted, nil
}

// storable makes a text one that a column takes, and not too long to be read.
func storable(text string) string {
	const limit = 2000
	text = strings.ReplaceAll(strings.ToValidUTF8(text, "\ufffd"), "\x00", "")
	if len(text) > limit {
		text = strings.ToValidUTF8(text[:limit], "")
	}
	return text
}
