package lease

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/millrace/watermill-outbox/internal/cursor"
)

// Seat is one subscription's place among those that want a topic for a group. It
// gets the leases of its share of the shards, one after the other.
type Seat struct {
	manager *Manager
	topic   cursor.Topic
	// patterns are those of its topics, nil for one.
	patterns []string
	// refused is told of other.
	refused func(error)
	// ready gets something when a lease was granted.
	ready chan struct{}

	// The rest is guarded by manager.mu.

	granted []*Lease
	// leases are those it has, granted ones included, in the order it got them.
	leases []*Lease
	// since is when it last got or gave up one.
	since time.Time
	left  bool
	// other says that the cursors are over other topics.
	other error
}

// share is what the subscriptions of this process have of a topic for a group,
// and what is known of the rest. Guarded by Manager.mu.
type share struct {
	seats []*Seat
	// rows and members are what the last look found, at looked; it is the zero
	// time when there must be another.
	rows    []cursor.Row
	members []cursor.Member
	looked  time.Time
	// claims are the cursors to take now.
	claims []cursor.Key
	// waiting says that the process should have more than it has.
	waiting bool
	// overdue says that somebody else's beat is.
	overdue bool
	// settled says that nothing can change without this process's doing.
	settled bool
	// change says that the number of shards can be changed now.
	change bool
	// refused says that none of the seats can have its cursors.
	refused bool
}

// unknown is a number of seats that says nothing.
const unknown = -1

// Join adds a subscription to those that want the topic, or many topics, whose
// patterns these are. It gets no cursor over others: refused is called with a
// *cursor.OtherTopicsError when there turn out to be such, with ErrNoCursor when
// there is none, and with nil when that is over; it must not call the manager.
// Join returns an error only when the manager is closed.
func (m *Manager) Join(topic cursor.Topic, patterns []string, refused func(error)) (*Seat, error) {
	s := &Seat{manager: m, topic: topic, patterns: patterns, refused: refused, ready: make(chan struct{}, 1), since: time.Now()}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, errClosed
	}
	sh := m.shares[topic]
	if sh == nil {
		sh = &share{}
		m.shares[topic] = sh
	}
	sh.seats = append(sh.seats, s)
	sh.looked = time.Time{}
	m.nudge()
	return s, nil
}

// Acquire waits for the next lease of the seat's share. It returns an error only
// when the context ends.
func (s *Seat) Acquire(ctx context.Context) (*Lease, error) {
	for {
		s.manager.mu.Lock()
		if len(s.granted) > 0 && ctx.Err() == nil {
			lease := s.granted[0]
			s.granted = s.granted[1:]
			s.manager.mu.Unlock()
			return lease, nil
		}
		s.manager.mu.Unlock()
		select {
		case <-s.ready:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// Leave ends the wish for more. The leases that were acquired stay until they are
// released.
func (s *Seat) Leave() {
	m := s.manager
	m.mu.Lock()
	if s.left {
		m.mu.Unlock()
		return
	}
	s.left = true
	granted := s.granted
	s.granted = nil
	sh := m.shares[s.topic]
	if i := slices.Index(sh.seats, s); i >= 0 {
		sh.seats = slices.Delete(sh.seats, i, i+1)
	}
	sh.looked = time.Time{}
	if len(sh.seats) == 0 {
		delete(m.shares, s.topic)
	}
	m.mu.Unlock()
	for _, lease := range granted {
		m.forget(lease) // nobody has it: given up as it was
	}
	// What is being claimed waits to be granted.
	m.dirty.Store(true)
	m.nudge()
}

// fits returns an error unless the seat reads the topics that a cursor of these
// patterns is over.
func (s *Seat) fits(patterns []string) error {
	return cursor.CheckTopics(s.topic.Group, patterns, s.patterns)
}

// compare tells the seat's owner if the cursors that there are turn out to be over
// other topics, or there are none, or that is over. Called with mu held.
func (s *Seat) compare(rows []cursor.Row) {
	other := ErrNoCursor
	if len(rows) > 0 {
		other = s.fits(rows[0].Patterns)
	}
	if (other == nil) != (s.other == nil) || errors.Is(other, ErrNoCursor) != errors.Is(s.other, ErrNoCursor) {
		s.other = other
		s.refused(other)
	}
}

// fitting returns the seats that can have a cursor of these patterns. Called with
// mu held.
func (sh *share) fitting(patterns []string) []*Seat {
	unfit := func(s *Seat) bool { return s.fits(patterns) != nil }
	if !slices.ContainsFunc(sh.seats, unfit) {
		return sh.seats
	}
	return slices.DeleteFunc(slices.Clone(sh.seats), unfit)
}

// candidates returns the seats that count: those that can have the cursors that
// there are. Called with mu held.
func (sh *share) candidates() []*Seat {
	if len(sh.rows) == 0 {
		return sh.seats
	}
	return sh.fitting(sh.rows[0].Patterns)
}

// wants returns what the table is to say of the process's seats, where it says
// something else. Called with mu held.
func (m *Manager) wants() map[cursor.Topic]int {
	wants := map[cursor.Topic]int{}
	for topic, sh := range m.shares {
		if n := len(sh.candidates()); m.joined[topic] != n {
			wants[topic] = n
		}
	}
	for topic := range m.joined {
		if m.shares[topic] == nil {
			wants[topic] = 0
		}
	}
	return wants
}

// join says in the table what the process wants.
func (m *Manager) join(ctx context.Context) error {
	m.mu.Lock()
	wants, lapses := m.wants(), m.lapses.Load()
	m.mu.Unlock()
	if len(wants) == 0 {
		return nil
	}
	if err := m.store.Join(ctx, m.db, wants); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lapses.Load() != lapses {
		return nil // somebody may have removed it since: again
	}
	for topic, n := range wants {
		if n == 0 {
			delete(m.joined, topic)
		} else {
			m.joined[topic] = n
		}
	}
	return nil
}

// look asks how things stand with the topics of which that is due, and, of those
// that are waited for, whether there is something to take.
func (m *Manager) look(ctx context.Context) error {
	m.mu.Lock()
	now := time.Now()
	var due, quick []cursor.Topic
	for topic, sh := range m.shares {
		switch {
		case now.Sub(sh.looked) >= m.patience(sh):
			due = append(due, topic)
		case m.quick(sh):
			quick = append(quick, topic)
		}
	}
	m.mu.Unlock()
	if len(quick) > 0 {
		found, err := m.store.Look(ctx, m.db, quick, false)
		if err != nil {
			return err
		}
		m.mu.Lock()
		for _, row := range found.Rows {
			if m.held[row.Key] == nil && now.After(m.bad[row.Key]) && !slices.Contains(due, row.Key.Of()) {
				due = append(due, row.Key.Of())
			}
		}
		m.mu.Unlock()
	}
	if len(due) == 0 {
		return nil
	}
	found, err := m.store.Look(ctx, m.db, due, true)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	// The time counts from the answer, which is later than the renewals it shows.
	now = time.Now()
	for holder, beat := range found.Beats {
		if seen, ok := m.beats[holder]; !ok || seen.beat != beat {
			m.beats[holder] = sighting{beat: beat, since: now, read: now}
		} else {
			seen.read = now
			m.beats[holder] = seen
		}
	}
	for holder, seen := range m.beats {
		if now.Sub(seen.read) > 10*m.config.Duration {
			delete(m.beats, holder)
		}
	}
	rows := map[cursor.Topic][]cursor.Row{}
	for _, row := range found.Rows {
		rows[row.Key.Of()] = append(rows[row.Key.Of()], row)
	}
	for _, topic := range due {
		sh := m.shares[topic]
		if sh == nil {
			continue
		}
		sh.rows, sh.members, sh.looked = rows[topic], found.Members[topic], now
		slices.SortFunc(sh.rows, func(a, b cursor.Row) int { return a.Key.Shard - b.Key.Shard })
		m.reportMissing(topic, sh.rows, now)
		for _, seat := range sh.seats {
			seat.compare(sh.rows)
		}
		// Somebody who took the process for dead may have removed it, and others, too.
		// Of topics that have no shards none are returned.
		shared := len(sh.rows) > 0 && sh.rows[0].Shards > 1
		if others := sh.members; (shared || len(others) > 0) && len(sh.candidates()) > 0 && !slices.ContainsFunc(others, func(o cursor.Member) bool { return o.Holder == m.store.Holder() }) {
			m.joined[topic] = unknown
			m.nudge()
		}
	}
	return nil
}

// quick reports whether to look every Claim if there is a free cursor. Called
// with mu held.
func (m *Manager) quick(sh *share) bool {
	return !sh.refused && (sh.waiting || len(sh.members) > 1 && !sh.settled && !m.config.Told())
}

// patience is how long a look at a topic is good for.
func (m *Manager) patience(sh *share) time.Duration {
	switch {
	case sh.looked.IsZero():
		return 0
	case sh.settled:
		return 1 << 62
	case sh.overdue:
		return m.config.Claim
	}
	return max(min(m.config.Duration/10, maxPatience), m.config.Claim)
}

// deadAfter is for how long a beat must not have changed. A holder has stopped by
// then: it counts from when it sent the beat, and stops at the margin before.
func (c Config) deadAfter() time.Duration { return c.Duration - c.margin()/2 }

// dead returns the processes that are, with their beats. Called with mu held.
func (m *Manager) dead() map[string]int64 {
	dead := map[string]int64{}
	for holder, seen := range m.beats {
		if holder != m.store.Holder() && time.Since(seen.since) >= m.config.deadAfter() {
			dead[holder] = seen.beat
		}
	}
	return dead
}

// plan decides what to do about a topic: which cursors to take, which leases to
// recall, whether its number of shards can be changed. Called with mu held.
func (m *Manager) plan(sh *share, dead map[string]int64) {
	sh.claims, sh.waiting, sh.overdue, sh.settled, sh.change = nil, false, false, false, false
	if sh.refused = len(sh.candidates()) == 0; sh.refused {
		return
	}
	me := m.store.Holder()
	free := func(row cursor.Row) bool {
		_, isDead := dead[row.Holder]
		return row.Holder == "" || !row.Alive || isDead || (row.Holder == me && m.held[row.Key] == nil)
	}
	late := func(holder string) bool {
		seen, ok := m.beats[holder]
		return ok && holder != me && time.Since(seen.since) > m.config.Duration*2/3
	}
	// The first ones end before those of a higher base may begin. The last are
	// those whose number can be changed.
	first, changing, allFree := len(sh.rows), false, true
	for i, row := range sh.rows {
		if row.Base != sh.rows[0].Base {
			first = min(first, i)
		}
		if !row.Ending {
			changing = changing || row.Reshard > 0
			allFree = allFree && free(row) && m.held[row.Key] == nil
		}
		sh.overdue = sh.overdue || late(row.Holder)
	}
	rows := sh.rows[:first]
	sh.change = changing && allFree
	if changing && len(rows) > 0 && !rows[0].Ending {
		sh.waiting = true
		m.recall(sh, len(rows))
		return
	}

	members, unclaimed := m.membersOf(sh, rows, dead, free)
	for _, member := range members {
		sh.overdue = sh.overdue || late(member.holder)
	}
	scarce := spread(len(rows), members)
	mine := 0
	for mine < len(members)-1 && members[mine].holder != me {
		mine++
	}
	limit := members[mine].target
	if scarce {
		limit = members[mine].weight
	}
	limit = min(limit, len(rows))
	// Who comes later begins to take further back, so that those who look at the
	// same time do not reach for the same ones.
	begin := 0
	for _, before := range members[:mine] {
		begin += max(0, before.target-before.held)
	}
	var own, others []cursor.Key
	for _, row := range rows {
		switch {
		case m.held[row.Key] != nil || !free(row) || !time.Now().After(m.bad[row.Key]):
		case row.Holder == me:
			own = append(own, row.Key)
		default:
			others = append(others, row.Key)
		}
	}
	if begin >= len(others) {
		begin = 0
	}
	candidates := slices.Concat(own, others[begin:], others[:begin])
	need := max(0, limit-members[mine].held)
	sh.claims = candidates[:min(need, len(candidates))]
	for _, row := range rows {
		if need > 0 && m.held[row.Key] == nil && time.Now().After(m.bad[row.Key]) {
			sh.waiting = true
		}
	}
	if len(own) > need {
		m.dirty.Store(true)
	}
	if back := giveBack(members, me, unclaimed); back > 0 {
		m.recall(sh, back)
	} else {
		m.level(sh)
	}
	sh.settled = len(sh.rows) == 1 && members[mine].held == 1
}

// membersOf returns the living members with what they hold of the rows, this
// process among them, and how many nobody holds that counts. Called with mu held.
func (m *Manager) membersOf(sh *share, rows []cursor.Row, dead map[string]int64, free func(cursor.Row) bool) (members []member, unclaimed int) {
	me := m.store.Holder()
	index := map[string]int{}
	add := func(holder string, weight int) {
		index[holder] = len(members)
		members = append(members, member{holder: holder, weight: weight})
	}
	add(me, len(sh.candidates()))
	for _, other := range sh.members {
		if _, isDead := dead[other.Holder]; !isDead && other.Holder != me {
			add(other.Holder, other.Subscriptions)
		}
	}
	for _, row := range rows {
		i, isMember := index[row.Holder]
		switch {
		case m.held[row.Key] != nil:
			members[0].held++
		case free(row) || !isMember || row.Holder == me:
			unclaimed++
		default:
			members[i].held++
		}
	}
	return members, unclaimed
}

// recall asks for n of the share's leases back, those included that were asked
// for already. It takes them from the seats that have most. Called with mu held.
func (m *Manager) recall(sh *share, n int) {
	left := map[*Seat][]*Lease{}
	for _, seat := range sh.seats {
		for _, lease := range seat.leases {
			if lease.isRecalled {
				n--
			} else {
				left[seat] = append(left[seat], lease)
			}
		}
	}
	for ; n > 0; n-- {
		var most *Seat
		for _, seat := range sh.seats {
			if len(left[seat]) > 0 && (most == nil || len(left[seat]) > len(left[most])) {
				most = seat
			}
		}
		if most == nil {
			return
		}
		last := len(left[most]) - 1
		left[most][last].recall()
		left[most] = left[most][:last]
	}
}

// level moves a lease from the seat that has most to the one that has least, if
// that is two less. Called with mu held.
func (m *Manager) level(sh *share) {
	var most, least *Seat
	for _, seat := range sh.candidates() {
		if slices.ContainsFunc(seat.leases, func(l *Lease) bool { return l.isRecalled }) {
			return // one at a time
		}
		if most == nil || len(seat.leases) > len(most.leases) {
			most = seat
		}
		if least == nil || len(seat.leases) < len(least.leases) {
			least = seat
		}
	}
	if most != nil && len(most.leases)-len(least.leases) > 1 {
		most.leases[len(most.leases)-1].recall()
	}
}

// reportMissing says which cursors are waited for in vain, once a minute.
func (m *Manager) reportMissing(topic cursor.Topic, rows []cursor.Row, now time.Time) {
	if now.Sub(m.missingReported) < time.Minute {
		return
	}
	missing := []cursor.Key{{Group: topic.Group, Topic: topic.Topic}}
	if len(rows) > 0 {
		missing = nil
		last := rows[len(rows)-1]
		for shard := last.Base; shard < last.Base+last.Shards && !last.Ending; shard++ {
			if !slices.ContainsFunc(rows, func(r cursor.Row) bool { return r.Key.Shard == shard }) {
				missing = append(missing, cursor.Key{Group: topic.Group, Topic: topic.Topic, Shard: shard})
			}
		}
	}
	for _, key := range missing {
		m.missingReported = now
		m.config.Logger.Error("A cursor row is gone; its topic is not delivered to its group until somebody subscribes again",
			fmt.Errorf("%s has no row in cursors", key), watermill.LogFields{"consumer_group": key.Group, "topic": key.Topic})
	}
}
