// Package watch tells readers when their topic may have new rows: one statement
// per poll interval and process, however many topics there are.
//
// The watcher keeps a snapshot W, its own last one. Each look asks which of the
// registered topics have rows that W could not see, wakes their readers and
// only then moves W. A wake is a number that counts up: a reader remembers it
// before it begins a window, and sleeps only while it has not changed, so a
// wake that falls into a window leads to another one. When a look fails, and
// when the server began another life, all are woken. The watcher is a hint to
// be quick, not a promise: every reader also looks by itself from time to time.
package watch

import (
	"context"
	_ "embed"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"

	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/window"
	"github.com/millrace/watermill-outbox/schema"
)

//go:embed queries/watch.sql
var watchText string

// Config of a Watcher; all of it is needed.
type Config struct {
	Schema string
	// Interval is the longest time between two looks. After news the watcher
	// looks again sooner, ten times as often at most.
	Interval time.Duration
	// Timeout bounds one look.
	Timeout time.Duration
	// Shared returns the groups and topics of which a free cursor would be taken;
	// Free is called when there is one.
	Shared func() (groups, topics []string)
	Free   func()
	// Seals let it leave out partitions that hold nothing new.
	Seals *window.Seals
	// Failed is told of each look that failed.
	Failed func(err error)
	Logger watermill.LoggerAdapter
}

// Watcher looks for news in the log. Run does the looking, in one goroutine.
type Watcher struct {
	config Config
	db     window.Querier
	// query looks at what is no older than since. They are Look's own.
	query string
	since time.Time

	mu     sync.Mutex
	topics map[string]*topic // by the key of what is watched
	// now is the last look, if any: its snapshot is W.
	now *window.Now
	// changed is signalled when the first topic is registered.
	changed chan struct{}
}

type topic struct {
	topics        window.Topics
	registrations int
	generation    uint64
	woken         chan struct{} // closed by the next wake
	// looked: a look has asked for the topic since it was registered.
	looked bool
}

// New returns a watcher that looks through db.
func New(db window.Querier, config Config) *Watcher {
	return &Watcher{
		config: config, db: db,
		topics: map[string]*topic{}, changed: make(chan struct{}, 1),
	}
}

// Looking reports whether there are looks, as nobody needs any who reads the
// write-ahead log.
func (w *Watcher) Looking() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.topics) > 0
}

// Registration is a reader's interest in a topic.
type Registration struct {
	watcher *Watcher
	key     string
	topic   *topic
}

// Register begins to watch topics. A reader registers before its first read.
// Of those that are read together any that has news wakes all such readers.
func (w *Watcher) Register(topics window.Topics) *Registration {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := topics.Key()
	t := w.topics[key]
	if t == nil {
		t = &topic{topics: topics, woken: make(chan struct{})}
		w.topics[key] = t
	}
	t.registrations++
	select {
	case w.changed <- struct{}{}:
	default:
	}
	return &Registration{watcher: w, key: key, topic: t}
}

// Close ends the interest.
func (r *Registration) Close() {
	r.watcher.mu.Lock()
	defer r.watcher.mu.Unlock()
	if r.topic.registrations--; r.topic.registrations == 0 {
		delete(r.watcher.topics, r.key)
	}
}

// Generation returns the number of wakes so far, to be remembered before a
// window begins.
func (r *Registration) Generation() uint64 {
	r.watcher.mu.Lock()
	defer r.watcher.mu.Unlock()
	return r.topic.generation
}

// Wait returns when there was a wake since the generation was seen, when also is
// closed (it may be nil), when d has passed, or when the context ends.
func (r *Registration) Wait(ctx context.Context, seen uint64, d time.Duration, also <-chan struct{}) {
	r.watcher.mu.Lock()
	generation, woken := r.topic.generation, r.topic.woken
	r.watcher.mu.Unlock()
	if generation != seen {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-woken:
	case <-also:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// Run looks for news until the context ends.
func (w *Watcher) Run(ctx context.Context) {
	retry := backoff.Policy{Min: w.config.Interval, Max: max(5*time.Second, w.config.Interval)}
	failures := 0
	pause := w.config.Interval
	for ctx.Err() == nil {
		news, watching, err := w.Look(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			failures++
			pause = retry.Delay(failures)
			w.config.Failed(err)
			w.config.Logger.Error("Cannot look for new messages; subscribers look by themselves", err, watermill.LogFields{
				"failures": failures, "retry_in": pause.String(),
			})
		case !watching:
			failures = 0
			select {
			case <-w.changed:
			case <-ctx.Done():
			}
			continue
		case news:
			failures = 0
			pause = w.config.Interval / 10
		default:
			failures = 0
			pause = min(2*max(pause, w.config.Interval/10), w.config.Interval)
		}
		backoff.Wait(ctx, pause)
	}
}

// Look is one look: it reports whether any topic had news, and whether any is
// watched at all.
func (w *Watcher) Look(ctx context.Context) (anything, watching bool, err error) {
	w.mu.Lock()
	names := make([]string, 0, len(w.topics))
	var patterns, many []string // many are the keys of those
	for key, t := range w.topics {
		if like := t.topics.Like(); like != nil {
			patterns, many = append(patterns, like...), append(many, key)
		} else {
			names = append(names, key)
		}
	}
	before := w.now
	w.mu.Unlock()
	if len(names)+len(many) == 0 {
		w.mu.Lock()
		w.now = nil // too old by the time somebody registers
		w.mu.Unlock()
		return false, false, nil
	}

	ctx, cancel := context.WithTimeout(ctx, w.config.Timeout)
	defer cancel()
	var bound window.Bound
	if before != nil {
		bound = w.config.Seals.Of(before.Life.Era, before.Snapshot)
	}
	now, found, news, voids, err := w.ask(ctx, names, patterns, before, bound.Since)
	if err == nil && !bound.Holds(now.Life, voids) {
		w.config.Seals.Forget()
		now, found, news, _, err = w.ask(ctx, names, patterns, before, time.Time{})
	}

	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.wakeAll()
		return true, true, err
	}
	if before == nil || before.Life != now.Life || !now.Snapshot.Covers(before.Snapshot) {
		found, news = names, true // nothing is known of what came before this look
	}
	if news {
		found = append(found, many...)
	}
	for _, key := range append(names, many...) {
		t := w.topics[key]
		if t == nil {
			continue
		}
		if !t.looked || slices.Contains(found, key) {
			t.looked = true
			t.wake()
		}
	}
	w.now = &now
	return len(found) > 0, true, nil
}

// ask runs the statement: which topics have news since the look before, and whether
// those that match the patterns have, of what is no older than since; and whether it
// may leave that out, if since is not zero (window.Bound). Without a look before it
// asks for no topic.
func (w *Watcher) ask(ctx context.Context, names, patterns []string, before *window.Now, since time.Time) (now window.Now, found []string, news bool, voids int64, err error) {
	fail := func(err error) (window.Now, []string, bool, int64, error) {
		return window.Now{}, nil, false, 0, fmt.Errorf("look for new messages: %w", err)
	}
	var last window.Snapshot
	if before == nil {
		names, patterns = nil, nil
	} else {
		last = before.Snapshot
	}
	if patterns == nil {
		patterns = []string{}
	}
	if w.query == "" || !since.Equal(w.since) {
		w.query, w.since = schema.Text(w.config.Schema, window.Fill(watchText, true, since)), since
	}
	groups, shared := w.config.Shared()
	rows, err := w.db.Query(ctx, w.query, names, last.String(), groups, shared, patterns)
	if err != nil {
		return fail(err)
	}
	var text string
	var boot *string
	var free bool
	var spare *int64
	found, err = pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (found []string, err error) {
		err = row.Scan(&now.Life.Era, &boot, &text, &now.Top, &found, &news, &free, &spare)
		return found, err
	})
	if err != nil {
		return fail(err)
	}
	if boot != nil {
		now.Life.Boot = *boot
	}
	if spare != nil {
		voids = *spare
	}
	if now.Snapshot, err = window.ParseSnapshot(text); err != nil {
		return fail(err)
	}
	if free {
		w.config.Free()
	}
	return now, found, news, voids, nil
}

// wakeAll is called with mu held.
func (w *Watcher) wakeAll() {
	for _, t := range w.topics {
		t.wake()
	}
}

// wake is called with mu held.
func (t *topic) wake() {
	t.generation++
	close(t.woken)
	t.woken = make(chan struct{})
}
