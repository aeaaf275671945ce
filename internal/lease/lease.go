// Package lease holds cursors on behalf of a process: it renews the process's
// beat, takes cursors for those who wait for them, writes their positions back
// and notices when they are lost. The rules are told in package cursor.
//
// What ends a lease, and what it leads to:
//
//	released        by its owner, with the last position, in one statement
//	expired         the beat could not be renewed in time, so others may take
//	                the cursor: nothing more is handed out
//	taken, removed  a write found another epoch or no row
//	void            the server began another life, as its owner, the beat or a
//	                write noticed: the position in memory means nothing
//
// All but the first end the lease's context with a cause. The owner stops what
// it does, releases, which then writes nothing, and asks again.
package lease

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/millrace/watermill-outbox/internal/backoff"
	"github.com/millrace/watermill-outbox/internal/cursor"
	"github.com/millrace/watermill-outbox/internal/window"
)

var (
	// ErrLost is matched by the cause of every lease that ended against its
	// owner's will.
	ErrLost = errors.New("lease lost")
	// errClosed is returned to those who wait when the manager stops.
	errClosed = errors.New("leases are closed")
)

// Config of a Manager; all of it is needed.
type Config struct {
	// Duration is how long a beat counts; it is renewed three times as often.
	Duration time.Duration
	// Claim is the time between two looks for free cursors while somebody
	// waits for one.
	Claim time.Duration
	// Checkpoint is the time between two writes of positions that moved.
	Checkpoint time.Duration
	// IdleCheckpoint is the same for positions that moved without a message.
	IdleCheckpoint time.Duration
	// Timeout bounds one statement.
	Timeout time.Duration
	// Failed is told of each failed statement but the beat's, and of a beat
	// that found another server than the leases are of: connections may lead
	// to the wrong one.
	Failed func(err error)
	Logger watermill.LoggerAdapter
}

// margin is what a holder stops short of the end of its lease, for the time
// between its decision and its effects, and for clocks that run at slightly
// different rates.
func (c Config) margin() time.Duration { return c.Duration / 5 }

// Manager holds the leases of one process. Run does its work; the other methods
// may be called at any time, concurrently.
type Manager struct {
	config Config
	store  *cursor.Store
	db     cursor.DB
	// beatDB is a connection of its own, so that a busy pool costs no lease.
	beatDB cursor.Querier

	mu      sync.Mutex
	held    map[cursor.Key]*Lease
	waiting map[cursor.Key][]*candidate
	closed  bool
	// bad says until when a cursor with an unusable row is left alone.
	bad map[cursor.Key]time.Time

	// validUntil is when the leases end unless the beat is renewed, as
	// nanoseconds since started: monotonic, and read for each message.
	validUntil atomic.Int64
	started    time.Time
	// lapses counts how often it has run out.
	lapses atomic.Int64
	// dirty: the table may say that the process holds what nobody in it holds
	// or waits for, so that other processes wait in vain.
	dirty atomic.Bool

	kick chan struct{} // somebody waits, or a lease became free
	// nudges asks for positions to be stored before it is time.
	nudges chan struct{}

	// Of the claiming goroutine: the beats of others, and since when they have
	// not changed, on this process's monotonic clock.
	beats           map[string]sighting
	beatsRead       time.Time
	missingReported time.Time
}

type sighting struct {
	beat  int64
	since time.Time
}

type candidate struct {
	granted chan *Lease // buffered, one lease at most
}

// New returns a manager that works through db and renews through beatDB.
func New(store *cursor.Store, db cursor.DB, beatDB cursor.Querier, config Config) *Manager {
	return &Manager{
		config: config, store: store, db: db, beatDB: beatDB,
		held: map[cursor.Key]*Lease{}, waiting: map[cursor.Key][]*candidate{},
		bad: map[cursor.Key]time.Time{}, started: time.Now(),
		kick: make(chan struct{}, 1), nudges: make(chan struct{}, 1), beats: map[string]sighting{},
	}
}

// Lease is a cursor held. Its owner reports the position as it moves.
type Lease struct {
	Key cursor.Key
	// Start is the state the cursor had when it was taken, in Life.
	Start window.State
	Life  window.Life

	// Unclean says that the process that held it before has died.
	Unclean bool

	manager *Manager
	epoch   int64
	granted time.Time
	ctx     context.Context //nolint:containedctx // is the lease's own end, not a caller's context
	lose    context.CancelCauseFunc

	// write is held from asking for the state until it is stored, so that no
	// older state replaces a newer one.
	write sync.Mutex
	// doubt, of which write is held too, is the verdict whose outcome is unknown:
	// nothing else is stored until it is known. resolved are those whose outcome
	// became known to somebody else than who asked for them.
	doubt    *doubt
	resolved map[[2]int64]bool

	mu              sync.Mutex
	source          Source
	saved, savedUrg uint64
	savedAt         time.Time
}

// doubt is a verdict that was sent and not answered.
type doubt struct {
	write    cursor.Write
	verdict  cursor.Verdict
	versions [2]uint64
	settled  func()
}

// Source says what is to be stored. Its methods are called from other goroutines.
type Source interface {
	// State returns the state to store and a number that changes with it; urgent
	// is the part of that number that counts messages.
	State() (state window.State, version, urgent uint64)
	// Stored is told the version of the last state asked for, when it is stored.
	Stored(version uint64)
}

// Context ends when the lease is lost (the cause matches ErrLost) or released.
func (l *Lease) Context() context.Context { return l.ctx }

// Report sets where the state to be stored comes from.
func (l *Lease) Report(source Source) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.source = source
}

// Acquire waits until the key's cursor is free and takes it. It returns an error
// only when the context ends or the manager stops.
func (m *Manager) Acquire(ctx context.Context, key cursor.Key) (*Lease, error) {
	c := &candidate{granted: make(chan *Lease, 1)}
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil, errClosed
	}
	m.waiting[key] = append(m.waiting[key], c)
	m.mu.Unlock()
	m.nudge()
	select {
	case lease := <-c.granted:
		return lease, nil
	case <-ctx.Done():
	}
	m.mu.Lock()
	waiting := m.waiting[key]
	for i := range waiting {
		if waiting[i] == c {
			m.waiting[key] = append(waiting[:i:i], waiting[i+1:]...)
			break
		}
	}
	if len(m.waiting[key]) == 0 {
		delete(m.waiting, key)
	}
	m.mu.Unlock()
	select {
	case lease := <-c.granted: // granted in the meantime
		return lease, nil
	default:
		// It may have been claimed, and waits to be granted.
		m.dirty.Store(true)
		m.nudge()
		return nil, context.Cause(ctx)
	}
}

func (m *Manager) nudge() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

// Run renews, claims and writes until the context ends. Leases that are held
// then stay valid until their owners release them or their time is up.
func (m *Manager) Run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { m.renew(ctx) })
	wg.Go(func() { m.claimLoop(ctx) })
	wg.Go(func() { m.checkpointLoop(ctx) })
	wg.Wait()
}

// renew keeps the beat going, and ends all leases when it did not.
func (m *Manager) renew(ctx context.Context) {
	host, err := os.Hostname()
	if err != nil {
		host = ""
	}
	every := m.config.Duration / 3
	retry := backoff.Policy{Min: every / 10, Max: every / 2}
	failures := 0
	for ctx.Err() == nil {
		sent := time.Now()
		// A beat that hangs must not outlast the leases it should renew.
		limit := every
		if left := m.left(); left > 0 {
			limit = min(every, left)
		}
		beatCtx, cancel := context.WithTimeout(ctx, limit)
		holding, err := m.store.Beat(beatCtx, m.beatDB, host, os.Getpid())
		cancel()
		if m.left() <= 0 {
			m.expire() // even if it was renewed, which is too late
		}
		pause := every
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			failures = 0
			m.compare(holding, sent)
			m.validUntil.Store(int64(sent.Sub(m.started) + m.config.Duration - m.config.margin()))
			m.nudge()
		default:
			failures++
			pause = retry.Delay(failures)
			m.config.Logger.Error("Cannot renew the lease of this process", err, watermill.LogFields{"failures": failures, "retry_in": pause.String()})
		}
		if left := m.left(); left > 0 {
			pause = min(pause, left) // look again when the time is up
		}
		backoff.Wait(ctx, pause)
	}
}

// compare ends the leases that the table no longer grants: their cursor was
// taken while the process was paused, by an operator, or removed, or the server
// is not the one they were granted by. Leases granted since the beat was sent
// may be missing from its answer.
func (m *Manager) compare(holding cursor.Holding, sent time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for key, lease := range m.held {
		if !lease.granted.Before(sent) {
			continue
		}
		epoch, held := holding.Epochs[key]
		switch {
		case holding.Life != lease.Life:
			err := fmt.Errorf("%s: %w", key, window.ErrOtherLife)
			lease.Lose(err)
			m.config.Failed(err)
		case !held || epoch != lease.epoch:
			lease.Lose(fmt.Errorf("%s: another process took the cursor, or it was removed", key))
		}
	}
}

// expire ends all leases whose time is up, and those that are being granted.
func (m *Manager) expire() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lapses.Add(1)
	for key, lease := range m.held {
		lease.Lose(fmt.Errorf("%s: this process could not renew its beat for %s", key, m.config.Duration-m.config.margin()))
	}
}

// left is how long the leases are still good for.
func (m *Manager) left() time.Duration {
	return time.Duration(m.validUntil.Load()) - time.Since(m.started)
}

// Valid reports whether the lease's owner may hand out a message now. A process
// that was paused for longer than its lease learns it here before anything else.
func (l *Lease) Valid() bool { return l.manager.left() > 0 && l.ctx.Err() == nil }

func (m *Manager) claimLoop(ctx context.Context) {
	retry := backoff.Policy{Min: m.config.Claim, Max: 5 * time.Second}
	failures := 0
	timer := time.NewTimer(m.config.Claim)
	defer timer.Stop()
	for ctx.Err() == nil {
		waiting, err := m.Claim(ctx)
		if err == nil {
			err = m.sweep(ctx)
		}
		pause := time.Duration(0) // until somebody waits
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			failures++
			pause = retry.Delay(failures)
			m.config.Failed(err)
			m.config.Logger.Error("Cannot look for free cursors", err, watermill.LogFields{"failures": failures, "retry_in": pause.String()})
			backoff.Wait(ctx, pause) // a nudge does not shorten this one
			continue
		case waiting:
			failures, pause = 0, m.config.Claim
		}
		if pause == 0 {
			select {
			case <-m.kick:
			case <-ctx.Done():
			}
			continue
		}
		timer.Reset(pause)
		select {
		case <-m.kick:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
}

// Claim is one look for free cursors; it reports whether anybody still waits
// for one that another process holds.
func (m *Manager) Claim(ctx context.Context) (waiting bool, err error) {
	if m.left() <= 0 {
		return false, nil // the first beat, or the next good one, nudges
	}
	wanted, waiting := m.wanted()
	if len(wanted) == 0 {
		return waiting, nil
	}

	ctx, cancel := context.WithTimeout(ctx, m.config.Timeout)
	defer cancel()
	if time.Since(m.beatsRead) >= m.config.Duration/10 {
		if err := m.readBeats(ctx, wanted); err != nil {
			return true, err
		}
	}
	dead := map[string]int64{}
	for holder, seen := range m.beats {
		if time.Since(seen.since) >= m.config.Duration {
			dead[holder] = seen.beat
		}
	}
	lapses := m.lapses.Load()
	held, err := m.store.Claim(ctx, m.db, wanted, dead)
	if err != nil {
		m.dirty.Store(true) // the answer may be lost, and not the claim
		return true, err
	}
	marked := false
	for _, h := range held {
		if h.Life.Boot == "" {
			m.dirty.Store(true)
			if !marked {
				if err := m.store.MarkLife(ctx, m.db); err != nil {
					return true, err
				}
				marked = true
			}
			continue // taken again with the next look, now in a life with a name
		}
		if h.Err != nil {
			m.dirty.Store(true)
			m.config.Logger.Error("Cannot use a stored position; its topic is not delivered to its group", h.Err, watermill.LogFields{
				"consumer_group": h.Key.Group, "topic": h.Key.Topic,
			})
			m.mu.Lock()
			m.bad[h.Key] = time.Now().Add(m.config.Duration / 2)
			m.mu.Unlock()
			continue
		}
		m.grant(h, lapses)
	}
	if marked {
		m.nudge()
	}
	_, waiting = m.wanted()
	return waiting, nil
}

// wanted returns the cursors to look for now, and whether there are any to look
// for later.
func (m *Manager) wanted() (keys []cursor.Key, waiting bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for key := range m.waiting {
		if m.held[key] != nil {
			continue // another subscription of this process has it
		}
		waiting = true
		if time.Now().After(m.bad[key]) {
			keys = append(keys, key)
		}
	}
	return keys, waiting
}

// readBeats notes which beats changed. The time counts from the answer, which is
// later than the renewal it shows.
func (m *Manager) readBeats(ctx context.Context, wanted []cursor.Key) error {
	beats, err := m.store.Beats(ctx, m.db, wanted)
	if err != nil {
		return err
	}
	now := time.Now()
	m.beatsRead = now
	if err := m.reportMissing(ctx, wanted, now); err != nil {
		return err
	}
	for holder, beat := range beats {
		if seen, ok := m.beats[holder]; !ok || seen.beat != beat {
			m.beats[holder] = sighting{beat: beat, since: now}
		}
	}
	for holder := range m.beats {
		if _, ok := beats[holder]; !ok {
			delete(m.beats, holder)
		}
	}
	return nil
}

// reportMissing says which cursors are waited for in vain, once a minute.
func (m *Manager) reportMissing(ctx context.Context, wanted []cursor.Key, now time.Time) error {
	if now.Sub(m.missingReported) < time.Minute {
		return nil
	}
	missing, err := m.store.Missing(ctx, m.db, wanted)
	if err != nil {
		return err
	}
	for _, key := range missing {
		m.missingReported = now
		m.config.Logger.Error("A cursor row is gone; its topic is not delivered to its group until somebody subscribes again",
			fmt.Errorf("%s has no row in cursors", key), watermill.LogFields{"consumer_group": key.Group, "topic": key.Topic})
	}
	return nil
}

// grant hands a taken cursor to the one who has waited longest. If nobody does
// any more, it is given back. If the process's lease ran out since the claim was
// sent, the answer may be old: others may have the cursor by now.
func (m *Manager) grant(h cursor.Held, lapses int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	waiting := m.waiting[h.Key]
	if len(waiting) == 0 || m.closed || m.left() <= 0 || m.lapses.Load() != lapses {
		m.dirty.Store(true)
		return
	}
	delete(m.bad, h.Key)
	if len(waiting) == 1 {
		delete(m.waiting, h.Key)
	} else {
		m.waiting[h.Key] = waiting[1:]
	}
	ctx, lose := context.WithCancelCause(context.Background())
	lease := &Lease{Key: h.Key, Start: h.State, Life: h.Life, Unclean: h.Unclean, manager: m, epoch: h.Epoch, granted: time.Now(), ctx: ctx, lose: lose, savedAt: time.Now()}
	m.held[h.Key] = lease
	waiting[0].granted <- lease
}

// sweep gives up what the table says the process holds and nobody in it holds or
// waits for: after a release that failed, a claim whose answer was lost, a lease
// that was lost and not taken again. It runs in the goroutine that claims, so
// that nothing is claimed and not yet granted meanwhile.
func (m *Manager) sweep(ctx context.Context) error {
	if !m.dirty.Swap(false) {
		return nil
	}
	m.mu.Lock()
	var keep []cursor.Key
	for key := range m.held {
		keep = append(keep, key)
	}
	for key := range m.waiting {
		if m.held[key] == nil && m.bad[key].IsZero() {
			keep = append(keep, key)
		}
	}
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, m.config.Timeout)
	defer cancel()
	if err := m.store.Sweep(ctx, m.db, keep); err != nil {
		m.dirty.Store(true)
		return err
	}
	return nil
}

// nudgeShare is how many times as often positions are stored at most when that
// is asked for.
const nudgeShare = 20

func (m *Manager) checkpointLoop(ctx context.Context) {
	ticker := time.NewTicker(m.config.Checkpoint)
	defer ticker.Stop()
	failures := 0
	last := time.Now()
	for {
		select {
		case <-ticker.C:
		case <-m.nudges:
			// Many are as good as one.
			backoff.Wait(ctx, m.config.Checkpoint/nudgeShare-time.Since(last))
		case <-ctx.Done():
			return
		}
		last = time.Now()
		if err := m.Checkpoint(ctx); err != nil && ctx.Err() == nil {
			failures++
			m.config.Failed(err)
			if failures == 1 || failures%20 == 0 {
				m.config.Logger.Error("Cannot store positions; messages may be delivered again after a crash", err, watermill.LogFields{"failures": failures})
			}
		} else {
			failures = 0
		}
	}
}

// Checkpoint writes the positions that moved, in one statement.
func (m *Manager) Checkpoint(ctx context.Context) error {
	m.mu.Lock()
	leases := make([]*Lease, 0, len(m.held))
	for _, lease := range m.held {
		leases = append(leases, lease)
	}
	m.mu.Unlock()

	var writes []cursor.Write
	var moved []*Lease
	var versions [][2]uint64
	now := time.Now()
	for _, lease := range leases {
		if !lease.write.TryLock() {
			continue // its state is just being stored
		}
		write, version, urgent, due := lease.pending(now, m.config.IdleCheckpoint)
		if !due {
			lease.write.Unlock()
			continue
		}
		defer lease.write.Unlock()
		writes, moved, versions = append(writes, write), append(moved, lease), append(versions, [2]uint64{version, urgent})
	}
	if len(writes) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, m.config.Timeout)
	defer cancel()
	saved, err := m.store.Save(ctx, m.db, writes)
	if err != nil {
		return err
	}
	for i, lease := range moved {
		if saved[lease.Key] {
			lease.mark(versions[i], now)
			continue
		}
		_ = lease.gone()
	}
	return nil
}

// pending returns the write that is due, if any.
func (l *Lease) pending(now time.Time, idle time.Duration) (write cursor.Write, version, urgent uint64, due bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.source == nil || l.ctx.Err() != nil || l.doubt != nil {
		return cursor.Write{}, 0, 0, false
	}
	state, version, urgent := l.source.State()
	due = urgent != l.savedUrg || (version != l.saved && now.Sub(l.savedAt) >= idle)
	return cursor.Write{Key: l.Key, Epoch: l.epoch, State: state, Life: l.Life}, version, urgent, due
}

func (l *Lease) mark(versions [2]uint64, now time.Time) {
	l.mu.Lock()
	l.saved, l.savedUrg, l.savedAt = versions[0], versions[1], now
	source := l.source
	l.mu.Unlock()
	if source != nil {
		source.Stored(versions[0])
	}
}

// Nudge asks for the state to be stored soon.
func (l *Lease) Nudge() {
	select {
	case l.manager.nudges <- struct{}{}:
	default:
	}
}

// Save stores the state now.
func (l *Lease) Save(ctx context.Context) error {
	l.write.Lock()
	defer l.write.Unlock()
	l.mu.Lock()
	source := l.source
	l.mu.Unlock()
	if source == nil || l.ctx.Err() != nil {
		return fmt.Errorf("store %s: %w", l.Key, ErrLost)
	}
	if err := l.resolve(ctx); err != nil {
		return err
	}
	state, version, urgent := source.State()
	now := time.Now()
	ctx, cancel := context.WithTimeout(ctx, l.manager.config.Timeout)
	defer cancel()
	saved, err := l.manager.store.Save(ctx, l.manager.db, []cursor.Write{{Key: l.Key, Epoch: l.epoch, State: state, Life: l.Life}})
	if err != nil {
		l.manager.config.Failed(err)
		return err
	}
	if !saved[l.Key] {
		return l.gone()
	}
	l.mark([2]uint64{version, urgent}, now)
	return nil
}

// Settle stores a verdict on a row together with a state, both or neither, and
// calls settled once they are stored.
func (l *Lease) Settle(ctx context.Context, verdict cursor.Verdict, state func() (state window.State, version, urgent uint64), settled func()) error {
	l.write.Lock()
	defer l.write.Unlock()
	if l.ctx.Err() != nil {
		return fmt.Errorf("store %s: %w", l.Key, ErrLost)
	}
	row := [2]int64{verdict.Era, verdict.ID}
	if err := l.resolve(ctx); err != nil {
		return err
	}
	if l.resolved[row] {
		delete(l.resolved, row)
		return nil
	}
	stored, version, urgent := state()
	d := &doubt{
		write: cursor.Write{Key: l.Key, Epoch: l.epoch, State: stored, Life: l.Life}, verdict: verdict,
		versions: [2]uint64{version, urgent}, settled: settled,
	}
	return l.settle(ctx, d, false)
}

// settle stores a verdict. Called with write held, as resolve is.
func (l *Lease) settle(ctx context.Context, d *doubt, repeated bool) error {
	now := time.Now()
	ctx, cancel := context.WithTimeout(ctx, l.manager.config.Timeout)
	defer cancel()
	saved, err := l.manager.store.Settle(ctx, l.manager.db, d.write, d.verdict, repeated)
	if err != nil {
		var refused *pgconn.PgError
		switch {
		case !errors.As(err, &refused) || refused.Severity != "ERROR":
			l.doubt = d
		case strings.HasPrefix(refused.Code, "22") || strings.HasPrefix(refused.Code, "23"):
			l.doubt = nil // what it says cannot be stored, so it was not the first time
		}
		l.manager.config.Failed(err)
		return err
	}
	l.doubt = nil
	if !saved {
		return l.gone()
	}
	d.settled()
	l.mark(d.versions, now)
	return nil
}

// resolve sends the verdict again whose outcome is unknown, if there is one.
func (l *Lease) resolve(ctx context.Context) error {
	d := l.doubt
	if d == nil {
		return nil
	}
	if err := l.settle(ctx, d, true); err != nil {
		return err
	}
	if l.resolved == nil {
		l.resolved = map[[2]int64]bool{}
	}
	l.resolved[[2]int64{d.verdict.Era, d.verdict.ID}] = true
	return nil
}

// Buried reports whether the row is among the group's dead letters.
func (l *Lease) Buried(ctx context.Context, era, id int64) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, l.manager.config.Timeout)
	defer cancel()
	return l.manager.store.Buried(ctx, l.manager.db, l.Key.Group, era, id)
}

// gone ends a lease of which a write found nothing.
func (l *Lease) gone() error {
	err := fmt.Errorf("%s: another process took the cursor, the server began another life, or the row was removed", l.Key)
	l.Lose(err)
	return fmt.Errorf("%w: %w", ErrLost, err)
}

// Lose ends the lease's context; nothing is written on its behalf any more. The
// cursor counts as held by this process until the owner releases it, so that no
// other subscription of the process begins while the owner winds up.
func (l *Lease) Lose(cause error) { l.lose(fmt.Errorf("%w: %w", ErrLost, cause)) }

// Release writes the last position and gives the cursor up, in one statement; a
// lease that was lost is only forgotten. It is over in any case: an error says
// that the write failed, so that some messages may come again; the cursor is
// given up without a position as soon as the database answers.
func (l *Lease) Release(ctx context.Context) error {
	defer l.manager.forget(l)
	if l.ctx.Err() != nil {
		l.manager.dirty.Store(true)
		return nil
	}
	l.write.Lock()
	defer l.write.Unlock()
	// What asked for a verdict has given up; the last position must not take it
	// back.
	if err := l.resolveLast(ctx); err != nil {
		l.manager.dirty.Store(true)
		return fmt.Errorf("release %s: %w", l.Key, err)
	}
	write := cursor.Write{Key: l.Key, Epoch: l.epoch, State: l.Start, Life: l.Life, Release: true}
	l.mu.Lock()
	if l.source != nil {
		write.State, _, _ = l.source.State()
	}
	write.State = clean(write.State)
	l.source = nil // a checkpoint that is on its way fits no more: no holder
	l.mu.Unlock()
	saved, err := l.manager.saveLast(ctx, write)
	if err != nil {
		l.manager.dirty.Store(true)
		return fmt.Errorf("release %s: %w", l.Key, err)
	}
	if !saved {
		l.manager.dirty.Store(true)
		return fmt.Errorf("release %s: %w: it is no longer ours", l.Key, ErrLost)
	}
	return nil
}

// clean returns the state as it is when the process has ended nothing by dying.
func clean(state window.State) window.State {
	state.Reach = 0
	state.Holes = slices.Clone(state.Holes)
	for i := range state.Holes {
		state.Holes[i].Starts = 0
	}
	return state
}

// resolveLast is resolve as often as it takes.
func (l *Lease) resolveLast(ctx context.Context) error {
	retry := backoff.Policy{Min: 10 * time.Millisecond, Max: time.Second}
	for try := 1; ; try++ {
		err := l.resolve(ctx)
		if err == nil || errors.Is(err, ErrLost) || !backoff.Wait(ctx, retry.Delay(try)) {
			return err
		}
	}
}

// saveLast stores a last position, which nobody will try again to store: a
// connection that has died meanwhile must not cost it. A write whose answer was
// lost counts when it did release the cursor.
func (m *Manager) saveLast(ctx context.Context, write cursor.Write) (bool, error) {
	retry := backoff.Policy{Min: 10 * time.Millisecond, Max: time.Second}
	for try := 1; ; try++ {
		saved, err := m.store.Save(ctx, m.db, []cursor.Write{write})
		if err == nil {
			return saved[write.Key] || try > 1, nil
		}
		m.config.Failed(err)
		if !backoff.Wait(ctx, retry.Delay(try)) {
			return false, err
		}
	}
}

// forget makes the cursor free for other subscriptions of the process.
func (m *Manager) forget(l *Lease) {
	l.lose(context.Canceled)
	m.mu.Lock()
	delete(m.held, l.Key)
	m.mu.Unlock()
	m.nudge()
}

// Close refuses further candidates and gives up whatever the process still
// holds. It is called when Run has returned and no lease is used any more.
func (m *Manager) Close(ctx context.Context) error {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	return m.store.Leave(ctx, m.db)
}
