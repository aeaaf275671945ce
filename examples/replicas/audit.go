package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// delivery is a call of a handler that came to its end.
type delivery struct {
	event OrderChanged
	// pid is the process that handled it.
	pid int
}

// compare returns what the deliveries, in their order, say of what was
// committed, the version of each order. The replicas that were killed may have
// stored less than they handled.
func compare(committed map[int]int, deliveries []delivery, killed map[int]bool) result {
	r := result{handled: len(deliveries)}
	by := map[OrderChanged]int{}
	newest := map[int]int{}
	for _, d := range deliveries {
		previous, again := by[d.event]
		switch {
		case d.event.Version > committed[d.event.OrderID]:
			r.unexplained++ // a transaction that was rolled back
		case again && killed[previous]:
			r.repeated++
		case again:
			r.repeated++
			r.unexplained++
		case d.event.Version < newest[d.event.OrderID]:
			r.outOfOrder++
		}
		by[d.event] = d.pid
		newest[d.event.OrderID] = max(newest[d.event.OrderID], d.event.Version)
	}
	for id, version := range committed {
		r.published += version
		for v := 1; v <= version; v++ {
			if _, came := by[OrderChanged{OrderID: id, Version: v}]; !came {
				r.lost++
			}
		}
	}
	return r
}

// result is the outcome of the program.
type result struct {
	published, rolledBack, handled, lost, repeated, outOfOrder int
	// unexplained is what came of transactions that were rolled back, or again
	// although the process that had handled it was not killed.
	unexplained int
}

// ok reports whether nothing was lost, each order's events came in order, and
// only what killed replicas had handled came again.
func (r result) ok() bool {
	return r.lost == 0 && r.outOfOrder == 0 && r.unexplained == 0
}

// String is the last line that the program prints.
func (r result) String() string {
	text := fmt.Sprintf("published=%d rolled_back=%d handled=%d lost=%d repeated=%d out_of_order=%d",
		r.published, r.rolledBack, r.handled, r.lost, r.repeated, r.outOfOrder)
	if r.unexplained > 0 {
		return text + fmt.Sprintf(" unexplained=%d", r.unexplained)
	}
	return text + " (repeated: what a killed replica had handled and not stored yet)"
}

// versions returns the version of each order, as committed.
func versions(ctx context.Context, db *pgxpool.Pool) (map[int]int, error) {
	rows, err := db.Query(ctx, "SELECT id, version FROM orders")
	if err != nil {
		return nil, err
	}
	versions := map[int]int{}
	var id, version int
	_, err = pgx.ForEachRow(rows, []any{&id, &version}, func() error {
		versions[id] = version
		return nil
	})
	return versions, err
}

// handled returns the deliveries, in their order.
func handled(ctx context.Context, db *pgxpool.Pool) ([]delivery, error) {
	rows, err := db.Query(ctx, "SELECT order_id, version, pid FROM handled ORDER BY number")
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (d delivery, err error) {
		return d, row.Scan(&d.event.OrderID, &d.event.Version, &d.pid)
	})
}

// unhandled returns how many committed events no handler has come to the end of.
func unhandled(ctx context.Context, db *pgxpool.Pool) (n int, err error) {
	err = db.QueryRow(ctx, `SELECT (SELECT sum(version) FROM orders) - (SELECT count(DISTINCT (order_id, version)) FROM handled)`).Scan(&n)
	return n, err
}

// waits returns how many events were handled for the first time after the given
// row of handled, the longest time that one of them waited since it was written,
// and the last of their rows.
func waits(ctx context.Context, db *pgxpool.Pool, after int64) (n int, longest time.Duration, last int64, err error) {
	err = db.QueryRow(ctx, `
		SELECT count(*), coalesce(max(h.waited), '0'), coalesce(max(h.number), $1) FROM handled h
		WHERE h.number > $1 AND NOT EXISTS (
			SELECT FROM handled e WHERE e.order_id = h.order_id AND e.version = h.version AND e.number < h.number)`, after).
		Scan(&n, &longest, &last)
	return n, longest, last, err
}
