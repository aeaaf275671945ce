package delivery

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/window"
)

// Policy says how messages go out. All of it is needed unless it says otherwise.
type Policy struct {
	Ordering Ordering
	// MaxInFlight is how many messages may be in flight, 1 with Strict; with
	// Batches, how many batches.
	MaxInFlight int
	// Batch is how many messages of a line a batch has at most.
	Batch int
	// Pending and PendingBytes bound what is taken in and not settled, in flight
	// or waiting. PendingBytes may be passed by one row.
	Pending, PendingBytes int
	// MaxAttempts is how many deliveries a message gets, 0 for any number.
	MaxAttempts int
	// Deferred says that a message waits for its next delivery in the table for
	// that, and the next of its line goes on.
	Deferred bool
	// Backoff is the pause before the next delivery.
	Backoff backoff.Policy
	// AckDeadline is how long a handler may take, 0 for ever.
	AckDeadline time.Duration
	// Grace is how long a message in flight keeps its context after Stop, and how
	// long a handler may go on when its context has ended.
	Grace time.Duration
}

// Store keeps what the engine cannot answer for alone. Its methods are called
// concurrently, and bound their own time.
type Store interface {
	// Save stores the tracker's state.
	Save(ctx context.Context) error
	// Settle stores the verdict on a row and the state in which it is settled,
	// both or neither, if the lease is still good, and then settles the entry.
	Settle(ctx context.Context, entry *Entry, verdict Verdict) error
	// Buried reports whether somebody has put the row among the dead letters.
	Buried(ctx context.Context, row window.Row) (bool, error)
	// Nudge asks for the state to be stored soon.
	Nudge()
}

// Verdict says what becomes of a row that is not acked.
type Verdict struct {
	Row window.Row
	// Attempts is how many deliveries it had.
	Attempts int
	// Metadata replaces the row's, unless nil.
	Metadata []byte
	// Dead says that it becomes a dead letter, with this Error. Otherwise it is
	// deferred until Due, or if that is zero for After.
	Dead  bool
	Error string
	Due   time.Time
	After time.Duration
}

// Engine hands out what comes in pages. It belongs to one subscription; Run
// belongs to one lease and may be called again for the next. All fields are
// needed unless they say otherwise.
type Engine struct {
	Policy

	// Out or Batches is the channel of the subscription, the other is nil. Nothing
	// is in it when Run has returned, for it is unbuffered.
	Out     chan<- *message.Message
	Batches chan<- []*message.Message
	// Base is the parent of the messages' contexts; only its values count.
	Base context.Context //nolint:containedctx // handed on to messages
	// Stop ends when nothing more may be handed out.
	Stop context.Context //nolint:containedctx // outlives each Run
	// Slots, if not nil, is shared with other engines of the subscription: what
	// is in flight has put a value in.
	Slots chan struct{}
	// Alone, if not nil, is shared by all engines of the process and has room for
	// one: the engine that has suspects out has put a value in, or those of others
	// would be in flight beside them, and count if one ends the process.
	Alone chan struct{}
	// Wrap puts what is known of a delivery into its message's context.
	Wrap func(ctx context.Context, row *window.Row, attempt int) context.Context
	// Reason returns why the handler of a message with such a context failed, nil
	// if nobody said.
	Reason func(ctx context.Context) error
	// Valid reports whether the lease is still good.
	Valid func() bool
	Store Store
	// Died is told of each dead letter.
	Died   func(verdict Verdict)
	Logger watermill.LoggerAdapter

	current atomic.Pointer[run]
}

// run is the engine under one lease.
type run struct {
	*Engine

	lease context.Context //nolint:containedctx // as long as the run
	// over is closed when the lease or the subscription ends. One channel for both:
	// all that is in flight waits for it.
	over    <-chan struct{}
	tracker *Tracker
	// room is signalled when more may be taken in.
	room chan struct{}
	wg   sync.WaitGroup

	mu    sync.Mutex
	queue queue
	// pending and pendingBytes count what is taken in and not settled.
	pending, pendingBytes int
	// inFlight counts the items that workers have, workers also those workers
	// that look for one.
	inFlight, workers int
	// suspectsOut says that suspects are in flight, and so nothing else. stuck counts
	// the workers whose suspects took too long for that.
	suspectsOut bool
	stuck       int
	retrying    map[*item]Retrying
	ended       bool
}

// Retrying is a message that has failed and waits to be delivered again.
type Retrying struct {
	Row      window.Row
	Attempts int
	Err      error // nil if unknown
	Since    time.Time
	Next     time.Time
}

// outcome is how a row left a worker.
type outcome int

const (
	// stopped: the subscription or the lease ended first; the row is not settled.
	stopped outcome = iota
	settled
	// again: it failed and will be handed out again.
	again
	// withdrawn: it was in a batch behind one that failed, or was not handed out,
	// and comes again.
	withdrawn
	// nacked and overdue are failures that are yet to be seen to.
	nacked
	overdue
)

// Run hands out the pages as they come and moves the tracker, until Stop or the
// lease's context ends. Nothing is in flight any more when it returns, but
// handlers that did not end in their grace period.
func (e *Engine) Run(lease context.Context, tracker *Tracker, pages <-chan window.Page) {
	over, cancel := context.WithCancel(lease)
	defer cancel()
	defer context.AfterFunc(e.Stop, cancel)()
	r := &run{
		Engine: e, lease: lease, over: over.Done(), tracker: tracker, room: make(chan struct{}, 1),
		queue: newQueue(e.Ordering), retrying: map[*item]Retrying{},
	}
	tracker.Changed = r.room
	e.current.Store(r)
	defer e.current.CompareAndSwap(r, nil)
	defer r.wg.Wait()
	defer r.end()
	for {
		select {
		case page := <-pages:
			if !r.take(page) {
				return
			}
		case <-r.over:
			return
		}
	}
}

// Retrying returns the messages that wait to be delivered again, the oldest
// failures first, at most limit; n is how many there are.
func (e *Engine) Retrying(limit int) (list []Retrying, n int) {
	r := e.current.Load()
	if r == nil {
		return nil, 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, info := range r.retrying {
		list = append(list, info)
	}
	slices.SortFunc(list, func(a, b Retrying) int { return a.Since.Compare(b.Since) })
	return list[:min(len(list), limit)], len(list)
}

func (r *run) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	for it := range r.retrying {
		if it.timer != nil {
			it.timer.Stop() // it would keep the run until then
		}
	}
}

// going reports whether anything may be handed out.
func (r *run) going() bool { return r.Stop.Err() == nil && r.lease.Err() == nil && r.Valid() }

// take takes in one page, as there is room, and reports whether to go on.
func (r *run) take(page window.Page) bool {
	for _, hole := range page.Gone {
		r.Logger.Info("A row that was not acked no longer exists", watermill.LogFields{"outbox_id": hole.ID})
		r.tracker.Gone(hole)
	}
	for i, row := range page.Rows {
		if !r.await(!page.Holes) {
			return false
		}
		hole := window.Hole{Era: row.Era, ID: row.ID, CreatedAt: row.CreatedAt}
		it := &item{row: row, before: row.Attempt, attempts: row.Attempt, size: len(row.Payload) + len(row.Metadata)}
		if page.Holes {
			var n int
			it.entry, n = r.tracker.Hole(hole)
			it.attempts += n
		} else {
			it.entry = r.tracker.Add(hole, page.After(i))
		}
		it.suspect = it.entry.Suspect
		r.mu.Lock()
		r.pending++
		r.pendingBytes += it.size
		r.queue.add(it)
		r.employ()
		r.mu.Unlock()
	}
	if len(page.Rows) == 0 && !page.Holes {
		r.tracker.Move(page.End)
	}
	return true
}

// await waits until there is room for a row, of the log or of a hole, and
// reports whether to go on.
func (r *run) await(ofLog bool) bool {
	for needed := 1; ; needed = min(r.Pending/8+1, 64) {
		r.mu.Lock()
		room := r.pending == 0 || r.pending+needed <= r.Pending && r.pendingBytes < r.PendingBytes
		r.mu.Unlock()
		if room && (!ofLog || r.tracker.Room()) {
			return true
		}
		if room {
			r.Store.Nudge()
		}
		// When it was full, many places are worth waking up for.
		select {
		case <-r.room:
		case <-r.over:
			return false
		}
	}
}

// employ begins workers for what is ready. Called with mu held.
func (r *run) employ() {
	for !r.ended && r.workers < r.MaxInFlight && r.workers-r.inFlight < r.queue.ready.len() {
		r.workers++
		r.wg.Go(r.work)
	}
}

// work hands out one item after the other.
func (r *run) work() {
	for {
		items := r.next()
		switch {
		case items == nil:
			return
		case items[0].suspect:
			r.try(items)
		default:
			r.deliver(items)
			r.done(items)
		}
		r.back()
	}
}

// next returns the next item that may go out and what may follow it in a batch, or
// suspects that go out together and beside nothing else. Without any the worker
// ends.
func (r *run) next() []*item {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended || !r.going() || r.queue.ready.len() == 0 || r.suspectsOut || r.queue.ready.peek().suspect && r.inFlight > r.stuck {
		r.workers--
		return nil
	}
	it := r.queue.ready.pop()
	r.inFlight++
	r.suspectsOut = it.suspect
	delete(r.retrying, it)
	batch := []*item{it}
	switch {
	case it.suspect:
		batch = r.wave(batch)
	case r.Batches != nil:
		batch = r.queue.follow(batch, r.Batch)
	}
	return batch
}

// done notes how the items of a line left the worker.
func (r *run) done(batch []*item) {
	r.mu.Lock()
	defer r.mu.Unlock()
	blocked := false
	for _, it := range batch {
		switch it.result {
		case settled:
			r.pending--
			r.pendingBytes -= it.size
		case withdrawn: // it is in front of its line again
		case again:
			blocked = true // until its retry
			r.rest(it)
		case stopped, nacked, overdue:
			blocked = true // for good
		}
	}
	if !blocked {
		r.queue.gone(batch[0])
	}
	select {
	case r.room <- struct{}{}:
	default:
	}
}

// back notes that a worker has nothing in flight any more.
func (r *run) back() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.inFlight--
	r.employ()
}

// deliver hands out a batch, of one item as a rule, of which only the first may
// have a past, and sees to what becomes of it.
func (r *run) deliver(batch []*item) {
	for _, it := range batch {
		it.result = withdrawn // those of which nothing else becomes
	}
	if r.decided(batch[0]) {
		r.giveBack(batch[1:])
		return
	}
	n := 1
	for ; n < len(batch) && batch[n].decode() == nil; n++ { //nolint:revive // the rest has its turn, alone
	}
	r.giveBack(batch[n:])
	r.handOut(batch[:n])
}

// decided sees to an item that is not to be handed out any more, and reports
// whether it is one. Otherwise its metadata are decoded.
func (r *run) decided(it *item) bool {
	if it.attempts > it.before {
		switch buried, err := r.Store.Buried(r.lease, it.row); {
		case err != nil:
			r.Logger.Error("Cannot see whether a message was buried meanwhile; it is delivered", err, r.fields(it))
		case buried:
			it.entry.Settled()
			it.result = settled
			r.Logger.Info("A message that failed was put among the dead letters by somebody", r.fields(it))
			return true
		}
	}
	err := it.decode()
	switch {
	case err != nil:
		it.result = r.bury(it, nil, fmt.Sprintf("the stored row cannot become a message: %s", err))
	case r.exhausted(it):
		// The last one has ended its process, or was not yet stored as the last.
		it.result = r.bury(it, poisoned(it.metadata, nil, lastAttempt), lastAttempt)
	default:
		return false
	}
	return true
}

func (r *run) exhausted(it *item) bool {
	return r.MaxAttempts > 0 && it.attempts >= r.MaxAttempts && it.attempts > it.before
}

func (r *run) fields(it *item) watermill.LogFields {
	return watermill.LogFields{"message_uuid": it.row.UUID, "outbox_id": it.row.ID, "attempt": it.attempts}
}
