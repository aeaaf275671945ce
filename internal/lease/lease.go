// Package lease holds cursors on behalf of a process: it renews the process's
// beat, takes cursors for those who wait for them, writes their positions back
// and notices when they are lost. The rules are told in package cursor.
//
// What ends a lease, and what it leads to:
//
//	released        by its owner, with the last position, in one statement; one
//	                that has come to its end is removed instead
//	recalled        another process or subscription should have the shard, or the
//	                number of shards is to be changed: its owner winds up in good
//	                order and releases
//	expired         the beat could not be renewed in time, so others may take
//	                the cursor: nothing more is handed out
//	taken, removed  a write found another epoch or no row
//	void            the server began another life, as its owner, the beat or a
//	                write noticed: the position in memory means nothing
//
// All but the first two end the lease's context with a cause. The owner stops
// what it does, releases, which then writes nothing, and waits for the next.
//
// # Shares
//
// A topic has one cursor for each of its shards. Every process says in members
// how many of its subscriptions want the topic; each decides by itself, from what
// all can see, how many shards it should have (spread), takes what is free up to
// that, and gives back what it has beyond it when others lack some. Holdings
// then differ by one at most. Members count while their beat changes. While a
// process lacks a shard it looks every Claim; otherwise, where there is more than
// one shard, every tenth of Duration, a second at most, or when it is told that
// there is a free one (Stir).
//
// A cursor over many topics says which. A seat that wants others gets none of its
// shards, counts as no member, and is told (Join).
//
// # Changing the number of shards
//
// Somebody asks for another number, in the cursors. Their holders see it with
// their beat or look, and release. When no living process holds one, whoever
// looks first makes the change, in one transaction: the old cursors end at its
// snapshot, the new ones begin there. The old ones are taken as before, read up
// to that snapshot and removed; then the new ones can be taken.
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
	// ErrNoCursor says that there is nothing to have a lease on.
	ErrNoCursor = errors.New("the group has no cursor")
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
	// Told reports whether Stir is called within about Claim of the release of a
	// cursor that Shared asks for. The manager looks by itself while it is not.
	Told func() bool
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
	db     DB
	// beatDB is a connection of its own, so that a busy pool costs no lease.
	beatDB cursor.Querier

	mu   sync.Mutex
	held map[cursor.Key]*Lease
	// known are the cursors granted since they were last released in good order.
	known  map[cursor.Key]struct{}
	shares map[cursor.Topic]*share
	closed bool
	// joined is what the table says of the process's seats, or unknown.
	joined map[cursor.Topic]int
	// beats are those of others, and since when they have not changed, on this
	// process's monotonic clock.
	beats map[string]sighting
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

	// Of the claiming goroutine.
	missingReported time.Time
	buried          map[string]int64
}

// DB is what the manager's statements run on.
type DB interface {
	cursor.DB
	cursor.Beginner
}

type sighting struct {
	beat  int64
	since time.Time
	read  time.Time
}

// New returns a manager that works through db and renews through beatDB.
func New(store *cursor.Store, db DB, beatDB cursor.Querier, config Config) *Manager {
	return &Manager{
		config: config, store: store, db: db, beatDB: beatDB,
		held: map[cursor.Key]*Lease{}, known: map[cursor.Key]struct{}{}, shares: map[cursor.Topic]*share{}, joined: map[cursor.Topic]int{},
		bad: map[cursor.Key]time.Time{}, started: time.Now(),
		kick: make(chan struct{}, 1), nudges: make(chan struct{}, 1), beats: map[string]sighting{}, buried: map[string]int64{},
	}
}

// Lease is a cursor held. Its owner reports the position as it moves.
type Lease struct {
	Key cursor.Key
	// Start is the state the cursor had when it was taken, in Life.
	Start window.State
	Life  window.Life
	// Shards is how many cursors the topic is divided among; they are numbered
	// from Base on.
	Shards, Base int
	// Until, if not nil, is where the cursor ends.
	Until *window.Until

	// Unclean says that the process that held it before has died.
	Unclean bool

	manager *Manager
	seat    *Seat
	epoch   int64
	granted time.Time
	ctx     context.Context //nolint:containedctx // is the lease's own end, not a caller's context
	lose    context.CancelCauseFunc
	// recalled is closed when isRecalled, which manager.mu guards, becomes true.
	recalled   chan struct{}
	isRecalled bool

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
	// endedAt is when the position was first seen to have come to its end.
	endedAt time.Time
}

// Recalled is closed when the lease is to be released in good order.
func (l *Lease) Recalled() <-chan struct{} { return l.recalled }

// recall asks for the lease back. Called with manager.mu held.
func (l *Lease) recall() {
	if !l.isRecalled {
		l.isRecalled = true
		close(l.recalled)
	}
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

// maxPatience is how long a look at shards that others have is good for, at most.
const maxPatience = time.Second

// Shared returns the topics of which the process would take a free cursor, and
// which it does not look at every Claim.
func (m *Manager) Shared() (groups, topics []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for topic, sh := range m.shares {
		if !sh.settled && !sh.waiting && !sh.refused {
			groups, topics = append(groups, topic.Group), append(topics, topic.Topic)
		}
	}
	return groups, topics
}

// Stir says that there may be a free cursor of a topic with several shards.
func (m *Manager) Stir() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, sh := range m.shares {
		if !sh.settled && time.Since(sh.looked) >= m.config.Claim {
			sh.looked = time.Time{}
			m.nudge()
		}
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
		case holding.Reshard[key]:
			lease.recall()
		default:
			if err := cursor.CheckTopics(key.Group, holding.Patterns[key], lease.seat.patterns); err != nil {
				lease.Lose(err)
			}
		}
	}
}

// expire ends all leases whose time is up, and those that are being granted.
func (m *Manager) expire() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lapses.Add(1)
	for topic := range m.joined {
		m.joined[topic] = unknown // others may have removed it
	}
	for key, lease := range m.held {
		lease.Lose(m.expired(key))
	}
}

func (m *Manager) expired(key cursor.Key) error {
	return fmt.Errorf("%s: this process could not renew its beat for %s", key, m.config.Duration-m.config.margin())
}

// left is how long the leases are still good for.
func (m *Manager) left() time.Duration {
	return time.Duration(m.validUntil.Load()) - time.Since(m.started)
}

// Valid reports whether the lease's owner may hand out a message now. A process
// that was paused for longer than its lease learns it here before anything else. Once
// it may not, the lease is lost, though the answer to a beat may just be coming in:
// its owner has given up on something by then.
func (l *Lease) Valid() bool {
	if l.ctx.Err() != nil {
		return false
	}
	if l.manager.left() > 0 {
		return true
	}
	l.Lose(l.manager.expired(l.Key))
	return false
}

func (m *Manager) claimLoop(ctx context.Context) {
	retry := backoff.Policy{Min: m.config.Claim, Max: 5 * time.Second}
	failures := 0
	timer := time.NewTimer(m.config.Claim)
	defer timer.Stop()
	for ctx.Err() == nil {
		pause, err := m.Claim(ctx)
		if err == nil {
			err = m.sweep(ctx)
		}
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
		}
		failures = 0
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

// Claim is one look for what the process should have and has not, or has and
// should not. It returns when the next one is due, 0 for not before a nudge.
func (m *Manager) Claim(ctx context.Context) (pause time.Duration, err error) {
	if m.left() <= 0 {
		return 0, nil // the first beat, or the next good one, nudges
	}
	ctx, cancel := context.WithTimeout(ctx, m.config.Timeout)
	defer cancel()
	if err := m.join(ctx); err != nil {
		return 0, err
	}
	if err := m.look(ctx); err != nil {
		return 0, err
	}
	m.mu.Lock()
	dead, lapses := m.dead(), m.lapses.Load()
	var wanted []cursor.Wanted
	var change []cursor.Topic
	for topic, sh := range m.shares {
		m.plan(sh, dead)
		for _, key := range sh.claims {
			wanted = append(wanted, cursor.Wanted{Key: key, Patterns: sh.rows[0].Patterns})
		}
		if sh.change {
			change = append(change, topic)
		}
	}
	m.mu.Unlock()
	for _, topic := range change {
		made, err := m.store.Switch(ctx, m.db, topic, dead)
		if err != nil {
			return 0, err
		}
		if made {
			m.config.Logger.Info("The number of shards was changed; the old ones are read to their end first", watermill.LogFields{
				"consumer_group": topic.Group, "topic": topic.Topic,
			})
			m.nudge()
		}
		m.stale(topic)
	}
	if err := m.take(ctx, wanted, dead, lapses); err != nil {
		return 0, err
	}
	if err := m.bury(ctx, dead); err != nil {
		return 0, err
	}
	return m.pause(), nil
}

// take claims free cursors and grants them.
func (m *Manager) take(ctx context.Context, wanted []cursor.Wanted, dead map[string]int64, lapses int64) error {
	if len(wanted) == 0 {
		return nil
	}
	held, err := m.store.Claim(ctx, m.db, wanted, dead)
	if err != nil {
		m.dirty.Store(true) // the answer may be lost, and not the claim
		return err
	}
	marked := false
	got := map[cursor.Key]bool{}
	for _, h := range held {
		if h.Life.Boot == "" {
			m.dirty.Store(true)
			if !marked {
				if err := m.store.MarkLife(ctx, m.db); err != nil {
					return err
				}
				marked = true
			}
			continue // taken again with the next look, now in a life with a name
		}
		got[h.Key] = true
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
	for _, w := range wanted {
		if !got[w.Key] {
			m.stale(w.Of()) // somebody was quicker
		}
	}
	if marked {
		m.nudge()
	}
	return nil
}

// bury removes from the members those that are dead.
func (m *Manager) bury(ctx context.Context, dead map[string]int64) error {
	news := map[string]int64{}
	m.mu.Lock()
	for _, sh := range m.shares {
		for _, member := range sh.members {
			if beat, isDead := dead[member.Holder]; isDead && m.buried[member.Holder] != beat {
				news[member.Holder] = beat
			}
		}
	}
	m.mu.Unlock()
	if len(news) == 0 {
		return nil
	}
	if err := m.store.Bury(ctx, m.db, news); err != nil {
		return err
	}
	m.buried = dead
	return nil
}

// LookAt says that something has changed about a topic.
func (m *Manager) LookAt(topic cursor.Topic) {
	m.stale(topic)
	m.nudge()
}

// stale asks for another look at a topic.
func (m *Manager) stale(topic cursor.Topic) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if sh := m.shares[topic]; sh != nil {
		sh.looked = time.Time{}
	}
}

// pause returns when the next look is due, 0 if none is.
func (m *Manager) pause() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	var pause time.Duration
	for _, sh := range m.shares {
		next := m.config.Claim
		if !m.quick(sh) && !sh.looked.IsZero() {
			if sh.settled {
				continue
			}
			next = max(m.patience(sh)-time.Since(sh.looked), time.Millisecond)
		}
		if pause == 0 || next < pause {
			pause = next
		}
	}
	return pause
}

// grant hands a taken cursor to the subscription that has least, of those to the
// one that has waited longest, if they read the topics that it is over. If nobody
// waits any more, it is given back. If the process's lease ran out since the claim
// was sent, the answer may be old: others may have the cursor by now.
func (m *Manager) grant(h cursor.Held, lapses int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	sh := m.shares[h.Key.Of()]
	if sh == nil || m.held[h.Key] != nil || m.closed || m.left() <= 0 || m.lapses.Load() != lapses {
		m.dirty.Store(true)
		return
	}
	delete(m.bad, h.Key)
	var seat *Seat
	for _, other := range sh.fitting(h.Patterns) {
		if seat == nil || len(other.leases) < len(seat.leases) || len(other.leases) == len(seat.leases) && other.since.Before(seat.since) {
			seat = other
		}
	}
	if seat == nil {
		m.dirty.Store(true)
		return
	}
	ctx, lose := context.WithCancelCause(context.Background())
	lease := &Lease{
		Key: h.Key, Start: h.State, Life: h.Life, Shards: h.Shards, Base: h.Base, Until: h.Until, Unclean: m.unclean(h),
		manager: m, seat: seat, epoch: h.Epoch, granted: time.Now(), ctx: ctx, lose: lose, recalled: make(chan struct{}), savedAt: time.Now(),
	}
	m.held[h.Key] = lease
	m.known[h.Key] = struct{}{}
	seat.leases, seat.granted, seat.since = append(seat.leases, lease), append(seat.granted, lease), time.Now()
	select {
	case seat.ready <- struct{}{}:
	default:
	}
}

// unclean reports whether the cursor's last holder has died: another process, or
// one before a claim of this one's whose answer was lost, or could not be used.
func (m *Manager) unclean(h cursor.Held) bool {
	_, known := m.known[h.Key]
	return h.Before != "" && (h.Before != m.store.Holder() || !known)
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
	for _, sh := range m.shares {
		for _, key := range sh.claims {
			if m.held[key] == nil && m.bad[key].IsZero() {
				keep = append(keep, key)
			}
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
		if lease.atEnd(now, m.config.Duration) {
			m.mu.Lock()
			lease.recall()
			m.mu.Unlock()
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

// reached reports whether the state is all that the cursor has to give: nothing
// more can be handed out.
func (l *Lease) reached(state window.State) bool {
	return l.Until != nil && state.Position.Era == l.Life.Era && l.Until.Reached(state.Position)
}

// atEnd reports whether the lease's position has come to its end: with nothing
// left unacked, or when that has stayed so for a while. What is unacked then goes
// to other cursors, which must not have to wait for it.
func (l *Lease) atEnd(now time.Time, patience time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.source == nil || l.Until == nil || l.ctx.Err() != nil {
		return false
	}
	state, _, _ := l.source.State()
	switch {
	case !l.reached(state):
		l.endedAt = time.Time{}
		return false
	case len(state.Holes) == 0:
		return true
	case l.endedAt.IsZero():
		l.endedAt = now
	}
	return now.Sub(l.endedAt) >= patience
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
	write := cursor.Write{Key: l.Key, Epoch: l.epoch, State: l.Start, Life: l.Life, Release: true, Patterns: l.seat.patterns}
	l.mu.Lock()
	if l.source != nil {
		write.State, _, _ = l.source.State()
	}
	write.State = clean(write.State)
	l.source = nil // a checkpoint that is on its way fits no more: no holder
	l.mu.Unlock()
	last := l.manager.save
	if l.reached(write.State) {
		last = l.manager.finish
	}
	saved, err := l.manager.saveLast(ctx, write, last)
	if err != nil {
		l.manager.dirty.Store(true)
		return fmt.Errorf("release %s: %w", l.Key, err)
	}
	if !saved {
		l.manager.dirty.Store(true)
		return fmt.Errorf("release %s: %w: it is no longer ours", l.Key, ErrLost)
	}
	l.manager.mu.Lock()
	defer l.manager.mu.Unlock()
	delete(l.manager.known, l.Key)
	return nil
}

// clean returns the state as it is when the process has ended nothing by dying.
func clean(state window.State) window.State {
	state.Reach = 0
	state.Holes = slices.Clone(state.Holes)
	for i := range state.Holes {
		state.Holes[i].Starts, state.Holes[i].Among = 0, false
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

// saveLast stores a last position, or removes a cursor that has come to its end,
// which nobody will try again: a
// connection that has died meanwhile must not cost it. A write whose answer was
// lost counts when it did release the cursor.
func (m *Manager) saveLast(ctx context.Context, write cursor.Write, last func(context.Context, cursor.Write) (bool, error)) (bool, error) {
	retry := backoff.Policy{Min: 10 * time.Millisecond, Max: time.Second}
	for try := 1; ; try++ {
		saved, err := last(ctx, write)
		if err == nil {
			return saved || try > 1, nil
		}
		m.config.Failed(err)
		if !backoff.Wait(ctx, retry.Delay(try)) {
			return false, err
		}
	}
}

func (m *Manager) save(ctx context.Context, write cursor.Write) (bool, error) {
	saved, err := m.store.Save(ctx, m.db, []cursor.Write{write})
	return saved[write.Key], err
}

func (m *Manager) finish(ctx context.Context, write cursor.Write) (bool, error) {
	return m.store.Finish(ctx, m.db, write)
}

// forget makes the cursor free for other subscriptions of the process.
func (m *Manager) forget(l *Lease) {
	l.lose(context.Canceled)
	m.mu.Lock()
	delete(m.held, l.Key)
	if i := slices.Index(l.seat.leases, l); i >= 0 {
		l.seat.leases = slices.Delete(l.seat.leases, i, i+1)
	}
	l.seat.since = time.Now()
	if sh := m.shares[l.Key.Of()]; sh != nil {
		sh.looked = time.Time{}
	}
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
