// Package promote moves messages whose time has come from the table deferred
// into the log: scheduled messages, and retries of one group. That is one
// statement for up to a thousand of them, by the database's clock; their content
// does not leave the server.
//
// Every process with subscriptions has a Promoter, and each looks for itself. A
// transaction-level advisory lock has one at a time move rows, so that the log
// has them in the order of their due times; who does not get it comes again.
//
// # When it looks
//
// As soon as the next row is due that the last look saw, and after an Interval at
// the latest, for a row may have come that is due sooner; who has just written one
// says so (Nudge). It looks ten times in an Interval at most, unless there was more
// than it could take.
//
// # What a look costs
//
// Two probes of the index on the due times, however many rows wait behind the
// present. But in front of it are the entries of rows that were moved already,
// until a vacuum takes them out, which a long transaction may put off for hours;
// to read past them at each look would cost more with every message. Most looks
// begin at the place up to which the last one has moved everything, less a second
// (overlap). Rows may still come before that place: of transactions that stayed
// open for longer than it took until the row was due, or from a clock that was set
// back. They are found by full looks, from the very front, and these come as often
// as they take no more than a fiftieth of the time (fullShare). That is every
// look when there is nothing to read past.
//
// # What can go wrong
//
//	the server cannot be reached,      logged; tried again after a pause that
//	is read-only, shuts down           grows to five seconds
//	a batch is refused, or takes       half as many rows the next time, and with
//	longer than Timeout                each batch that works twice as many again
//	one row on its own is refused      its failures, the error and a later due_at
//	                                   (rowBackoff) go into the row; the next one
//	                                   is moved. Logged once per failure.
//	the error may concern every row,   the same, but with the pause that grows, so
//	as a privilege that is missing     that not all rows get another due_at
//	a panic                            as a server that cannot be reached
package promote

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/millrace/watermill-outbox/internal/backoff"
)

const (
	// maxBatchRows and maxBatchBytes bound a statement, and so for how long it
	// holds its locks: measured on two cores, 1,000 small rows take some 35 ms.
	maxBatchRows  = 1000
	maxBatchBytes = 16 << 20
	// overlap is how far a look goes back before the moment of the last one, for
	// transactions that were open then.
	overlap = time.Second
	// fullShare is the time between two full looks, in times of what one takes.
	fullShare = 50
)

// rowBackoff is when a row that was refused is tried again.
var rowBackoff = backoff.Policy{Min: time.Second, Max: 5 * time.Minute}

// Config of a Promoter; all of it is needed.
type Config struct {
	Schema string
	// Interval is the longest time between two looks.
	Interval time.Duration
	// Timeout bounds each statement.
	Timeout time.Duration
	// Failed is told of each statement that failed.
	Failed func(err error)
	Logger watermill.LoggerAdapter
}

// Promoter moves what is due. Run does the moving, in one goroutine, which alone
// has what is below config.
type Promoter struct {
	config Config
	store  store
	// nudges says that a row has come.
	nudges chan struct{}

	// rows is how many a batch may have; 1 has them moved one by one.
	rows int
	// from is where looks begin that are not full.
	from place
	// fullAt is when the next full look may come.
	fullAt time.Time
	// doubts counts the rows refused since the last that was not, for reasons
	// that may be everybody's.
	doubts int
}

// New returns a promoter that works through db.
func New(db Querier, config Config) *Promoter {
	return &Promoter{
		config: config, store: newSQLStore(db, config.Schema, config.Timeout), nudges: make(chan struct{}, 1),
		rows: maxBatchRows, from: front,
	}
}

// Nudge says that a row has come that may be due sooner than those that the last
// look saw. Safe for concurrent use.
func (p *Promoter) Nudge() {
	select {
	case p.nudges <- struct{}{}:
	default:
	}
}

// Run moves what is due until the context ends.
func (p *Promoter) Run(ctx context.Context) {
	failures := 0
	for ctx.Err() == nil {
		pause, err := p.Step(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			failures++
			pause = p.retry(failures)
			p.config.Failed(err)
			p.config.Logger.Error("Cannot move messages that are due into the log; trying again", err, watermill.LogFields{
				"failures": failures, "retry_in": pause.String(),
			})
		default:
			failures = 0
		}
		p.wait(ctx, pause, failures == 0)
	}
}

// wait waits until it is time for the next look. A nudge makes it a tenth of an
// Interval at most, unless the last look failed.
func (p *Promoter) wait(ctx context.Context, pause time.Duration, nudged bool) {
	least := p.config.Interval / 10
	if pause <= least || !nudged {
		backoff.Wait(ctx, max(pause, 0))
		return
	}
	began := time.Now()
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.nudges:
		backoff.Wait(ctx, least-time.Since(began))
	case <-ctx.Done():
	}
}

func (p *Promoter) retry(failures int) time.Duration {
	return backoff.Policy{Min: p.config.Interval, Max: max(5*time.Second, p.config.Interval)}.Delay(failures)
}

// Step is one look: it moves a batch, or a single row, and returns how long to
// wait before the next, 0 if there is something to do at once. It is exported for
// tests, which call it instead of Run.
func (p *Promoter) Step(ctx context.Context) (pause time.Duration, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	after, full := p.from, false
	if !time.Now().Before(p.fullAt) {
		after, full = front, true
	}
	if p.rows == 1 {
		return p.single(ctx, after, full)
	}
	return p.batch(ctx, after, full)
}

// batch moves what is due after a place, as far as it fits in a statement.
func (p *Promoter) batch(ctx context.Context, after place, full bool) (pause time.Duration, err error) {
	began := time.Now()
	b, err := p.store.batch(ctx, after, p.rows)
	if err != nil {
		fault := blameFor(err)
		if full && fault == slow {
			p.fullAt = time.Now().Add(fullShare * time.Since(began))
		}
		if fault == elsewhere || ctx.Err() != nil {
			return 0, err
		}
		p.rows = max(1, p.rows/2)
		if fault == slow {
			return 0, err // not at once: it may be that the server has too much to do
		}
		p.config.Failed(err)
		return 0, nil
	}
	if !b.locked {
		return p.config.Interval, nil
	}
	if full {
		p.fullAt = time.Now().Add(fullShare * b.cost)
	}
	more := b.moved > 0 && (b.due == p.rows || b.moved < b.due)
	p.worked()
	if more {
		p.from = b.last
		return 0, nil
	}
	p.from = place{due: b.at}
	p.from.due.Time = b.at.Time.Add(-overlap)
	return p.untilNext(b.next), nil
}

// untilNext is how long to wait when a row is due after this time. The time has
// passed since it was computed, so it may be negative; a loop that ended, or spun,
// for that reason would be the end of all scheduled messages.
func (p *Promoter) untilNext(next *time.Duration) time.Duration {
	if next == nil {
		return p.config.Interval
	}
	return min(max(*next, p.config.Interval/10), p.config.Interval)
}

// single moves the first row that is due, or notes in it why that cannot be.
func (p *Promoter) single(ctx context.Context, after place, full bool) (pause time.Duration, err error) {
	began := time.Now()
	r, found, err := p.store.first(ctx, after)
	if full {
		p.fullAt = time.Now().Add(fullShare * time.Since(began))
	}
	if err != nil {
		return 0, err
	}
	if !found {
		p.rows = maxBatchRows // a batch that finds nothing says when to come again
		return 0, nil
	}
	locked, err := p.store.one(ctx, r)
	switch {
	case err != nil:
		return p.refused(ctx, r, err)
	case !locked:
		return p.config.Interval, nil
	}
	p.worked()
	p.from = r.place
	return 0, nil
}

// worked lets the next batch have more rows.
func (p *Promoter) worked() {
	p.doubts = 0
	p.rows = min(2*p.rows, maxBatchRows)
}

// refused puts a row off that could not be moved.
func (p *Promoter) refused(ctx context.Context, r row, cause error) (pause time.Duration, err error) {
	fault := blameFor(cause)
	if fault == elsewhere || ctx.Err() != nil {
		return 0, cause
	}
	p.config.Failed(cause)
	again := rowBackoff.Delay(r.failures + 1)
	noted, err := p.store.refused(ctx, r, again, cause.Error())
	if err != nil {
		return 0, errors.Join(cause, err)
	}
	if noted {
		p.config.Logger.Error("Cannot move a message into the log; the others go on, and it is tried again", cause, watermill.LogFields{
			"deferred_id": r.id, "topic": r.topic, "message_uuid": r.uuid,
			"failures": r.failures + 1, "retry_in": again.String(),
		})
	}
	p.from = r.place
	if fault == aRow {
		return 0, nil
	}
	p.doubts++
	return p.retry(p.doubts), nil
}
