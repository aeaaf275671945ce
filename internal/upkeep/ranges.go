package upkeep

import (
	"context"
	_ "embed"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/schema"
)

//go:embed queries/sealed.sql
var sealedText string

// Range is the range of one partition.
type Range struct {
	Lower, Upper time.Time
	// Seal sees all that is in it, on the cluster Era. Empty if it is not sealed.
	Seal window.Snapshot
	Era  int64
}

// Ranges are those of all partitions, in order, the DEFAULT one's left out.
type Ranges []Range

// Bound returns the moment up to which a position has the log behind it: the upper
// bound of the last in an unbroken row of ranges, from the first on, that are sealed
// on its cluster by what p covers. The zero time if there is none. What is in the
// DEFAULT partition has no range, so a reader that leaves out what was created
// before Bound must not leave out that. And a window must go by the ranges that its
// own snapshot sees: a seal may be void a moment later, and a row come.
func (r Ranges) Bound(era int64, p window.Snapshot) time.Time {
	var bound time.Time
	for i, part := range r {
		if part.Seal.Empty() || part.Era != era || !p.Covers(part.Seal) || i > 0 && !part.Lower.Equal(r[i-1].Upper) {
			break
		}
		bound = part.Upper
	}
	return bound
}

// RangesOf reads them.
func RangesOf(ctx context.Context, db Querier, schemaName string) (Ranges, error) {
	rows, err := db.Query(ctx, schema.Text(schemaName, sealedText))
	if err != nil {
		return nil, fmt.Errorf("read the ranges of partitions: %w", err)
	}
	ranges, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (r Range, err error) {
		var seal *string
		if err := row.Scan(&r.Lower, &r.Upper, &seal, &r.Era); err != nil {
			return Range{}, err
		}
		if seal != nil {
			r.Seal, err = window.ParseSnapshot(*seal)
		}
		return r, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the ranges of partitions: %w", err)
	}
	return ranges, nil
}
