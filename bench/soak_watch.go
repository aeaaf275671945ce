package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

const (
	soakWriterName = "outbox-bench soak writer"
	// soakLockLook is how often it is looked which writers wait for locks,
	// soakSizeLook how often how much there is.
	soakLockLook = 20 * time.Millisecond
	soakSizeLook = time.Second
)

// soakLocks says how long each writer waits for a lock right now, in ms, and, if
// upkeep holds or awaits what it, or somebody it waits for, waits for, what upkeep is
// at. pg_blocking_pids has those that are ahead in the queue, too. It is asked of
// those that wait only, since it stops the server's locking for a moment.
const soakLocks = `
WITH waiting AS MATERIALIZED (
    SELECT a.pid, coalesce((SELECT max(extract(epoch FROM clock_timestamp() - l.waitstart)) FROM pg_locks l WHERE l.pid = a.pid AND NOT l.granted), 0) AS secs
    FROM pg_stat_activity a
    WHERE a.datname = current_database() AND a.application_name = $1 AND a.wait_event_type = 'Lock'
)
SELECT (w.secs * 1000)::float8, (
    WITH RECURSIVE chain (pid) AS (
        SELECT unnest(pg_blocking_pids(w.pid))
        UNION
        SELECT b FROM chain c CROSS JOIN LATERAL unnest(pg_blocking_pids(c.pid)) AS b
    )
    SELECT max(a.query) FROM chain c JOIN pg_stat_activity a ON a.pid = c.pid
    WHERE a.application_name = $2 AND a.query LIKE '%upkeep\_%'
)
FROM waiting w`

// soakSizes: the bytes of the log and of the other tables; dead rows of the log and
// of the others; the partitions but the DEFAULT one; rows in that.
const soakSizes = `
WITH log AS MATERIALIZED (
    SELECT i.inhrelid AS relation FROM pg_inherits i WHERE i.inhparent = 'outbox.messages'::regclass
), others AS MATERIALIZED (
    SELECT c.oid AS relation FROM pg_class c
    WHERE c.relnamespace = 'outbox'::regnamespace AND c.relkind = 'r' AND c.oid NOT IN (SELECT l.relation FROM log l)
)
SELECT (SELECT coalesce(sum(pg_total_relation_size(l.relation)), 0) FROM log l)::float8,
    (SELECT coalesce(sum(pg_total_relation_size(o.relation)), 0) FROM others o)::float8,
    (SELECT coalesce(sum(s.n_dead_tup), 0) FROM pg_stat_user_tables s WHERE s.relid IN (SELECT l.relation FROM log l))::float8,
    (SELECT coalesce(sum(s.n_dead_tup), 0) FROM pg_stat_user_tables s WHERE s.relid IN (SELECT o.relation FROM others o))::float8,
    ARRAY(SELECT c.relname::text FROM log l JOIN pg_class c ON c.oid = l.relation WHERE c.relname <> 'messages_default'),
    (SELECT count(*) FROM outbox.messages_default)::float8`

// soakSample is how much there is at a moment.
type soakSample struct {
	at                                  time.Duration
	log, others, deadInLog, deadInOther float64
	partitions, spare                   float64
}

// soakWatch looks at the database from outside while others work.
type soakWatch struct {
	database *database
	// every is the time between two samples, and each is called with it.
	every time.Duration
	each  func(soakSample)
	start time.Time

	samples []soakSample
	// names are all partitions that were seen, present those of the last sample.
	names   map[string]struct{}
	present int
	// byUpkeep and byAll are the longest waits of writers for locks, in ms: those
	// that upkeep caused, and culprit says with what, and all. gap is the longest
	// time between two looks.
	byUpkeep, byAll, gap float64
	culprit              string
}

// run looks until stop ends.
func (w *soakWatch) run(ctx, stop context.Context) error {
	w.start, w.names = time.Now(), map[string]struct{}{}
	group, ctx := errgroup.WithContext(ctx)
	loop := func(every time.Duration, look func(*pgx.Conn) error) {
		group.Go(func() error {
			conn, err := w.database.pool.Acquire(ctx)
			if err != nil {
				return err
			}
			defer conn.Release()
			for stop.Err() == nil && ctx.Err() == nil {
				began := time.Now()
				if err := look(conn.Conn()); err != nil {
					return err
				}
				wait(stop, every-time.Since(began))
			}
			return ctx.Err()
		})
	}
	var last time.Time
	loop(soakLockLook, func(conn *pgx.Conn) error {
		if !last.IsZero() {
			w.gap = max(w.gap, time.Since(last).Seconds()*1000)
		}
		last = time.Now()
		return w.lookAtLocks(ctx, conn)
	})
	loop(w.every, func(conn *pgx.Conn) error { return w.lookAtSizes(ctx, conn) })
	return group.Wait()
}

func (w *soakWatch) lookAtLocks(ctx context.Context, conn *pgx.Conn) error {
	rows, err := conn.Query(ctx, soakLocks, soakWriterName, soakConsumerName)
	if err != nil {
		return err
	}
	var waited float64
	var upkeep *string
	_, err = pgx.ForEachRow(rows, []any{&waited, &upkeep}, func() error {
		w.byAll = max(w.byAll, waited)
		if upkeep != nil && waited >= w.byUpkeep {
			w.byUpkeep, w.culprit = waited, *upkeep
		}
		return nil
	})
	return err
}

func (w *soakWatch) lookAtSizes(ctx context.Context, conn *pgx.Conn) error {
	s := soakSample{at: time.Since(w.start)}
	var names []string
	err := conn.QueryRow(ctx, soakSizes).Scan(&s.log, &s.others, &s.deadInLog, &s.deadInOther, &names, &s.spare)
	if err != nil {
		return err
	}
	for _, name := range names {
		w.names[name] = struct{}{}
	}
	w.present = len(names)
	s.partitions = float64(len(names))
	w.samples = append(w.samples, s)
	w.each(s)
	return nil
}

// dropped is how many partitions there are no more.
func (w *soakWatch) dropped() int { return len(w.names) - w.present }

// thirds returns the most there was of something in the middle third of the first
// so long, and in the last third. Either is empty if nothing was seen then.
func (w *soakWatch) thirds(length time.Duration, of func(soakSample) float64) (middle, last series) {
	for _, s := range w.samples {
		switch third := 3 * s.at / length; third {
		case 1:
			middle = append(middle, of(s))
		case 2:
			last = append(last, of(s))
		}
	}
	return most(middle), most(last)
}

// most returns the largest, of none none.
func most(s series) series {
	if len(s) == 0 {
		return nil
	}
	return series{s.quantile(1)}
}
