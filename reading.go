package outbox

import (
	"context"
	"errors"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/lease"
	"github.com/millrace/watermill-outbox/internal/live"
	"github.com/millrace/watermill-outbox/internal/window"
)

const (
	// maxQueryTimeout is how far the time limit of a page grows that ran into it.
	maxQueryTimeout = time.Hour
	// calm is how long a reader must have been live for its next detachment not
	// to count as another in a row.
	calm = time.Minute
	// smallWindow is how many pages a window has at most after which a reader
	// counts as caught up.
	smallWindow = 2
)

// readRetry is the pause after a page that could not be read, attachRetry the
// one before a reader that was detached attaches again.
var (
	readRetry   = backoff.Policy{Min: 50 * time.Millisecond, Max: 5 * time.Second}
	attachRetry = backoff.Policy{Min: 500 * time.Millisecond, Max: 30 * time.Second}
)

// reading brings the pages of one lease to the engine, each one while the page
// before is handed out: the holes, then windows of the table, and transactions
// from the WAL once it is caught up. Its methods belong to one goroutine.
type reading struct {
	*subscription
	held   *lease.Lease
	status *shardStatus
	logger watermill.LoggerAdapter
	out    chan<- window.Page
	reader window.Reader
	// interest is nil when only the table is read.
	interest *live.Interest

	pos   window.Position
	holes []window.Hole
	// pages counts those of the open window. caughtUp says that the last window
	// was a small one: a reader does not attach while it has a backlog, which
	// the table gives sooner, and which would only fill its buffer.
	pages    int
	caughtUp bool
	// detached counts the detachments in a row, notBefore is when to attach
	// again.
	detached  int
	notBefore time.Time
}

// read tries for as long as it may.
func (s *subscription) read(ctx context.Context, held *lease.Lease, pages chan<- window.Page, status *shardStatus, logger watermill.LoggerAdapter) {
	r := &reading{
		subscription: s, held: held, status: status, logger: logger, out: pages,
		reader: window.Reader{
			Queries: s.consumer.queries, Seals: s.consumer.seals, Topics: s.topics, Group: s.key.Group,
			Limits: window.Limits{Rows: s.config.PageSize, Bytes: s.config.PageBytes},
			Shard:  held.Key.Shard - held.Base, Shards: held.Shards, Until: held.Until,
		},
		pos: held.Start.Position, holes: held.Start.Holes,
	}
	if s.consumer.live != nil && held.Until == nil {
		r.interest = s.consumer.live.Want(s.topics)
		defer r.interest.Close()
	}
	for {
		buffer := r.fromTable(ctx)
		if buffer == nil {
			return
		}
		r.fromWAL(ctx, buffer)
	}
}

// fromTable reads windows until it is caught up and attached to the stream. It
// returns nil when it may not read any more.
func (r *reading) fromTable(ctx context.Context) *live.Buffer {
	registration := r.consumer.watcher.Register(r.topics)
	defer registration.Close()
	var buffer *live.Buffer
	drop := func() {
		if buffer != nil {
			buffer.Close()
			buffer = nil
		}
	}
	failures, limit := 0, r.consumer.config.QueryTimeout
	var seen uint64
	var changed <-chan struct{}
	for ctx.Err() == nil {
		opens := r.pos.Step == window.Idle && len(r.holes) == 0
		if opens {
			// The window that begins now has what is known by now. A wake that
			// comes later, while its pages are read, asks for another one.
			seen = registration.Generation()
			changed = r.streamChanged()
			r.pages = 0
			if r.caughtUp && r.mayAttach() {
				buffer = r.interest.Attach(r.key.Group, live.Shard{Shard: r.reader.Shard, Shards: r.reader.Shards})
			}
		}
		page, rest, err := r.page(ctx, limit)
		switch {
		case ctx.Err() != nil:
			drop()
			return nil
		case errors.Is(err, window.ErrWentBack):
			drop()
			r.held.Lose(err)
			return nil
		case err != nil:
			drop()
			failures++
			if errors.Is(err, context.DeadlineExceeded) {
				limit = min(2*limit, maxQueryTimeout) // it may just take longer
			}
			r.failedToRead(ctx, err, failures)
			continue
		case page.Life != r.held.Life:
			drop()
			r.held.Lose(window.ErrOtherLife)
			r.consumer.failed(window.ErrOtherLife)
			return nil
		}
		failures, limit = 0, r.consumer.config.QueryTimeout
		r.status.read(nil)
		if buffer != nil && opens && !buffer.Follow(page.Window(), page.Life) {
			drop() // the stream is that of another life, and about to end
			r.notBefore = time.Now().Add(attachRetry.Min)
		}
		if !r.send(ctx, page) {
			drop()
			return nil
		}
		if page.Holes {
			r.holes = rest
			continue
		}
		r.pos = page.End
		if r.pages++; page.More {
			continue
		}
		r.caughtUp = r.pages <= smallWindow
		if r.reader.Until != nil && r.reader.Until.Reached(r.pos) {
			<-ctx.Done() // the lease is recalled when all of it is acked
			return nil
		}
		switch {
		case buffer != nil:
			return buffer
		case r.caughtUp && r.mayAttach() && r.interest.Ready():
			// Another window, with a buffer beside it.
		default:
			registration.Wait(ctx, seen, r.patience(), changed)
		}
	}
	drop()
	return nil
}

// page reads the next page of the table: of holes, if there are any, else of the
// window.
func (r *reading) page(ctx context.Context, limit time.Duration) (page window.Page, rest []window.Hole, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if len(r.holes) > 0 {
		return r.reader.Holes(ctx, r.consumer.db, r.holes)
	}
	page, err = r.reader.Next(ctx, r.consumer.db, r.pos)
	return page, nil, err
}

func (r *reading) failedToRead(ctx context.Context, err error, failures int) {
	pause := readRetry.Delay(failures)
	r.consumer.failed(err)
	err = explain(err, r.consumer.config.Schema)
	r.status.read(err)
	r.logger.Error("Cannot read messages", err, watermill.LogFields{"failures": failures, "retry_in": pause.String()})
	backoff.Wait(ctx, pause)
}

func (r *reading) send(ctx context.Context, page window.Page) bool {
	select {
	case r.out <- page:
		return true
	case <-ctx.Done():
		return false
	}
}

// mayAttach reports whether it is time to.
func (r *reading) mayAttach() bool {
	return r.interest != nil && !time.Now().Before(r.notBefore)
}

// streamChanged returns the channel that says when to try to attach again.
func (r *reading) streamChanged() <-chan struct{} {
	if r.interest == nil {
		return nil
	}
	return r.consumer.live.Changed()
}

// patience is how long to wait for news before looking without.
func (r *reading) patience() time.Duration {
	if wait := time.Until(r.notBefore); wait > 0 {
		return min(wait, lookInterval)
	}
	return lookInterval
}

// fromWAL hands on what the stream has, until the reader is detached from it.
func (r *reading) fromWAL(ctx context.Context, buffer *live.Buffer) {
	defer buffer.Close()
	began := time.Now()
	r.status.source(SourceWAL, "")
	r.logger.Debug("Topic is read from the WAL", nil)
	gone := buffer.Gone()
	for ctx.Err() == nil {
		rows, sample, ok := buffer.Next(ctx, r.reader.Limits)
		if !ok {
			break
		}
		page := window.LivePage(r.pos, buffer.Life(), rows, sample)
		for sent := false; !sent && ctx.Err() == nil; {
			select {
			case r.out <- page:
				r.pos, sent = page.End, true
			case <-gone: // it shows at once, even if a handler never ends
				r.detach(buffer.Err(), began)
				gone = nil
			case <-ctx.Done():
			}
		}
	}
	switch {
	case ctx.Err() != nil:
		r.status.source(SourceTable, "")
	case gone != nil:
		r.detach(buffer.Err(), began)
	}
}

// detach notes why the reader is no longer live, and when to attach again.
func (r *reading) detach(why error, began time.Time) {
	if time.Since(began) > calm {
		r.detached = 0
	}
	r.detached++
	r.notBefore = time.Now().Add(attachRetry.Delay(r.detached))
	r.status.source(SourceTable, why.Error())
	r.logger.Debug("Topic is polled: "+why.Error(), nil)
}

// followSeals keeps what is known of sealed partitions up to date. What is old is
// good enough, so it need not be told of failures.
func (c *Consumer) followSeals() {
	for {
		ctx, cancel := context.WithTimeout(c.background, c.config.QueryTimeout)
		if err := c.seals.Refresh(ctx, c.queries, c.db); err != nil && c.background.Err() == nil {
			c.logger.Debug("Cannot see which partitions are sealed; more of them are read than have to be: "+err.Error(), nil)
		}
		cancel()
		if !backoff.Wait(c.background, sealsInterval) {
			return
		}
	}
}
