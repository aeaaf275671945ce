package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// balance is who has how many shards. A replica knows its own part of it
// (Consumer.Status); who wants to know all of it asks the tables.
type balance struct {
	// held is by the number of the process; free are those that nobody has.
	held map[int]int
	free int
	// ending are shards of an earlier division, which are read to their end
	// before the new ones are.
	ending int
}

// look returns how the shards are spread at this moment.
func look(ctx context.Context, db *pgxpool.Pool) (balance, error) {
	rows, err := db.Query(ctx, `
		SELECT coalesce(p.pid, 0), count(*) FILTER (WHERE c.until IS NULL), count(*) FILTER (WHERE c.until IS NOT NULL)
		FROM outbox.cursors c LEFT JOIN outbox.processes p ON p.holder = c.holder
		WHERE c.consumer_group = $1 AND c.topic = $2
		GROUP BY 1`, group, topic)
	if err != nil {
		return balance{}, err
	}
	b := balance{held: map[int]int{}}
	var pid, n, ending int
	_, err = pgx.ForEachRow(rows, []any{&pid, &n, &ending}, func() error {
		b.held[pid] = n
		b.ending += ending
		return nil
	})
	b.free = b.held[0]
	delete(b.held, 0)
	return b, err
}

// even reports whether the running replicas have all shards, none of them two
// more than another, and there are as many as there should be.
func (b balance) even(running map[string]int, shards int) bool {
	low, high, sum := shards, 0, 0
	for _, pid := range running {
		n := b.held[pid]
		low, high, sum = min(low, n), max(high, n), sum+n
	}
	// What a dead process has, or nobody, is missing from the sum.
	all := b.free
	for _, n := range b.held {
		all += n
	}
	return all == shards && sum == shards && high-low <= 1 && b.ending == 0
}

// text says how many shards each replica has.
func (b balance) text(running map[string]int) string {
	var parts []string
	elsewhere := 0
	for _, n := range b.held {
		elsewhere += n
	}
	for _, name := range names {
		pid, runs := running[name]
		if !runs {
			parts = append(parts, name+"=-")
			continue
		}
		parts = append(parts, fmt.Sprintf("%s=%d", name, b.held[pid]))
		elsewhere -= b.held[pid]
	}
	if elsewhere > 0 {
		parts = append(parts, fmt.Sprintf("ended=%d", elsewhere))
	}
	if b.free > 0 {
		parts = append(parts, fmt.Sprintf("nobody=%d", b.free))
	}
	if b.ending > 0 {
		parts = append(parts, fmt.Sprintf("old=%d", b.ending))
	}
	return strings.Join(parts, " ")
}
