package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"

	outbox "github.com/millrace/watermill-outbox"
	"github.com/millrace/watermill-outbox/internal/cursor"
	"github.com/millrace/watermill-outbox/internal/watch"
	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/schema"
)

const (
	partitionsFew  = 10
	partitionsMany = 500
	partitionsMax  = 1.3
	// partitionsAhead is the look-ahead: few partitions are of the future.
	partitionsAhead = 2 * time.Hour
	// partitionsRows are in each partition of the past.
	partitionsRows = 200
	// partitionsTopics are watched, beside the one that is published to.
	partitionsTopics = 20
	// partitionsLooks is how many idle looks, or idle pages, a turn times.
	partitionsLooks = 200
	partitionsTurns = 3 // in a round
)

// partitionsScenario: what a process asks of the log with few and with many
// partitions of the past, all of them sealed and delivered: the page with news, the
// page when there are none, and the look of the watcher for all topics. How long a
// page takes where nothing is known of the seals is what they save.
func partitionsScenario(ctx context.Context, b *bench) error {
	b.options.rounds *= partitionsTurns
	var logs []*partitionedLog
	for _, size := range []int{partitionsFew, partitionsMany} {
		l, err := newPartitionedLog(ctx, b, b.count(size))
		if err != nil {
			return err
		}
		defer l.close()
		logs = append(logs, l)
	}
	change := fmt.Sprintf("with %d partitions, against %d", logs[1].partitions, logs[0].partitions)
	for _, c := range []struct {
		metric   string
		run      func(*partitionedLog, context.Context) (float64, error)
		required *requirement
	}{
		{"page", (*partitionedLog).page, maxRatio(partitionsMax)},
		{"idle page", (*partitionedLog).idlePage, maxRatio(partitionsMax)},
		{fmt.Sprintf("idle poll of %d topics", partitionsTopics+1), (*partitionedLog).idlePoll, maxRatio(partitionsMax)},
		{"idle page that knows no seals", (*partitionedLog).unsealed, nil},
	} {
		var contenders []contender
		for _, l := range logs {
			contenders = append(contenders, contender{fmt.Sprintf("with %d", l.partitions), func(ctx context.Context) (float64, error) {
				took, err := c.run(l, ctx)
				return took, errors.Join(err, l.checkSeals())
			}})
		}
		results, err := b.rounds(ctx, c.metric, contenders...)
		if err != nil {
			return err
		}
		b.add(newFigure(b.scenario, c.metric+" "+change, "ms", results[1], results[0], c.required))
	}
	return nil
}

// partitionedLog is a log of which everything has been delivered.
type partitionedLog struct {
	*steadyState

	// partitions is how many there are, beside the DEFAULT one.
	partitions int
	looks      int
	watcher    *watch.Watcher
	// last is where the last sealed partition ends.
	last time.Time
}

// newPartitionedLog makes one with so many partitions, or one more than those that
// are not past yet.
func newPartitionedLog(ctx context.Context, b *bench, partitions int) (l *partitionedLog, err error) {
	d, err := b.databaseWith(ctx, schema.Config{LookAhead: partitionsAhead})
	if err != nil {
		return nil, err
	}
	l = &partitionedLog{looks: b.count(partitionsLooks)}
	if err := l.addPast(ctx, d, partitions); err != nil {
		return nil, err
	}
	// The seals count in a life of the server that somebody has marked.
	if err := errors.Join(d.settle(ctx), cursor.NewStore(schema.DefaultName, watermill.NewUUID()).MarkLife(ctx, d.pool)); err != nil {
		return nil, err
	}
	if l.steadyState, err = d.steadyState(ctx); err != nil {
		return nil, err
	}
	l.reader.Seals = &window.Seals{}
	if err := l.reader.Seals.Refresh(ctx, l.reader.Queries, l.reading); err != nil {
		l.close()
		return nil, err
	}
	l.watcher = watch.New(l.reading, watch.Config{
		Schema: schema.DefaultName, Interval: outbox.DefaultPollInterval, Timeout: outbox.DefaultQueryTimeout, Seals: l.reader.Seals,
		Shared: func() (groups, topics []string) { return nil, nil }, Free: func() {}, Failed: func(error) {}, Logger: watermill.NopLogger{},
	})
	l.watcher.Register(window.One("orders"))
	for i := range partitionsTopics {
		l.watcher.Register(window.One(fmt.Sprint("quiet ", i)))
	}
	return l, nil
}

// addPast adds partitions before the first one, with rows of theirs, each sealed
// after these were written.
func (l *partitionedLog) addPast(ctx context.Context, d *database, partitions int) error {
	var first time.Time
	err := d.pool.QueryRow(ctx, "SELECT count(*), min(p.lower) FROM outbox.partitions p WHERE p.upper IS NOT NULL").Scan(&l.partitions, &first)
	if err != nil {
		return err
	}
	past := max(partitions-l.partitions, 1)
	l.partitions += past
	l.last = first.UTC()
	for i := past; i > 0; i-- {
		lower := l.last.Add(-time.Duration(i) * schema.DefaultPartitionInterval)
		upper := lower.Add(schema.DefaultPartitionInterval)
		name := "messages_" + lower.Format("20060102t150405")
		table := pgx.Identifier{schema.DefaultName, name}.Sanitize()
		at := func(t time.Time) string { return "'" + t.Format(time.RFC3339) + "'" }
		for _, statement := range []string{
			"CREATE TABLE " + table + " PARTITION OF outbox.messages FOR VALUES FROM (" + at(lower) + ") TO (" + at(upper) + ")",
			fmt.Sprintf(`INSERT INTO outbox.messages (topic, uuid, metadata, payload, created_at)
				SELECT 'orders', gen_random_uuid()::text, '%s', %s, %s::timestamptz + i * interval '1 second'
				FROM generate_series(1, %d) AS i`, metadata, payload200, at(lower), partitionsRows),
			fmt.Sprintf(`INSERT INTO outbox.partitions (name, lower, upper, state, seal, seal_era, sealed_at)
				VALUES ('%s', %s, %s, 'sealed', pg_current_snapshot(), outbox.era(), clock_timestamp())`, name, at(lower), at(upper)),
		} {
			if _, err := d.pool.Exec(ctx, statement); err != nil {
				return err
			}
		}
	}
	return nil
}

// page is the median time of a page with news, in ms.
func (l *partitionedLog) page(ctx context.Context) (float64, error) { return l.outbox(ctx) }

// idlePage is the median time of a page that finds nothing, in ms.
func (l *partitionedLog) idlePage(ctx context.Context) (float64, error) {
	return l.idle(ctx, func() (bool, error) {
		page, err := l.reader.Next(ctx, l.reading, l.position)
		l.position = page.End
		return page.More || len(page.Rows) > 0, err
	})
}

// unsealed is the same for a reader that looks into all partitions.
func (l *partitionedLog) unsealed(ctx context.Context) (float64, error) {
	blind := l.reader
	blind.Seals = nil
	return l.idle(ctx, func() (bool, error) {
		page, err := blind.Next(ctx, l.reading, l.position)
		l.position = page.End
		return page.More || len(page.Rows) > 0, err
	})
}

// idlePoll is the median time of a look for all topics that finds nothing, in ms.
func (l *partitionedLog) idlePoll(ctx context.Context) (float64, error) {
	return l.idle(ctx, func() (bool, error) {
		news, _, err := l.watcher.Look(ctx)
		return news, err
	})
}

// idle returns the median time of what finds nothing, in ms. Some that are not
// counted come first: they prepare the statements, and what the watcher has not seen
// since its last turn is news to it.
func (l *partitionedLog) idle(ctx context.Context, look func() (found bool, err error)) (float64, error) {
	if err := l.catchUp(ctx); err != nil {
		return 0, err
	}
	var times series
	const before = 3
	for i := range l.looks + before {
		start := time.Now()
		found, err := look()
		took := time.Since(start)
		switch {
		case err != nil:
			return 0, err
		case i < before:
		case found:
			return 0, errors.New("there was something to read")
		default:
			times = append(times, took.Seconds()*1000)
		}
	}
	return times.median(), nil
}

// checkSeals returns an error if the seals were forgotten: what was measured is
// something else then.
func (l *partitionedLog) checkSeals() error {
	if bound := l.reader.Seals.Of(l.position.Era, l.position.P); !bound.Since.Equal(l.last) {
		return fmt.Errorf("sealed partitions are left out up to %s instead of %s", bound.Since, l.last)
	}
	return nil
}
